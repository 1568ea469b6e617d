"""LoRA files in every family: the bits of the whole pipeline that wears them, and nothing left."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("peft", reason="peft is not installed")

from stages import offload
from stages.adapters import loadable_modules, lora_loader
from stages.artifacts import ArtifactStore
from stages.contracts import AdapterUse, OffloadChoice, StageContext, StageResult
from stages.errors import ModelError, RequestError
from stages.families import FAMILIES, family_named
from stages.manifest import AdapterFacts
from stages.mp4 import encode_mp4
from stages.videos import frames, sound_of
from tests.stages.test_video_families import stage as stage_of_video
from tests.stages.test_video_families import video_of
from tests.support.chain import context, request, run_stage
from tests.support.fake_gpu import FakeDevices
from tests.support.kept_pipes import drop_kept
from tests.support.lora_files import digest, factors, run_pipe, whole_pipe, write_lora
from tests.support.picture_tasks import KONTEXT
from tests.support.tiny_families import CASES, Case
from tests.support.video_cases import VIDEO_CASES, VideoCase

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]

ENCODERS = {
    **{"sd15": "text_encoder", "flux": "text_encoder"},
    **{"sdxl": "text_encoder", "sd3": "text_encoder_2"},
}
"""Families whose loader adds LoRA to a text encoder, with one that it adds to."""


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    drop_kept()
    yield
    drop_kept()


PICTURES = CASES | {KONTEXT.name: KONTEXT}
WITHOUT_LOADER = {name for name, case in PICTURES.items() if lora_loader(case.family) is None}


@pytest.fixture(params=sorted(PICTURES.keys() - WITHOUT_LOADER))
def case(request: pytest.FixtureRequest) -> Case:
    return PICTURES[request.param]


def wearing(where: StageContext, *files: Path) -> StageContext:
    return where.model_copy(update={"adapters": {digest(f, where): str(f) for f in files}})


def use(where: StageContext, path: Path, scale: float = 1.0, target: str = "") -> AdapterUse:
    return AdapterUse(digest=digest(path, where), scale=scale, target=target)


def stage(
    case: Case, where: StageContext, name: str, *inputs: StageResult, **changes: Any
) -> StageResult:
    if name == "denoise":
        changes.setdefault("seed", 7)
    return run_stage(
        request(name, case.requests[name], *inputs, family=case.name, **changes), where
    )[0]


def picture(
    case: Case,
    where: StageContext,
    encode: tuple[AdapterUse, ...] = (),
    denoise: tuple[AdapterUse, ...] = (),
    dtype: str = "float32",
) -> np.ndarray[Any, Any]:
    embeds = stage(case, where, "encode", adapters=encode, dtype=dtype)
    latents = stage(case, where, "denoise", embeds, adapters=denoise, dtype=dtype)
    result = stage(case, where, "decode", latents, dtype=dtype)
    png = ArtifactStore(where.store_url).read(result.artifacts["image-0"])
    return np.asarray(Image.open(io.BytesIO(png)))


def whole(case: Case, model_dir: Path, files: dict[Path, float], dtype: torch.dtype) -> Any:
    """The picture of one pipeline in one process that wears the files."""
    pipe = whole_pipe(case.family, model_dir, dtype, case.guidance)
    for n, path in enumerate(files):
        pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=f"a{n}")
    if files:
        pipe.set_adapters([f"a{n}" for n in range(len(files))], list(files.values()))
    every = {name: value for phase in case.options.values() for name, value in phase.items()}
    made = run_pipe(pipe, case.family, {**every, "output_type": "pil"}, case.guidance)
    return np.asarray(made[case.family.output][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_files_give_the_bits_of_the_whole_pipeline(
    case: Case, tiny: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    model_dir, name = tiny(case), str(dtype).removeprefix("torch.")
    files = [
        write_lora(tmp_path / f"{n}.safetensors", factors(model_dir, case.family.denoiser, seed=n))
        for n in (1, 2)
    ]
    where = wearing(context(model_dir, tmp_path), *files)
    uses = (use(where, files[0], 0.8), use(where, files[1], -0.3))
    plain = picture(case, where, dtype=name)
    found = picture(case, where, denoise=uses, dtype=name)
    assert not np.array_equal(found, plain)
    assert np.array_equal(
        found, whole(case, model_dir, dict(zip(files, (0.8, -0.3), strict=True)), dtype)
    )


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_a_file_for_a_text_encoder_too_gives_the_bits_of_the_whole_pipeline(
    name: str, tiny: Any, tmp_path: Path
) -> None:
    case, model_dir = CASES[name], tiny(CASES[name])
    both = factors(model_dir, case.family.denoiser) | factors(model_dir, ENCODERS[name])
    path = write_lora(tmp_path / "both.safetensors", both)
    where = wearing(context(model_dir, tmp_path), path)
    worn = (use(where, path, 0.7),)
    assert facts(case, where, worn[0]) == {case.family.denoiser, ENCODERS[name]}
    found = picture(case, where, encode=worn, denoise=worn)
    assert not np.array_equal(found, picture(case, where, denoise=worn))
    assert np.array_equal(found, whole(case, model_dir, {path: 0.7}, torch.float32))


def facts(case: Case, where: StageContext, worn: AdapterUse) -> set[str]:
    """The components that inspect finds a file to change."""
    asked = request("inspect", {}, family=case.name, adapters=(worn,))
    result = run_stage(asked, where)[0]
    content = ArtifactStore(where.store_url).read(result.artifacts["adapter"])
    return set(AdapterFacts.model_validate_json(content).components)


def test_nothing_of_one_request_is_left_in_the_next(tiny: Any, tmp_path: Path) -> None:
    """A process that wore other files before makes the bits of one that never did."""
    case = CASES["sd15"]
    model_dir = tiny(case)
    files = [
        write_lora(tmp_path / "a.safetensors", factors(model_dir, "unet", seed=1)),
        write_lora(
            tmp_path / "b.safetensors",
            factors(model_dir, "unet", seed=2) | factors(model_dir, "text_encoder", seed=2),
        ),
    ]
    where = wearing(context(model_dir, tmp_path), *files)
    a, b = (use(where, path, 0.5) for path in files)
    rows: list[tuple[tuple[AdapterUse, ...], tuple[AdapterUse, ...]]] = [
        ((), ()),
        ((), (a,)),
        ((b,), (b,)),
        ((b,), (a, b)),
        ((b,), (b, a)),
        ((), (a.model_copy(update={"scale": 0.9}),)),
    ]
    alone = []
    for encode, denoise in rows:
        drop_kept()
        alone.append(latents(case, where, encode, denoise))
    assert len(set(alone)) >= len(rows) - 1  # the order of two files is a matter of rounding
    drop_kept()
    for n in (5, 2, 1, 3, 0, 4, 2, 5, 0):
        assert latents(case, where, *rows[n]) == alone[n], n


def latents(
    case: Case,
    where: StageContext,
    encode: tuple[AdapterUse, ...],
    denoise: tuple[AdapterUse, ...],
) -> str:
    """Digest of the latents."""
    embeds = stage(case, where, "encode", adapters=encode)
    return stage(case, where, "denoise", embeds, adapters=denoise).only().digest


def test_a_failed_change_leaves_nothing_behind(tiny: Any, tmp_path: Path) -> None:
    case = CASES["flux"]
    model_dir = tiny(case)
    good = write_lora(tmp_path / "good.safetensors", factors(model_dir, "transformer"))
    bad = write_lora(tmp_path / "bad.safetensors", factors(tiny(CASES["z-image"]), "transformer"))
    where = wearing(context(model_dir, tmp_path), good, bad)
    plain, worn = latents(case, where, (), ()), latents(case, where, (), (use(where, good),))
    with pytest.raises(Exception, match=r"Target modules|not found"):
        latents(case, where, (), (use(where, good), use(where, bad)))
    assert latents(case, where, (), ()) == plain
    assert latents(case, where, (), (use(where, good),)) == worn


def test_a_file_that_changed_under_way_is_refused(tiny: Any, tmp_path: Path) -> None:
    case = CASES["flux"]
    path = write_lora(tmp_path / "a.safetensors", factors(tiny(case), "transformer"))
    where = wearing(context(tiny(case), tmp_path), path)
    worn = use(where, path)
    write_lora(path, factors(tiny(case), "transformer", seed=3))
    with pytest.raises(ModelError, match=r"a.safetensors changed while the run was under way"):
        latents(case, where, (), (worn,))


def test_files_of_kohyas_trainer_keep_their_alpha(tiny: Any, tmp_path: Path) -> None:
    """Flat names, `lora_down` and `lora_up`, and a scale of their own beside each pair."""
    case = CASES["sdxl"]
    model_dir, tensors = tiny(case), {}
    for name, tensor in factors(model_dir, "unet", rank=4).items():
        layer, _, factor = name.removeprefix("unet.").partition(".lora_")
        if "attn" not in layer:  # the others have names of their own in such files
            continue
        flat = "lora_unet_" + layer.replace(".", "_")
        tensors[f"{flat}.lora_{'down' if factor[0] == 'A' else 'up'}.weight"] = tensor
        tensors[f"{flat}.alpha"] = torch.tensor(3.0)
    path = write_lora(tmp_path / "kohya.safetensors", tensors)
    where = wearing(context(model_dir, tmp_path), path)
    worn = use(where, path, 0.6)
    assert facts(case, where, worn) == {"unet"}
    found = picture(case, where, denoise=(worn,))
    assert np.array_equal(found, whole(case, model_dir, {path: 0.6}, torch.float32))


def test_kohyas_names_of_text_encoders_are_read(tiny: Any, tmp_path: Path) -> None:
    case = CASES["sdxl"]
    model_dir, tensors = tiny(case), {}
    for number, component in (("1", "text_encoder"), ("2", "text_encoder_2")):
        for name, tensor in factors(model_dir, component, seed=int(number)).items():
            layer, _, factor = name.partition(".")[2].partition(".lora_linear_layer.")
            layer = layer if layer.startswith("text_model.") else f"text_model.{layer}"
            flat = f"lora_te{number}_" + layer.replace(".", "_")
            tensors[f"{flat}.lora_{factor}"] = tensor
            tensors[f"{flat}.alpha"] = torch.tensor(1.0)
    path = write_lora(tmp_path / "kohya.safetensors", tensors)
    where = wearing(context(model_dir, tmp_path), path)
    worn = use(where, path, 0.6)
    assert facts(case, where, worn) == {"text_encoder", "text_encoder_2"}
    found = picture(case, where, encode=(worn,))
    assert not np.array_equal(found, picture(case, where))
    assert np.array_equal(found, whole(case, model_dir, {path: 0.6}, torch.float32))


def test_the_names_of_fluxs_makers_are_read(tiny: Any, tmp_path: Path) -> None:
    """Query, key and value are one layer there."""
    case = CASES["flux"]
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, (num_out, num_in) in {
        "double_blocks_0_img_attn_qkv": (96, 32),
        "double_blocks_0_txt_mlp_0": (128, 32),
        "single_blocks_0_linear2": (32, 160),
    }.items():
        down = torch.randn(2, num_in, generator=generator)
        tensors[f"lora_unet_{name}.lora_down.weight"] = down / num_in**0.5
        tensors[f"lora_unet_{name}.lora_up.weight"] = torch.randn(num_out, 2, generator=generator)
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(1.0)
    path = write_lora(tmp_path / "flux.safetensors", tensors)
    where = wearing(context(tiny(case), tmp_path), path)
    worn = use(where, path, 0.6)
    assert facts(case, where, worn) == {"transformer"}
    found = picture(case, where, denoise=(worn,))
    assert not np.array_equal(found, picture(case, where))
    assert np.array_equal(found, whole(case, tiny(case), {path: 0.6}, torch.float32))


def test_what_a_file_says_of_its_training_counts(tiny: Any, tmp_path: Path) -> None:
    case = CASES["flux"]
    tensors = factors(tiny(case), "transformer")
    layers = sorted({name.split(".lora_")[0].partition(".")[2] for name in tensors})
    told = {"transformer.r": 2, "transformer.lora_alpha": 6, "transformer.target_modules": layers}
    path = write_lora(
        tmp_path / "told.safetensors", tensors, {"lora_adapter_metadata": json.dumps(told)}
    )
    silent = write_lora(tmp_path / "silent.safetensors", tensors)
    where = wearing(context(tiny(case), tmp_path), path, silent)
    found = picture(case, where, denoise=(use(where, path),))
    assert not np.array_equal(found, picture(case, where, denoise=(use(where, silent),)))
    assert np.array_equal(found, whole(case, tiny(case), {path: 1.0}, torch.float32))


# ---- videos --------------------------------------------------------------------------------

VIDEOS = {
    **{name: VIDEO_CASES[name] for name in ("wan", "ltx", "ltx2", "hunyuan-video", "cogvideox")},
    "wan from a picture": VIDEO_CASES["wan-i2v from a picture"],
}


def made_of(
    case: VideoCase, model_dir: Path, where: StageContext, worn: dict[str, AdapterUse]
) -> bytes:
    """The file that the stages make; each adapter goes to the phases that hold its component."""
    found: dict[str, Any] = {
        phase: {"adapters": tuple(u for name, u in worn.items() if name in names)}
        for phase, names in case.loads.items()
    }
    start = [stage_of_video(case, where, n, **found[n]) for n in list(case.options)[:-2]]
    made = stage_of_video(case, where, "denoise", *start, **found["denoise"])
    return video_of(where, stage_of_video(case, where, "decode", made))


@pytest.mark.parametrize("name", sorted(VIDEOS))
def test_a_video_has_the_bits_of_the_whole_pipeline(name: str, tiny: Any, tmp_path: Path) -> None:
    case = VIDEOS[name]
    model_dir = tiny(case)
    path = write_lora(tmp_path / "a.safetensors", factors(model_dir, "transformer"))
    where = wearing(context(model_dir, tmp_path), path)
    made = made_of(case, model_dir, where, {"transformer": use(where, path, 0.8)})
    assert made != made_of(case, model_dir, where, {})
    assert made == whole_video(case, model_dir, lambda pipe: wear(pipe, path, 0.8))


def test_connectors_wear_files_in_the_phase_that_loads_them(tiny: Any, tmp_path: Path) -> None:
    case = VIDEO_CASES["ltx2"]
    model_dir = tiny(case)
    path = write_lora(tmp_path / "a.safetensors", factors(model_dir, "connectors"))
    where = wearing(context(model_dir, tmp_path), path)
    made = made_of(case, model_dir, where, {"connectors": use(where, path)})
    assert made == whole_video(case, model_dir, lambda pipe: wear(pipe, path, 1.0))
    assert made != made_of(case, model_dir, where, {})


def wear(pipe: Any, path: Path, scale: float, **options: Any) -> None:
    name = f"a{len(options)}"
    pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name, **options)
    pipe.set_adapters(name, scale)


def whole_video(case: VideoCase, model_dir: Path, change: Callable[[Any], None]) -> bytes:
    pipe = whole_pipe(case.family, model_dir, torch.float32, case.scales)
    change(pipe)
    made = run_pipe(pipe, case.family, {**case.arguments, "output_type": "pt"}, case.scales)
    sound = sound_of(case.family, pipe, made[case.family.sound][0]) if case.family.sound else None
    return encode_mp4(frames(made["videos"][0]), case.frame_rate, sound)


def test_each_transformer_of_wan_22_takes_files_of_its_own(tiny: Any, tmp_path: Path) -> None:
    case = VIDEO_CASES["wan22"]
    model_dir = tiny(case)
    high, low = (
        write_lora(tmp_path / f"{n}.safetensors", factors(model_dir, "transformer", seed=n))
        for n in (1, 2)
    )
    where = wearing(context(model_dir, tmp_path), high, low)
    worn = {
        "transformer": use(where, high, 0.8, "transformer"),
        "transformer_2": use(where, low, 0.4, "transformer_2"),
    }

    def change(pipe: Any) -> None:
        pipe.load_lora_weights(str(high.parent), weight_name=high.name, adapter_name="high")
        pipe.load_lora_weights(
            str(low.parent), weight_name=low.name, adapter_name="low", load_into_transformer_2=True
        )
        pipe.transformer.set_adapters("high", 0.8)
        pipe.transformer_2.set_adapters("low", 0.4)

    made = made_of(case, model_dir, where, worn)
    assert made == whole_video(case, model_dir, change)
    assert made != made_of(case, model_dir, where, {"transformer": worn["transformer"]})


# ---- while weights stream ------------------------------------------------------------------


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> FakeDevices:
    pytest.importorskip("native", reason="the native extension is not built")
    found = FakeDevices()
    monkeypatch.setattr(offload, "open_device", found.open)
    monkeypatch.setattr(offload, "is_computed_in_place", lambda _: False)
    return found


def streaming(where: StageContext, **choice: Any) -> StageContext:
    return where.model_copy(update={"offload": OffloadChoice(link_rate=10**9, **choice)})


@pytest.mark.parametrize("preset", ["stream", "resident"])
def test_files_come_and_go_while_weights_stream(
    tiny: Any, tmp_path: Path, devices: FakeDevices, preset: str
) -> None:
    case = CASES["z-image"]
    path = write_lora(tmp_path / "a.safetensors", factors(tiny(case), "transformer"))
    where = wearing(context(tiny(case), tmp_path), path)
    worn = (use(where, path, 0.7),)
    with pytest.MonkeyPatch.context() as undone:
        undone.setattr(offload, "is_computed_in_place", lambda _: True)
        embeds = stage(case, where, "encode")
        rows = ((), worn)
        expected = [stage(case, where, "denoise", embeds, adapters=each) for each in rows]
    drop_kept()
    tight = {"device_budget": 1320 << 10, "reserve": 8 << 10} if preset == "stream" else {}
    there = streaming(where, preset=preset, **tight)
    for n in (0, 1, 0, 1, 1, 0):
        assert stage(case, there, "denoise", embeds, adapters=rows[n]) == expected[n], n
    assert devices.drivers and devices.violations() == []


def test_text_encoders_change_files_while_their_weights_stream(
    tiny: Any, tmp_path: Path, devices: FakeDevices
) -> None:
    """Held to streaming ones that wear nothing else: in the slots of a ring, numbers lie aligned
    as they do not in their files, and a CPU's kernels round them differently."""
    case = CASES["sd3"]
    path = write_lora(tmp_path / "a.safetensors", factors(tiny(case), "text_encoder"))
    where = streaming(wearing(context(tiny(case), tmp_path), path), preset="stream")
    rows: tuple[tuple[AdapterUse, ...], ...] = ((), (use(where, path, 0.7),))
    alone = []
    for worn in rows:
        drop_kept()
        alone.append(stage(case, where, "encode", adapters=worn).only())
    assert alone[0] != alone[1]
    drop_kept()
    for n in (1, 0, 1, 1, 0, 0):
        assert stage(case, where, "encode", adapters=rows[n]).only() == alone[n], n
    assert devices.drivers and devices.violations() == []


def test_a_family_without_a_loader_says_so(tiny: Any, tmp_path: Path) -> None:
    assert {"pixart"} == WITHOUT_LOADER
    case = CASES["pixart"]
    path = write_lora(tmp_path / "a.safetensors", factors(tiny(case), "transformer"))
    where = wearing(context(tiny(case), tmp_path), path)
    with pytest.raises(RequestError, match="pixart takes no lora: diffusers has no loader"):
        facts(case, where, use(where, path))


def test_the_page_tells_what_each_family_wears() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "use-loras-and-quantized-weights.md"
    told: dict[str, str] = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = line.split("|")
        if len(cells) == 4:
            told |= dict.fromkeys(re.findall(r"`([a-z0-9-]+)`", cells[1]), cells[2].strip())
    listed = told.keys() & FAMILIES.keys()
    assert len(listed) > 20
    for name in listed:
        loader = lora_loader(family_named(name))
        expected = ", ".join(loadable_modules(loader)) if loader else "none"
        assert told[name].startswith(expected), name
