"""Model directories are read whole, or refused with the reason before anything loads."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.errors import ModelError
from stages.models import MINIATURE, open_model, resolve_model
from tests.support.fake_models import weights, write_json, write_model, write_shards

SHARD_2 = "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "a model, 模型")


def refuse(directory: Path) -> str:
    """The message with which a model is refused; it always names the place."""
    with pytest.raises(ModelError) as caught:
        open_model(directory)
    message = str(caught.value)
    assert str(directory) in message
    return message


def test_a_model_is_described_by_its_files(model_dir: Path) -> None:
    model = open_model(model_dir)

    assert (model.class_name, model.is_modular, model.warnings) == ("ZImagePipeline", False, ())
    assert model.settings == {"boundary_ratio": 0.875, "layers": [9, 18]}
    assert sorted(model.components) == [
        "scheduler", "text_encoder", "tokenizer", "transformer", "vae",
    ]  # fmt: skip
    transformer = model.components["transformer"]
    assert (transformer.library, transformer.class_name) == (
        "diffusers",
        "ZImageTransformer2DModel",
    )
    assert [path.name for path in transformer.weight_files] == [
        f"diffusion_pytorch_model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    assert transformer.tensor_shapes() == {"a": (2, 2), "b": (2,), "c": (3, 1), "d": (1,)}
    assert (transformer.nbytes, transformer.file_dtype) == (20, "bfloat16")
    assert transformer.config() == {"patch_size": 2}
    assert model.components["vae"].file_dtype == "float32"
    tokenizer = model.components["tokenizer"]
    assert (tokenizer.file_dtype, tokenizer.weight_files) == (None, ())
    assert [path.name for path in tokenizer.other_files] == ["vocab.json"]


def test_reading_a_model_loads_no_torch(model_dir: Path) -> None:
    code = (
        "import sys; from stages.models import open_model; open_model(sys.argv[1])\n"
        "print(sorted({'torch', 'numpy', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(model_dir)], check=True, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[]"


def test_a_modular_index_leads_to_the_folders_beside_it(model_dir: Path) -> None:
    index = json.loads((model_dir / "model_index.json").read_text())
    components = {key: value for key, value in index.items() if isinstance(value, list)}
    modular: dict[str, object] = {
        "_class_name": "ZImageModularPipeline",
        "_blocks_class_name": "ZImageAutoBlocks",
    }
    for name, value in components.items():
        if name != "layers":
            origin = "/where/it/was/saved" if value[0] else None
            spec = {"pretrained_model_name_or_path": origin, "subfolder": name}
            modular[name] = [*value, spec]
    modular["guider"] = ["diffusers", "Guider", {"pretrained_model_name_or_path": None}]
    write_json(model_dir / "modular_model_index.json", modular)

    model = open_model(model_dir)

    assert (model.class_name, model.is_modular) == ("ZImageModularPipeline", True)
    assert "guider" not in model.components
    assert len(model.components) == 5


# ---- what is missing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model_index.json", "no model_index.json in"),
        ("vae", "folder of component 'vae'"),
        ("vae/config.json", "configuration of component 'vae'"),
        ("scheduler/scheduler_config.json", "configuration of component 'scheduler'"),
        (VAE, "weights are missing: neither diffusion_pytorch_model.safetensors or"),
        (SHARD_2, "1 of 3 shards are missing: diffusion_pytorch_model-00002-of-00003.safetensors"),
    ],
)
def test_a_missing_file_is_named(model_dir: Path, path: str, expected: str) -> None:
    target = model_dir / path
    shutil.rmtree(target) if target.is_dir() else target.unlink()

    assert expected in refuse(model_dir)


def test_what_is_no_model_directory_is_refused(tmp_path: Path) -> None:
    assert "model directory is missing" in refuse(tmp_path / "nowhere")
    (tmp_path / "x.safetensors").write_bytes(weights({"a": (1,)}))
    assert "model is a file" in refuse(tmp_path / "x.safetensors")
    write_json(tmp_path / "empty" / "model_index.json", {"_class_name": "Nothing"})
    assert "names no components" in refuse(tmp_path / "empty")


def test_a_hub_id_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"'org/model-1\.0' is no folder in .*hf download"):
        open_model("org/model-1.0")

    write_model(tmp_path / "org" / "model-1.0")  # a folder of that name is a folder
    assert open_model("org/model-1.0").directory == tmp_path / "org" / "model-1.0"


def test_names_are_resolved_to_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("miniature") == MINIATURE
    assert resolve_model("~/models/m") == tmp_path / "models" / "m"
    assert resolve_model("./miniature") == tmp_path / "miniature"
    for name in ("", "a\0b", "~nobody-of-that-name/x"):
        with pytest.raises(ModelError):
            resolve_model(name)


# ---- what is incomplete or damaged ---------------------------------------------------------


@pytest.mark.parametrize("path", [VAE, SHARD_2])
@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (lambda data: data[:-1], "file has {found} bytes, its header describes {whole} bytes"),
        (lambda data: data[:20], "file has 20 bytes but its header alone needs"),
        (lambda data: data[:7], "file has 7 bytes, a safetensors file has at least 10 bytes"),
        (lambda data: b"", "weight file is empty (0 bytes)"),
    ],
)
def test_a_truncated_weight_file_is_refused_with_both_sizes(
    model_dir: Path, path: str, keep: Callable[[bytes], bytes], expected: str
) -> None:
    whole = (model_dir / path).read_bytes()
    (model_dir / path).write_bytes(keep(whole))

    message = refuse(model_dir)

    assert expected.format(found=len(whole) - 1, whole=len(whole)) in message
    assert str(model_dir / path) in message
    assert "incomplete download?" in message


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n", "git-lfs poi"),
        (b"PK\x03\x04 an archive of pickles", "not a safetensors file"),
        (b"\x08\0\0\0\0\0\0\0not json", "header is not JSON"),
        (b'\x18\0\0\0\0\0\0\0{"a":1,"a":2}           ', "a name occurs twice"),
        (b'\x18\0\0\0\0\0\0\0{"a":{"dtype":"F32"}}   ', "'a' is malformed"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(
    model_dir: Path, data: bytes, expected: str
) -> None:
    (model_dir / VAE).write_bytes(data)

    assert expected in refuse(model_dir)


def test_a_git_lfs_pointer_in_place_of_a_vocabulary_is_refused(model_dir: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n"
    (model_dir / "tokenizer" / "vocab.json").write_text(pointer)

    message = refuse(model_dir)

    assert "not the file of 12345 bytes" in message
    assert "git lfs pull" in message


@pytest.mark.parametrize("path", ["model_index.json", "vae/config.json", INDEX])
@pytest.mark.parametrize(
    ("text", "expected"), [("", "empty"), ('{"a": ', "not JSON"), ("[]", "expected an object")]
)
def test_a_damaged_json_file_is_refused(
    model_dir: Path, path: str, text: str, expected: str
) -> None:
    (model_dir / path).write_text(text)

    message = refuse(model_dir)

    assert expected in message
    assert path in message


def test_pickled_weights_are_refused(model_dir: Path) -> None:
    (model_dir / VAE).rename(model_dir / "vae" / "diffusion_pytorch_model.bin")

    assert "convert it to safetensors" in refuse(model_dir)


def test_pickles_beside_safetensors_are_not_read(model_dir: Path) -> None:
    before = open_model(model_dir).components["vae"].fingerprint(model_dir)
    (model_dir / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"cos\nsystem\n")

    assert open_model(model_dir).components["vae"].fingerprint(model_dir) == before


# ---- shards and their index ----------------------------------------------------------------


def _edit_index(model_dir: Path, edit: Callable[[dict[str, str]], object]) -> None:
    document = json.loads((model_dir / INDEX).read_text())
    edit(document["weight_map"])
    write_json(model_dir / INDEX, document)


def test_an_index_that_promises_too_much_is_refused(model_dir: Path) -> None:
    _edit_index(model_dir, lambda found: found.update(ghost=found["a"]))

    assert "index promises 1 tensors that its shards do not hold: ghost in" in refuse(model_dir)


def test_an_index_that_lists_too_little_is_refused(model_dir: Path) -> None:
    _edit_index(model_dir, lambda found: found.pop("b"))

    assert "shards hold 1 tensors that their index does not list: b in" in refuse(model_dir)


def test_a_renamed_shard_is_a_missing_one(model_dir: Path) -> None:
    (model_dir / SHARD_2).rename(model_dir / "transformer" / "shard-2.safetensors")

    assert "1 of 3 shards are missing" in refuse(model_dir)


@pytest.mark.parametrize("shard", ["../vae/diffusion_pytorch_model.safetensors", "/etc/passwd", 5])
def test_an_index_does_not_lead_out_of_its_folder(model_dir: Path, shard: str) -> None:
    _edit_index(model_dir, lambda found: found.update(a=shard))

    assert "names a file outside its folder" in refuse(model_dir)


def test_a_stray_file_beside_an_index_is_not_read_and_is_reported(model_dir: Path) -> None:
    before = open_model(model_dir).components["transformer"]
    stray = model_dir / "transformer" / "diffusion_pytorch_model.safetensors"
    stray.write_bytes(weights({"a": (9, 9)}))

    model = open_model(model_dir)

    assert model.components["transformer"].weight_files == before.weight_files
    assert [text for text in model.warnings if str(stray) in text]


def test_a_stray_file_that_transformers_would_read_is_refused(model_dir: Path) -> None:
    folder = model_dir / "text_encoder"
    write_shards(folder, [{"embed.weight": (4, 8)}, {"norm.weight": (8,)}], "model")

    assert "transformers would read the first" in refuse(model_dir)


def test_variants_are_found_by_name(model_dir: Path) -> None:
    vae = model_dir / "vae"
    (vae / "diffusion_pytorch_model.fp16.safetensors").write_bytes(
        weights({"conv.weight": (2, 2)}, "F16")
    )

    plain = open_model(model_dir).components["vae"]
    half = open_model(model_dir, variant="fp16").components["vae"]

    assert (plain.variant, plain.file_dtype) == (None, "float32")
    assert (half.variant, half.file_dtype) == ("fp16", "float16")
    assert open_model(model_dir, variant="fp16").components["text_encoder"].variant is None
    assert plain.fingerprint(model_dir) != half.fingerprint(model_dir)
    (model_dir / VAE).unlink()
    assert open_model(model_dir).components["vae"].variant == "fp16"
    (vae / "diffusion_pytorch_model.bf16.safetensors").write_bytes(weights({"conv.weight": (4,)}))
    assert "found bf16, fp16; name one" in refuse(model_dir)


def test_sharded_variants_are_found(model_dir: Path) -> None:
    (model_dir / VAE).unlink()
    write_shards(model_dir / "vae", [{"a": (1,)}, {"b": (1,)}], "diffusion_pytorch_model", "fp16")

    vae = open_model(model_dir).components["vae"]

    assert (vae.variant, len(vae.weight_files)) == ("fp16", 2)


# ---- links, permissions, code --------------------------------------------------------------


def _move_into_blobs(model_dir: Path, path: str) -> Path:
    """Lay a file out as a download cache does: a link to a blob named by its hash."""
    blob = model_dir / "blobs" / "0123abcd"
    blob.parent.mkdir()
    (model_dir / path).rename(blob)
    (model_dir / path).symlink_to(Path("..") / "blobs" / "0123abcd")
    return blob


def test_links_are_followed(model_dir: Path, tmp_path: Path) -> None:
    before = open_model(model_dir).components["vae"].fingerprint(tmp_path)
    _move_into_blobs(model_dir, VAE)
    (tmp_path / "link").symlink_to(model_dir)

    assert open_model(tmp_path / "link").components["vae"].fingerprint(tmp_path) == before


def test_a_dangling_link_is_named_with_its_target(model_dir: Path) -> None:
    _move_into_blobs(model_dir, VAE).unlink()

    message = refuse(model_dir)

    assert f"dangling link: {model_dir / VAE} -> ../blobs/0123abcd" in message


def test_a_link_that_leads_to_itself_is_refused(model_dir: Path) -> None:
    (model_dir / VAE).unlink()
    (model_dir / VAE).symlink_to(model_dir / VAE)

    assert "leads to itself" in refuse(model_dir)


def test_a_pipe_in_place_of_a_file_does_not_block(model_dir: Path) -> None:
    (model_dir / VAE).unlink()
    os.mkfifo(model_dir / VAE)

    assert "is not a regular file" in refuse(model_dir)


@pytest.mark.parametrize(
    ("path", "change", "expected"),
    [
        ("model_index.json", {"vae": ["my_vae", "MyVae"]}, "of library 'my_vae'"),
        ("model_index.json", {"vae": ["subprocess", "Popen"]}, "of library 'subprocess'"),
        ("model_index.json", {"_class_name": ["pipeline", "Mine"]}, "_class_name"),
        ("vae/config.json", {"auto_map": {"AutoModel": "vae.MyVae"}}, "auto_map"),
        ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": "t.T"}}, "auto_map"),
        ("modular_config.json", {"auto_map": {"ModularPipelineBlocks": "b.B"}}, "auto_map"),
    ],
)
def test_code_of_a_models_own_is_refused(
    model_dir: Path, path: str, change: dict[str, object], expected: str
) -> None:
    target = model_dir / path
    before = json.loads(target.read_text()) if target.exists() else {}
    write_json(target, before | change)

    message = refuse(model_dir)

    assert expected in message
    assert "code of a model's own is refused" in message


@pytest.mark.parametrize("place", ["diffusers.py", "vae/diffusers.py"])
def test_a_python_file_that_poses_as_the_library_is_refused(model_dir: Path, place: str) -> None:
    (model_dir / place).write_text("raise SystemExit('must never run')")

    assert "out of the model's own code" in refuse(model_dir)


def test_pipeline_folders_of_diffusers_are_allowed_as_libraries(model_dir: Path) -> None:
    index = json.loads((model_dir / "model_index.json").read_text())
    write_json(model_dir / "model_index.json", index | {"vae": ["ltx2", "LTX2TextConnectors"]})

    assert open_model(model_dir).components["vae"].library == "ltx2"


def test_a_component_does_not_lead_out_of_its_model(model_dir: Path) -> None:
    index = json.loads((model_dir / "model_index.json").read_text())
    write_json(model_dir / "model_index.json", index | {"../vae": ["diffusers", "AutoencoderKL"]})

    assert "leads out of its model" in refuse(model_dir)
