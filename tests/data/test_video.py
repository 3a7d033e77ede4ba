from __future__ import annotations

import io
import itertools
import math
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from p3net.data import video, video_source
from p3net.data.video import frames
from p3net.data.video_source import facts
from p3net.errors import InputError


def write(
    path: Path,
    times_ms: Sequence[int],
    *,
    codec: str = "libx264",
    size_wh: tuple[int, int] = (64, 48),
    keys_every: int = 12,
    muxing: dict[str, str] | None = None,
    paint: Callable[[int], np.ndarray] | None = None,
) -> Path:
    """A video whose frame i is grey 3 i, shown at times_ms[i]."""
    with av.open(str(path), "w", options=muxing or {}) as out:
        options = {"g": str(keys_every), "bf": "2"}
        stream = out.add_stream(codec, rate=25, options=options if codec == "libx264" else {})
        stream.width, stream.height = size_wh
        stream.bit_rate = 4_000_000 if codec == "mpeg4" else 400_000
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000 if codec != "mpeg4" else 25)
        for i, ms in enumerate(times_ms):
            pixels = np.full((size_wh[1], size_wh[0], 3), 3 * i % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(paint(i) if paint else pixels, format="rgb24")
            frame.pts, frame.time_base = ms, Fraction(1, 1000)
            if codec == "mpeg4":
                frame.pts, frame.time_base = i, Fraction(1, 25)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


STEADY = [40 * i for i in range(75)]  # three seconds of 25 frames


def shown(source: str | Path, **options: float) -> list[tuple[float, int]]:
    """Times, and which frames they are, by their grey."""
    return [(round(f.time_s, 3), number(f.image)) for f in frames(source, **options)]


def number(image: Image.Image) -> int:
    return round(float(np.asarray(image).mean()) / 3)


def by_hand(times_ms: Sequence[int], every: int, start: int, end: float) -> list[int]:
    """For each tick the first frame at or after it, by looking at every frame for every tick."""
    chosen: list[int] = []
    for tick in range(start, max(times_ms) + 1, every):
        first = min((i for i, ms in enumerate(times_ms) if ms >= tick), key=times_ms.__getitem__)
        if times_ms[first] < end and first not in chosen:
            chosen.append(first)
    return chosen


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("video") / "clip.mp4", STEADY)


# --- sampling -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "codec"),
    [("mp4", "libx264"), ("mkv", "libx264"), ("ts", "libx264"), ("avi", "mpeg4"), ("mkv", "mjpeg")],
)
def test_samples_of_every_container(tmp_path, ending, codec):
    path = write(tmp_path / f"a.{ending}", STEADY, codec=codec)
    assert shown(path, every_s=1.0) == [(0.0, 0), (1.0, 25), (2.0, 50)]
    assert shown(path, every_s=0.5, start_s=0.7, end_s=2.0) == [(0.72, 18), (1.2, 30), (1.72, 43)]
    assert [n for _, n in shown(path, every_s=0.0)] == list(range(75))


def test_a_stream_without_time_stamps_is_numbered(tmp_path):
    path = write(tmp_path / "a.h264", STEADY)
    assert shown(path, every_s=1.0) == [(0.0, 0), (1.0, 25), (2.0, 50)]
    assert shown(path, every_s=1.0, start_s=1.5) == [(1.52, 38), (2.52, 63)]
    assert facts(path).duration_s is None


def tens(low: int, high: int) -> st.SearchStrategy[int]:
    """Milliseconds on which no rounding of a time stamp has a bearing."""
    return st.integers(low, high).map(lambda n: 10 * n)


gaps = st.lists(tens(2, 90), min_size=2, max_size=20)


@given(gaps, tens(5, 250), tens(0, 150), st.none() | tens(1, 300))
@settings(max_examples=40, deadline=None)
def test_any_rate_any_times(tmp_path_factory, gaps_ms, every, start, length):
    """Frames at irregular times, key frames here and there; compared with a double loop."""
    times = [0, *itertools.accumulate(gaps_ms)]
    end = math.inf if length is None else start + length
    path = write(tmp_path_factory.mktemp("v") / "a.mkv", times, size_wh=(32, 32), keys_every=5)
    chosen = by_hand(times, every, start, end)
    options = {"every_s": every / 1000, "start_s": start / 1000}
    options |= {} if length is None else {"end_s": end / 1000}
    if not chosen:
        with pytest.raises(InputError, match=r"no frame in the time|lies behind the end"):
            shown(path, **options)
        return
    found = shown(path, **options)
    assert [n for _, n in found] == chosen
    assert [t for t, _ in found] == pytest.approx([times[i] / 1000 for i in chosen], abs=2e-3)


def test_frames_between_samples(clip):
    found = list(frames(clip, every_s=1.0, start_s=0.5, end_s=2.0, between=True))
    assert [number(f.image) for f in found] == list(range(13, 50))
    assert [number(f.image) for f in found if f.due] == [13, 38]


