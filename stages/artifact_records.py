"""What a store remembers of a request: which artifacts it made, with a checksum of its own."""

from __future__ import annotations

import json
import logging
import re
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from stages.contracts import StageRequest, StageResult, canonical_json, json_digest

log = logging.getLogger(__name__)

RECORD_FORMAT = 1
"""Raised when a reader of today's records could not read tomorrow's."""

MAX_RECORD_NBYTES = 16 * 2**20
"""Far above a request with two prompts of 100,000 characters, each escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One remembered request, read back and checked.

    Attributes:
        request_digest: The cache key, 64 hex digits.
        request: What was asked, as plain JSON.
        result: What it made.
        created: ISO 8601, UTC.
        host: Where it was made.
    """

    request_digest: str
    request: dict[str, Any]
    result: StageResult
    created: str
    host: str


def record_key(stage: str, request_digest: str) -> str:
    """Where a record lies in a store."""
    return f"records/{stage}/{request_digest}.json"


def encode_record(request: StageRequest, result: StageResult) -> bytes:
    """A record as JSON text."""
    plain_result = result.model_dump(mode="json")
    return canonical_json(
        {
            "format": RECORD_FORMAT,
            "request_digest": request.digest,
            "request": request.model_dump(mode="json"),
            "result": plain_result,
            "result_sha256": json_digest(plain_result),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
        }
    )


def decode_record(data: bytes, key: str) -> StageRecord | None:
    """A record read back; None with a log line if it cannot be trusted or understood."""
    try:
        return _read(data, key)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        log.warning("record %s is not used: %s; its stage runs again", key, why)
        return None


def _read(data: bytes, key: str) -> StageRecord:
    if len(data) > MAX_RECORD_NBYTES:
        raise ValueError(f"it has more than {MAX_RECORD_NBYTES} bytes")
    document = json.loads(data.decode("utf-8"))
    if (found := document["format"]) != RECORD_FORMAT:
        raise ValueError(f"its format is {found!r}, this version reads {RECORD_FORMAT}")
    if json_digest(document["result"]) != document["result_sha256"]:
        raise ValueError("its result does not match its checksum")
    digest = document["request_digest"]
    if json_digest(document["request"]) != digest or not key.endswith(f"/{digest}.json"):
        raise ValueError("its request is not the one it is named after")
    return StageRecord(
        request_digest=digest,
        request=document["request"],
        result=StageResult.model_validate(document["result"]),
        created=str(document["created"]),
        host=str(document["host"]),
    )


def digests_in(data: bytes) -> set[str]:
    """Everything in an unreadable record that may name an object.

    A record of a newer version must keep its objects, whatever it looks like.
    """
    return {text.decode() for text in re.findall(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", data)}
