from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from p3net import checkpoint
from p3net.app import figures
from p3net.app.cli import cli
from p3net.app.video import label, overlay, seconds
from p3net.data.formats import FORMATS
from p3net.errors import InputError
from p3net.intervals import PUBLISHED
from p3net.network.p3net import Architecture, P3Net
from p3net.prediction import Interval, Prediction, RegionCount


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    torch.manual_seed(0)
    network = P3Net(Architecture(backbone="small", layers=1, hidden=8), PUBLISHED)
    checkpoint.save(folder / "model.safetensors", network, {})
    return folder


def write(path: Path, seconds_long: int = 3, **muxing: str) -> Path:
    """Noise of changing brightness, 64×48, 10 frames a second; even seconds are still."""
    with av.open(str(path), "w", options=muxing) as out:
        stream = out.add_stream("libx264", rate=10, options={"crf": "18", "g": "10"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(10 * seconds_long):
            pixels = np.random.default_rng(i // 10).integers(0, 256, (48, 64, 3), np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("video") / "clip.mp4")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["count", *map(str, arguments)])


def error(*arguments: object) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, InputError), result.output
    return str(result.exception)


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_counts_over_time_are_those_of_the_frames(model, clip, tmp_path):
    out, chart = tmp_path / "out.csv", tmp_path / "chart.png"
    result = run(model, clip, "--every", "500ms", "--csv", out, "--chart", chart)
    assert result.exit_code == 0, result.output
    counter = checkpoint.load(model)
    with av.open(str(clip)) as container:
        images = [frame.to_image() for frame in container.decode(video=0)]
    expected = [counter.count(images[i]) for i in range(0, 30, 5)]
    rows = lines_of(out)
    assert [float(row["time_s"]) for row in rows] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    for row, want in zip(rows, expected, strict=True):
        assert float(row["count"]) == pytest.approx(want.count, abs=2e-3)
        assert float(row["low"]) == pytest.approx(want.interval.low, abs=2e-3)
    mean, most = np.mean([e.count for e in expected]), max(e.count for e in expected)
    assert f"clip.mp4: 6 frames, mean {mean:,.1f}, most {most:,.1f}; 0 failed" in result.stdout
    assert "clip.mp4 at 0:01.5" in result.stdout
    with Image.open(chart) as image:
        assert image.width > image.height > 400


def test_start_and_end(model, clip):
    result = run(model, clip, "--start", "1", "--end", "0:02.5", "--json")
    assert [json.loads(text)["time_s"] for text in result.stdout.splitlines()] == [1.0, 2.0]
    behind = run(model, clip, "--start", "60")
    assert behind.exit_code == 1
    assert "lies behind the end" in behind.stderr


def test_the_annotated_video_has_every_frame_and_lasts_as_long(model, clip, tmp_path):
    out = tmp_path / "annotated.mp4"
    regions = tmp_path / "r.json"
    polygon = [[32, 24], [64, 24], [64, 48], [32, 48]]
    regions.write_text(json.dumps({"regions": [{"name": "gate", "polygon": polygon}]}))
    result = run(model, clip, "--annotated", out, "--regions", regions, "--every", "1s")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("clip.mp4 at") == 3  # counted three times
    with av.open(str(out)) as container:
        stream = container.streams.video[0]
        shown = [
            (float(frame.time), frame.to_ndarray(format="rgb24"))
            for frame in container.decode(video=0)
        ]
        assert float(stream.duration * stream.time_base) == pytest.approx(3.0, abs=0.11)
    assert [round(time_s, 3) for time_s, _ in shown] == [round(0.1 * i, 3) for i in range(30)]
    with av.open(str(clip)) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    corner = np.mean([pixels[:6, :6] for _, pixels in shown])
    assert corner < np.mean([pixels[:6, :6] for pixels in plain]) / 2  # the label's dark ground
    assert all(pixels.shape == (48, 64, 3) for _, pixels in shown)


def test_only_the_part_asked_for_is_annotated(model, clip, tmp_path):
    out = tmp_path / "a.mkv"
    assert run(model, clip, "--annotated", out, "--start", "1", "--end", "2").exit_code == 0
    with av.open(str(out)) as container:
        times = [frame.time for frame in container.decode(video=0)]
    assert len(times) == 10
    assert times[0] == pytest.approx(0, abs=0.01)


def test_overlays_and_points_of_frames(model, clip, tmp_path):
    result = run(
        model,
        clip,
        clip.parent,
        "--overlay",
        tmp_path / "o",
        "--points",
        "coco",
        "--points-to",
        tmp_path / "p",
        "--json",
    )
    assert result.exit_code == 0, result.output
    found = [json.loads(text) for text in result.stdout.splitlines()]
    assert len(found) == 3  # the same file twice is counted once
    names = [f"clip-00000{i}.000s" for i in range(3)]
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == [f"{n}.overlay.jpg" for n in names]
    dataset = FORMATS["coco"].read(tmp_path / "p")
    assert [s.name for s in dataset.samples] == [f"{name}.png" for name in names]
    counts = [round(each["count"]) for each in found]
    assert [len(s.marks().points_xy) for s in dataset.samples] == counts
    with dataset.samples[0].open() as image:
        assert image.size == (64, 48)


def test_a_cut_video_keeps_its_counts(model, tmp_path):
    path, out = write(tmp_path / "cut.mp4", 6, movflags="faststart"), tmp_path / "out.csv"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    annotated, chart = tmp_path / "a.mp4", tmp_path / "c.png"
    result = run(model, path, "--csv", out, "--annotated", annotated, "--chart", chart)
    assert result.exit_code == 1
    rows = lines_of(out)
    assert [row["time_s"] for row in rows[:3]] == ["0.000", "1.000", "2.000"]
    assert "cut off: it ends after" in rows[-1]["error"]
    assert "1 failed" in result.stdout
    with av.open(str(annotated)) as container:
        assert len(list(container.decode(video=0))) > 20
    assert chart.is_file()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "the video file is empty"), (b"hello, no video", "cannot be opened as a video")],
)
def test_files_that_are_no_videos(model, tmp_path, clip, content, words):
    (tmp_path / "a.mp4").write_bytes(content)
    (tmp_path / "b.mp4").write_bytes(clip.read_bytes())
    result = run(model, tmp_path, "--json")
    assert result.exit_code == 1
    first, *rest = (json.loads(text) for text in result.stdout.splitlines())
    assert words in first["error"]
    assert len(rest) == 3


