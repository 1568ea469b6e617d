"""MP4 files: frames and sound in, H.264 and AAC out, with settings in a comment.

The bytes depend on the frames, the sound and the codecs' version alone: the number of encoder
threads is fixed, and neither time nor host is written. This module loads no torch.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.errors import ArtifactError, RequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEDIA_TYPE = "video/mp4"
MAX_FRAME_RATE = 240.0
CRF = "17"
"""x264's constant quality: 0 is lossless, 23 its own choice; at 17 hardly anyone sees a loss."""

_NUM_THREADS = 4  # another number gives other bytes
_SOUND_BITS_PER_S = 192_000
_BT709 = 1  # of primaries, transfer and matrix, by the numbers of ISO/IEC 23091-2
_LIMITED_RANGE = 1
_FASTSTART = {"movflags": "+faststart+use_metadata_tags", "fflags": "+bitexact"}
_SOUND_CHUNK = 1024  # samples of one AAC frame
_LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Sound of a video.

    Attributes:
        samples: float32 in [-1, 1], shape `(channels, samples)`, one or two channels.
        sample_rate: Samples a second.
    """

    samples: NDArray[np.float32]
    sample_rate: int


def check_frame_rate(frame_rate: object) -> float:
    """Frames a second, over 0 and at most 240.

    Raises:
        RequestError: It is anything else.
    """
    if isinstance(frame_rate, bool) or not isinstance(frame_rate, int | float):
        raise RequestError(f"frame_rate is {frame_rate!r}, expected frames a second as a number")
    if not 0 < frame_rate <= MAX_FRAME_RATE:
        raise RequestError(
            f"frame_rate is {frame_rate:g} frames a second, allowed are over 0 and up to "
            f"{MAX_FRAME_RATE:g}"
        )
    return frame_rate


def encode_mp4(
    frames_HWC: Iterable[NDArray[np.uint8]],  # noqa: N803 - the shape rides in the name
    frame_rate: float,
    sound: Sound | None = None,
) -> bytes:
    """A video of frames that are taken one at a time, so that they need not all be in memory.

    Args:
        frames_HWC: RGB levels of shape `(H, W, 3)`, all of one height and width. An odd edge gets
            one more row or column like its last one, since H.264 halves the edges of its colours.
        frame_rate: Frames a second; kept as a fraction such as 24000/1001.
        sound: Ends with the last frame: what is longer is cut, silence follows what is shorter.

    Raises:
        ArtifactError: There is no frame, or the sound has another form.
    """
    with _Writer() as writer, writer.open() as container:
        rate = Fraction(frame_rate).limit_denominator(1001)
        video: Any = container.add_stream("libx264", rate=rate)
        speech = None if sound is None else _SoundTrack(container, sound)
        num_frames = 0
        for levels_HWC in frames_HWC:  # noqa: N806
            frame_HWC = _even(levels_HWC)  # noqa: N806
            if num_frames == 0:
                _begin(video, frame_HWC, rate)
            container.mux(video.encode(_frame(frame_HWC, num_frames)))
            num_frames += 1
            if speech is not None:
                speech.write_until(num_frames / rate)
        if num_frames == 0:
            raise ArtifactError("a video without frames cannot be written; decode at least one")
        container.mux(video.encode(None))
        if speech is not None:
            speech.finish(num_frames / rate)
    return writer.content


class _Writer:
    """A file of its own for the time of writing: its index goes in front when all is known."""

    content: bytes = b""

    def __enter__(self) -> _Writer:
        self._folder = tempfile.TemporaryDirectory(prefix="exeunt-video-")
        self._path = Path(self._folder.name, "video.mp4")
        return self

    def open(self) -> Any:
        """The container to write into; `content` is there when both are closed."""
        import av

        return av.open(str(self._path), "w", format="mp4", options=_FASTSTART)

    def __exit__(self, kind: object, *_: object) -> None:
        with self._folder:
            if kind is None:
                self.content = self._path.read_bytes()


def _even(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:  # noqa: N803
    height, width = frame_HWC.shape[:2]
    return np.pad(frame_HWC, ((0, height % 2), (0, width % 2), (0, 0)), "edge")


def _begin(video: Any, frame_HWC: NDArray[np.uint8], rate: Fraction) -> None:  # noqa: N803
    height, width = frame_HWC.shape[:2]
    video.width, video.height, video.pix_fmt = width, height, "yuv420p"
    video.time_base = video.codec_context.time_base = 1 / rate
    # x264's macroblock tree gives other bits from run to run on CPUs with AVX-512.
    video.options = {"crf": CRF, "preset": "medium", "x264-params": "mbtree=0"}
    context = video.codec_context
    context.thread_count = _NUM_THREADS
    context.color_primaries = context.color_trc = context.colorspace = _BT709
    context.color_range = _LIMITED_RANGE


def _frame(levels_HWC: NDArray[np.uint8], number: int) -> Any:  # noqa: N803
    import av

    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(levels_HWC), format="rgb24")
    made = frame.reformat(
        format="yuv420p", dst_colorspace="ITU709", interpolation="BICUBIC", threads=1
    )
    made.pts = number
    return made


class _SoundTrack:
    """The sound of a video, written along with its frames so that a player finds both nearby."""

    def __init__(self, container: Any, sound: Sound) -> None:
        num_channels = len(sound.samples)
        if sound.samples.ndim != 2 or num_channels not in _LAYOUTS:
            raise ArtifactError(
                f"sound has shape {sound.samples.shape}, expected (channels, samples) with 1 or 2 "
                "channels"
            )
        self._container, self._sound, self._position = container, sound, 0
        self._layout = _LAYOUTS[num_channels]
        self._stream = container.add_stream("aac", rate=sound.sample_rate, layout=self._layout)
        self._stream.bit_rate = _SOUND_BITS_PER_S

    def write_until(self, time_s: Fraction) -> None:
        """Write whole chunks up to a time."""
        while self._position + _SOUND_CHUNK <= time_s * self._sound.sample_rate:
            self._write_chunk(_SOUND_CHUNK)

    def finish(self, end_s: Fraction) -> None:
        """Write what is left until the end of the video."""
        end = round(end_s * self._sound.sample_rate)
        while self._position < end:
            self._write_chunk(min(_SOUND_CHUNK, end - self._position))
        self._container.mux(self._stream.encode(None))

    def _write_chunk(self, num_samples: int) -> None:
        import av

        chunk = self._sound.samples[:, self._position : self._position + num_samples]
        chunk = np.pad(chunk, ((0, 0), (0, num_samples - chunk.shape[1])))  # silence
        samples = np.ascontiguousarray(chunk.clip(-1, 1), dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=self._layout)
        frame.sample_rate = self._sound.sample_rate
        frame.time_base = Fraction(1, self._sound.sample_rate)
        frame.pts = self._position
        self._container.mux(self._stream.encode(frame))
        self._position += num_samples


def with_texts(mp4: bytes, texts: Mapping[str, str]) -> bytes:
    """The same video with texts in its metadata; no frame and no sample is encoded again.

    Raises:
        ArtifactError: It is no video that can be read.
    """
    with (
        _reading(io.BytesIO(mp4), "the video") as source,
        _Writer() as writer,
        writer.open() as container,
    ):
        container.metadata.update(texts)
        streams = {each.index: container.add_stream_from_template(each) for each in source.streams}
        for packet in source.demux():
            if packet.dts is None:  # the end of a stream
                continue
            packet.stream = streams[packet.stream.index]
            container.mux(packet)
    return writer.content


def read_texts(path: Path) -> dict[str, str]:
    """The texts in a video's metadata. They are data of whoever made the file: untrusted.

    Raises:
        ArtifactError: It is no video that can be read.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file, _reading(file, str(path)) as container:
        return dict(container.metadata)


def _reading(file: Any, name: str) -> Any:
    import av

    opened: Callable[..., Any] = av.open
    try:
        return opened(file, "r", format="mp4")
    except av.error.FFmpegError as error:
        raise ArtifactError(f"{name} is no MP4 file: {error}; make it again") from error
