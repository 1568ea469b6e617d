"""Launchers of tiny stages, for every test of what happens in their processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flows.launch import Launcher
from flows.session import StageSession
from tests.support.fake_stages import ENVIRON, LIGHT_PRELOAD
from tests.support.stage_processes import ask


@pytest.fixture(scope="module", params=["forkserver", "spawn"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """One launcher of each kind for the module: what they make must not differ."""
    with Launcher(request.param, preload=LIGHT_PRELOAD, environ=ENVIRON) as launcher:
        with StageSession("inspect", launcher) as session:  # its threads exist from here on
            ask(session, "echo")
        yield launcher
