"""Encode, denoise, decode and inspect as functions, with a tiny model and a real store."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from stages.artifacts import ArtifactStore
from stages.contracts import StageContext, StageResult
from stages.errors import BorderError, ModelError, RequestError
from stages.families import family_named
from stages.handover import pack, unpack
from stages.latents import describe_latents
from stages.manifest import Manifest
from stages.miniature.draw import draw
from stages.miniature.grammar import Placed, Placement
from stages.models import MINIATURE
from stages.phases import Handover
from stages.worker import handler_for
from tests.support import tiny_models
from tests.support.chain import Heard, context, request, run_stage
from tests.support.whole_run import run_whole

TEXT = {"prompt": "a small red fox", "max_sequence_length": 64}
LOOP = {"height": 64, "width": 64, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.z_image(tmp_path_factory.mktemp("tiny") / "z-image")


@pytest.fixture
def where(model_dir: Path, tmp_path: Path) -> StageContext:
    return context(model_dir, tmp_path)


def encode(where: StageContext, **options: Any) -> StageResult:
    return run_stage(request("encode", {**TEXT, **options}), where)[0]


def denoise(where: StageContext, embeds: StageResult, seed: int, **options: Any) -> StageResult:
    return run_stage(request("denoise", {**LOOP, **options}, embeds, seed=seed), where)[0]


def pixels(where: StageContext, result: StageResult, name: str = "image-0") -> np.ndarray[Any, Any]:
    png = ArtifactStore(where.store_url).read(result.artifacts[name])
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_chain_through_artifacts_equals_the_unsplit_pipeline(
    where: StageContext, model_dir: Path, dtype: str
) -> None:
    guided = {"negative_prompt": "blurry", "do_classifier_free_guidance": True}
    embeds = run_stage(request("encode", TEXT | guided, dtype=dtype), where)[0]
    loop = {**LOOP, "guidance_scale": 3.0}
    latents = run_stage(request("denoise", loop, embeds, seed=7, dtype=dtype), where)[0]
    image = run_stage(request("decode", {}, latents, dtype=dtype), where)[0]
    whole = run_whole(
        family_named("z-image"),
        model_dir,
        {**TEXT, **LOOP, "negative_prompt": "blurry", "output_type": "pil"},
        seed=7,
        dtype=getattr(torch, dtype),
        guidance={"guider": 3.0},
    )
    assert np.array_equal(pixels(where, image), np.asarray(whole[0]))


def test_one_embedding_serves_every_guidance_scale_and_seed(where: StageContext) -> None:
    embeds = encode(where, negative_prompt="", do_classifier_free_guidance=True)
    pictures = {
        (seed, scale): denoise(where, embeds, seed, guidance_scale=scale).only().digest
        for seed in (1, 2**64 - 1)
        for scale in (2.0, 5.0)
    }
    assert len(set(pictures.values())) == 4


def test_a_warm_process_makes_the_same_bits_as_a_fresh_one(where: StageContext) -> None:
    """Guiders and schedulers keep state from call to call unless they are renewed."""
    embeds = encode(where, negative_prompt="", do_classifier_free_guidance=True)
    first = denoise(where, embeds, 3, guidance_scale=4.0)
    denoise(where, embeds, 4, guidance_scale=1.0, num_inference_steps=5)
    assert denoise(where, embeds, 3, guidance_scale=4.0) == first


def test_guidance_without_negative_embeddings_is_an_error(where: StageContext) -> None:
    with pytest.raises(RequestError, match="guidance_scale 4 needs negative embeddings"):
        denoise(where, encode(where), 1, guidance_scale=4.0)


def test_a_long_prompt_and_an_empty_negative_equal_the_unsplit_run(
    where: StageContext, model_dir: Path
) -> None:
    """Embeddings of different lengths cross the border as they are, masks applied."""
    text = {"prompt": "red fox, " * 30, "negative_prompt": "", "max_sequence_length": 256}
    guided = {**text, "do_classifier_free_guidance": True}
    embeds = run_stage(request("encode", guided), where)[0]
    latents = denoise(where, embeds, 5, guidance_scale=3.0)
    image = run_stage(request("decode", {}, latents), where)[0]
    options = {**text, **LOOP, "output_type": "pil"}
    whole = run_whole(
        family_named("z-image"),
        model_dir,
        options,
        seed=5,
        dtype=torch.float32,
        guidance={"guider": 3.0},
    )
    assert np.array_equal(pixels(where, image), np.asarray(whole[0]))


def test_ten_thousand_characters_are_cut_and_told(where: StageContext) -> None:
    text = "a small red fox, " * 600
    _, report, _ = run_stage(request("encode", {**TEXT, "prompt": text}), where)
    assert report["tokens"][0]["tokens_used"] == 64
    assert len(report["warnings"][0]) < 500


def test_artifacts_are_equal_bytes_when_made_again(where: StageContext) -> None:
    assert encode(where) == encode(where)


def test_a_report_says_what_a_request_cost(where: StageContext) -> None:
    embeds = encode(where)
    _, report, heard = run_stage(request("denoise", LOOP, embeds, seed=1), where)
    assert report["schema"] == "exeunt.stage-report/1"
    assert report["steps"]["num_run"] == 3
    assert {"load", "run"} <= {phase["name"] for phase in report["host_phases"]} | {"load"}
    assert report["memory"]["peak_rss_bytes"] > 50e6
    assert [step for step in heard.steps if step[2]] == [
        ("running", 1, 3),
        ("running", 2, 3),
        ("running", 3, 3),
    ]


def test_a_long_prompt_is_cut_and_the_report_says_what_was_lost(where: StageContext) -> None:
    text = "red " * 100 + "and a final hedgehog"
    result, report, heard = run_stage(request("encode", {**TEXT, "prompt": text}), where)
    (use,) = report["tokens"]
    assert use["tokens_used"] == 64 < use["tokens_total"]
    assert use["dropped_text"].endswith("and a final hedgehog")
    assert use["encoder"] == "text_encoder"
    assert "text_encoder reads 64" in heard.warnings[0]
    held = unpack(ArtifactStore(where.store_url).path(result.only()))
    assert held.handover.values["prompt_embeds"][0].shape[0] <= 64
    assert held.facts["tokens"] == report["tokens"]


def test_a_long_prompt_can_be_an_error_before_the_encoder_loads(tmp_path: Path) -> None:
    strict = context(tiny_models.z_image(tmp_path / "model"), tmp_path, on_truncate="error")
    heard = Heard()
    with pytest.raises(RequestError, match=r"prompt has \d+ tokens but text_encoder reads 64"):
        handler_for("encode")(request("encode", {**TEXT, "prompt": "red " * 100}), strict, heard)
    assert heard.steps == []
    run_stage(request("encode", TEXT), strict)


def test_an_empty_prompt_is_encoded_and_the_word_nan_stays_a_word(where: StageContext) -> None:
    texts = ("", "   ", "nan", "None", "null")
    assert len({encode(where, prompt=text).only().digest for text in texts}) == len(texts)


def test_an_empty_prompt_has_the_embedding_of_no_guidance(where: StageContext) -> None:
    embeds = embeds_of(where, prompt="", negative_prompt="", do_classifier_free_guidance=True)
    (positive,), (negative,) = embeds["prompt_embeds"], embeds["negative_prompt_embeds"]
    assert torch.equal(positive, negative)


def test_a_prompt_and_its_negative_have_one_embedding_each(where: StageContext) -> None:
    """Never the negative one among the positive ones."""
    guided = {"prompt": "a robot", "do_classifier_free_guidance": True}
    both = embeds_of(where, **guided, negative_prompt="blurry")
    other = embeds_of(where, **guided | {"prompt": "blurry"}, negative_prompt="a robot")
    assert {name: len(rows) for name, rows in both.items()} == {
        "prompt_embeds": 1,
        "negative_prompt_embeds": 1,
    }
    assert torch.equal(both["prompt_embeds"][0], other["negative_prompt_embeds"][0])
    assert torch.equal(both["negative_prompt_embeds"][0], other["prompt_embeds"][0])


@pytest.mark.parametrize(
    "text",
    [
        "a cat\n(red:1.4) dog",
        "a cat\r\n(red:1.4)\u2028dog",
        "portrait (photo \\(medium\\)), twintails ((twintails)), (x:0.5), [y",
        "لوحة\u200f زيتية\u061c جميلة",
        "\U0001f469\u200d\U0001f3a8 caf\u00e9 cafe\u0301 a\ufeffb",
        "\x1b[31mred",
    ],
)
def test_an_encoder_reads_a_prompt_as_it_was_typed(
    where: StageContext, model_dir: Path, text: str
) -> None:
    """No weights are parsed, no character is dropped: the plain tokenizer's ids are encoded."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir / "tokenizer")
    encoder = transformers.AutoModel.from_pretrained(model_dir / "text_encoder")
    ids = tokenizer(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        expected = encoder(ids, output_hidden_states=True).hidden_states[-2][0]
    (found,) = embeds_of(where, prompt=text, max_sequence_length=256)["prompt_embeds"]
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)


