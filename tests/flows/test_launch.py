"""Stage processes as a flow sees them: real processes, tiny stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.launch import Launcher, StageSession
from stages.errors import StageCrashed
from tests.support.fake_stages import ENVIRON, LIGHT_PRELOAD, context, request


@pytest.fixture(scope="module", params=["forkserver", "spawn"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """One launcher of each kind for the module: the results must not differ."""
    with Launcher(request.param, preload=LIGHT_PRELOAD, environ=ENVIRON) as launcher:
        launcher.start_fork_server()
        with StageSession("inspect", launcher) as session:  # its threads exist from here on
            session.run(globals()["request"]("echo", stage="inspect"), context(Path("/")))
        yield launcher


def test_one_process_serves_many_requests(launcher: Launcher, tmp_path: Path) -> None:
    with StageSession("encode", launcher) as session:
        answers = [session.run(request("echo", n), context(tmp_path)) for n in range(5)]

    assert [report["answer"] for _, report in answers] == [0, 1, 2, 3, 4]
    assert {result.stage for result, _ in answers} == {"encode"}
    assert len({report["pid"] for _, report in answers}) == 1


def test_a_crash_names_the_signal_and_the_next_run_gets_a_fresh_process(
    launcher: Launcher, tmp_path: Path
) -> None:
    with StageSession("decode", launcher) as session:
        with pytest.raises(StageCrashed, match=r"phase decode killed by signal 11 \(SIGSEGV\)"):
            session.run(request("segfault", stage="decode"), context(tmp_path))

        _, report = session.run(request("echo", "again", stage="decode"), context(tmp_path))

    assert report["answer"] == "again"
