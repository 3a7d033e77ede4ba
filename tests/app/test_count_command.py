from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from p3net import checkpoint
from p3net.app import sources
from p3net.app.cli import cli
from p3net.app.count import _plain_progress
from p3net.app.rows import Row, csv_rows, ends, line
from p3net.app.sources import Source, is_model, plan
from p3net.data.catalogue import open_dataset
from p3net.data.formats import FORMATS
from p3net.errors import InputError
from p3net.intervals import PUBLISHED
from p3net.network.p3net import Architecture, P3Net
from p3net.prediction import Interval, Prediction


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never trained."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    torch.manual_seed(0)
    network = P3Net(Architecture(backbone="small", layers=1, hidden=8), PUBLISHED)
    checkpoint.save(folder / "model.safetensors", network, {})
    return folder


def picture(path: Path, seed: int = 0, size_wh: tuple[int, int] = (56, 40)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size_wh[::-1], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["count", *map(str, arguments)], input=stdin)


def error(*arguments: object) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, InputError), result.output
    return str(result.exception)


def objects(result: Result) -> list[dict]:
    return [json.loads(text) for text in result.stdout.splitlines()]


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- what is counted ----------------------------------------------------------------------


def test_counts_are_those_of_the_model(model, tmp_path):
    paths = [picture(tmp_path / f"{i}.png", i) for i in range(3)]
    counter = checkpoint.load(model)
    expected = [counter.count(path, level=0.8) for path in paths]
    result = run(model, *paths, "--json", "--level", "0.8", "--csv", tmp_path / "out.csv")
    assert result.exit_code == 0, result.output
    found, written = objects(result), lines_of(tmp_path / "out.csv")
    assert [o["file"] for o in found] == [w["file"] for w in written] == [str(p) for p in paths]
    for one, row, want in zip(found, written, expected, strict=True):
        assert one["count"] == pytest.approx(want.count)
        assert float(row["count"]) == pytest.approx(want.count, abs=1e-3)
        assert one["interval"]["level"] == float(row["level"]) == 0.8
        assert float(row["low"]) == pytest.approx(want.interval.low, abs=1e-3)
        assert float(row["high"]) == pytest.approx(want.interval.high, abs=1e-3)
        assert (one["width"], one["height"]) == (56, 40) == (int(row["width"]), int(row["height"]))
        assert row["error"] == row["time_s"] == ""
    assert "3 images" in result.stderr
    assert "0 failed" in result.stderr
    total = sum(want.count for want in expected)
    assert f"{total:,.1f} counted" in result.stderr


