"""What the command's exit codes tell a caller."""

from __future__ import annotations

from flows.prefect_api import ServerError
from stages.errors import (
    ArtifactError,
    ModelError,
    RequestError,
    StageCancelled,
    StageCrashed,
    StageError,
    StageOutOfMemory,
    StageTimeout,
)

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_BAD_INPUT = 2
EXIT_STAGE_FAILED = 3
EXIT_PROCESS_LOST = 4
EXIT_STORE = 5
EXIT_SERVER = 6
EXIT_INTERRUPTED = 130

EXIT_CODES = """exit codes:
  0  done
  1  unexpected error
  2  bad input: arguments, prompt, model directory
  3  a stage failed: the same request fails again; or rows of a batch have no picture
  4  a stage process was lost, ran out of memory or out of time: try again
  5  the artifact store cannot be read or written
  6  the Prefect server or worker cannot be reached or started
130  interrupted"""


def exit_code(error: BaseException) -> int:
    """The exit code that tells a caller what kind of error this is."""
    match error:
        case RequestError() | ModelError():
            return EXIT_BAD_INPUT
        case StageCrashed() | StageTimeout() | StageOutOfMemory():
            return EXIT_PROCESS_LOST
        case ServerError():
            return EXIT_SERVER
        case ArtifactError():
            return EXIT_STORE
        case KeyboardInterrupt() | StageCancelled():
            return EXIT_INTERRUPTED
        case StageError():
            return EXIT_STAGE_FAILED
    return EXIT_UNEXPECTED