def embeds_of(where: StageContext, **options: Any) -> dict[str, Any]:
    ref = encode(where, **options).only()
    values = unpack(ArtifactStore(where.store_url).path(ref)).handover.values
    return {name: value for name, value in values.items() if name.endswith("_embeds")}


@pytest.mark.parametrize(
    ("spoiling", "what"),
    [
        (lambda latents: latents[0, 0, 0, 0].fill_(float("nan")), r"1 NaN and 0 infinite of 1024"),
        (lambda latents: latents[0, 0, 0, 0].fill_(float("inf")), r"0 NaN and 1 infinite of 1024"),
        (lambda latents: latents.zero_(), "is constant: all 1024 values are 0"),
        (lambda latents: latents.fill_(0.5), "is constant: all 1024 values are 0.5"),
    ],
    ids=["nan", "inf", "zeros", "equal"],
)
def test_spoiled_latents_stop_the_decode_before_its_model_loads(
    model_dir: Path, tmp_path: Path, spoiling: Any, what: str
) -> None:
    where = context(tiny_models.z_image(tmp_path / "model"), tmp_path)
    spoiled = spoil(where, denoise(where, encode(where), 1), spoiling)
    heard, before = Heard(), ArtifactStore(where.store_url).ls()
    with pytest.raises(BorderError, match=rf"decode: input latents \(1, 16, 8, 8\).* {what}"):
        handler_for("decode")(request("decode", {}, spoiled), where, heard)
    assert heard.steps == []
    assert ArtifactStore(where.store_url).ls() == before