@pytest.mark.parametrize(
    ("runtime", "other"), [("onnxruntime", "openvino"), ("openvino", "onnxruntime")]
)
def test_what_runs_an_exported_model(tmp_path, monkeypatch, runtime, other):
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["images", "colours"], ["density"], keepdims=0)],
        "brightness",
        [tensor("images", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [tensor("density", TensorProto.FLOAT, ["n", "h", "w"])],
        [helper.make_tensor("colours", TensorProto.INT64, [1], [1])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    helper.set_model_props(made, {"p3net": "{}"})
    onnx.save(made, tmp_path / "m.onnx")
    path = picture(tmp_path / "a.png")
    brightness = np.asarray(Image.open(path)).sum() / 3 / 255
    monkeypatch.setitem(sys.modules, other, None)  # so that it cannot have been the other one
    result = run(tmp_path / "m.onnx", path, "--json", "--runtime", runtime)
    assert result.exit_code == 0, result.output
    assert objects(result)[0]["count"] == pytest.approx(brightness, rel=1e-4)
    assert "torch does not run .onnx" in error(tmp_path / "m.onnx", path, "--runtime", "torch")


def test_torch_runs_weights(model, tmp_path):
    path = picture(tmp_path / "a.png")
    assert run(model, path, "--runtime", "torch").stdout == run(model, path).stdout
    assert "openvino runs exported files" in error(model, path, "--runtime", "openvino")
    assert "use one of torch, onnxruntime, openvino" in error(model, path, "--runtime", "cuda")


def test_lines_for_people(model, tmp_path):
    path = picture(tmp_path / "a.png")
    result = run(model, path)
    assert result.exit_code == 0, result.output
    first, second, last = result.stdout.splitlines()
    assert first.split() == ["count", "90", "%", "interval", "file"]
    count = checkpoint.load(model).count(path).count
    assert second.split()[0] == f"{count:,.1f}"
    assert second.endswith(str(path))
    assert last.startswith(f"1 image, {count:,.1f} counted; 0 failed")
    assert "uncalibrated" in result.stderr


def test_folders_and_patterns(model, tmp_path):
    for name in ("b/2.png", "b/10.png", "a.png", "b/.hidden.png", "b/c/x.jpg"):
        picture(tmp_path / name)
    (tmp_path / "b/notes.txt").write_text("no image")
    (tmp_path / "b/a.overlay.jpg").write_bytes(b"an overlay of an earlier run")

    def names(*words: object) -> list[str]:
        return [Path(s.place).relative_to(tmp_path).as_posix() for s in plan(map(str, words))]

    below_b = ["b/2.png", "b/10.png", "b/c/x.jpg"]
    assert names(tmp_path) == ["a.png", *below_b]
    assert names(f"{tmp_path}/**/*.png") == ["a.png", "b/2.png", "b/10.png"]
    assert names(f"{tmp_path}/b/*") == below_b
    assert names(f"{tmp_path}/?.png", tmp_path / "b") == ["a.png", *below_b]
    assert names(tmp_path / "a.png", tmp_path, tmp_path / "b/../a.png") == ["a.png", *below_b]
    odd = picture(tmp_path / "x[1].png")
    assert names(odd) == ["x[1].png"]  # a name, not a pattern
    assert [s.name for s in plan([str(tmp_path / "b")])] == ["2.png", "10.png", "c/x.jpg"]
    result = run(model, f"{tmp_path}/b/**", "--json")
    assert len(objects(result)) == 3


def test_what_is_not_there_is_reported_and_passed_over(model, tmp_path):
    path = picture(tmp_path / "a.png")
    (tmp_path / "empty").mkdir()
    words = [tmp_path / "no.jpg", tmp_path / "*.tif", tmp_path / "empty", path]
    result = run(model, *words, "--json")
    assert result.exit_code == 1
    found = objects(result)
    assert [o.get("error") for o in found] == [
        "no such file or folder",
        "no image or video matches",
        "no images or videos in it",
        None,
    ]
    assert "3 failed" in result.stderr
    assert f"error: {words[0]}: no such file or folder" in result.stderr


def test_standard_input(model, tmp_path):
    path = picture(tmp_path / "a.png")
    result = run(model, "-", "--json", "--overlay", tmp_path / "o", stdin=path.read_bytes())
    (found,) = objects(result)
    assert found["file"] == "-"
    assert found["count"] == pytest.approx(checkpoint.load(model).count(path).count)
    assert (tmp_path / "o/stdin.overlay.jpg").is_file()
    assert run(model, "-", stdin=b"").exit_code == 1


def test_pictures_behind_addresses(model, tmp_path):
    content = picture(tmp_path / "a.png").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.startswith("/a.png") else 404)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        result = run(model, f"{base}/a.png?x=1", f"{base}/b.png", "--json")
    finally:
        server.shutdown()
        server.server_close()
    assert result.exit_code == 1
    one, two = objects(result)
    expected = checkpoint.load(model).count(tmp_path / "a.png").count
    assert one["count"] == pytest.approx(expected)
    assert "cannot be fetched: Not Found" in two["error"]


def test_a_picture_that_is_too_large_to_fetch(monkeypatch):
    monkeypatch.setattr(sources, "MAX_BYTES", 3)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(b"12345"))
    with pytest.raises(InputError, match="more than 3 bytes"):
        sources.fetch("http://host/a.png")


# --- bad input ----------------------------------------------------------------------------


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is this large, and holds next to nothing."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def gif() -> bytes:
    file = io.BytesIO()
    pages = [Image.new("RGB", (56, 40), colour) for colour in ("red", "green", "blue")]
    pages[0].save(file, "GIF", save_all=True, append_images=pages[1:])
    return file.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (80, 80, 3), np.uint8)
