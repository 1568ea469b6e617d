"""A VAE that runs out of memory works in tiles or on the CPU, under honest keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.display import Display
from flows.fallbacks import ways_with_less_memory
from flows.phase import Phase
from flows.run import Run
from stages.artifacts import ArtifactStore
from stages.contracts import ArtifactRef, StageContext, StageName, StageRequest, StageResult
from stages.errors import RequestError, StageFailed, StageOutOfMemory
from stages.models import MINIATURE, open_model

Answer = Callable[[StageRequest, StageContext], StageResult]


class Told(Display):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def phase_of(home: Path, told: Told) -> Callable[[StageName, Answer], Phase]:
    def make(stage: StageName, answer: Answer) -> Phase:
        run = Run(
            family="z-image",
            task="text-to-image",
            model=open_model(MINIATURE),
            model_name="miniature",
            dtype="float32",
            device="cuda:1",
        )
        run.display = told
        run.__dict__["_inspected"] = (Manifest(), ())
        phase = Phase(run, stage)
        phase._task = lambda request, _, context: answer(request, context)  # type: ignore[assignment]
        return phase

    return make


class Manifest:
    """Loads nothing in any phase."""

    class Facts:
        components = ()
        task = ""

    def __init__(self) -> None:
        self.phases = dict.fromkeys(("encode", "condition", "denoise", "decode"), self.Facts)


def fails_unless(fits: Callable[[StageRequest, StageContext], bool], seen: list[Any]) -> Answer:
    def answer(request: StageRequest, context: StageContext) -> StageResult:
        seen.append((bool(request.options.get("tiling")), context.device, context.fallbacks))
        if not fits(request, context):
            raise StageOutOfMemory("phase decode ran out of device memory: 20 GiB")
        return StageResult(stage=request.stage, artifacts={})

    return answer


def test_tiles_come_first(phase_of: Any, told: Told) -> None:
    seen: list[Any] = []
    phase = phase_of("decode", fails_unless(lambda r, _: "tiling" in r.options, seen))
    phase()
    assert [(tiled, device) for tiled, device, _ in seen] == [(False, "cuda:1"), (True, "cuda:1")]
    assert "tried again in tiles" in told.warnings[0] and "20 GiB" in told.warnings[0]
    assert len(seen[1][2]) == 1 and "tried in tiles" in seen[1][2][0]


def test_the_cpu_comes_last_and_decodes_whole(phase_of: Any, told: Told) -> None:
    seen: list[Any] = []
    phase = phase_of("decode", fails_unless(lambda _, c: c.device == "cpu", seen))
    phase()
    assert [(tiled, device) for tiled, device, _ in seen] == [
        (False, "cuda:1"),
        (True, "cuda:1"),
        (False, "cpu"),
    ]
    assert [text.rpartition(" again ")[2] for text in told.warnings] == ["in tiles", "on the CPU"]
    assert len(seen[2][2]) == 2


def latents_of(nbytes: int) -> StageResult:
    ref = ArtifactRef(digest=f"{nbytes:064x}", size=nbytes)
    return StageResult(stage="denoise", artifacts={"latents": ref})


def test_what_is_no_smaller_is_not_tried_whole_again_in_this_phase(
    phase_of: Any, told: Told
) -> None:
    seen: list[Any] = []
    phase = phase_of("decode", fails_unless(lambda r, _: "tiling" in r.options, seen))
    for nbytes in (5000, 5000, 7000, 4000, 4500):
        phase(latents_of(nbytes))
    tiled = [tiled for tiled, _, _ in seen]
    assert tiled == [False, True, True, True, False, True, True]
    assert len(told.warnings) == 2, "one for each size that was tried"
    assert all(len(fallbacks) == 1 for is_tiled, _, fallbacks in seen if is_tiled)


def test_a_whole_picture_that_is_there_is_found_before_tiles_are_made(
    phase_of: Any, home: Path
) -> None:
    seen: list[Any] = []
    phase = phase_of("decode", fails_unless(lambda r, _: "tiling" in r.options, seen))
    phase(latents_of(5000))
    seen.clear()
    store = ArtifactStore(home / "store")
    latents = store.put(b"latents" * 1000)
    known = StageResult(stage="denoise", artifacts={"latents": latents})
    request = phase._run.request("decode", (known,), seed=None, label="", options={})
    store.record(request, StageResult(stage="decode", artifacts={"image-0": store.put(b"png")}))
    with pytest.raises(AssertionError, match="found"):
        phase._task = finds  # type: ignore[assignment]
        phase(known)
    assert seen == []


def finds(request: StageRequest, *_: object) -> StageResult:
    assert request.options.get("tiling"), "found"
    raise LookupError


def test_a_vae_without_tiles_goes_to_the_cpu_at_once(phase_of: Any) -> None:
    seen: list[Any] = []
    inner = fails_unless(lambda _, c: c.device == "cpu", seen)

    def answer(request: StageRequest, context: StageContext) -> StageResult:
        if request.options.get("tiling"):
            raise RequestError("AutoencoderTiny cannot decode in tiles")
        return inner(request, context)

    phase_of("decode", answer)()
    assert [device for _, device, _ in seen] == ["cuda:1", "cpu"]


def test_when_nothing_helps_the_last_error_is_told(phase_of: Any) -> None:
    with pytest.raises(StageOutOfMemory, match="20 GiB"):
        phase_of("decode", fails_unless(lambda *_: False, []))()


def test_another_error_on_the_way_is_told_at_once(phase_of: Any) -> None:
    def answer(request: StageRequest, _: StageContext) -> StageResult:
        if request.options.get("tiling"):
            raise StageFailed("the VAE is broken")
        raise StageOutOfMemory("full")

    with pytest.raises(StageFailed, match="the VAE is broken"):
        phase_of("decode", answer)()


def test_a_picture_that_is_encoded_goes_to_the_cpu_at_once(phase_of: Any, told: Told) -> None:
    """Tiles would change what the denoiser starts from."""
    seen: list[Any] = []
    phase_of("condition", fails_unless(lambda _, c: c.device == "cpu", seen))()
    assert [(tiled, device) for tiled, device, _ in seen] == [(False, "cuda:1"), (False, "cpu")]
    assert told.warnings[0].endswith("condition is tried again on the CPU")


def test_other_phases_have_no_other_way(phase_of: Any, told: Told) -> None:
    with pytest.raises(StageOutOfMemory):
        phase_of("denoise", fails_unless(lambda *_: False, []))()
    assert told.warnings == []


def test_what_was_asked_for_in_tiles_on_the_cpu_has_no_other_way_left() -> None:
    request = StageRequest(
        stage="decode",
        code_version="1",
        family="f",
        task="t",
        dtype="float32",
        options={"tiling": True},
    )
    where = StageContext(model_dir="/m", store_url="/s", home_dir="/h", device="cpu")
    assert list(ways_with_less_memory(request, where)) == []


def test_tiles_may_be_ruled_out() -> None:
    request = StageRequest(
        stage="decode", code_version="1", family="f", task="t", dtype="float32", options={}
    )
    where = StageContext(model_dir="/m", store_url="/s", home_dir="/h", device="cuda")
    ways = [way.how for way in ways_with_less_memory(request, where, may_tile=False)]
    assert ways == ["on the CPU"]


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[None]:
    """Real stage processes in which a picture cannot be decoded whole."""
    from flows.launch import shared_launcher

    monkeypatch.setenv("EXEUNT_STAGE_HANDLERS", "tests.support.scarce_memory")
    shared_launcher.cache_clear()
    yield
    shared_launcher("forkserver").close()
    shared_launcher.cache_clear()


@pytest.mark.usefixtures("prefect_server", "scarce")
def test_a_run_without_memory_for_whole_pictures_paints_and_says_so(
    home: Path, tmp_path: Path
) -> None:
    from flows.z_image import z_image
    from stages.media import read_settings

    said: dict[str, Any] = {
        "prompt": "a large red circle on a white background",
        "seed": 1,
        "height": 192,
        "width": 192,
        "num_inference_steps": 2,
        "device": "cpu",
        "output": str(tmp_path / "pictures"),
    }
    with pytest.raises(StageOutOfMemory):
        z_image(**said, vae_tiling="off")
    num_reports = len(list((home / "reports").rglob("*-denoise.json")))
    (picture,) = z_image(**said)
    assert len(list((home / "reports").rglob("*-denoise.json"))) == num_reports == 1
    settings = read_settings(Path(picture.path))
    assert settings is not None
    (note,) = (home / "store").rglob(f"{settings.artifacts['decode.tiling']}*")
    assert json.loads(note.read_text())["tile_sample_min_size"] == 128
    (report,) = (home / "reports").rglob("*-decode.json")
    (fallback,) = json.loads(report.read_text())["fallbacks"]
    assert "ran out of device memory" in fallback and fallback.endswith("tried in tiles")
    (asked,) = z_image(**said, vae_tiling="on")
    assert asked.digest == picture.digest
    assert len(list((home / "reports").rglob("*-decode.json"))) == 1, "tiles were found again"