def test_a_nearly_black_picture_is_kept_with_a_warning(tmp_path: Path) -> None:
    dark = tiny_models.z_image(tmp_path / "dark")

    def dim(tensors: Any) -> None:
        tensors["decoder.conv_out.weight"] *= 1e-4
        tensors["decoder.conv_out.bias"].fill_(-0.99)

    edit(dark, dim)
    where = context(dark, tmp_path)
    result, report, heard = run_stage(
        request("decode", {}, denoise(where, encode(where), 1)), where
    )
    assert pixels(where, result).max() < 4
    (warning,) = heard.warnings
    assert re.match(r"image-0 is nearly one colour \(1, 1, 1 of 255\), its contrast is", warning)
    assert report["warnings"] == [warning]


def test_constant_latents_are_named_at_their_border(where: StageContext) -> None:
    from stages.borders import check_border

    with pytest.raises(BorderError, match=r"denoise: latents \(1, 4, 8, 8\) float32 is constant"):
        check_border("denoise", {"latents": torch.zeros(1, 4, 8, 8)})


def test_the_first_bad_step_is_named(model_dir: Path, tmp_path: Path) -> None:
    broken = tiny_models.z_image(tmp_path / "broken")
    weights = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["t_embedder.mlp.0.bias"][0] = float("nan")
    save_file(tensors, weights)
    there = context(broken, tmp_path)
    embeds = encode(there)
    with pytest.raises(BorderError, match=r"denoise: latents .* NaN .*first seen after step 1"):
        denoise(there, embeds, 1)


def test_latents_of_another_vae_are_refused(where: StageContext) -> None:
    latents = denoise(where, encode(where), 1)
    store = ArtifactStore(where.store_url)
    held = unpack(store.path(latents.only()))
    held.facts["latents"]["vae"]["scaling_factor"] = 0.13025
    forged = store.put(pack("denoise", held.handover, held.facts))
    with pytest.raises(BorderError, match=r"scaling_factor 0.13025, but this VAE has 0.3611"):
        run_stage(
            request("decode", {}, StageResult(stage="denoise", artifacts={"latents": forged})),
            where,
        )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("packed", True),
        ("normalized", False),
        ("layout", "BLC"),
        ("shape", [1, 16, 16, 4]),
        ("dtype", "float16"),
    ],
)
def test_latents_that_are_not_of_the_form_they_are_described_with_are_refused(
    where: StageContext, name: str, told: Any
) -> None:
    store = ArtifactStore(where.store_url)
    held = unpack(store.path(denoise(where, encode(where), 1).only()))
    held.facts["latents"]["tensors"]["latents"][name] = told
    forged = store.put(pack("denoise", held.handover, held.facts))
    result = StageResult(stage="denoise", artifacts={"latents": forged})
    with pytest.raises(BorderError, match=rf"its latents with {name} {re.escape(repr(told))}"):
        run_stage(request("decode", {}, result), where)


