"""The whole chain as a flow: real stage processes, a real Prefect server, a tiny model."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stages.contracts import ArtifactRef
from stages.errors import BorderError, ModelError, RequestError
from stages.media import read_settings
from tests.support.studio import TINY, Studio

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support import tiny_models

    return tiny_models.z_image(tmp_path_factory.mktemp("tiny") / "z-image")


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[Any]:
    """One fork server for the module, as one flow process has."""
    from flows.launch import shared_launcher

    shared_launcher.cache_clear()
    made = shared_launcher("forkserver")
    made.expect("z-image")
    made.start_fork_server()
    yield made
    made.close()
    shared_launcher.cache_clear()


@pytest.fixture
def studio(model_dir: Path, home: Path, tmp_path: Path, launcher: Any) -> Studio:
    return Studio(model_dir, home, tmp_path / "pictures", launcher)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pixels_equal_the_one_process_modular_run(studio: Studio, dtype: str) -> None:
    import torch

    from stages.families import family_named
    from tests.support.whole_run import run_whole

    painted = studio.paint(dtype=dtype, guidance_scale=3.0, negative_prompt="blurry")
    whole = run_whole(
        family_named("z-image"),
        studio.model,
        {**TINY, "prompt": "a small red fox", "negative_prompt": "blurry", "output_type": "pil"},
        seed=7,
        dtype=getattr(torch, dtype),
        guidance={"guider": 3.0},
    )
    assert np.array_equal(painted.pixels[0], np.asarray(whole[0]))
    assert painted.started == {"inspect": 1, "encode": 1, "denoise": 1, "decode": 1}


def test_many_seeds_of_one_prompt_take_one_encode_and_one_process_a_phase(studio: Studio) -> None:
    painted = studio.paint(num_images=4)
    assert painted.ran == {"inspect": 1, "encode": 1, "denoise": 4, "decode": 4}
    assert painted.started == {"inspect": 1, "encode": 1, "denoise": 1, "decode": 1}
    assert len({pixels.tobytes() for pixels in painted.pixels}) == 4


def test_a_batch_of_seeds_split_differently_has_the_same_bits(
    studio: Studio, tmp_path: Path
) -> None:
    together = studio.paint(num_images=4, seed=10)
    apart = [
        studio.paint(num_images=2, seed=seed, fresh=True, output=str(tmp_path / "apart"))
        for seed in (12, 10)
    ]
    split = {one.tobytes() for painted in apart for one in painted.pixels}
    assert split == {one.tobytes() for one in together.pixels}
    assert sum(painted.ran["denoise"] for painted in apart) == 4


def test_spawned_processes_make_the_same_bits_as_forked_ones(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import phase
    from flows.launch import Launcher

    forked = studio.paint()
    with Launcher("spawn") as spawner:
        monkeypatch.setattr(phase, "shared_launcher", lambda method: spawner)
        spawned = studio.paint(fresh=True)
        assert spawner.num_processes_started == {
            "inspect": 1,
            "encode": 1,
            "denoise": 1,
            "decode": 1,
        }
    assert np.array_equal(forked.pixels[0], spawned.pixels[0])


def test_the_same_request_again_starts_no_process(studio: Studio) -> None:
    first, again = studio.paint(), studio.paint()
    assert again.started == {} and again.ran == {}
    assert np.array_equal(first.pixels[0], again.pixels[0])
    assert first.files != again.files  # nothing is overwritten


def test_offload_is_no_part_of_any_key(studio: Studio) -> None:
    first = studio.paint()
    again = studio.paint(offload="low_memory", device_budget="64MiB", host_budget="1GiB")
    assert not again.started
    assert np.array_equal(first.pixels[0], again.pixels[0])


def test_a_new_seed_denoises_and_decodes(studio: Studio) -> None:
    studio.paint()
    painted = studio.paint(seed=8)
    assert painted.ran == {"denoise": 1, "decode": 1}
    assert painted.num_steps == 3


def test_another_prompt_runs_every_phase_but_the_inspection(studio: Studio) -> None:
    studio.paint()
    assert studio.paint(prompt="a robot").ran == {"encode": 1, "denoise": 1, "decode": 1}


@pytest.mark.parametrize(
    ("component", "runs"),
    [
        ("text_encoder", {"encode": 1, "denoise": 1, "decode": 1}),
        ("transformer", {"denoise": 1, "decode": 1}),
        ("vae", {"decode": 1}),
    ],
)
def test_a_weight_file_changed_under_the_same_name_runs_what_depends_on_it(
    studio: Studio, tmp_path: Path, component: str, runs: dict[str, int]
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    studio.model = Path(shutil.copytree(studio.model, tmp_path / "changing"))
    studio.paint()
    (weights,) = (studio.model / component).glob("*.safetensors")
    status = weights.stat()
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = tensor * 1.5
    save_file(tensors, weights, metadata={"format": "pt"})
    assert weights.stat().st_size == status.st_size
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert studio.paint().ran == runs


def test_a_fresh_run_notices_what_the_disk_hides(studio: Studio, tmp_path: Path) -> None:
    """Weights rot, or a network's disk tells old times: only their content shows it."""
    import shutil

    from stages.file_writes import stat_key

    studio.model = Path(shutil.copytree(studio.model, tmp_path / "rotting"))
    studio.paint()
    weights = studio.model / "vae" / "diffusion_pytorch_model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\xff")
    for memory in (studio.home / "fingerprints").iterdir():
        document = json.loads(memory.read_text())
        if document["path"] == str(weights):
            document["stat"] = [*stat_key(weights.stat())]  # as if nothing had changed
            memory.write_text(json.dumps(document))
    assert studio.paint().ran == {}
    assert studio.paint(fresh=True).ran["decode"] == 1
    assert studio.paint().ran == {}
    assert len(list((studio.home / "store" / "records" / "decode").rglob("*.json"))) == 2