def test_sparse_samples_do_not_decode_what_is_between(tmp_path, monkeypatch):
    path = write(tmp_path / "a.mp4", [40 * i for i in range(85)], keys_every=5)
    decoded = 0
    original = video._needed

    def counted(*arguments: object) -> Iterator[av.Packet]:
        nonlocal decoded
        for packet in original(*arguments):
            decoded += 1
            yield packet

    monkeypatch.setattr(video, "_needed", counted)
    assert [n for _, n in shown(path, every_s=1.5)] == [0, 38, 75]
    assert decoded < 45  # of 85: up to a group of five, and the decoder's delay, for each


def test_a_start_is_sought(tmp_path, monkeypatch):
    path = write(tmp_path / "a.mp4", [40 * i for i in range(85)], keys_every=5)
    original = video._needed
    packets = []
    monkeypatch.setattr(video, "_needed", lambda *a: (packets.append(p) or p for p in original(*a)))
    assert shown(path, start_s=3.0, end_s=3.1) == [(3.0, 75)]
    assert min(p.pts * p.time_base for p in packets if p.pts is not None) == 3


@pytest.mark.parametrize("quarter", [0, 1, 2, 3])
def test_turned_videos_come_upright(tmp_path, quarter):
    """The matrix of the track's header, by ISO 14496-12: x' = a x + c y, y' = b x + d y."""

    def corner(_: int) -> np.ndarray:
        pixels = np.zeros((48, 64, 3), np.uint8)
        pixels[:16, :16] = 255  # white at the top left as stored
        return pixels

    path = write(tmp_path / "a.mp4", STEADY[:3], paint=corner)
    content = bytearray(path.read_bytes())
    place = content.index(b"tkhd") + 4 + 4 + 5 * 4 + 8 + 4 * 2  # version 0
    a, b, c, d = ((1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0))[quarter]
    one = 1 << 16
    content[place : place + 36] = struct.pack(
        ">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30
    )
    path.write_bytes(content)
    image = next(frames(path)).image
    assert image.size == ((64, 48), (48, 64))[quarter % 2]
    pixels = np.asarray(image.convert("L"))
    corners = [pixels[4, 4], pixels[4, -4], pixels[-4, -4], pixels[-4, 4]]  # clockwise
    assert int(np.argmax(corners)) == quarter  # each quarter turns clockwise


def test_facts(clip):
    known = facts(clip)
    assert known.duration_s == pytest.approx(3.0)
    assert known.rate == pytest.approx(25)
    assert not known.live


# --- what cannot be read ------------------------------------------------------------------


def test_a_video_that_is_cut_off_gives_what_it_has(tmp_path):
    path = write(tmp_path / "a.mp4", STEADY, muxing={"movflags": "faststart"}, paint=noise)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    found = []
    with pytest.raises(InputError, match=r"cut off: it ends after \d\.\d s of 3\.0 s") as caught:
        found.extend(frames(path, every_s=0.5))
    assert [round(f.time_s, 2) for f in found][:3] == [0.0, 0.52, 1.0]
    assert len(found) < 6
    assert caught.value.source == str(path)


def noise(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (48, 64, 3), np.uint8)


def test_damage_in_the_middle_is_passed_over_and_told(tmp_path):
    path = write(tmp_path / "a.mkv", STEADY, codec="mjpeg", paint=noise)
    content = path.read_bytes()
    second = content.index(b"\xff\xd8\xff", content.index(b"\xff\xd8\xff") + 3)
    third = content.index(b"\xff\xd8\xff", second + 3)
    half = (second + third) // 2
    # a header that claims the picture is enormous
    place = content.index(b"\xff\xc0", second)
    broken = content[: place + 5] + b"\0\0\0\0" + content[place + 9 :]
    assert second < place < half
    path.write_bytes(broken)
    found = []
    with pytest.raises(InputError, match="damaged"):
        found.extend(frames(path, every_s=0.0))
    assert len(found) == 74


def sound_only(path: Path) -> None:
    with av.open(str(path), "w") as out:
        stream = out.add_stream("aac", rate=8000)
        for _ in range(8):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 8000
            out.mux(stream.encode(frame))
        out.mux(stream.encode())


