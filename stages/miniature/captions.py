"""Scene <-> caption: many wordings of one scene, and the way back.

Pure Python. `describe` words a scene; `parse` reads a caption of the grammar again, past words
that it does not know.
"""

import re
from random import Random

from stages.miniature.grammar import COLOURS, SHAPES, Figure, Scene

_SIZE_WORDS = {
    "small": ("small", "little", "tiny"),
    "large": ("large", "big", "huge"),
}
_RELATION_WORDS = {
    "left of": ("left of", "to the left of", "on the left of", "on the left side of"),
    "right of": ("right of", "to the right of", "on the right of", "on the right side of"),
    "above": ("above", "over", "directly above"),
    "below": ("below", "under", "beneath", "underneath"),
}
_PLACE_WORDS = {
    "left of": ("on the left", "on the right"),
    "right of": ("on the right", "on the left"),
    "above": ("at the top", "at the bottom"),
    "below": ("at the bottom", "at the top"),
}
_PRONOUN_WORDS = {
    "left of": ("to its left", "on its left"),
    "right of": ("to its right", "on its right"),
    "above": ("above it", "over it"),
    "below": ("below it", "under it"),
}
_OPENINGS = (
    "a picture of", "an image of", "a drawing of", "please draw", "draw", "paint", "show me",
    "i want", "a simple drawing of", "there is", "we see", "an illustration with", "imagine",
)  # fmt: skip
_ADJECTIVES = (
    "shiny", "bright", "flat", "simple", "nice", "pretty", "glossy", "plain", "perfect", "lovely",
    "dark", "smooth", "clean", "old", "new", "happy", "lonely", "solid", "single", "wooden",
)  # fmt: skip
_UNRELATED = (
    "minimal", "style", "poster", "art", "high", "quality", "detailed", "photo", "of", "my",
    "house", "cat", "and", "dog", "sunset", "city", "street", "4k", "8k", "masterpiece", "forest",
    "vector", "graphic", "for", "children", "book", "cover", "cinematic", "light", "soft",
    "robot", "night", "water", "mountain", "logo", "icon", "design", "abstract", "geometry",
    "modern", "painting", "watercolor", "oil", "sketch", "digital", "trending", "beautiful",
    "summer", "winter", "music", "coffee", "dream", "river", "ocean", "fast", "slow", "people",
    "with", "in", "by", "from", "very", "really", "some", "more", "world", "time", "today",
)  # fmt: skip
_SYLLABLES = ("ka", "lo", "mi", "ter", "zu", "phe", "sta", "ri", "on", "gle", "ba", "ch", "ex", "y")

_SHAPE = "|".join(SHAPES)
_COLOUR = "|".join(COLOURS)
_GROUND = "background|backdrop"
_LEAD_IN = rf"(?:\s+(?:{'|'.join((*_ADJECTIVES, 'a', 'an', 'the', 'one'))}))*\s*$"


def describe(scene: Scene, rng: Random) -> str:
    """Word the scene as a caption; the same state of `rng` gives the same words."""
    body = _body(scene, rng)
    ground = scene.background
    ahead = ground is not None and rng.random() < 0.3
    if rng.random() < 0.25 and not ahead:
        body = f"{rng.choice(_OPENINGS)} {body}"
    if ground is not None:
        body = _with_ground(body, ground, ahead, rng)
    if rng.random() < 0.15:
        body = f"{body}, {unrelated(rng, rng.randint(1, 10))}"
    elif rng.random() < 0.05:
        body = f"{unrelated(rng, rng.randint(1, 5))}, {body}"
    if rng.random() < 0.15:
        body += "."
    if rng.random() < 0.15:
        body = body[0].upper() + body[1:]
    return body


def unrelated(rng: Random, num_words: int) -> str:
    """Words that say nothing of a scene; one in four is made up."""
    words = []
    for _ in range(num_words):
        if rng.random() < 0.25:
            words.append("".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4))))
        else:
            words.append(rng.choice(_UNRELATED))
    return " ".join(words)


def parse(caption: str) -> Scene:
    """Read a caption of the grammar.

    Raises:
        ValueError: The caption names no figure, more than two, or one without a colour.
    """
    text = caption.lower()
    ground, text = _take_ground(text)
    nouns = list(re.finditer(rf"\b(?:{_SHAPE})\b", text))
    if not 1 <= len(nouns) <= 2:
        raise ValueError(
            f"a caption names 1 or 2 shapes but {len(nouns)} were found: {caption!r}; "
            f"use {', '.join(SHAPES)}"
        )
    figures, spans = [], []
    floor = 0
    for index, noun in enumerate(nouns):
        ceiling = nouns[index + 1].start() if index + 1 < len(nouns) else len(text)
        figure, span = _read_figure(text, noun, floor, ceiling, caption)
        figures.append(figure)
        spans.append(span)
        floor = span[1]
    if len(figures) == 1:
        return Scene((figures[0],), None, ground)
    before = text[: spans[0][0]]
    between = text[spans[0][1] : spans[1][0]]
    after = text[spans[1][1] :]
    relation, swapped = _read_relation(before, between, after)
    return Scene(tuple(reversed(figures)) if swapped else tuple(figures), relation, ground)