BAD = {
    "empty.jpg": (b"", "empty"),
    "text.jpg": (b"hello, I am no photograph", "not an image"),
    "one.jpg": (jpeg(NOISE[:1, :1]), "1×1 px is smaller than one cell"),
    "line.jpg": (jpeg(np.zeros((1, 20_000, 3), np.uint8)), "smaller than one cell"),
    "bomb.png": (bomb(60_000, 60_000), "60000 × 60000 pixels are more than"),
    "cut.jpg": (jpeg(NOISE)[:2000], "truncated"),
}


def test_bad_images_are_reported_and_the_rest_is_counted(model, tmp_path):
    for name, (content, _) in BAD.items():
        (tmp_path / name).write_bytes(content)
    good = [picture(tmp_path / name) for name in ("a.png", "z.png")]
    out = tmp_path / "out.csv"
    result = run(model, tmp_path, "--csv", out, "--json", "--overlay", tmp_path / "o")
    assert result.exit_code == 1
    found = {Path(o["file"]).name: o for o in objects(result)}
    assert len(found) == len(BAD) + 2
    for name, (_, words) in BAD.items():
        assert words in found[name]["error"], name
        assert f"{name}: " in result.stderr
    rows = {Path(row["file"]).name: row for row in lines_of(out)}
    assert rows["text.jpg"]["error"]
    assert rows["text.jpg"]["count"] == ""
    assert all(float(rows[path.name]["count"]) >= 0 for path in good)
    assert f"2 images, {sum(found[p.name]['count'] for p in good):,.1f} counted" in result.stderr
    assert f"{len(BAD)} failed" in result.stderr
    assert len(list((tmp_path / "o").iterdir())) == 2


def test_of_an_animation_the_first_picture_is_counted(model, tmp_path):
    path = tmp_path / "a.gif"
    path.write_bytes(gif())
    red = tmp_path / "red.png"
    Image.new("RGB", (56, 40), "red").save(red)
    one, two = objects(result := run(model, path, red, "--json"))
    assert one["count"] == pytest.approx(two["count"], rel=1e-4)
    assert f"note: {path}: holds several pictures; the first is counted" in result.stderr
    assert "red.png" not in result.stderr.replace("counted", "")


# --- what is written ----------------------------------------------------------------------


def test_overlays_do_not_collide_nor_touch_inputs(model, tmp_path):
    names = ("a/x.png", "b/x.png", "a/x.jpg", "a/x.overlay.jpg")
    paths = [picture(tmp_path / name, i) for i, name in enumerate(names)]
    before = [path.read_bytes() for path in paths]
    result = run(model, *paths, "--overlay", tmp_path)  # the folder they lie in
    assert result.exit_code == 0, result.output
    assert [path.read_bytes() for path in paths] == before
    new = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")} - set(names)
    assert new == {
        "a/x-2.overlay.jpg",  # of x.png: x.overlay.jpg is an input
        "a/x-3.overlay.jpg",  # of x.jpg
        "a/x.overlay.overlay.jpg",
        "b/x.overlay.jpg",
    }
    for name in new:
        with Image.open(tmp_path / name) as image:
            assert image.size == (56, 40)


