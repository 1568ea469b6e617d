from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from ddo.weight_files import SourceError, read_header, read_weight_files


@pytest.fixture
def single(tmp_path):
    """A directory with one weight file of two tensors."""
    tensors = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(4, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """A directory with three shards and their index."""
    weight_map = {}
    for k in range(3):
        name = f"model-0000{k + 1}-of-00003.safetensors"
        save_file({f"layer.{k}": torch.full((3,), float(k))}, tmp_path / name)
        weight_map[f"layer.{k}"] = name
    write_index(tmp_path, weight_map)
    return tmp_path


def write_index(folder, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_a_header_tells_where_each_tensor_lies(single):
    path = single / "model.safetensors"
    found = {tensor.name: tensor for tensor in read_header(path)}
    raw = path.read_bytes()
    a = found["a.weight"]
    assert (a.dtype, a.shape, a.nbytes) == ("F32", (2, 3), 24)
    values = torch.frombuffer(bytearray(raw[a.offset : a.offset + a.nbytes]), dtype=torch.float32)
    assert values.tolist() == [0, 1, 2, 3, 4, 5]
    assert found["b.bias"].dtype == "I8"


def test_shards_are_read_through_their_index_and_strays_are_named(sharded):
    save_file({"layer.0": torch.zeros(3)}, sharded / "model.safetensors")
    files = read_weight_files(sharded)
    assert sorted(files.tensors) == ["layer.0", "layer.1", "layer.2"]
    assert [path.name for path in files.ignored] == ["model.safetensors"]


def test_one_file_may_be_given_instead_of_a_directory(single):
    assert len(read_weight_files(single / "model.safetensors").tensors) == 2


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_file_that_was_cut_off_is_refused_with_its_size(single, keep):
    path = single / "model.safetensors"
    raw = path.read_bytes()
    cut = raw[:keep]
    path.write_bytes(cut)
    with pytest.raises(SourceError, match=rf"file has {len(cut)} bytes, .*incomplete download\?"):
        read_weight_files(single)


def test_a_pointer_of_large_file_storage_is_told_apart(single):
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SourceError, match="is a Git LFS pointer of 43 bytes"):
        read_weight_files(single)


def test_missing_shard_missing_tensor_and_unlisted_tensor_are_three_errors(sharded):
    names = {f"layer.{k}": f"model-0000{k + 1}-of-00003.safetensors" for k in range(3)}
    write_index(
        sharded, {k: v for k, v in names.items() if k != "layer.2"} | {"layer.9": names["layer.2"]}
    )
    with pytest.raises(SourceError, match=r"index promises 1 tensors .* layer\.9 in model-00003"):
        read_weight_files(sharded)
    save_file({"layer.2": torch.zeros(3), "layer.3": torch.zeros(3)}, sharded / names["layer.2"])
    write_index(sharded, names)
    with pytest.raises(SourceError, match=r"shards hold 1 tensors .* layer\.3"):
        read_weight_files(sharded)
    (sharded / names["layer.1"]).unlink()
    with pytest.raises(SourceError, match=r"1 of 3 shards are missing: model-00002-of-00003"):
        read_weight_files(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    save_file({"layer.0": torch.zeros(3)}, sharded / "model-00002-of-00003.safetensors")
    with pytest.raises(SourceError, match=r"tensor 'layer\.0' is in "):
        read_weight_files(sharded)


def test_a_variant_is_found_alone_and_has_to_be_named_among_several(single):
    (single / "model.safetensors").rename(single / "model.fp16.safetensors")
    assert read_weight_files(single).variant == "fp16"
    save_file({"a": torch.zeros(1)}, single / "model.bf16.safetensors")
    with pytest.raises(SourceError, match=r"several variants: .* has bf16, fp16"):
        read_weight_files(single)
    assert list(read_weight_files(single, "bf16").tensors) == ["a"]
    with pytest.raises(SourceError, match="variant 'int8' is missing"):
        read_weight_files(single, "int8")


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(SourceError, match="weights are missing"):
        read_weight_files(tmp_path)
    with pytest.raises(SourceError, match="model directory is missing"):
        read_weight_files(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        [],
    ],
)
def test_a_damaged_header_is_refused(tmp_path, entry):
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SourceError, match=r"header is damaged|begins at byte|bytes"):
        read_weight_files(tmp_path)


def test_a_file_that_changed_since_it_was_read_is_noticed(single):
    files = read_weight_files(single)
    files.verify()
    path = single / "model.safetensors"
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceError, match="has changed since it was read"):
        files.verify()
    path.unlink()
    with pytest.raises(SourceError, match="has gone"):
        files.verify()