def object_of(studio: Studio, ref: ArtifactRef) -> Path:
    return studio.home / "store" / "objects" / "sha256" / ref.digest[:2] / ref.digest


def stored(studio: Studio, stage: str) -> tuple[Path, ArtifactRef]:
    """The record and the artifact of the one request of a stage."""
    (record,) = (studio.home / "store" / "records" / stage).rglob("*.json")
    (ref,) = json.loads(record.read_text())["result"]["artifacts"].values()
    return record, ArtifactRef.model_validate(ref)


def test_swapping_two_prompts_swaps_their_pictures_and_nothing_else(studio: Studio) -> None:
    both, guided = (
        ["a small red fox", "a robot"],
        {"guidance_scale": 3.0, "negative_prompt": "blurry"},
    )
    one = studio.paint(prompt=both, **guided)
    other = studio.paint(prompt=both[::-1], fresh=True, **guided)
    assert np.array_equal(one.pixels[0], other.pixels[1])
    assert np.array_equal(one.pixels[1], other.pixels[0])
    assert one.ran == {"inspect": 1, "encode": 2, "denoise": 2, "decode": 2}


def test_a_store_that_moved_is_found_as_it_was(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = studio.paint()
    moved = (studio.home / "store").rename(tmp_path / "moved")
    monkeypatch.setenv("EXEUNT_STORE", str(moved))
    again = studio.paint()
    assert again.ran == {}
    assert np.array_equal(first.pixels[0], again.pixels[0])


def test_a_flow_run_that_failed_is_retried_from_its_finished_stages(
    studio: Studio, tmp_path: Path, prefect_server: str, launcher: Any
) -> None:
    """As a person does it: `prefect flow-run retry`, after mending what was wrong."""
    import shutil
    import subprocess
    import sys

    import torch
    from prefect.client.orchestration import get_client
    from safetensors.torch import load_file, save_file

    studio.model = Path(shutil.copytree(studio.model, tmp_path / "mended"))
    weights = studio.model / "vae" / "diffusion_pytorch_model.safetensors"
    whole = weights.read_bytes()
    tensors = load_file(weights)
    tensors["decoder.conv_in.bias"][0] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(BorderError):
        studio.paint()
    started = Counter(launcher.num_processes_started)
    with pytest.raises(BorderError):  # a new run of the same request: decode alone runs again
        studio.paint()
    assert Counter(launcher.num_processes_started) - started == {"decode": 1}
    weights.write_bytes(whole)
    with get_client(sync_client=True) as client:
        newest = max(client.read_flow_runs(), key=lambda run: run.created)
    entrypoint = f"{Path(__file__).resolve().parents[2] / 'flows' / 'z_image.py'}:z_image"
    before = {path: path.stat().st_mtime_ns for path in studio.reports()}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "prefect",
            "flow-run",
            "retry",
            str(newest.id),
            "--entrypoint",
            entrypoint,
        ],
        env=os.environ | {"PREFECT_API_URL": prefect_server},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    new = [path for path in studio.reports() if before.get(path) != path.stat().st_mtime_ns]
    assert [json.loads(path.read_text())["stage"] for path in new] == ["decode"]
    assert list(studio.output.glob("*.png"))


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [delete, truncate, flip_one_bit])
@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
def test_a_damaged_artifact_is_made_again_and_healed(
    studio: Studio, stage: str, damage: Any
) -> None:
    first = studio.paint()
    _, ref = stored(studio, stage)
    path = object_of(studio, ref)
    path.chmod(0o644)
    damage(path)
    again = studio.paint()
    assert again.ran == {stage: 1}
    assert np.array_equal(first.pixels[0], again.pixels[0])
    assert studio.store.read(ref)
    assert studio.paint().ran == {}


