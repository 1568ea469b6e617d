"""A denoise that ends in the middle and is asked again: from its last checkpoint, equal bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages import checkpoints
from stages.artifacts import ArtifactStore
from stages.checkpoint_files import FOLDER
from stages.checkpoints import StepCheckpoints
from stages.contracts import (
    OffloadChoice,
    OffloadPreset,
    StageContext,
    StageRequest,
    StageResult,
)
from stages.errors import BorderError
from stages.worker import handler_for
from tests.support import tiny_models
from tests.support.chain import Heard, context, request, run_stage
from tests.support.picture_tasks import KONTEXT
from tests.support.tiny_families import CASES, Case

# diffusers' Euler scheduler hands torch tensors to numpy in a way that numpy 2 advises against
pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

NUM_STEPS = 6
TEXT_CASES = CASES | {KONTEXT.name: KONTEXT}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the stage's own code runs after it."""


class KillAt(Heard):
    """Ends the stage as soon as it has told of a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def progress(self, activity: str, step: int = 0, num_steps: int = 0, message: str = "") -> None:
        super().progress(activity, step, num_steps, message)
        if (activity, step) == ("running", self._step):
            raise Killed


@pytest.fixture
def z_image(tiny: Any) -> Path:
    return Path(tiny(CASES["z-image"]))


def encoded(case: Case, where: StageContext, dtype: str = "float32") -> StageResult:
    asked = request("encode", case.requests["encode"], family=case.name, dtype=dtype)
    return run_stage(asked, where)[0]


def loop_request(case: Case, embeds: StageResult, **changes: Any) -> StageRequest:
    options = case.requests["denoise"] | {"num_inference_steps": NUM_STEPS}
    fields = {"family": case.name, "seed": 7} | changes
    return request("denoise", options, embeds, **fields)


def kill(asked: StageRequest, where: StageContext, step: int) -> None:
    with pytest.raises(Killed):
        handler_for("denoise")(asked, where, KillAt(step))


def stored(where: StageContext, asked: StageRequest) -> list[int]:
    files = ArtifactStore(where.store_url).checkpoints(asked)
    return [each.step for each in files.newest_first()]


def files_of(where: StageContext) -> list[Path]:
    return sorted((Path(where.store_url) / FOLDER).glob("*"))


@pytest.mark.parametrize(("dtype", "step"), [("float32", 4), ("bfloat16", 1)])
@pytest.mark.parametrize("name", sorted(TEXT_CASES))
def test_every_family_ends_with_the_bits_of_the_undisturbed_run(
    tiny: Any, tmp_path: Path, name: str, dtype: str, step: int
) -> None:
    case = TEXT_CASES[name]
    plain = context(tiny(case), tmp_path / "undisturbed")
    where = context(tiny(case), tmp_path / "killed", checkpoint_every_steps=1)
    expected, _, _ = run_stage(loop_request(case, encoded(case, plain, dtype), dtype=dtype), plain)
    asked = loop_request(case, encoded(case, where, dtype), dtype=dtype)
    kill(asked, where, step)
    assert stored(where, asked) == [step, step - 1][: min(step, 2)]

    result, report, heard = run_stage(asked, where)

    assert result == expected
    assert report["resumed_from_step"] == step
    assert report["steps"]["num_run"] == NUM_STEPS - step
    told = [each for each in heard.steps if each[0] in ("resumed", "running")]
    assert told[:2] == [("resumed", step, NUM_STEPS), ("running", step + 1, NUM_STEPS)]
    assert heard.warnings == [] and files_of(where) == []


OTHER_SCHEDULERS = [
    ("EulerAncestralDiscreteScheduler", {}),
    ("UniPCMultistepScheduler", {"solver_order": 3}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
]


def sdxl_with(scheduler: str, config: dict[str, Any], directory: Path) -> Path:
    """A tiny SDXL whose files name another scheduler."""
    model = tiny_models.sdxl(directory)
    for path, changes in (
        (model / "model_index.json", {"scheduler": ["diffusers", scheduler]}),
        (model / "scheduler" / "scheduler_config.json", {"_class_name": scheduler, **config}),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


@pytest.mark.parametrize(("scheduler", "config"), OTHER_SCHEDULERS)
def test_other_schedulers_of_a_family_resume_with_equal_bits(
    tmp_path: Path, scheduler: str, config: dict[str, Any]
) -> None:
    case, model = CASES["sdxl"], sdxl_with(scheduler, config, tmp_path / "model")
    plain = context(model, tmp_path / "undisturbed")
    where = context(model, tmp_path / "killed", checkpoint_every_steps=2)
    expected, _, _ = run_stage(loop_request(case, encoded(case, plain)), plain)
    asked = loop_request(case, encoded(case, where))
    kill(asked, where, 5)
    (newest, *_) = ArtifactStore(where.store_url).checkpoints(asked).newest_first()
    data = ArtifactStore(where.store_url).checkpoints(asked).read(newest)
    _, captured = checkpoints.unpack(data)
    assert captured["objects"]["component scheduler"]["class"] == scheduler

    result, report, _ = run_stage(asked, where)

    assert result == expected and report["resumed_from_step"] == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("preset", ["off", "low_memory"])
@pytest.mark.parametrize(("scheduler", "config"), OTHER_SCHEDULERS)
def test_on_a_gpu_histories_go_back_to_where_they_were(
    tmp_path: Path, scheduler: str, config: dict[str, Any], preset: OffloadPreset
) -> None:
    case, model = CASES["sdxl"], sdxl_with(scheduler, config, tmp_path / "model")
    said = {"device": "cuda", "offload": OffloadChoice(preset=preset)}
    plain = context(model, tmp_path / "undisturbed", **said)
    where = context(model, tmp_path / "killed", checkpoint_every_steps=1, **said)
    expected, _, _ = run_stage(loop_request(case, encoded(case, plain)), plain)
    asked = loop_request(case, encoded(case, where))
    kill(asked, where, 4)

    result, report, heard = run_stage(asked, where)

    assert result == expected and report["resumed_from_step"] == 4
    assert heard.warnings == [] and files_of(where) == []


def test_a_scheduler_that_cannot_be_kept_denoises_without_checkpoints(tmp_path: Path) -> None:
    case, model = CASES["sdxl"], sdxl_with("SASolverScheduler", {}, tmp_path / "model")
    where = context(model, tmp_path, checkpoint_every_steps=1)
    asked = loop_request(case, encoded(case, where))
    kill(asked, where, 3)
    assert files_of(where) == []
    _, report, heard = run_stage(asked, where)
    assert report["resumed_from_step"] == 0 and report["checkpoints"]["num_written"] == 0
    assert "tau_func is a builtins.function" in report["checkpoints"]["refusal"]
    assert heard.warnings == []


@pytest.fixture
def killed(z_image: Path, tmp_path: Path) -> tuple[StageRequest, StageContext, StageResult]:
    """A request killed after step 4, and the result of an undisturbed run."""
    case = CASES["z-image"]
    plain = context(z_image, tmp_path / "undisturbed")
    where = context(z_image, tmp_path / "killed", checkpoint_every_steps=1)
    expected, _, _ = run_stage(loop_request(case, encoded(case, plain)), plain)
    asked = loop_request(case, encoded(case, where))
    kill(asked, where, 4)
    return asked, where, expected


Killing = tuple[StageRequest, StageContext, StageResult]


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [flip_last_bit, cut_off])
@pytest.mark.parametrize(("num_damaged", "begins_at"), [(1, 3), (2, 0)])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_used(
    killed: Killing, damage: Callable[[Path], None], num_damaged: int, begins_at: int
) -> None:
    asked, where, expected = killed
    for path in files_of(where)[::-1][:num_damaged]:
        damage(path)
    result, report, heard = run_stage(asked, where)
    assert result == expected and report["resumed_from_step"] == begins_at
    assert len(heard.warnings) == num_damaged and report["warnings"] == heard.warnings
    assert heard.warnings[0].startswith("checkpoint of step 4 is not used: it is damaged")
    assert files_of(where) == []


def test_a_checkpoint_of_other_code_is_not_used(killed: Killing) -> None:
    """Nor one of other weights, options, seed or libraries: it belongs to another request."""
    asked, where, expected = killed
    newer = asked.model_copy(update={"code_version": "1000"})
    result, report, _ = run_stage(newer, where)
    assert result == expected and report["resumed_from_step"] == 0
    assert stored(where, asked) == [4, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [("torch", "0.1"), ("device_name", "ABACUS"), ("num_threads", "77")],
)
def test_a_checkpoint_from_where_bits_differ_is_told_and_not_used(
    killed: Killing, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    asked, where, expected = killed
    here = checkpoints.bits_binding("cpu")
    monkeypatch.setattr(checkpoints, "bits_binding", lambda device: here | {name: value})
    result, report, heard = run_stage(asked, where)
    assert result == expected and report["resumed_from_step"] == 0
    told = f"its {name} is {here[name]}, here it is {value}; other bits would come out"
    assert heard.warnings == [f"checkpoint of step {n} is not used: {told}" for n in (4, 3)]


def test_a_second_kill_resumes_from_where_the_second_run_was(killed: Killing) -> None:
    asked, where, expected = killed
    kill(asked, where, 5)
    assert stored(where, asked) == [5, 4]
    result, report, _ = run_stage(asked, where)
    assert result == expected and report["resumed_from_step"] == 5


def test_two_seeds_have_checkpoints_of_their_own(z_image: Path, tmp_path: Path) -> None:
    case = CASES["z-image"]
    plain = context(z_image, tmp_path / "undisturbed")
    where = context(z_image, tmp_path / "killed", checkpoint_every_steps=1)
    embeds = encoded(case, plain)
    expected = [run_stage(loop_request(case, embeds, seed=seed), plain)[0] for seed in (1, 2)]
    embeds = encoded(case, where)
    one, two = (loop_request(case, embeds, seed=seed) for seed in (1, 2))
    kill(one, where, 2)
    kill(two, where, 5)
    results = [run_stage(asked, where) for asked in (two, one)]
    assert [report["resumed_from_step"] for _, report, _ in results] == [5, 2]
    assert [result for result, _, _ in results] == expected[::-1]
    assert files_of(where) == []


def test_a_quick_picture_writes_no_checkpoint(z_image: Path, tmp_path: Path) -> None:
    where = context(z_image, tmp_path)
    assert where.checkpoint_every_s == 60
    asked = loop_request(CASES["z-image"], encoded(CASES["z-image"], where))
    _, report, _ = run_stage(asked, where)
    assert report["checkpoints"]["num_written"] == 0
    assert not (tmp_path / "store" / FOLDER).exists()


def test_without_either_interval_none_is_written_and_none_is_used(killed: Killing) -> None:
    asked, where, expected = killed
    changes = {"checkpoint_every_steps": None, "checkpoint_every_s": None}
    result, report, _ = run_stage(asked, where.model_copy(update=changes))
    assert result == expected and "resumed_from_step" not in report
    assert stored(where, asked) == [4, 3]


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_picture(
    z_image: Path, tmp_path: Path
) -> None:
    where = context(z_image, tmp_path, checkpoint_every_steps=1)
    asked = loop_request(CASES["z-image"], encoded(CASES["z-image"], where))
    (tmp_path / "store" / FOLDER).write_text("in the way")
    result, report, heard = run_stage(asked, where)
    assert result.only().size > 0 and report["steps"]["num_run"] == NUM_STEPS
    assert len(heard.warnings) == 1
    assert heard.warnings[0].startswith("no checkpoint can be written: cannot write")


def test_latents_that_are_not_finite_are_not_kept_and_the_step_is_named(
    z_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler as Euler

    whole_step = Euler.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = whole_step(self, *args, **kwargs)
        return (out[0] * (float("nan") if self.step_index == 4 else 1),)

    where = context(z_image, tmp_path, checkpoint_every_steps=1)
    asked = loop_request(CASES["z-image"], encoded(CASES["z-image"], where))
    monkeypatch.setattr(Euler, "step", step)
    for _ in range(2):  # from the start, and from the last sound checkpoint
        with pytest.raises(BorderError, match="first seen after step 4"):
            run_stage(asked, where)
        assert stored(where, asked) == [3, 2]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("every_steps", "every_s", "step_s", "expected"),
    [
        (None, 60.0, 25.0, [3, 6, 9]),
        (None, 60.0, 1.0, []),
        (4, 60.0, 1.0, [4, 8]),
        (4, 60.0, 25.0, [3, 6, 9]),
        (2, None, 1000.0, [2, 4, 6, 8]),
        (None, 1.0, 90.0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_whichever_interval_is_over_first_counts(
    tmp_path: Path,
    every_steps: int | None,
    every_s: float | None,
    step_s: float,
    expected: list[int],
) -> None:
    """Ten steps; after the last one there is nothing to go on with."""
    store, clock = ArtifactStore(tmp_path), Clock()
    asked = request("denoise", {})
    kept = StepCheckpoints(
        store.checkpoints(asked),
        every_steps=every_steps,
        every_s=every_s,
        device="cpu",
        warn=pytest.fail,
        clock=clock,
    )
    clock.now_s = 500.0  # until the loop begins, nothing can be lost
    state = SimpleNamespace(latents=torch.zeros(2), timesteps=torch.arange(10))
    kept.begin(SimpleNamespace(components={}), state)
    written, before = [], 0
    for step in range(1, 11):
        clock.now_s += step_s
        state.latents = state.latents + 1
        kept.step_done(step, 10, state)
        if kept.report()["num_written"] > before:
            before = kept.report()["num_written"]
            written.append(step)
    assert written == expected
    newest = [each.step for each in store.checkpoints(asked).newest_first()]
    assert newest == expected[::-1][:2]
