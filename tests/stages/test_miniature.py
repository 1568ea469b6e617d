"""The miniature model: its scenes, their captions and pictures, and the weights that ship."""

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image, ImageDraw

from stages.miniature import IMAGE_SIZE_PX, MODEL_DIR
from stages.miniature.captions import describe, parse
from stages.miniature.grammar import (
    COLOURS,
    RADIUS_PX,
    SHAPES,
    Figure,
    Placed,
    Placement,
    Scene,
    is_held_out,
    place,
    sample_scene,
)
from tests.support.judge import judge

MAX_WEIGHT_BYTES = 16_000_000
MIRRORED = {"right of": "left of", "below": "above"}


def mirrored(scene: Scene) -> Scene:
    """The same scene named from the left or from above."""
    if scene.relation in MIRRORED:
        return Scene(tuple(reversed(scene.figures)), MIRRORED[scene.relation], scene.background)
    return scene


def scenes(count: int, *, seed: int, held_out: bool = False) -> list[Scene]:
    rng = Random(seed)
    return [sample_scene(rng, held_out=held_out) for _ in range(count)]


def drawings(some: list[Scene], *, seed: int) -> list[Image.Image]:
    from stages.miniature.draw import draw

    rng = Random(seed)
    return [draw(place(scene, rng)) for scene in some]


def test_every_wording_of_a_scene_parses_back_to_it() -> None:
    rng = Random(0)
    for scene in scenes(2000, seed=0):
        caption = describe(scene, rng)
        assert mirrored(parse(caption)) == mirrored(scene), caption


def test_captions_of_one_seed_are_equal_and_of_another_are_not() -> None:
    def captions(seed: int) -> list[str]:
        rng = Random(seed)
        return [describe(sample_scene(rng), rng) for _ in range(20)]

    assert captions(1) == captions(1)
    assert captions(1) != captions(2)


@pytest.mark.parametrize(
    "caption", ["a nice day", "a circle", "a red circle, a red square, a red star"]
)
def test_a_caption_outside_the_grammar_is_refused_with_its_text(caption: str) -> None:
    with pytest.raises(ValueError, match=caption):
        parse(caption)


def test_held_out_scenes_stay_held_out_at_any_size_order_and_stated_background() -> None:
    for scene in scenes(200, seed=3, held_out=True):
        assert is_held_out(mirrored(scene))
        resized = tuple(Figure(f.shape, f.colour, "large") for f in scene.figures)
        assert is_held_out(Scene(resized, scene.relation, scene.background_colour))
    assert not any(is_held_out(scene) for scene in scenes(200, seed=3))


def test_placed_figures_stay_inside_apart_and_in_their_relation() -> None:
    rng = Random(4)
    for scene in scenes(500, seed=4):
        placed = place(scene, rng).figures
        for figure in placed:
            assert 8 < figure.x < IMAGE_SIZE_PX - 8
            assert 8 < figure.y < IMAGE_SIZE_PX - 8
        for first, second in pairwise(placed):
            right, down = second.x - first.x, second.y - first.y
            ahead = {"left of": right, "right of": -right, "above": down, "below": -down}
            if scene.relation:
                assert ahead[scene.relation] > 16


def test_judge_accepts_every_drawing() -> None:
    some = scenes(150, seed=5)
    for scene, picture in zip(some, drawings(some, seed=5), strict=True):
        assert judge(picture, scene).ok, (scene, judge(picture, scene).problems)


def test_judge_refuses_drawings_of_other_scenes() -> None:
    some = scenes(150, seed=6)
    for picture, other in zip(drawings(some, seed=6), scenes(150, seed=7), strict=True):
        if not judge(picture, other).ok:
            continue
        pytest.fail(f"a picture of another scene passes for {other}")


def one_change() -> Iterator[tuple[str, Scene]]:
    """Scenes one word away from "small red circle left of large blue square on yellow"."""
    circle, square = Figure("circle", "red", "small"), Figure("square", "blue", "large")
    for shape in SHAPES[1:]:
        yield "looks like", Scene((Figure(shape, "red", "small"), square), "left of", "yellow")
    for colour in ("orange", "purple", "green"):
        yield "is red", Scene((Figure("circle", colour, "small"), square), "left of", "yellow")
    yield "radius", Scene((Figure("circle", "red", "large"), square), "left of", "yellow")
    for relation in ("right of", "above", "below"):
        yield "which is not", Scene((circle, square), relation, "yellow")
    yield "which is not", Scene((square, circle), "left of", "yellow")
    yield "background", Scene((circle, square), "left of", "orange")
    yield "shows 2", Scene((circle,), None, "yellow")


@pytest.mark.parametrize(("problem", "wrong"), list(one_change()))
def test_judge_names_the_one_thing_that_is_wrong(problem: str, wrong: Scene) -> None:
    right = Scene(
        (Figure("circle", "red", "small"), Figure("square", "blue", "large")), "left of", "yellow"
    )
    picture = drawings([right], seed=0)[0]
    assert judge(picture, right).ok
    assert any(problem in found for found in judge(picture, wrong).problems)


