"""Colours for previews: fitted to a VAE by pictures, stored beside the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from stages.latent_rgb import coloured_pictures, fit, main
from stages.models import MINIATURE
from stages.previews import read_latent_rgb, to_picture
from tests.support.tiny_videos import wan_vae


class LinearVae:
    """Latents that are a known mixture of the pixels, four to an edge."""

    mixture = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.25], [0.0, 2.0, 0.0], [1.0, 1.0, 1.0]])
    config: ClassVar = {"scaling_factor": 2.0, "shift_factor": 0.5}

    def encode(self, pictures: torch.Tensor) -> SimpleNamespace:
        small = torch.nn.functional.avg_pool2d(pictures, 4)
        latents = torch.einsum("bchw,lc->blhw", small, self.mixture)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))


def test_a_linear_vae_is_undone() -> None:
    rgb = fit(LinearVae())
    picture = coloured_pictures(1, 16, seed=5)
    latents = (LinearVae().encode(picture).latent_dist.mode() - 0.5) * 2.0
    rows = torch.tensor(rgb)
    found = torch.einsum("bchw,cr->brhw", latents, rows[:-1]) + rows[-1].view(1, 3, 1, 1)
    assert torch.allclose(found, torch.nn.functional.avg_pool2d(picture, 4), atol=1e-3)


def test_a_video_vae_has_a_row_for_each_channel_too() -> None:
    rgb = fit(wan_vae().eval(), coloured_pictures(4, 32, seed=0))
    assert np.shape(rgb) == (17, 3) and np.isfinite(rgb).all()


def test_the_miniature_is_shown_in_its_colours() -> None:
    rgb = read_latent_rgb(MINIATURE)
    assert rgb is not None
    vae = AutoencoderKL.from_pretrained(MINIATURE / "vae").eval()
    for colour in ((255, 0, 0), (0, 0, 255), (255, 255, 255), (0, 128, 0)):
        pixels = torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 128, 128) / 127.5 - 1
        with torch.no_grad():
            (latents,) = vae.encode(pixels).latent_dist.mode()
        shown = np.asarray(to_picture(latents, rgb)).reshape(-1, 3).mean(axis=0)
        others = [(255, 0, 0), (0, 0, 255), (255, 255, 255), (0, 128, 0)]
        nearest = min(others, key=lambda other: float(np.abs(shown - other).sum()))
        assert nearest == colour, shown


def test_pictures_to_fit_by_are_the_same_each_time() -> None:
    assert torch.equal(coloured_pictures(4, 16, seed=0), coloured_pictures(4, 16, seed=0))
    assert coloured_pictures(4, 16, seed=0).abs().max() <= 1


def test_a_model_without_such_a_vae_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["latent_rgb", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "model directory is missing" in capsys.readouterr().err