def test_a_stream_that_stalls_is_told(model, tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the call and says nothing
        url = f"http://user:secret@127.0.0.1:{server.getsockname()[1]}/live"
        result = run(model, url, "--timeout", "300ms", "--json", "--csv", tmp_path / "o.csv")
    assert result.exit_code == 1
    assert "no data for 0.3 s" in json.loads(result.stdout)["error"]
    assert "secret" not in result.output + (tmp_path / "o.csv").read_text()


def test_ctrl_c_leaves_whole_files(model, tmp_path):
    path = write(tmp_path / "long.mp4", 120)
    out, chart, annotated = tmp_path / "o.csv", tmp_path / "c.png", tmp_path / "a.mp4"
    command = [sys.executable, "-m", "p3net", "count", str(model), str(path), "--every", "100ms"]
    command += ["--json", "--csv", out, "--chart", chart, "--annotated", annotated]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(15):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "stopped: " in errors
    number = len(lines_of(out))
    assert 14 <= number < 1200
    with av.open(str(annotated)) as container:
        assert abs(len(list(container.decode(video=0))) - number) <= 2
    with Image.open(chart) as image:
        image.load()


def test_usage(model, clip, tmp_path, monkeypatch):
    other = tmp_path / "other.mp4"
    other.write_bytes(clip.read_bytes())
    chart, video = tmp_path / "c.png", tmp_path / "v.mp4"
    cases = {
        (model, clip, other, "--chart", chart): "--chart needs exactly one video, got 2",
        (model, clip, other, "--annotated", video): "--annotated needs exactly one video",
        (model, other, "--annotated", other): "is one of the inputs",
        (model, clip, "--annotated", chart): "expected the name of a video",
        (model, clip, "--annotated", tmp_path / "no/v.mp4"): "does not exist",
        (model, clip, "--chart", video): "expected the name of a picture",
    }
    for words, expected in cases.items():
        assert expected in error(*words), words
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install 'p3net[video]'" in error(model, clip, "--annotated", video)
    assert "pip install 'p3net[video]'" in run(model, clip).stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1.5s", 1.5),
        (".5 s", 0.5),
        ("250ms", 0.25),
        ("2m", 120),
        ("2min", 120),
        ("1h", 3600),
        ("1:30", 90),
        ("1:00:01.5", 3601.5),
    ],
)
def test_times(text, expected):
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "soon", "-1", "1d", "1:75", "1:2:3:4", "nan", "1e3"])
def test_no_times(text):
    with pytest.raises(InputError, match="is no time"):
        seconds(text)


def prediction(count: float, high: float = 12.0) -> Prediction:
    interval = Interval(min(count, 1.0), high, 0.9, calibrated=True)
    regions = {"gate": RegionCount("gate", count / 2)}
    cells = np.full((6, 8), count / 48, np.float32)
    return Prediction(count, cells, (48, 64), (8.0, 8.0), interval, regions=regions)


def test_the_quick_overlay_is_the_overlay():
    cells = np.random.default_rng(0).random((6, 8)).astype(np.float32) ** 3
    counted = Prediction(float(cells.sum()), cells, (48, 64), (8.0, 8.0))
    noise = np.random.default_rng(1).integers(0, 256, (48, 64, 3), np.uint8)
    slow = np.asarray(counted.overlay(image=noise)).astype(int)
    quick = np.asarray(overlay(counted, (64, 48))(Image.fromarray(noise))).astype(int)
    assert abs(quick - slow).max() <= 2
    assert abs(quick - noise).max() > 50


def test_the_label_lies_in_the_corner_and_leaves_the_rest():
    picture = Image.new("RGB", (320, 240), (90, 120, 150))
    label(picture, prediction(7.0), 61.0)
    pixels = np.asarray(picture)
    assert (pixels[0, 0] < 60).all()
    assert pixels[:100, :100].max() == 255  # white figures
    assert (pixels[120:] == (90, 120, 150)).all()
    assert (pixels[:, 200:] == (90, 120, 150)).all()


@pytest.mark.parametrize("step_s", [1.0, 10.0, 200.0])
def test_the_chart(step_s):
    series = [(step_s * i, prediction(float(i), 40 + i)) for i in range(80)]
    image = figures.on_white(figures.over_time(series))
    pixels = np.asarray(image)
    assert image.width > image.height
    ink = (pixels < 120).any(axis=2)
    columns = np.flatnonzero(ink.any(axis=0))
    assert columns[-1] > 0.95 * image.width  # the line goes through to the right
    assert Fraction(len(columns), image.width) > Fraction(4, 5)
    figures.over_time(series[:1])  # a single frame is a chart, too
