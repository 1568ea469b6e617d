"""Condition: pictures, video and sound to what the denoiser starts from or looks at.

They come as artifacts, each named like the argument of the pipeline that it is; see
`stages.media_inputs`.
"""

from __future__ import annotations

from typing import Any

from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import RequestError
from stages.execute import Events, finish_handover, loaded_pipe, open_job, run_job
from stages.phases import MEDIA


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Encode the media of one request.

    The generator's state is handed on where the request has a seed: what is drawn here and what
    the denoiser draws come from one sequence.

    Raises:
        RequestError: No input of the request is a medium.
        BorderError: What was made of it is not finite.
    """
    job = open_job(request, context, events)
    if not MEDIA & set(job.options):
        raise RequestError(
            f"{request.task} of {job.family.name} starts from a picture, video or sound, but the "
            "request holds none; give one"
        )
    pipe = loaded_pipe(job)
    events.progress("running")
    return finish_handover(job, "condition", run_job(job, pipe), {})
