"""Stage processes that are killed inside the denoising loop, and asked again."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.launch import Launcher
from flows.session import StageSession
from flows.stage_process import Event
from stages.artifacts import ArtifactStore
from stages.checkpoint_files import FOLDER
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import StageCrashed
from stages.models import MINIATURE
from stages.protocol import Progress, Ready
from tests.support.chain import context, request, run_stage

NUM_STEPS = 24
LOOP = {"height": 64, "width": 64, "num_inference_steps": NUM_STEPS}


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[Launcher]:
    """One fork server for the module, as one flow process has."""
    from flows.launch import shared_launcher

    shared_launcher.cache_clear()
    made = shared_launcher("forkserver")
    first = made.start("inspect", logging.getLogger(__name__), lambda: False)
    first.retire(grace_s=3.0)  # the fork server and its threads are there from here on
    first.release()
    yield made
    made.close()
    shared_launcher.cache_clear()


class Killer:
    """Sends a signal to a stage process as soon as it has told of a step, once."""

    def __init__(self, step: int, signum: int = signal.SIGKILL) -> None:
        self.steps: list[tuple[str, int]] = []
        self.num_kills = 0
        self._step, self._signum, self._pid = step, signum, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Ready):
            self._pid = event.pid
        if isinstance(event, Progress) and event.num_steps:
            self.steps.append((event.activity, event.step))
            if event.step == self._step and self.num_kills == 0:
                self.num_kills += 1
                os.kill(self._pid, self._signum)


def embedded(where: StageContext, dtype: str) -> StageResult:
    text = {"prompt": "a red circle", "max_sequence_length": 64}
    return run_stage(request("encode", text, dtype=dtype), where)[0]


def in_the_loop(where: StageContext, dtype: str, seed: int = 7) -> StageRequest:
    return request("denoise", LOOP, embedded(where, dtype), seed=seed, dtype=dtype)


def decoded(where: StageContext, latents: StageResult, dtype: str) -> StageResult:
    return run_stage(request("decode", {}, latents, dtype=dtype), where)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_at_a_random_step_it_ends_with_the_undisturbed_bits(
    tmp_path: Path, launcher: Launcher, dtype: str
) -> None:
    plain = context(MINIATURE, tmp_path / "undisturbed")
    where = context(MINIATURE, tmp_path / "killed", checkpoint_every_steps=1)
    expected = run_stage(in_the_loop(plain, dtype), plain)[0]
    asked = in_the_loop(where, dtype)
    step = random.randrange(1, NUM_STEPS // 2)  # it goes on for some steps until it dies
    killer = Killer(step)
    with StageSession("denoise", launcher, on_event=killer) as session:
        with pytest.raises(StageCrashed, match="SIGKILL"):
            session.run(asked, where)
        killer.steps.clear()
        result, report = session.run(asked, where)  # in a fresh process
    resumed_from = report["resumed_from_step"]
    assert step <= resumed_from < NUM_STEPS
    assert report["steps"]["num_run"] == NUM_STEPS - resumed_from
    assert killer.steps[0] == ("resumed", resumed_from)
    assert result == expected
    assert decoded(where, result, dtype) == decoded(plain, expected, dtype)
    assert list((tmp_path / "killed" / "store" / FOLDER).iterdir()) == []


def test_a_stage_that_is_told_to_end_does_so_within_a_step_and_resumes(
    tmp_path: Path, launcher: Launcher
) -> None:
    """SIGTERM, as a cancelled session and a container that is stopped send it."""
    where = context(MINIATURE, tmp_path, checkpoint_every_steps=1)
    asked = in_the_loop(where, "float32")
    killer = Killer(3, signal.SIGTERM)
    with StageSession("denoise", launcher, on_event=killer) as session:
        with pytest.raises(StageCrashed, match="exit code 143"):
            session.run(asked, where)
        told, kept = killer.steps[-1][1], ArtifactStore(where.store_url).checkpoints(asked)
        assert told < NUM_STEPS
        assert kept.newest_first()[0].step in (told, told + 1)
        killer.steps.clear()
        _, report = session.run(asked, where)
    assert report["resumed_from_step"] >= 3


@pytest.mark.usefixtures("prefect_server")
def test_a_flow_finishes_the_batch_whose_second_picture_was_killed(
    home: Path, tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's own retry goes on inside the loop; the first picture is not painted again."""
    from flows.phase import Phase
    from tests.support.studio import Studio

    studio = Studio(MINIATURE, home, tmp_path / "pictures", launcher)
    arguments: dict[str, Any] = {**LOOP, "prompt": "a red circle", "num_images": 2}
    expected = studio.paint(**arguments)

    monkeypatch.setenv("EXEUNT_CHECKPOINT_EVERY_STEPS", "1")
    killer, tell, heard = Killer(5), Phase.tell, []

    def listen(self: Phase, event: Event) -> None:
        tell(self, event)
        if self._stage == "denoise":
            heard.append((self._label, getattr(event, "activity", ""), getattr(event, "step", 0)))
            if isinstance(event, Ready) or self._label.startswith("seed 8"):
                killer(event)

    monkeypatch.setattr(Phase, "tell", listen)
    known = set(studio.reports())
    again = studio.paint(**arguments, fresh=True, output=str(tmp_path / "again"))

    assert killer.num_kills == 1
    assert again.started["denoise"] == 2 and again.ran["denoise"] == 2
    assert all(
        np.array_equal(one, other) for one, other in zip(again.pixels, expected.pixels, strict=True)
    )
    reports = [json.loads(path.read_text()) for path in sorted(set(studio.reports()) - known)]
    resumed = [each["resumed_from_step"] for each in reports if each["stage"] == "denoise"]
    assert resumed[0] == 0 and 5 <= resumed[1] < NUM_STEPS
    assert [step for label, kind, step in heard if kind == "resumed"] == [resumed[1]]
    assert list((home / "store" / FOLDER).iterdir()) == []