BAD = {
    "empty": (lambda path: path.write_bytes(b""), "the video file is empty"),
    "text": (lambda path: path.write_text("hello, no video"), "cannot be opened as a video"),
    "no file": (lambda path: None, "No such file"),
    "a folder": (lambda path: path.mkdir(), "cannot be opened as a video"),
    "sound": (sound_only, "no pictures in it"),
    "no index": (
        lambda path: path.write_bytes(write(path, STEADY, paint=noise).read_bytes()[:60_000]),
        "cannot be opened as a video",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_are_no_videos(tmp_path, case):
    make, words = BAD[case]
    path = tmp_path / "a.mp4"
    make(path)
    with pytest.raises(InputError, match=words) as caught:
        list(frames(path))
    assert caught.value.source == str(path)


def test_a_playlist_cannot_reach_out(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n")
    with pytest.raises(InputError, match="cannot be opened"):
        list(frames(path))


def test_a_colon_in_a_name_is_no_protocol(tmp_path, monkeypatch, clip):
    (tmp_path / "http:clip.mp4").write_bytes(clip.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert len(list(frames("http:clip.mp4"))) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_s": -1.0}, "every must be a number of seconds"),
        ({"every_s": math.nan}, "every must be a number of seconds"),
        ({"start_s": math.inf}, "start must be"),
        ({"end_s": -1.0}, "end must be"),
        ({"start_s": 2.0, "end_s": 2.0}, "must lie after the start"),
        ({"start_s": 60.0}, r"the start \(60 s\) lies behind the end \(3.0 s\)"),
    ],
)
def test_times_that_make_no_sense(clip, options, words):
    with pytest.raises(InputError, match=words):
        list(frames(clip, **options))


def test_enormous_frames_are_refused(clip, monkeypatch):
    monkeypatch.setattr(video_source, "MAX_PIXELS", 1000)
    with pytest.raises(InputError, match="64 × 48 pixels are more than 1,000"):
        list(frames(clip))


def test_without_pyav(clip, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"pip install 'p3net\[video\]'"):
        list(frames(clip))


def test_a_camera_that_is_not_there():
    with pytest.raises(InputError, match="camera:97: cannot be opened as a video"):
        list(frames("camera:97"))


# --- live streams -------------------------------------------------------------------------


@contextmanager
def camera(*scripts: Sequence[object]) -> Iterator[str]:
    """An MJPEG camera. Each connection plays the next script: a number of pictures to send, 20 a
    second, or "stall", which keeps the line open and silent; connections beyond are refused.
    """
    waiting = list(scripts)
    over = threading.Event()
    ticks = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not waiting:
                self.send_error(503)
                return
            script = waiting.pop(0)
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=next")
            self.end_headers()
            for step in script:
                if step == "stall":
                    over.wait(20)
                for _ in range(step if isinstance(step, int) else 0):
                    picture = io.BytesIO()
                    Image.new("L", (64, 48), next(ticks) % 80 * 3).convert("RGB").save(
                        picture, "JPEG"
                    )
                    head = f"--next\r\nContent-Type: image/jpeg\r\nContent-Length: {picture.tell()}"
                    try:
                        self.wfile.write(head.encode() + b"\r\n\r\n" + picture.getvalue() + b"\r\n")
                    except OSError:
                        return
                    time.sleep(0.05)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://guard:secret@127.0.0.1:{server.server_port}/live"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def wait_until_read() -> None:
    for thread in threading.enumerate():
        if thread.name == "p3net video":
            thread.join(10)
            assert not thread.is_alive()


def test_a_live_stream_until_its_end_time():
    with camera([400]) as url:
        assert facts(url).live
    with camera([400]) as url:
        found = list(frames(url, every_s=0.2, end_s=1.1))
        wait_until_read()
    assert 3 <= len(found) <= 6
    assert all(b.time_s - a.time_s > 0.1 for a, b in itertools.pairwise(found))


def test_old_frames_of_a_live_stream_are_dropped():
    with camera([400]) as url:
        source = frames(url, every_s=0.0)
        first = number(next(source).image)
        time.sleep(1.0)  # a slow counter: twenty pictures go by
        second, third = number(next(source).image), number(next(source).image)
        source.close()
        wait_until_read()
    assert second - first > 10
    assert 1 <= third - second <= second - first


def test_a_lost_stream_is_looked_for_again(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(video, "FIRST_PAUSE_S", 0.02)
    with camera([20], [20, "stall"]) as url:
        options = {"every_s": 0.0, "timeout_s": 0.5, "retries": 3, "notify": told.append}
        found = []
        with pytest.raises(InputError, match="3 attempts to reach it again failed") as caught:
            found.extend(frames(url, **options))
    assert 25 <= len(found) <= 40  # both connections
    assert "attempt 1 of 3" in told[0]  # the first ended
    assert "attempt 1 of 3" in told[1]  # the second fell silent
    assert "attempt 3 of 3" in told[3]
    assert len(told) == 4
    assert "secret" not in f"{caught.value}{told}"


def test_a_stream_that_is_silent_from_the_start():
    begun = time.monotonic()
    silent = pytest.raises(InputError, match=r"no data for 0\.4 s")
    with camera(["stall"]) as url, silent as caught:
        list(frames(url, timeout_s=0.4))
    assert time.monotonic() - begun < 5
    assert "secret" not in str(caught.value)


def test_a_recording_behind_an_address_is_read_whole(clip):
    content = clip.read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/clip.mp4"
        assert not facts(url).live
        assert shown(url) == [(0.0, 0), (1.0, 25), (2.0, 50)]
    finally:
        server.shutdown()
        server.server_close()


def test_a_fault_of_the_reader_reaches_who_waits(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    with camera([40]) as url:
        monkeypatch.setattr(video, "upright", fail)
        with pytest.raises(RuntimeError, match="a fault"):
            list(frames(url))
        wait_until_read()
