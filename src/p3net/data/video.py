"""Video: frames of files, streams and cameras, sampled by time.

Times are seconds since the first frame of a recording, or since a live stream was reached.
A recording is read from one end to the other and nothing is left out; of a live stream only
the newest frame waits, so whoever counts slowly loses frames and never lags behind.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from PIL import Image

from p3net.data.video_source import (
    TIMEOUT_S,
    duration_s,
    is_live,
    open_video,
    public_name,
    rate_of,
    reason,
    seconds_of,
    upright,
)
from p3net.errors import InputError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

RETRIES = 10
"""How often in a row a lost stream is looked for again: two and a half minutes in all."""

FIRST_PAUSE_S = 0.5
"""Before the first of these; each pause is twice the one before, up to 30 s."""

_ROUNDING_S = 1e-3  # Matroska rounds time stamps to milliseconds
_MISSING_S = 0.5  # a recording that ends so much before its declared end is cut off
_MAX_PENDING = 512  # packets kept undecoded until it is known whether they are needed


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One picture of a video.

    Attributes:
        time_s: when it is shown.
        image: upright RGB.
        due: whether it is a sample; False for a frame between two, where those are asked for.
    """

    time_s: float
    image: Image.Image
    due: bool = True


# --- reading ------------------------------------------------------------------------------