@pytest.mark.parametrize("fault", ["noise", "stripe", "joined", "missing", "extra"])
def test_judge_refuses_damaged_pictures(fault: str) -> None:
    from stages.miniature.draw import draw

    scene = Scene((Figure("circle", "red"), Figure("square", "blue")), "left of", "white")
    placement = Placement(
        (Placed("circle", "red", 34, 64, 18), Placed("square", "blue", 90, 64, 18)), "white"
    )
    picture = draw(placement)
    assert judge(picture, scene).ok
    pen = ImageDraw.Draw(picture)
    if fault == "noise":
        rng = Random(0)
        for _ in range(3000):
            spot = (rng.randrange(IMAGE_SIZE_PX), rng.randrange(IMAGE_SIZE_PX))
            pen.point(spot, fill=rng.choice(list(COLOURS.values())))
    elif fault == "stripe":
        pen.rectangle((0, 100, IMAGE_SIZE_PX, 110), fill=COLOURS["green"])
    elif fault == "joined":
        pen.rectangle((34, 60, 90, 68), fill=COLOURS["red"])
    elif fault == "missing":
        pen.rectangle((60, 30, 120, 100), fill=COLOURS["white"])
    else:
        pen.ellipse((50, 100, 70, 120), fill=COLOURS["red"])
    assert not judge(picture, scene).ok


def test_drawn_areas_are_those_of_the_placed_radius() -> None:
    import torch

    from stages.miniature.draw import pack, render

    for shape in SHAPES:
        for low, high in RADIUS_PX.values():
            radius = (low + high) / 2
            placement = Placement((Placed(shape, "black", 64, 64, radius),), "white")
            ink = 1 - render(*pack([placement]))[0, 0]
            white, black = COLOURS["white"][0] / 255, COLOURS["black"][0] / 255
            covered = ((ink - (1 - white)) / (white - black)).sum().item()
            assert covered == pytest.approx(torch.pi * radius**2, rel=0.03)


def test_shipped_weights_fit_into_16_megabytes() -> None:
    files = list(MODEL_DIR.rglob("*.safetensors"))
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) <= MAX_WEIGHT_BYTES


@pytest.fixture(scope="module")
def pipeline() -> Any:
    import diffusers

    loaded = diffusers.ZImagePipeline.from_pretrained(MODEL_DIR)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.mark.parametrize("name", ["vae", "text_encoder", "transformer"])
def test_shipped_weights_are_those_of_the_modules_and_no_others(pipeline: Any, name: str) -> None:
    (file,) = (MODEL_DIR / name).glob("*.safetensors")
    with Path(file).open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    expected = getattr(pipeline, name).state_dict()
    assert {key: tuple(item["shape"]) for key, item in header.items()} == {
        key: tuple(value.shape) for key, value in expected.items()
    }
    assert not any(value.is_meta for value in expected.values())


def test_chat_template_gives_the_text_that_training_used(pipeline: Any) -> None:
    from stages.miniature.tokenizer import wrap

    for caption in ("a red circle", "", "größe 🟥 <b>"):
        text = pipeline.tokenizer.apply_chat_template(
            [{"role": "user", "content": caption}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        assert text == wrap(caption)
        assert pipeline.tokenizer.decode(pipeline.tokenizer(text).input_ids) == text


def test_training_forward_equals_the_modules_own(pipeline: Any) -> None:
    import torch

    from stages.miniature.forward import Forward

    text_encoder, transformer = pipeline.text_encoder, pipeline.transformer
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([33, 64, 40])
    ids = torch.randint(3, 700, (3, 64), generator=generator)
    mask = torch.arange(64)[None] < lengths[:, None]
    latents = torch.randn(3, transformer.in_channels, 16, 16, generator=generator)
    time = torch.tensor([0.0, 0.4, 0.9])
    with torch.no_grad():
        states = text_encoder(
            input_ids=ids * mask, attention_mask=mask, output_hidden_states=True
        ).hidden_states[-2]
        captions = [state[:length] for state, length in zip(states, lengths, strict=True)]
        outputs = transformer(list(latents[:, :, None]), time, captions, return_dict=False)[0]
        forward = Forward(text_encoder, transformer)
        features = forward.encode(ids)
        predicted = forward.predict(latents, time, features, lengths)
    torch.testing.assert_close(features[mask], states[mask])
    torch.testing.assert_close(predicted, torch.stack(outputs)[:, :, 0], rtol=1e-4, atol=1e-4)


def test_orthogonalised_matrices_have_singular_values_about_one() -> None:
    import torch

    from stages.miniature.optim import orthogonalise

    matrices = torch.randn(2, 60, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert values.min() > 0.5
    assert values.max() < 1.5


@pytest.mark.parametrize("prompt", ["", "zxqv ∮ 漢字 \U0001f9ea", "word " * 600])
def test_unknown_words_paint_some_picture(pipeline: Any, prompt: str) -> None:
    import numpy as np

    picture = pipeline(
        prompt,
        height=IMAGE_SIZE_PX,
        width=IMAGE_SIZE_PX,
        num_inference_steps=2,
        guidance_scale=0.0,
    ).images[0]
    assert picture.size == (IMAGE_SIZE_PX, IMAGE_SIZE_PX)
    assert np.asarray(picture).std() > 0


def test_most_captions_never_trained_on_are_painted_right(pipeline: Any) -> None:
    """A small sample of what `python -m tests.benchmarks.miniature` measures on 500."""
    from tests.benchmarks.miniature import held_out_captions, paint

    pairs = held_out_captions(16, seed=500)
    pictures = paint(pipeline, [caption for _, caption in pairs], batch_size=16)
    right = sum(judge(each, scene).ok for each, (scene, _) in zip(pictures, pairs, strict=True))
    assert right >= 14