def test_inspect_finds_each_phases_components(where: StageContext) -> None:
    result = run_stage(request("inspect", {}), where)[0]
    manifest = Manifest.model_validate_json(ArtifactStore(where.store_url).read(result.only()))
    assert {name: facts.components for name, facts in manifest.phases.items()} == {
        "encode": ("text_encoder", "tokenizer"),
        "denoise": ("scheduler", "transformer"),
        "decode": ("vae",),
    }
    assert "guidance_scale" not in manifest.phases["denoise"].options
    assert "num_inference_steps" in manifest.phases["denoise"].options
    assert manifest.num_parameters["transformer"] > 10_000


def swap_files(model_dir: Path) -> None:
    a = model_dir / "vae" / "diffusion_pytorch_model.safetensors"
    b = model_dir / "transformer" / "diffusion_pytorch_model.safetensors"
    held = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(held)


def drop_tensor(model_dir: Path) -> None:
    edit(model_dir, lambda tensors: tensors.pop("decoder.conv_in.weight"))


def reshape_tensor(model_dir: Path) -> None:
    edit(
        model_dir,
        lambda tensors: tensors.update({"decoder.conv_in.bias": torch.zeros(3)}),
    )


def add_tensor(model_dir: Path) -> None:
    edit(model_dir, lambda tensors: tensors.update({"decoder.extra": torch.zeros(3)}))


def edit(model_dir: Path, change: Any) -> None:
    weights = model_dir / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_files, r"component 'transformer' of .* lacks \d+ of \d+ tensors"),
        (drop_tensor, r"component 'vae' of .* lacks 1 of \d+ tensors: 'decoder.conv_in.weight'"),
        (reshape_tensor, r"'decoder.conv_in.bias' is \(3,\) in its file but \(8,\)"),
        (add_tensor, r"holds 1 tensors that its config.json does not ask for: 'decoder.extra'"),
    ],
)
def test_inspect_refuses_weights_that_do_not_fit_their_configuration(
    tmp_path: Path, damage: Any, message: str
) -> None:
    model_dir = tiny_models.z_image(tmp_path / "model")
    damage(model_dir)
    with pytest.raises(ModelError, match=message):
        run_stage(request("inspect", {}), context(model_dir, tmp_path))


def test_a_model_that_changed_after_the_request_was_made_is_refused(where: StageContext) -> None:
    stale = request("encode", TEXT, components={"text_encoder": "0" * 64})
    with pytest.raises(ModelError, match=r"'text_encoder' .* changed while the run was under way"):
        run_stage(stale, where)


def test_decode_gives_back_a_picture_that_its_vae_has_encoded(tmp_path: Path) -> None:
    """Scale and shift are undone, once: a second time would take most of the brightness."""
    import diffusers

    vae = diffusers.AutoencoderKL.from_pretrained(MINIATURE / "vae")
    figures = (Placed("circle", "red", 34, 64, 18), Placed("square", "blue", 90, 64, 18))
    drawn = np.asarray(draw(Placement(figures, "yellow")))
    pixels_BCHW = torch.tensor(drawn).permute(2, 0, 1)[None] / 127.5 - 1  # noqa: N806
    with torch.no_grad():
        latents = vae.encode(pixels_BCHW).latent_dist.mode()
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    facts = {"latents": describe_latents(SimpleNamespace(vae=vae), {"latents": latents})}
    where = context(MINIATURE, tmp_path)
    made = Handover(values={"latents": latents})
    ref = ArtifactStore(where.store_url).put(pack("denoise", made, facts))
    encoded = StageResult(stage="denoise", artifacts={"latents": ref})
    decoded = pixels(where, run_stage(request("decode", {}, encoded), where)[0])
    assert np.abs(decoded.astype(float) - drawn).mean() < 0.01 * 255
    assert abs(decoded.mean() - drawn.mean()) < 0.01 * 255


def spoil(where: StageContext, latents: StageResult, change: Any) -> StageResult:
    store = ArtifactStore(where.store_url)
    held = unpack(store.path(latents.only()))
    change(held.handover.values["latents"])
    ref = store.put(pack("denoise", held.handover, held.facts))
    return StageResult(stage="denoise", artifacts={"latents": ref})
