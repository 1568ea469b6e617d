"""Values come back from an artifact as exactly what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stages.codec import from_entries, to_entries
from stages.errors import ArtifactError
from stages.handover import pack, unpack
from stages.phases import Handover

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(DTYPES)
)
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(trees)
def test_plain_values_survive_with_their_types(value: Any) -> None:
    entries, tree = to_entries({"value": value})
    assert entries == {}
    back = from_entries(entries, tree)["value"]
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_survive_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    assert torch.equal(through({"t": tensor})["t"], tensor)


def test_strides_survive_because_kernels_are_chosen_by_them() -> None:
    tensor = torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last)
    back = through({"t": tensor})["t"]
    assert back.stride() == tensor.stride() and torch.equal(back, tensor)


def test_views_of_one_storage_become_entries_of_their_own() -> None:
    base = torch.arange(10.0)
    back = through({"head": base[:5], "all": base, "list": [base[2:4], base[2:4]]})
    assert torch.equal(back["head"], base[:5]) and torch.equal(back["list"][1], base[2:4])


def test_an_expanded_tensor_keeps_its_values() -> None:
    tensor = torch.arange(3.0).reshape(3, 1).expand(3, 4)
    assert torch.equal(through({"t": tensor})["t"], tensor)


def test_nested_lists_pictures_arrays_and_sizes_survive() -> None:
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    value = {
        "embeds": [[torch.ones(2)], [torch.zeros(3), None]],
        "overlay": {"box": (1, 2, 3), "picture": picture},
        "array": np.arange(6).reshape(2, 3),
        "size": torch.Size([1, 2]),
    }
    back = through(value)
    assert torch.equal(back["embeds"][1][0], torch.zeros(3)) and back["embeds"][1][1] is None
    assert back["overlay"]["box"] == (1, 2, 3)
    assert np.array_equal(np.asarray(back["overlay"]["picture"]), np.asarray(picture))
    assert np.array_equal(back["array"], value["array"]) and back["size"] == torch.Size([1, 2])


def test_a_value_that_cannot_be_held_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"job.extra.1 is a object"):
        to_entries({"job": {"extra": [1, object()]}})


def test_a_handover_keeps_groups_and_the_generators_state(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2**64 - 1)
    torch.randn(3, generator=generator)
    handover = Handover(
        values={"latents": torch.randn(1, 4, 2, 2)},
        groups={"denoiser_input_fields": {"scale": 0.7}},
        generator_state=generator.get_state(),
    )
    path = tmp_path / "handover.safetensors"
    path.write_bytes(pack("encode", handover, {"tokens": []}))
    opened = unpack(path)
    assert torch.equal(opened.handover.values["latents"], handover.values["latents"])
    assert opened.handover.groups == handover.groups
    again = torch.Generator()
    assert opened.handover.generator_state is not None
    again.set_state(opened.handover.generator_state)
    assert torch.equal(torch.randn(5, generator=again), torch.randn(5, generator=generator))


def test_a_file_of_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(1)}, path, metadata={"exeunt": '{"schema": "exeunt.handover/9"}'})
    with pytest.raises(ArtifactError, match=r"schema 'exeunt.handover/9', this version reads"):
        unpack(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ArtifactError, match="is not a handover"):
        unpack(path)


def through(values: dict[str, Any]) -> dict[str, Any]:
    return from_entries(*to_entries(values))
