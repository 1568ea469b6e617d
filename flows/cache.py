"""How Prefect finds a stage's result again: by the request's digest, and only if it is intact.

Prefect keeps a record per cache key and asks its storage for it. Here the artifact store's own
record answers first, Prefect's file second, and neither counts unless every artifact it names
is present and intact; then Prefect sees no record, and the stage runs. Nothing read from disk
chooses a class, a function or a serializer: a record that names any of them is no record.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.filesystems import WritableFileSystem
from prefect.serializers import Serializer
from pydantic import Field, PrivateAttr

from flows.settings import RunSettings
from stages.artifacts import ArtifactStore, open_store
from stages.contracts import ArtifactRef, Record, StageContext, StageRequest, StageResult
from stages.errors import ERROR_TYPES, ArtifactError, ArtifactMissing, StageError, StageFailed

logger = logging.getLogger(__name__)

SERIALIZER = "verified-json"

_TYPES: dict[str, type[Record]] = {"ArtifactRef": ArtifactRef, "StageResult": StageResult}
_CLASS, _ERROR = "__class__", "__exc_type__"

# ---- the active store ----------------------------------------------------------------------

_active: ContextVar[str | None] = ContextVar("exeunt_store_url", default=None)
# Prefect reads a record and parses its payload in two calls, and only the first one knows the
# task run and its store. The first leaves here what it has checked, for the second to take.
_just_checked = threading.local()


def active_store() -> ArtifactStore:
    """The store of the run around this call; outside of any, the one of `EXEUNT_STORE`."""
    return open_store(active_store_url())


def active_store_url() -> str:
    """The URL of `active_store`."""
    return _active.get() or RunSettings.from_env().store_url


@contextmanager
def use_store(url: str) -> Iterator[ArtifactStore]:
    """Make the store at `url` the active one within the block."""
    token = _active.set(url)
    try:
        yield open_store(url)
    finally:
        _active.reset(token)


# ---- the serializer ------------------------------------------------------------------------


class VerifiedJSONSerializer(Serializer):
    """JSON of plain values, our own records and errors; nothing else goes out or comes in.

    Reading fails unless every artifact that is referred to is present and intact, and Prefect
    takes a record that cannot be read for one that is not there.
    """

    type: str = Field(default=SERIALIZER, frozen=True)

    def dumps(self, obj: Any) -> bytes:
        """`obj` as JSON.

        Raises:
            TypeError: It holds something that is neither plain, nor a record, nor an error.
        """
        return json.dumps(obj, default=_encode, allow_nan=False).encode()

    def loads(self, blob: bytes) -> Any:
        """What was dumped.

        Raises:
            ArtifactMissing: An artifact is absent or damaged.
            ValueError: Not JSON, or it names a type that is not ours.
        """
        checked, _just_checked.payload = getattr(_just_checked, "payload", None), None
        return _load(blob, None if blob == checked else active_store())


def _load(blob: bytes, store: ArtifactStore | None) -> Any:
    obj = json.loads(blob.decode(), object_hook=_decode)
    if store is not None:
        for ref in _refs(obj):
            store.verify(ref)
    return obj


def _encode(obj: Any) -> dict[str, Any]:
    if isinstance(obj, BaseException):
        if isinstance(obj, StageError) and ERROR_TYPES.get(type(obj).__name__) is type(obj):
            return {_ERROR: type(obj).__name__, "message": str(obj)}
        # Somebody else's class must not be looked up by name when it is read back.
        return {_ERROR: StageFailed.__name__, "message": f"{type(obj).__name__}: {obj}"}
    name = type(obj).__name__
    if _TYPES.get(name) is type(obj):
        return {_CLASS: name, "data": obj.model_dump(mode="json")}
    raise TypeError(f"a {name} cannot be a stage's result; return a StageResult")


def _decode(item: dict[str, Any]) -> Any:
    if (name := item.get(_CLASS)) is not None:
        if name not in _TYPES:
            raise ValueError(f"type {name!r} in a record; allowed are {', '.join(_TYPES)}")
        return _TYPES[name].model_validate(item["data"])
    if (name := item.get(_ERROR)) is not None:
        if name not in ERROR_TYPES:
            raise ValueError(f"error type {name!r} in a record; allowed are those of stages.errors")
        return ERROR_TYPES[name](str(item["message"]))
    return item


def _refs(obj: Any) -> Iterator[ArtifactRef]:
    if isinstance(obj, ArtifactRef):
        yield obj
    elif isinstance(obj, StageResult):
        yield from obj.artifacts.values()
    elif isinstance(obj, dict):
        for item in obj.values():
            yield from _refs(item)
    elif isinstance(obj, list):
        for item in obj:
            yield from _refs(item)


# ---- the key -------------------------------------------------------------------------------


def stage_key(request: StageRequest) -> str:
    """`<stage>/<digest>`: the same in every process and on every host."""
    return f"{request.stage}/{request.digest}"


@dataclass
class StageKey(CachePolicy):
    """Keys a task by its parameter `request`, and has Prefect read only records we trust.

    Prefect runs a task uncached when this raises, so the task compares keys once more.
    """

    def compute_key(
        self,
        task_ctx: TaskRunContext,
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],
        **kwargs: Any,
    ) -> str | None:
        del flow_parameters, kwargs
        request = inputs.get("request")
        if not isinstance(request, StageRequest):
            raise TypeError(
                f"parameter 'request' of task {task_ctx.task.name!r} is a "
                f"{type(request).__name__}; pass a StageRequest"
            )
        context = inputs.get("context")
        url = context.store_url if isinstance(context, StageContext) else active_store_url()
        guard(task_ctx, request, url)
        return stage_key(request)


def guard(task_ctx: TaskRunContext, request: StageRequest, store_url: str) -> None:
    """Put `StageRecords` between a task run and its result storage."""
    results = task_ctx.result_store
    inner = results.result_storage
    if inner is None:
        raise RuntimeError(f"task {task_ctx.task.name!r} has no result storage")
    if isinstance(inner, StageRecords):  # a task inside of a task starts from that one's
        inner = inner._inner
    records = StageRecords()
    records._inner = inner
    records._request = request
    records._store_url = store_url
    # A saved block's id goes into the record, so that other hosts read it through that block.
    records._block_document_id = inner._block_document_id
    results.result_storage = records


class StageRecords(WritableFileSystem):
    """One task run's view of where results are kept: writes pass, reads are checked.

    Prefect deserializes a record with whatever serializer the record itself names, pickle
    included, so an untrusted record must not get as far as Prefect.
    """

    _block_type_name = "Exeunt stage records"
    _inner: WritableFileSystem = PrivateAttr()
    _request: StageRequest = PrivateAttr()
    _store_url: str = PrivateAttr()
    _found: StageResult | None = PrivateAttr(default=None)

    def _resolve_path(self, path: str) -> None:
        # None keeps storage keys relative: no host path in a record, and folders can move.
        del path

    def read_path(self, path: str, **kwargs: Any) -> bytes:  # type: ignore[override]
        """The record at `path`.

        Raises:
            ArtifactMissing: No trustworthy record, or an artifact it names is gone.
        """
        if path != stage_key(self._request):
            return cast(bytes, self._inner.read_path(path, **kwargs))
        # Prefect reads twice, to see whether there is a record and to have it; an artifact that
        # goes in between would fail the task instead of having it run.
        if self._found is None:
            self._found = self._find(path, **kwargs)
        payload = VerifiedJSONSerializer().dumps(self._found)
        _just_checked.payload = payload
        metadata = {"storage_key": path, "serializer": {"type": SERIALIZER}}
        return json.dumps({"metadata": metadata, "result": payload.decode()}).encode()

    def _find(self, path: str, **kwargs: Any) -> StageResult:
        store = open_store(self._store_url)
        if (result := store.lookup(self._request)) is not None:
            return result
        try:
            content = self._inner.read_path(path, **kwargs)
        except (OSError, ValueError) as error:
            raise ArtifactMissing(f"no record of {path}") from error
        result = trusted_result(cast(bytes, content), path, store)
        try:
            store.record(self._request, result)  # so that garbage collection sees it in use
        except ArtifactError as error:
            logger.warning("record of %s not renewed in the artifact store: %s", path, error)
        return result

    def write_path(self, path: str, content: bytes, **kwargs: Any) -> Any:
        """Write through to the storage that the settings name."""
        return self._inner.write_path(path, content, **kwargs)


def trusted_result(content: bytes, key: str, store: ArtifactStore) -> StageResult:
    """The stage's result in one of Prefect's result files, if we wrote it and it still holds.

    Raises:
        ArtifactMissing: It is damaged, names another serializer, is of another stage, or
            refers to an artifact that is absent or damaged.
    """
    try:
        envelope = json.loads(content)
        named = envelope["metadata"]["serializer"]
        if named != {"type": SERIALIZER}:
            raise ValueError(f"its serializer is {named!r}, not {SERIALIZER!r}")
        result = _load(envelope["result"].encode(), store)
        if not isinstance(result, StageResult) or result.stage != key.partition("/")[0]:
            raise ValueError("it holds no result of this stage")
    except ArtifactMissing as error:
        logger.warning("artifact missing, recomputing %s: %s", key, error)
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("record %s is not used, its stage runs again: %s", key, error)
        raise ArtifactMissing(f"record {key} cannot be trusted: {error}") from error
    return result
