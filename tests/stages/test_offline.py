"""A model in a folder is loaded without asking the network for anything."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.support import tiny_models
from tests.support.chain import context, request, run_stage

TEXT = {"prompt": "a small red fox", "max_sequence_length": 64}
LOOP = {"height": 64, "width": 64, "num_inference_steps": 1}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that were asked for while no variable forbids it; none of them answers."""
    seen: list[Any] = []

    def refuse(*address: Any, **_: Any) -> None:
        seen.append(address)
        raise OSError("there is no network")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return seen


def test_no_stage_asks_the_network_for_a_model_in_a_folder(
    tmp_path: Path, asked: list[Any]
) -> None:
    where = context(tiny_models.z_image(tmp_path / "model"), tmp_path)

    embeds = run_stage(request("encode", TEXT), where)[0]
    latents = run_stage(request("denoise", LOOP, embeds, seed=1), where)[0]
    run_stage(request("decode", {}, latents), where)

    assert asked == []
    with pytest.raises(Exception, match="there is no network"):
        huggingface_hub.HfApi().model_info("nobody/nothing")
    assert asked, "the test would not have noticed"