def test_points_become_a_dataset(model, tmp_path):
    paths = [
        picture(tmp_path / "in" / name, i, (96, 64))
        for i, name in enumerate(("a/x.png", "b/x.png"))
    ]
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = tmp_path / "in/turned.jpg"
    Image.fromarray(NOISE).resize((96, 64)).save(turned, exif=exif)
    for kind in ("coco", "txt", "labelstudio"):
        out = tmp_path / kind
        result = run(model, tmp_path / "in", "--points", kind, "--points-to", out, "--json")
        assert result.exit_code == 0, result.output
        counts = [round(o["count"]) for o in objects(result)]
        dataset = FORMATS[kind].read(out)
        assert {s.name for s in dataset.samples} == {"a/x.png", "b/x.png", "turned.jpg"}
        assert sorted(len(s.marks().points_xy) for s in dataset.samples) == sorted(counts)
        assert sum(counts) > 0
        for sample in dataset.samples:
            width, height = (64, 96) if sample.name == "turned.jpg" else (96, 64)
            xy = sample.marks().points_xy
            assert (xy >= 0).all()
            assert (xy < (width, height)).all()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert (tmp_path / "coco/images/a/x.png").read_bytes() == paths[0].read_bytes()
    assert open_dataset(tmp_path / "coco").kind == "coco"


def test_regions(model, tmp_path):
    path = picture(tmp_path / "a.png", size_wh=(64, 48))
    square = [[0, 0], [32, 0], [32, 48], [0, 48]]
    rest = [[32, 0], [64, 0], [64, 48], [32, 48]]
    described = {
        "regions": [{"name": "left", "polygon": square}, {"name": "right", "polygon": rest}]
    }
    (tmp_path / "r.json").write_text(json.dumps({**described, "metres_per_pixel": 0.5}))
    result = run(
        model, path, "--regions", tmp_path / "r.json", "--json", "--csv", tmp_path / "o.csv"
    )
    (found,) = objects(result)
    parts = found["regions"]
    assert parts["left"]["count"] + parts["right"]["count"] == pytest.approx(found["count"])
    assert parts["left"]["per_m2"] == pytest.approx(parts["left"]["count"] / (32 * 48 / 4))
    (row,) = lines_of(tmp_path / "o.csv")
    assert float(row["left"]) == pytest.approx(parts["left"]["count"], abs=1e-3)
    assert float(row["right: per m²"]) == pytest.approx(parts["right"]["per_m2"], abs=1e-4)
    text = run(model, path, "--regions", tmp_path / "r.json").stdout
    assert re.search(r"  left \(\d+\.\d\d per m²\), uncalibrated\n", text)


@pytest.mark.parametrize("name", ["count", "width", "error"])
def test_a_region_may_not_hide_a_column(model, tmp_path, name):
    areas = tmp_path / "regions.json"
    square = [[0, 0], [20, 0], [20, 20], [0, 20]]
    areas.write_text(json.dumps({"regions": [{"name": name, "polygon": square}]}))
    words = (model, picture(tmp_path / "a.png"), "--regions", areas, "--csv", tmp_path / "out.csv")
    assert f"a region called '{name}' would hide a column" in error(*words)