@pytest.mark.usefixtures("prefect_server")
def test_a_fresh_run_uses_no_checkpoint_of_an_earlier_one(
    home: Path, tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import tasks
    from flows.phase import Phase
    from tests.support.studio import Studio

    monkeypatch.setenv("EXEUNT_CHECKPOINT_EVERY_STEPS", "1")
    studio = Studio(MINIATURE, home, tmp_path / "pictures", launcher)
    arguments: dict[str, Any] = {**LOOP, "prompt": "a red circle"}
    killer, tell = Killer(5), Phase.tell

    def listen(self: Phase, event: Event) -> None:
        tell(self, event)
        if self._stage == "denoise":
            killer(event)

    with monkeypatch.context() as once:
        once.setattr(Phase, "tell", listen)
        once.setattr(tasks, "_is_retryable", lambda error: False)
        with pytest.raises(StageCrashed):
            studio.paint(**arguments)
    assert len(list((home / "store" / FOLDER).iterdir())) == 2
    painted = studio.paint(**arguments, fresh=True)
    assert painted.num_steps == NUM_STEPS
    assert list((home / "store" / FOLDER).iterdir()) == []


@pytest.mark.usefixtures("prefect_server")
def test_a_program_is_told_the_path_of_each_preview(
    home: Path, tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import phase
    from flows.display import JsonDisplay, showing
    from tests.support.studio import Studio

    lines, shown = io.StringIO(), []
    monkeypatch.setenv("EXEUNT_PREVIEW_EVERY_STEPS", "10")
    monkeypatch.setattr(phase, "report_progress", lambda *about: shown.append(about))
    with showing(JsonDisplay(lines)):
        Studio(MINIATURE, home, tmp_path, launcher).paint(**LOOP, prompt="a red circle")
    events = [json.loads(line) for line in lines.getvalue().splitlines()]
    told = [event for event in events if event.get("activity") == "preview"]
    assert [(event["step"], event["num_steps"]) for event in told] == [(10, 24), (20, 24)]
    (path,) = {event["preview"] for event in told}
    folder = Path(path).parent
    assert (folder.name, folder.parent.parent) == ("previews", home / "reports")
    assert not Path(path).exists(), "the picture itself is there"
    assert (11, 24, f"preview {path}") in shown, "Prefect's page goes on to show it"
