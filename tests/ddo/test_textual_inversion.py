"""A text encoder's vocabulary grows while it is attached, as textual inversion makes it."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from ddo.lifecycle import OffloadSession
from ddo.settings import OffloadSettings
from tests.ddo.fake_backend import FakeBackend

IDS = torch.tensor([[0, 5, 7, 49]])
NEW_IDS = torch.tensor([[0, 5, 50, 49]])


def make_encoder():
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=49,
    )
    return CLIPTextModel(config).eval().requires_grad_(False)


def encode(encoder, ids):
    with torch.no_grad():
        return encoder(ids).last_hidden_state


def learn_a_word(encoder):
    """What `load_textual_inversion` does to a text encoder."""
    encoder.resize_token_embeddings(51, mean_resizing=False)
    word = torch.linspace(-1, 1, 32)
    encoder.get_input_embeddings().weight.data[50] = word
    encoder.requires_grad_(False)


@pytest.mark.parametrize("preset", ["stream", "low_memory", "resident"])
def test_a_word_that_is_learned_while_attached_is_used_and_stays(preset):
    plain = make_encoder()
    before = encode(plain, IDS)
    learn_a_word(plain)
    expected = encode(plain, NEW_IDS)
    encoder = make_encoder()
    budget = 200_000 if preset == "resident" else 60_000
    settings = OffloadSettings(preset=preset, device_budget=budget + 1, reserve=1, link_rate="1GB")
    with OffloadSession(encoder, settings, FakeBackend(1)) as session:
        assert torch.equal(encode(encoder, IDS), before)
        learn_a_word(encoder)
        for _ in range(2):
            assert torch.equal(encode(encoder, NEW_IDS), expected)
        assert session.report().num_replans["module changed"] == 1
        assert not any(weight.is_meta for weight in encoder.parameters())
    assert encoder.get_input_embeddings().num_embeddings == 51
    assert torch.equal(encode(encoder, NEW_IDS), expected)