def test_a_missing_folder_is_no_model_of_the_hub(model, tmp_path, monkeypatch):
    """Nothing is fetched for a typing error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("p3net.hub.fetch", lambda name: pytest.fail(f"asked the hub for {name}"))
    (tmp_path / "photos").mkdir()
    picture(tmp_path / "a.png")
    alone = run("photos/june")
    assert alone.exit_code == 1
    assert "photos/june: no such file or folder" in alone.stderr
    for word in ("runs/nothing", "photos/june"):
        assert f"{word}: no such weights file" in error(word, "a.png")


def test_csv_files_are_continued(model, tmp_path):
    path, out = picture(tmp_path / "a.png"), tmp_path / "out.csv"
    assert run(model, path, "--csv", out).exit_code == 0
    assert run(model, path, "--csv", out).exit_code == 0
    assert len(lines_of(out)) == 2
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert "already there with other columns" in error(model, path, "--csv", other)
    assert other.read_text() == "a,b\n1,2\n"
    assert "it is no text file" in error(model, path, "--csv", _binary(tmp_path))
    assert "cannot be written" in error(model, path, "--csv", tmp_path)


def _binary(folder: Path) -> Path:
    (folder / "x.csv").write_bytes(b"\xff\xfe\x00\x81")
    return folder / "x.csv"


def test_rows_are_on_disk_at_once(tmp_path):
    path = tmp_path / "out.csv"
    source = Source("image", "a.png", "a.png", "a.png")
    with csv_rows(path, []) as add:
        add(Row(source, error="bad"))
        assert [row["error"] for row in lines_of(path)] == ["bad"]


def test_options_of_counting_reach_the_model(model, tmp_path):
    path = picture(tmp_path / "a.png", size_wh=(320, 200))
    small = tmp_path / "small.safetensors"
    network = checkpoint.load(model).network
    checkpoint.save(small, network, {"preparation": {"max_shorter_side": 64}})
    (shrunk,), (full,), (tiled,) = (
        objects(run(small, path, "--json", *more))
        for more in ([], ["--full-size"], ["--full-size", "--tile", "128"])
    )
    assert shrunk["count"] != pytest.approx(full["count"], rel=1e-2)
    assert full["count"] == pytest.approx(checkpoint.load(model).count(path).count, rel=1e-4)
    assert tiled["count"] == pytest.approx(full["count"], rel=1e-3)


def test_what_intervals_look_like():
    assert ends(None) == "–"
    assert ends(Interval(1.25, 99.0, 0.9, calibrated=True)) == "1.2 – 99.0"
    assert ends(Interval(1234.5, 2345.6, 0.9, calibrated=True)) == "1,234 – 2,346"
    cells = np.full((1, 1), 2.0, np.float32)
    source = Source("video", "a.mp4", "a.mp4", "a.mp4")
    shown = line(Row(source, Prediction(2.0, cells, (8, 8), (8.0, 8.0)), time_s=61.5))
    assert shown.split() == ["2.0", "–", "a.mp4", "at", "1:01.5"]


def test_a_terminal_gets_a_growing_table_and_a_bar(model, tmp_path, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80, highlight=False)
    monkeypatch.setattr("p3net.app.console.console", terminal)
    for i in range(3):
        picture(tmp_path / f"{i}.png", i)
    assert run(model, tmp_path).exit_code == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert text.index("90 % interval") < text.index("0.png") < text.index("2.png")
    assert "100%" in text  # the bar
    assert text.rstrip().splitlines()[-1].startswith("3 images, ")


def test_progress_elsewhere(monkeypatch, capsys):
    times = iter([0.0, 1.0, 6.0, 7.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    update = _plain_progress(4)
    for done in (0.5, 1.0, 1.2, 2.0):
        update(done)
    expected = ["counting: 25 %, about 0:18.0 left", "counting: 50 %, about 0:20.0 left"]
    assert capsys.readouterr().err.splitlines() == expected


# --- usage --------------------------------------------------------------------------------


def test_usage(model, tmp_path):
    path = picture(tmp_path / "a.png")
    cases = {
        (model,): "nothing to count",
        ("none.safetensors", path): "no such checkpoint",
        (model, path, "--level", "90"): "--level must lie between 0 and 1",
        (model, path, "--points", "coco"): "go together",
        (model, path, "--points-to", tmp_path): "go together",
        (model, path, "--points", "sha", "--points-to", tmp_path / "p"): "none of folder, txt",
        (model, path, "--points", "coco", "--points-to", tmp_path): "already exists",
        (model, path, "--points", "txt", "--points-to", tmp_path / "no/p"): "cannot be written",
        (model, path, "--every", "soon"): "is no time",
        (model, path, "--csv", tmp_path / "no/out.csv"): "does not exist",
        (model, path, "--csv", path): "is one of the inputs",
        (model, path, "--overlay", path): "expected a folder",
        (model, path, "--chart", tmp_path / "c.png"): "--chart needs exactly one video, got 0",
        (model, path, "--regions", tmp_path / "none.json"): "cannot be read",
    }
    for words, expected in cases.items():
        assert expected in error(*words), words
    assert run().exit_code == 2


def test_what_looks_like_a_model(model, tmp_path):
    picture(tmp_path / "a.png")
    assert is_model(str(model))
    assert is_model("some/where.onnx")
    assert is_model("owner/name")  # of a hub
    assert is_model("owner/name@v1.2")
    assert is_model("box")
    for word in (tmp_path, tmp_path / "a.png", "a.jpg", "in/a.jpg", "in/a.mp4", "rtsp://a/b", "-"):
        assert not is_model(str(word))


def test_a_model_that_is_named_and_not_there_is_not_replaced(tmp_path):
    photo = picture(tmp_path / "a.png")
    begun = tmp_path / "run"
    begun.mkdir()
    (begun / "run.json").write_text("{}")
    assert "this run has no model yet" in error(begun, photo)
    assert "phot: no such model, file or folder" in error("phot", photo)


def test_a_folder_that_cannot_be_listed_is_passed_over(model, tmp_path, monkeypatch):
    picture(tmp_path / "in" / "a.png")
    picture(tmp_path / "in" / "locked" / "b.png")
    scan = os.scandir

    def deny(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", deny)  # root may read everything
    result = run(model, tmp_path / "in", "--json")
    assert result.exit_code == 1
    first, second = objects(result)
    assert first["count"] >= 0
    assert "locked" in second["file"]
    assert "cannot be listed: Permission denied" in second["error"]


def test_a_name_with_a_line_break(model, tmp_path):
    path = picture(tmp_path / "in" / "a\nb.png")
    points = ["--points", "folder", "--points-to", tmp_path / "p"]
    for options in (["--overlay", tmp_path / "o"], points):
        assert run(model, path, *options).exit_code == 0
    assert (tmp_path / "o" / "a\nb.overlay.jpg").is_file()
    assert (tmp_path / "p" / "images" / "a_b.png").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_in_a_line(model, tmp_path):
    words = ["count", str(model), str(picture(tmp_path / "a.png")), "--csv", "/dev/full"]
    done = subprocess.run(
        [sys.executable, "-m", "p3net", *words], check=False, capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "could not be written: No space left on device" in done.stderr


def test_names_that_are_no_text(model, tmp_path):
    path = picture(tmp_path / "a.png")
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    path.rename(odd)
    for options in ([], ["--json"], ["--csv", tmp_path / "o.csv"]):
        assert run(model, odd, *options).exit_code == 0
    assert b"/\xff.png" in (tmp_path / "o.csv").read_bytes()


# --- stopped in the middle ----------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_was_counted_before_ctrl_c_is_on_disk(model, tmp_path, how):
    folder = tmp_path / "many"
    picture(folder / "0.png", size_wh=(160, 120))
    for i in range(1, 3000):
        os.link(folder / "0.png", folder / f"{i}.png")
    out, marked = tmp_path / "out.csv", tmp_path / "marked"
    command = [sys.executable, "-m", "p3net", "count", str(model), str(folder), "--json"]
    command += ["--csv", str(out), "--points", "txt", "--points-to", str(marked)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        seen = [process.stdout.readline() for _ in range(3)]  # lines come out one by one
        on_disk = len(lines_of(out))
        process.send_signal(how)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert [json.loads(text)["file"] for text in seen] == [
        str(folder / f"{i}.png") for i in range(3)
    ]
    assert on_disk >= 2  # the line of a count is written right after it is printed
    counted = 3 + len(rest.splitlines())
    assert counted < 3000
    assert abs(len(lines_of(out)) - counted) <= 1
    assert re.search(r"^stopped: \d+ images?, [\d,.]+ counted; 0 failed", errors, re.MULTILINE)
    assert abs(len(FORMATS["txt"].read(marked)) - counted) <= 1
    assert not list(tmp_path.glob(".marked-*"))
