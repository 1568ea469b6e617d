"""Finished files on the user's disk, under safe names, and the settings that they carry.

Nothing is overwritten unless asked for, and nothing is written outside of the output folder.
This module loads no torch.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from stages.errors import ArtifactError, RequestError
from stages.file_names import check_name, find_collisions, safe_stem
from stages.file_writes import check_folder_writable, new_file, raise_write_error, temp_name
from stages.png_text import read_texts
from stages.xmp import settings_in

__all__ = [
    "Settings",
    "check_name",
    "check_output_folder",
    "find_collisions",
    "read_settings",
    "safe_stem",
    "write_file",
]

SETTINGS_FORMAT = 1
KEYWORD = "exeunt"
_HASHED = ("transformer", "unet")  # whose hash stands for the model where only one fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one picture was made.

    Attributes:
        seed: Of this picture, not of its batch.
        num_inference_steps: Steps that ran.
        strength: Share of the noise over the picture that it starts from; None where it starts
            from noise alone.
        num_frames, frame_rate: Of a video, frames a second; None for a picture.
        other_scales: What other guiders than the first one were set to, by option.
        steps_requested: Steps that were asked for, if other than those that ran.
        model_hashes: Full fingerprint of each component, 64 hex digits.
        adapters: Weight of each adapter, by name.
        versions: Of the libraries that define the mathematics.
        artifacts: Digest of each artifact on the way, by stage and role.
        row_id: The row of a batch table, or empty.
    """

    prompt: str
    negative_prompt: str = ""
    seed: int
    num_inference_steps: int
    steps_requested: int | None = None
    guidance_scale: float
    strength: float | None = None
    scheduler: str
    height: int
    width: int
    num_frames: int | None = None
    frame_rate: float | None = None
    other_scales: Mapping[str, float] = field(default_factory=dict)
    model: str
    model_hashes: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, float] = field(default_factory=dict)
    family: str = ""
    dtype: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, str] = field(default_factory=dict)
    row_id: str = ""

    def as_parameters(self) -> str:
        """The text that most picture tools read: prompt, negative prompt, one line of values."""
        hashes = [self.model_hashes[name] for name in _HASHED if name in self.model_hashes]
        values: dict[str, object] = {
            "Steps": self.num_inference_steps,
            "Sampler": self.scheduler,
            "CFG scale": f"{self.guidance_scale:g}",
            "Seed": self.seed,
            "Size": f"{self.width}x{self.height}",
            "Denoising strength": None if self.strength is None else f"{self.strength:g}",
            "Model hash": hashes[0][:10] if hashes else None,
            "Model": self.model,
            "Version": f"exeunt {_version()}",
        }
        lines = [self.prompt]
        if self.negative_prompt:
            lines.append(f"Negative prompt: {self.negative_prompt}")
        present = {name: value for name, value in values.items() if value is not None}
        lines.append(", ".join(f"{name}: {_quoted(str(v))}" for name, v in present.items()))
        return "\n".join(lines)

    def as_json(self) -> str:
        """All settings as one JSON object with the format's number and our version."""
        document = asdict(self) | {"format": SETTINGS_FORMAT, "version": _version()}
        return json.dumps(document, ensure_ascii=False, sort_keys=True)


def _quoted(value: str) -> str:
    """Values that hold a separator stand as JSON text, as readers of that line expect."""
    return json.dumps(value, ensure_ascii=False) if set(value) & set(",:\n") else value


@lru_cache(maxsize=1)
def _version() -> str:
    return metadata.version("exeunt")


def check_output_folder(folder: str | Path) -> Path:
    """The absolute output folder, created if need be and known to be writable.

    Raises:
        RequestError: It cannot be written; with path, uid, owner and mode.
    """
    path = Path(folder).expanduser().absolute()
    try:
        check_folder_writable(path)
    except ArtifactError as error:
        raise RequestError(f"output folder is {error}") from error
    return path