def test_an_emptied_record_is_made_again_and_healed(studio: Studio) -> None:
    studio.paint()
    record, _ = stored(studio, "denoise")
    kept = record.read_bytes()
    record.write_bytes(b"")
    for prefects in Path(os.environ["EXEUNT_HOME"]).parent.rglob("results/denoise/*"):
        prefects.write_bytes(b"")
    studio.paint()
    healed = json.loads(stored(studio, "denoise")[0].read_bytes())
    assert healed["result"] == json.loads(kept)["result"]


def test_a_raised_code_version_runs_that_stage_and_no_more_when_its_bytes_are_equal(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.versions import CODE_VERSIONS

    studio.paint()
    monkeypatch.setitem(CODE_VERSIONS, "encode", "1-again")
    assert studio.paint().ran == {"encode": 1}


def test_latents_that_are_not_finite_fail_the_stage_and_write_no_picture(
    studio: Studio, tmp_path: Path
) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    studio.model = Path(shutil.copytree(studio.model, tmp_path / "broken"))
    weights = studio.model / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["decoder.conv_in.bias"][0] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(BorderError, match=r"decode: images .* NaN"):
        studio.paint()
    assert not list(studio.output.rglob("*.png"))


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"height": 100}, r"height 100 .*(96|112)"),
    ({"width": 65536, "height": 65536}, "65536"),
    ({"num_inference_steps": 0}, "0"),
    ({"num_inference_steps": -3}, "-3"),
    ({"guidance_scale": float("nan")}, "nan"),
    ({"guidance_scale": -1.0}, "-1"),
    ({"seed": 2**64}, str(2**64)),
    ({"seed": -2}, "-2"),
    ({"seed": "1.5"}, "1.5"),
    ({"prompt": "a\0b"}, "NUL"),
    ({"prompt": "a\ud800b"}, "surrogate"),
    ({"prompt": "x" * 1_000_001}, "1,?000,?001"),
    ({"prompt": ["x" * 90_000] * 5}, "450,?024 bytes"),
    ({"prompt": []}, "empty list"),
    ({"prompt": ["a fox", None]}, "prompt is null"),
    ({"dtype": "fp 16"}, "fp 16"),
    ({"device": "tpu"}, "tpu"),
    ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ({"max_sequence_length": 0}, "0"),
    ({"output": "/dev/null"}, "/dev/null"),
    ({"device_budget": "twelve"}, "device_budget: 'twelve' is no amount of memory"),
    ({"host_budget": 0}, "host_budget: 0 is 0 bytes"),
    ({"format": "gif"}, "format is 'gif', allowed are png, jpeg, webp"),
    ({"quality": 90}, "quality is 90, but a png has none to choose"),
    ({"format": "webp", "quality": 101}, "quality is 101, allowed are 1 to 100"),
    ({"format": "jpeg", "prompt": "x" * 60_000}, "bytes, but the settings in a jpeg have room"),
    ({"label": "c2pa"}, "label is 'c2pa', allowed is iptc"),
    ({"offload": "fast"}, "allowed are auto, resident, stream, low_memory, group, off"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_a_bad_argument_is_an_error_before_any_process_starts(
    studio: Studio, launcher: Any, bad: dict[str, Any], message: str
) -> None:
    before = Counter(launcher.num_processes_started)
    with pytest.raises((RequestError, ModelError), match=message):
        check_arguments(studio, **bad)
    assert Counter(launcher.num_processes_started) == before


def check_arguments(studio: Studio, **changes: Any) -> None:
    from flows.z_image import check

    arguments: dict[str, Any] = {
        "prompt": "a fox",
        "negative_prompt": "",
        "seed": 1,
        "num_images": 1,
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
        "guidance_scale": 1.0,
        "max_sequence_length": 64,
        "model": str(studio.model),
        "dtype": "auto",
        "device": "cpu",
        "output": str(studio.output),
    }
    check(**arguments | changes)


def test_a_seed_of_twenty_digits_is_kept_exact(studio: Studio) -> None:
    seed = 2**64 - 1
    painted = studio.paint(seed=str(seed))
    text = Image.open(painted.files[0]).text  # type: ignore[attr-defined]
    assert f"Seed: {seed}," in text["parameters"]
    assert json.loads(text["exeunt"])["seed"] == seed


def test_minus_one_draws_a_seed_and_records_it(studio: Studio) -> None:
    first, second = studio.paint(seed=-1), studio.paint(seed=-1)
    seeds = [
        json.loads(Image.open(painted.files[0]).text["exeunt"])["seed"]  # type: ignore[attr-defined]
        for painted in (first, second)
    ]
    assert seeds[0] != seeds[1] and all(0 <= seed < 2**64 for seed in seeds)
    assert studio.paint(seed=seeds[0]).ran == {}


def test_a_truncated_prompt_is_told_again_when_its_embedding_is_found(studio: Studio) -> None:
    from flows.display import LineDisplay, showing

    long = {"prompt": "red " * 100 + "hedgehog"}
    told = []
    for _ in range(2):
        heard = io.StringIO()
        with showing(LineDisplay(heard)):
            studio.paint(**long)
        told.append([line for line in heard.getvalue().splitlines() if "warning" in line])
    assert told[0] == told[1] and "text_encoder reads 64" in told[0][0]
    with pytest.raises(RequestError, match="text_encoder reads 64"):
        studio.paint(**long, on_truncate="error")


def test_a_report_that_cannot_be_kept_costs_a_warning(studio: Studio) -> None:
    from flows.display import LineDisplay, showing

    studio.home.mkdir()
    (studio.home / "reports").write_text("a file where the folder should be")
    told = io.StringIO()
    with showing(LineDisplay(told)):
        painted = studio.paint()
    assert len(painted.files) == 1
    assert "the report of decode is not kept: " in told.getvalue()


def test_settings_stay_out_of_the_picture_on_request(studio: Studio) -> None:
    painted = studio.paint(embed_settings=False)
    assert Image.open(painted.files[0]).text == {}  # type: ignore[attr-defined]


def test_another_format_is_written_from_what_was_painted(studio: Studio) -> None:
    """Format and label are of the file; the picture in the store, and its key, stay."""
    first = studio.paint()
    again = studio.paint(format="webp", quality=80, label="iptc")
    assert again.ran == {}
    (png,), (webp,) = first.files, again.files
    assert (webp.stem, webp.suffix) == (png.stem, ".webp")
    with Image.open(webp) as picture:
        assert (picture.format, picture.size) == ("WEBP", (64, 64))
        assert b"/trainedAlgorithmicMedia<" in picture.info["xmp"]
    assert read_settings(webp) == read_settings(png)
    assert b"trainedAlgorithmicMedia" not in png.read_bytes()
