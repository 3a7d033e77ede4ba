"""What a video comes from: files, addresses and cameras; opened, described, turned upright.

PyAV, a binding of FFmpeg, does the work; it comes with the extra `video`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from p3net.data.images import MAX_PIXELS
from p3net.errors import InputError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts"),
    *(".wmv", ".flv", ".3gp", ".ogv", ".mjpg", ".mjpeg", ".h264", ".264", ".hevc", ".h265"),
)
"""Endings, in lower case, of the files that are taken for videos."""

TIMEOUT_S = 10.0
"""How long a source may be silent."""

_TURN = {
    1: Image.Transpose.ROTATE_90,
    2: Image.Transpose.ROTATE_180,
    3: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a source says of itself; recordings may lie, live streams know little.

    Attributes:
        duration_s: None for a live stream, or where a file does not say.
        rate: frames a second on average.
        live: whether it goes on until somebody stops.
    """

    duration_s: float | None
    rate: float
    live: bool


# --- names --------------------------------------------------------------------------------


def is_video_name(path: str | Path) -> bool:
    """Whether a file is taken for a video, by the ending of its name.

    >>> is_video_name("CLIP.MOV"), is_video_name("clip.jpg"), is_video_name("._clip.mov")
    (True, False, False)
    """
    path = Path(path)
    return path.suffix.lower() in VIDEO_SUFFIXES and not path.name.startswith(".")


def is_stream(source: str) -> bool:
    """Whether a word names a camera or an address instead of a file.

    >>> [is_stream(s) for s in ("rtsp://gate/1", "camera:0", "/dev/video0", "C:/a.mp4", "a.mp4")]
    [True, True, True, False, False]
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://|camera:|/dev/video\d+$", source) is not None


def public_name(source: str | Path) -> str:
    """A source as it may be shown and stored: without the password in its address.

    >>> public_name("rtsp://guard:secret@gate:554/live"), public_name("a@b.mp4")
    ('rtsp://gate:554/live', 'a@b.mp4')
    """
    return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+://)[^/?#]*@", r"\1", str(source))


def facts(source: str | Path, *, timeout_s: float = TIMEOUT_S) -> Facts:
    """Open a source, and close it again."""
    with open_video(source, timeout_s) as container:
        stream = container.streams.video[0]
        return Facts(duration_s(container, stream), rate_of(stream), is_live(source, container))


# --- opened -------------------------------------------------------------------------------


def open_video(source: str | Path, timeout_s: float) -> InputContainer:
    """Open a source that has a video stream."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        raise InputError(
            "videos need PyAV, which comes with an extra: pip install 'p3net[video]'",
            source=public_name(source),
        ) from None
    words, kind, options = _address(source)
    try:
        container = av.open(words, format=kind, options=options, timeout=timeout_s)
    except (FFmpegError, OSError, ValueError) as error:
        raise InputError(
            f"cannot be opened as a video: {reason(error, timeout_s)}", source=public_name(source)
        ) from None
    if not container.streams.video:
        container.close()
        raise InputError("there are no pictures in it, only sound or text", source=source)
    return container


def _address(source: str | Path) -> tuple[str, str | None, dict[str, str]]:
    """What FFmpeg opens, in which format (None: it looks), with which options."""
    text = str(source)
    if not isinstance(source, str) or not is_stream(source):
        path = Path(source)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise InputError(f"cannot read the video: {error.strerror}", source=path) from None
        if path.is_file() and not size:
            raise InputError("the video file is empty", source=path)
        # A colon in a name is no protocol, and a playlist may not reach into the network.
        return f"file:{text}", None, {"protocol_whitelist": "file,crypto,data"}
    if text.startswith(("camera:", "/dev/video")):
        name = text.removeprefix("camera:").removeprefix("/dev/video")
        if sys.platform == "darwin":
            return name, "avfoundation", {}
        if sys.platform == "win32":
            return f"video={name}", "dshow", {}
        return f"/dev/video{name}", "v4l2", {}
    # Over UDP, lost packets smear the picture.
    return text, None, {"rtsp_transport": "tcp"} if text.startswith("rtsp") else {}


def is_live(source: str | Path, container: InputContainer) -> bool:
    """An address that knows how long it lasts is a recording, too."""
    return isinstance(source, str) and is_stream(source) and container.duration is None


def reason(error: Exception, timeout_s: float = TIMEOUT_S) -> str:
    """FFmpeg's words for what went wrong."""
    from av.error import ExitError

    if isinstance(error, ExitError):  # PyAV's own way to end a call that takes too long
        return f"no data for {timeout_s:g} s"
    return str(getattr(error, "strerror", None) or error)


def duration_s(container: InputContainer, stream: VideoStream) -> float | None:
    """How long a recording says it lasts."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / 1e6


def seconds_of(stream: VideoStream) -> Callable[[int], float]:
    """From time stamps of a stream to seconds since its first frame."""
    base, origin = stream.time_base or 0, stream.start_time or 0
    return lambda stamp: float((stamp - origin) * base)


def rate_of(stream: VideoStream) -> float:
    """Frames a second on average, or at a guess."""
    return float(stream.average_rate or stream.guessed_rate or 25)


def upright(frame: VideoFrame, source: str | Path) -> Image.Image:
    """A decoded frame as RGB, turned as the video says."""
    if frame.width * frame.height > MAX_PIXELS:
        raise InputError(
            f"frames of {frame.width} × {frame.height} pixels are more than {MAX_PIXELS:,}",
            source=public_name(source),
        )
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turn = _TURN.get(round(frame.rotation / 90) % 4)  # counter-clockwise, as Pillow turns
    return image if turn is None else image.transpose(turn)