def write_file(
    content: bytes,
    folder: str | Path,
    extension: str,
    *,
    prompt: str = "",
    seed: int | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a finished file under a name that nothing else has, and return its absolute path.

    The file appears whole or not at all; any number of processes may write into one folder.

    Args:
        content: Of the file, its settings included; see `stages.finished`.
        folder: Created if need be.
        extension: Of its format, such as `.png`.
        prompt, seed: Make the name where none is given.
        name: The user's own name, with `/` between subfolders; see `check_name`.
        overwrite: Take the place of a file of that name, where a counter is added otherwise.

    Raises:
        RequestError: The name cannot be used, or a subfolder is a link.
        ArtifactError: It cannot be written.
    """
    if name is not None:
        relative = check_name(name, extension)
        stem = relative.name[: -len(extension)]
    else:
        relative = PurePosixPath(safe_stem(prompt, seed))
        stem = relative.name
    top = Path(folder).expanduser().absolute()
    place = top.joinpath(*relative.parts[:-1])
    with _open_folder(top, relative.parts[:-1]) as folder_fd:
        temp = temp_name(".picture")
        with new_file(place / temp, len(content), folder_fd=folder_fd) as stream:
            stream.write(content)
        try:
            return place / _publish(temp, stem, extension, folder_fd, overwrite=overwrite)
        except OSError as error:
            raise_write_error(error, place, len(content))
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temp, dir_fd=folder_fd)


@contextmanager
def _open_folder(top: Path, subfolders: tuple[str, ...]) -> Iterator[int]:
    """A handle on the folder to write into, reached without following a link below `top`.

    A name that was checked a moment ago may be a link by now; a handle stays what it is.
    """
    here = top
    try:
        top.mkdir(parents=True, exist_ok=True)
        fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileExistsError as error:
        raise ArtifactError(f"output folder is a file: {top}; choose another folder") from error
    except OSError as error:
        raise_write_error(error, top, 0)
    try:
        for part in subfolders:
            here = here / part
            try:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(part, flags, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise RequestError(
                        f"subfolder is a link or a file: {here}; choose another name"
                    ) from error
                raise_write_error(error, here, 0)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _publish(temp: str, stem: str, extension: str, folder_fd: int, *, overwrite: bool) -> str:
    """Give a complete file its name, adding -2, -3 and so on where it is taken."""
    if overwrite:
        name = f"{stem}{extension}"
        os.rename(temp, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        return name
    count = 1
    while True:
        name = f"{stem}{extension}" if count == 1 else f"{stem}-{count}{extension}"
        try:
            _claim(temp, name, folder_fd)
        except FileExistsError:
            count += 1
        else:
            return name


def _claim(temp: str, name: str, folder_fd: int) -> None:
    """Rename without replacing, or raise FileExistsError: a plain rename would replace."""
    try:
        os.link(temp, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # A disk without hard links: an empty file holds the name until ours replaces it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o666, dir_fd=folder_fd))
        os.rename(temp, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


def _comment(path: Path) -> str | None:
    from stages.mp4 import read_texts as read_metadata

    try:
        return read_metadata(path).get("comment")
    except ArtifactError as error:
        raise RequestError(str(error)) from error


def _settings_text(path: Path) -> str | None:
    if path.name.casefold().endswith(".mp4"):
        return _comment(path)
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(b"\xff\xd8") or start == b"RIFF":
        return settings_in(path)
    return read_texts(path).get(KEYWORD)


def read_settings(path: str | Path) -> Settings:
    """The settings that a picture or a video carries. They are data of whoever made the file.

    Raises:
        RequestError: The file is no PNG, JPEG or WebP picture or MP4 video, carries no settings of
            ours, or settings of a newer format; or its texts exceed the limits of `read_texts`.
        OSError: The file cannot be read.
    """
    if (text := _settings_text(Path(path))) is None:
        raise RequestError(f"picture carries no settings: {path}")
    try:
        document = json.loads(text)
        found = document.pop("format")
        if found != SETTINGS_FORMAT:
            raise RequestError(
                f"settings have format {found!r}, this version reads {SETTINGS_FORMAT}: {path}"
            )
        document.pop("version", None)
        return TypeAdapter(Settings).validate_python(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        kind = "ValidationError" if isinstance(error, ValidationError) else str(error)
        raise RequestError(f"settings in a picture are malformed: {path}: {kind}") from error