def frames(
    source: str | Path,
    *,
    every_s: float = 1.0,
    start_s: float | None = None,
    end_s: float | None = None,
    between: bool = False,
    timeout_s: float = TIMEOUT_S,
    retries: int = RETRIES,
    notify: Callable[[str], None] | None = None,
) -> Iterator[Frame]:
    """The first frame at or after each of start, start + every, start + 2 every, … before end.

    Frames come with their own times, so a variable rate shifts none. A recording that is damaged
    or cut off gives the frames that can be had and then raises. A live stream that is silent,
    fails or ends is looked for again, after 0.5 s, 1 s, 2 s, … up to 30 s.

    Args:
        source: a video file, an address (`rtsp://…`, `http://…`) or a camera (`camera:0`).
        every_s: seconds between samples; 0 for every frame.
        start_s: of the first sample.
        end_s: where to stop; the frame at that time is not given any more.
        between: give the frames between the samples too, those of a recording.
        timeout_s: how long the source may be silent.
        retries: how often in a row to look for a lost live stream.
        notify: is told, from another thread, of every such attempt.
    """
    start = start_s or 0.0
    for name, value in (("every", every_s), ("start", start), ("end", end_s or 0.0)):
        if not 0 <= value < math.inf:
            raise InputError(f"{name} must be a number of seconds, 0 or more, got {value}")
    if end_s is not None and end_s <= start:
        raise InputError(f"the end ({end_s:g} s) must lie after the start ({start:g} s)")
    clock = _Clock(every_s, start)
    container = open_video(source, timeout_s)
    if not is_live(source, container):
        with container:
            lasts_s = duration_s(container, container.streams.video[0])
            if lasts_s is not None and start >= lasts_s:
                raise InputError(
                    f"the start ({start:g} s) lies behind the end ({lasts_s:.1f} s)",
                    source=public_name(source),
                )
            yield from _recorded(container, source, clock, end_s, between=between)
        return
    reader = _LiveReader(source, clock, end_s, timeout_s, retries, notify)
    Thread(target=reader.run, args=(container,), daemon=True, name="p3net video").start()
    try:
        while (item := reader.newest.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        reader.stop.set()


class _Clock:
    """Says which frames are samples."""

    def __init__(self, every_s: float, start_s: float) -> None:
        self.every_s, self.start_s, self.next_s = every_s, start_s, start_s

    def due(self, time_s: float) -> bool:
        """Whether a frame at this time is the next sample; then the one after it is awaited."""
        passed_s = time_s - self.start_s + _ROUNDING_S
        if time_s < self.next_s - _ROUNDING_S:
            return False
        if self.every_s:
            self.next_s = self.start_s + (passed_s // self.every_s + 1) * self.every_s
        return True


def _recorded(
    container: InputContainer,
    source: str | Path,
    clock: _Clock,
    end_s: float | None,
    *,
    between: bool,
) -> Iterator[Frame]:
    from av.error import FFmpegError

    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    seconds = seconds_of(stream)
    found, given, damaged, reached_s = 0, 0, 0, 0.0
    nothing = InputError("no frame in the time asked for", source=public_name(source))
    wanted = (lambda: clock.start_s) if between else (lambda: clock.next_s)
    try:
        for packet in _needed(container, stream, seconds, wanted):
            if packet.pts is not None:
                reached_s = max(reached_s, seconds(packet.pts + (packet.duration or 0)))
            try:
                decoded = stream.decode(packet)
            except FFmpegError:  # players go on with the next one, too
                damaged += 1
                continue
            for frame in decoded:
                # frames of an elementary stream can only be numbered
                time_s = found / rate_of(stream) if frame.pts is None else seconds(frame.pts)
                found += 1
                if end_s is not None and time_s >= end_s - _ROUNDING_S:
                    if not given:
                        raise nothing
                    return
                due = clock.due(time_s)
                if due or (between and time_s >= clock.start_s - _ROUNDING_S):
                    given += 1
                    yield Frame(time_s, upright(frame, source), due)
    except FFmpegError as error:
        raise InputError(
            f"damaged after {reached_s:.1f} s: {reason(error)}", source=public_name(source)
        ) from None
    told = stream.duration is not None or len(container.streams) == 1  # sound may last longer
    declared_s = duration_s(container, stream) if told else None
    _complain(source, found, damaged, reached_s, declared_s)
    if not given:
        raise nothing


def _complain(
    source: str | Path, found: int, damaged: int, reached_s: float, declared_s: float | None
) -> None:
    """Say, after the last frame, what was not there."""
    if not found:
        problem = "no frame of this video can be decoded"
    elif declared_s is not None and reached_s and reached_s < declared_s - _MISSING_S:
        problem = f"cut off: it ends after {reached_s:.1f} s of {declared_s:.1f} s"
    elif damaged:
        problem = f"damaged: {damaged} packets could not be decoded and were left out"
    else:
        return
    raise InputError(problem, source=public_name(source))


def _needed(
    container: InputContainer,
    stream: VideoStream,
    seconds: Callable[[int], float],
    wanted: Callable[[], float],
) -> Iterator[Packet[VideoStream]]:
    """The packets that must be decoded for the frame at `wanted()` seconds, which moves on.

    Decoding may begin at any key frame, so packets wait undecoded until one at or after the
    wanted time arrives; a key frame before that time makes those that wait superfluous.
    """
    if wanted() > 0:
        _seek(container, stream, seconds, wanted())
    pending: list[Packet[VideoStream]] = []
    for packet in container.demux(stream):
        time_s = math.inf if packet.pts is None else seconds(packet.pts)
        if packet.is_keyframe and time_s <= wanted():
            stream.codec_context.flush_buffers()
            pending.clear()
        pending.append(packet)
        if time_s >= wanted() or len(pending) >= _MAX_PENDING:
            yield from pending
            pending.clear()


def _seek(
    container: InputContainer, stream: VideoStream, seconds: Callable[[int], float], time_s: float
) -> None:
    """Go to a key frame at or before a time; a file that cannot be sought in stays as it is.

    MPEG-TS has no index and may land behind the key frame: then farther back, at last at 0.
    """
    from av.error import FFmpegError

    if stream.start_time is None or stream.time_base is None:
        return
    for earlier_s in (0.0, 10.0, math.inf):
        offset = stream.start_time + int(max(0.0, time_s - earlier_s) / stream.time_base)
        with suppress(FFmpegError):
            container.seek(offset, stream=stream)
            key = next((p for p in container.demux(stream) if p.is_keyframe), None)
            container.seek(offset, stream=stream)
            if key is not None and key.pts is not None and seconds(key.pts) <= time_s:
                return


@dataclass
class _LiveReader:
    """Reads a stream as fast as it comes and keeps the newest sample; runs in a thread."""

    source: str | Path
    clock: _Clock
    end_s: float | None
    timeout_s: float
    retries: int
    notify: Callable[[str], None] | None
    failures: int = 0
    newest: queue.Queue[Frame | Exception | None] = field(default_factory=lambda: queue.Queue(1))
    stop: Event = field(default_factory=Event)

    def run(self, container: InputContainer) -> None:
        """Read until the end is reached, somebody stops or the stream cannot be found again."""
        begun = time.monotonic()
        last: Exception | None = None
        try:
            while not self.read(container, begun):
                opened = None
                while opened is None:
                    opened = self.reopen()
                container = opened
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to who waits
            last = error
        while not self.stop.is_set():  # the end waits until the last frame has been taken
            with suppress(queue.Full):
                self.newest.put(last, timeout=0.1)
                return

    def read(self, container: InputContainer, begun: float) -> bool:
        """Read one connection; True when nothing more is wanted.

        Time stamps of live streams are not to be trusted: frames get the time they arrive at.
        """
        from av.error import FFmpegError

        stream = container.streams.video[0]
        with container, suppress(FFmpegError):
            for packet in container.demux(stream):
                decoded: list[VideoFrame] = []
                with suppress(FFmpegError):  # joined between two key frames, or a lost packet
                    decoded = stream.decode(packet)
                for frame in decoded:
                    self.failures = 0
                    now_s = time.monotonic() - begun
                    if self.stop.is_set() or (self.end_s is not None and now_s >= self.end_s):
                        return True
                    if self.clock.due(now_s):
                        sample = Frame(now_s, upright(frame, self.source))
                        with suppress(queue.Empty):
                            self.newest.get_nowait()
                        self.newest.put(sample)
        return self.stop.is_set()

    def reopen(self) -> InputContainer | None:
        """Wait, then look for the stream again; None where it is not there."""
        if self.failures >= self.retries:
            raise InputError(
                f"the stream ended or was silent for {self.timeout_s:g} s, and {self.retries} "
                "attempts to reach it again failed",
                source=public_name(self.source),
            )
        pause_s = min(FIRST_PAUSE_S * 2**self.failures, 30.0)
        self.failures += 1
        if self.notify is not None:
            self.notify(
                f"{public_name(self.source)}: lost; attempt {self.failures} of {self.retries} to "
                f"reach it again in {pause_s:g} s"
            )
        if self.stop.wait(pause_s):
            raise InputError("stopped", source=public_name(self.source))
        with suppress(InputError):
            return open_video(self.source, self.timeout_s)
        return None
