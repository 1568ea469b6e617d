"""Encode: prompts to `prompt_embeds`, with an account of what the encoder did not read."""

from __future__ import annotations

from typing import Any

from stages.components import component_names, load
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import RequestError
from stages.execute import (
    Events,
    Job,
    finish_handover,
    loaded_pipe,
    open_job,
    prepared_pipe,
    run_job,
)
from stages.tokens import TokenUse, token_use, truncation_sentence

PROMPTS = ("prompt", "negative_prompt")
GUIDANCE_ON = "do_classifier_free_guidance"


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Encode the prompts of one request.

    The option `do_classifier_free_guidance` says whether negative embeddings are made; the
    scale itself is the denoiser's business, so that one embedding serves every scale.

    Raises:
        RequestError: A prompt is longer than its encoder reads and `on_truncate` is `error`;
            raised before the encoder loads.
    """
    job = open_job(request, context, events)
    guided = bool(job.options.pop(GUIDANCE_ON, False))
    job.guidance = dict.fromkeys(job.family.guidance, 2.0 if guided else 1.0)
    uses, limit = _count_tokens(job, guided)
    for use in uses:
        if use.tokens_total > use.tokens_used:
            sentence = truncation_sentence(use.as_json())
            if context.on_truncate == "error":
                raise RequestError(f"{sentence}; shorten it, or allow it with --on-truncate warn")
            job.tracker.warnings.append(sentence)
            events.warn(sentence)
    made = run_job(job, loaded_pipe(job))
    facts = {"tokens": [use.as_json() for use in uses], "token_limit": limit}
    job.tracker.facts |= facts
    return finish_handover(job, "prompt_embeds", made, facts)


def _count_tokens(job: Job, guided: bool) -> tuple[list[TokenUse], int | None]:
    pipe = prepared_pipe(job)
    family = job.family
    there = set(component_names(pipe))  # a model may lack one of its family's text encoders
    readings = {name: each for name, each in family.tokenizers.items() if name in there}
    missing = [name for name in readings if getattr(pipe, name, None) is None]
    if missing:
        with job.tracker.host_phase("load_tokenizers"):
            load(job.graph, pipe, missing, job.model, dtype=job.dtype)
    limit = int(job.options[family.token_limit]) if family.token_limit else None
    prompts = {name: job.options[name] for name in PROMPTS if job.options.get(name) is not None}
    if family.guidance and not guided:
        prompts.pop("negative_prompt", None)
    uses = [
        token_use(getattr(pipe, tokenizer), text, reading, prompt=name, limit=limit)
        for tokenizer, reading in readings.items()
        for name, text in prompts.items()
    ]
    return uses, limit
