"""LoRA files as they are named on a command line, held to their headers without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages import lora_files
from stages.errors import DependencyError, RequestError
from stages.lora_files import Lora, check_lora_file, choose_loras
from tests.support.lora_files import write_lora

PAIR = {
    "transformer.x.lora_A.weight": torch.zeros(2, 8),
    "transformer.x.lora_B.weight": torch.zeros(4, 2),
}


@pytest.fixture(autouse=True)
def peft_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_files, "require_peft", lambda: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_lora(tmp_path / "fox.safetensors", PAIR)


def test_a_path_may_be_followed_by_its_scale(path: Path) -> None:
    assert choose_loras(None) == choose_loras([]) == ()
    assert choose_loras(str(path)) == (Lora(path=path),)
    assert choose_loras([f"{path}:0.5"]) == (Lora(path=path, scale=0.5),)
    assert choose_loras([f"{path}:-1e-1"]) == (Lora(path=path, scale=-0.1),)
    assert choose_loras([f"transformer_2={path}:2"]) == (
        Lora(path=path, scale=2.0, target="transformer_2"),
    )


def test_order_is_kept_and_a_folder_stands_for_its_one_file(tmp_path: Path, path: Path) -> None:
    other = write_lora(tmp_path / "in" / "pytorch_lora_weights.safetensors", PAIR)
    found = choose_loras([f"{other.parent}:2", str(path)])
    assert [each.path for each in found] == [other, path]
    write_lora(other.with_name("second.safetensors"), PAIR)
    with pytest.raises(RequestError, match=r"holds 2 safetensors files .*name one"):
        choose_loras(str(other.parent))


def test_odd_names_are_names(tmp_path: Path) -> None:
    for name in ("a:1.safetensors", "b=c.safetensors", "лиса fox.safetensors", "d.safetensors:2"):
        odd = write_lora(tmp_path / name, PAIR)
        assert choose_loras(str(odd)) == (Lora(path=odd),)
        assert choose_loras(f"{odd}:0.25") == (Lora(path=odd, scale=0.25),)


@pytest.mark.parametrize("scale", ["nan", "inf", "-inf"])
def test_a_scale_is_finite(path: Path, scale: str) -> None:
    with pytest.raises(RequestError, match=rf"scale is {scale} .*expected a finite number"):
        choose_loras(f"{path}:{scale}")


def test_a_file_is_given_once_for_a_component(path: Path) -> None:
    with pytest.raises(RequestError, match=r"fox.safetensors twice; .* sum of scales"):
        choose_loras([str(path), f"{path}:0.5"])
    assert len(choose_loras([f"transformer={path}", f"transformer_2={path}"])) == 2


def test_no_more_files_than_a_model_can_wear(path: Path) -> None:
    with pytest.raises(RequestError, match=r"names 33 files, allowed are 32"):
        choose_loras([str(path)] * 33)


def test_what_is_missing_or_unreadable_is_named(tmp_path: Path, path: Path) -> None:
    with pytest.raises(RequestError, match=r"lora is missing: .*none.safetensors"):
        choose_loras(str(tmp_path / "none.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RequestError, match=r"not a whole safetensors .*incomplete download\?"):
        choose_loras(str(path))
    path.write_bytes(b"not a safetensors file at all")
    with pytest.raises(RequestError, match=r"not a whole safetensors file: .*fox.safetensors"):
        choose_loras(str(path))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".ckpt"])
def test_a_pickle_is_refused_with_the_remedy(tmp_path: Path, suffix: str) -> None:
    pickle = tmp_path / f"lora{suffix}"
    pickle.write_bytes(b"\x80\x04.")
    with pytest.raises(RequestError, match=r"is a pickle, which can run code .*convert it to safe"):
        choose_loras(str(pickle))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"transformer.x.weight": torch.zeros(2, 2)}, r"holds no LoRA: none of its 1 tensors"),
        ({"transformer.x.lora_A.weight": torch.zeros(2, 8)}, r"1 factors without .*x.lora_B"),
        ({**PAIR, "y.lora_B.weight": torch.zeros(4, 2)}, r"1 factors without .*first 'y.lora_B"),
        ({**PAIR, "transformer.x.lora_B.weight": torch.zeros(4, 3)}, r"\(2, 8\) and \(4, 3\), exp"),
        ({**PAIR, "x.dora_scale": torch.zeros(4)}, r"of the kind DoRA, .*x.dora_scale"),
        ({"x.lokr_w1": torch.zeros(2, 2)}, r"of the kind LoKr"),
        ({"x.hada_w1_a": torch.zeros(2, 2)}, r"of the kind LoHa"),
    ],
)
def test_what_is_no_lora_is_told_by_its_names_and_shapes(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check_lora_file(write_lora(tmp_path / "x.safetensors", tensors))


@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("a.lora_down.weight", "a.lora_up.weight"),
        ("a.lora.down.weight", "a.lora.up.weight"),
        ("a.to_q_lora.down.weight", "a.to_q_lora.up.weight"),
        ("a.lora_linear_layer.down.weight", "a.lora_linear_layer.up.weight"),
        ("a.lora_A.default.weight", "a.lora_B.default.weight"),
    ],
)
def test_pairs_are_found_by_the_names_of_every_trainer(tmp_path: Path, down: str, up: str) -> None:
    pair = {down: torch.zeros(2, 8), up: torch.zeros(4, 2), "a.alpha": torch.tensor(1.0)}
    check_lora_file(write_lora(tmp_path / "x.safetensors", pair))
    del pair[up]
    with pytest.raises(RequestError, match="1 factors without"):
        check_lora_file(write_lora(tmp_path / "x.safetensors", pair))


def test_the_missing_library_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"needs the library peft; pip install 'exeunt\[ad"):
        choose_loras(str(path))
