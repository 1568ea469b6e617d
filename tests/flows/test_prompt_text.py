"""Where a prompt's text shows, it is short and cannot steer a terminal, whatever it is."""

from __future__ import annotations

import io
import logging
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.studio import Studio

pytestmark = pytest.mark.usefixtures("prefect_server")

NASTY = "\x1b[31mred\r\nfox\u202e\u200f " + "and a long, long road " * 500
LONGEST_LINE = 500


@pytest.fixture
def studio(home: Path, tmp_path: Path) -> Iterator[Studio]:
    from flows.launch import shared_launcher
    from tests.support import tiny_models

    shared_launcher.cache_clear()
    launcher = shared_launcher("forkserver")
    yield Studio(tiny_models.z_image(tmp_path / "z-image"), home, tmp_path / "pictures", launcher)
    launcher.close()
    shared_launcher.cache_clear()


def test_a_long_prompt_of_any_characters_is_short_and_plain_wherever_it_shows(
    studio: Studio, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.logging.configuration import setup_logging

    import flows.z_image  # noqa: F401 - Prefect sets levels once more while it is imported
    from flows.display import LineDisplay, showing

    setup_logging()  # once a process it starts from nothing; what is added before is lost
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        caplog.set_level(logging.INFO, name)
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
    told = io.StringIO()
    with showing(LineDisplay(told)):
        painted = studio.paint(prompt=NASTY)
    shown = {
        "display": told.getvalue().splitlines(),
        "log": [record.getMessage() for record in caplog.records],
        "file": [path.name for path in painted.files],
        "server": names_and_artifacts(),
    }
    for place, texts in shown.items():
        assert any("long" in text for text in texts), place
        for text in texts:
            assert len(text) < LONGEST_LINE, place
            assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf")}, place


def names_and_artifacts() -> list[str]:
    """What the newest run has on the server, its parameters aside."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    with get_client(sync_client=True) as client:
        run = max(client.read_flow_runs(), key=lambda run: run.created)
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        artifacts = client.read_artifacts(artifact_filter=mine)
        tasks = [task for task in client.read_task_runs() if task.flow_run_id == run.id]
    texts: list[Any] = [run.name, *(task.name for task in tasks)]
    texts += [value for each in artifacts for value in (each.key, each.description, each.data)]
    return [str(text) for text in texts]