def _body(scene: Scene, rng: Random) -> str:
    first = _noun_phrase(scene.figures[0], rng)
    if len(scene.figures) == 1:
        return first
    second = _noun_phrase(scene.figures[1], rng)
    relation = scene.relation
    if relation is None:
        return rng.choice((f"{first} and {second}", f"{first} next to {second}"))
    words = rng.choice(_RELATION_WORDS[relation])
    here, there = _PLACE_WORDS[relation]
    pronoun = rng.choice(_PRONOUN_WORDS[relation])
    form = rng.random()
    if form < 0.45:
        return f"{first} {words} {second}"
    if form < 0.6:
        return f"{first} {rng.choice(('is', 'sits', 'placed'))} {words} {second}"
    if form < 0.8:
        joint = rng.choice((" there is ", " is ", ", ", " sits "))
        return f"{words} {second}{joint}{first}"
    if form < 0.9:
        return f"{second} with {first} {pronoun}"
    if form < 0.95:
        return f"{first} {here} and {second} {there}"
    return f"{here} {first}, {there} {second}"


def _noun_phrase(figure: Figure, rng: Random) -> str:
    words = [figure.colour]
    if figure.size is not None:
        at_front = rng.random() < 0.85
        words.insert(0 if at_front else 1, rng.choice(_SIZE_WORDS[figure.size]))
    words.append(figure.shape)
    if rng.random() < 0.08:
        words.remove(figure.colour)
        words += ["in", figure.colour]
    if rng.random() < 0.1:
        words.insert(0, rng.choice(_ADJECTIVES))
    article = rng.random()
    if article < 0.8:
        words.insert(0, "an" if words[0][0] in "aeiou" else "a")
    elif article < 0.9:
        words.insert(0, rng.choice(("one", "the")))
    return " ".join(words)


def _with_ground(body: str, ground: str, ahead: bool, rng: Random) -> str:
    a_ground = f"{'an' if ground[0] in 'aeiou' else 'a'} {ground}"
    forms: tuple[str, ...]
    if ahead:
        forms = (
            f"on {a_ground} background, {body}",
            f"on {ground}: {body}",
            f"{ground} background: {body}",
            f"against {a_ground} backdrop, {body}",
            f"{a_ground} background with {body}",
        )
    else:
        forms = (
            f"{body} on {a_ground} background",
            f"{body} on {ground}",
            f"{body}, {ground} background",
            f"{body} against {a_ground} background",
            f"{body}, background {ground}",
            f"{body} with {a_ground} background",
            f"{body}. the background is {ground}",
        )
    return rng.choice(forms)


def _take_ground(text: str) -> tuple[str | None, str]:
    """Split off the words about the background; the figures' words are left."""
    patterns = (
        rf"(?:\b(?:on|against|with)\s+)?(?:\b(?:an?|the)\s+)?\b({_COLOUR})\s+(?:{_GROUND})(?:\s+with)?\b",
        rf"(?:\bthe\s+)?\b(?:{_GROUND})\s+(?:is\s+)?({_COLOUR})\b",
        rf"\b(?:on|against)\s+({_COLOUR})\b(?!\s+(?:{_SHAPE}))",
    )
    for pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return found.group(1), f"{text[: found.start()]};{text[found.end() :]}"
    return None, text


def _read_figure(
    text: str, noun: re.Match[str], floor: int, ceiling: int, caption: str
) -> tuple[Figure, tuple[int, int]]:
    """One figure and where its words start and end, looking no further than its neighbours."""
    head = text[floor : noun.start()]
    colours = list(re.finditer(rf"\b(?:{_COLOUR})\b", head))
    tail = re.match(rf"\s+in\s+({_COLOUR})\b", text[noun.end() : ceiling])
    if tail:
        colour, end = tail.group(1), noun.end() + tail.end()
    elif colours:
        colour, end = colours[-1].group(), noun.end()
    else:
        raise ValueError(
            f"a shape needs a colour but {noun.group()!r} has none: {caption!r}; "
            f"use {', '.join(COLOURS)}"
        )
    size, start = None, noun.start() if tail or not colours else floor + colours[-1].start()
    for name, words in _SIZE_WORDS.items():
        for found in re.finditer(rf"\b(?:{'|'.join(words)})\b", head):
            size, start = name, min(start, floor + found.start())
    return Figure(noun.group(), colour, size), (start, end)


def _read_relation(before: str, between: str, after: str) -> tuple[str | None, bool]:
    """The relation, and whether the figures were named in the opposite order."""
    for relation, (here, _) in _PLACE_WORDS.items():
        if re.search(rf"\b{here}{_LEAD_IN}", before):  # "on the left A, on the right B"
            return relation, False
        if re.match(rf"\s*{here}\b(?! (?:of|side))", between):  # "A on the left and B ..."
            return relation, False
    for relation, pronouns in _PRONOUN_WORDS.items():
        if re.match(rf"\s*(?:{'|'.join(pronouns)})\b", after):
            return relation, True
    for relation, phrases in _RELATION_WORDS.items():
        if re.search(rf"\b(?:{'|'.join(phrases)})\b", between):
            return relation, False
        if re.search(rf"\b(?:{'|'.join(phrases)}){_LEAD_IN}", before):
            return relation, True
    return None, False
