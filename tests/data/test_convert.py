"""Conversion there and back: image bytes, sizes, points, labels and splits survive."""

from __future__ import annotations

import io
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from p3net.app.data import app
from p3net.data.exports import percent
from p3net.data.formats import FORMATS, convert
from p3net.data.images import open_image
from p3net.data.layout import Layout
from p3net.errors import InputError
from p3net.structures import Dataset, Marks, Sample, as_points

PAIRS = list(itertools.product(FORMATS, FORMATS))


def encoded(width: int, height: int, kind: str, orientation: int) -> bytes:
    """An image file with an orientation tag, made by Pillow alone."""
    pixels = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) % 251
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(stream, format=kind, exif=exif)
    return stream.getvalue()


# Names that collide by stem, look like split folders or `images`, and need escaping.
letters = st.text("aA7 é人%&<>'\"#?+=;,()-_", min_size=1, max_size=6)
folders = st.sampled_from(["", "", "", "images/", "train/", "val/b/", "points/", "Test/", "jsons/"])
endings = st.sampled_from([".jpg", ".png", ".JPG", ".jpg.png"])
names = st.builds(
    lambda folder, stem, end: folder + stem.strip("/") + end,
    folders,
    letters | st.just("a"),
    endings,
)
coordinates = st.floats(-100, 5000, allow_subnormal=False)
annotations = st.none() | st.lists(st.tuples(coordinates, coordinates), max_size=4)
pictures = st.builds(
    encoded,
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["JPEG", "PNG"]),
    st.sampled_from([1, 3, 6, 8]),
)
members = st.lists(
    st.tuples(names, st.sampled_from(["train", "train", "val", "test"]), annotations, pictures),
    min_size=1,
    max_size=5,
    unique_by=lambda member: (member[1], member[0]),
)


Row = tuple[str, str, list[tuple[float, float]] | None, bytes]


def dataset_of(rows: list[Row], folder: Path) -> Dataset:
    folder.mkdir()
    samples = []
    for count, (name, split, points, content) in enumerate(rows):
        path = folder / f"{count}.bin"
        path.write_bytes(content)
        read = None if points is None else partial(Marks, as_points(points))
        samples.append(Sample(name, partial(open_image, path), read, split, path))
    return Dataset("test", str(folder), tuple(samples))


def contents(dataset: Dataset) -> dict[str, tuple[bytes, list[list[float]] | None]]:
    return {
        sample.key: (
            sample.path.read_bytes() if sample.path else b"",
            sample.marks().points_xy.tolist() if sample.labelled else None,
        )
        for sample in dataset.samples
    }


def assert_same(
    got: Dataset, expected: Dataset, close: Callable[[float, float], bool] = lambda a, b: a == b
) -> None:
    ours, theirs = contents(got), contents(expected)
    assert ours.keys() == theirs.keys()
    for key, (content, points) in theirs.items():
        assert ours[key][0] == content, key
        assert (ours[key][1] is None) == (points is None), key
        flat = np.ravel(ours[key][1] or []), np.ravel(points or [])
        assert len(flat[0]) == len(flat[1]), key
        assert all(map(close, *flat)), key
    assert got.orphans == ()


def written(dataset: Dataset, layout: Layout, folder: Path) -> Dataset:
    convert(dataset, folder, layout)
    recognised = [name for name, other in FORMATS.items() if other.recognises(folder)]
    same = {"txt", "csv", "npy", "json"}
    # A dataset without any annotation is a plain folder, whatever the files would have been.
    assert recognised in ([layout.name], ["folder"]), recognised
    if recognised == ["folder"] and layout.name not in same | {"folder"}:
        assert not any(sample.labelled for sample in dataset.samples)
    assert sorted(path.name for path in folder.parent.glob(".*")) == []
    return layout.read(folder)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=map("-".join, PAIRS))
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(rows=members)
def test_there_and_back(first: str, second: str, rows: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = dataset_of(rows, Path(folder, "source"))
        there = written(source, FORMATS[first], Path(folder, "there"))
        back = written(there, FORMATS[second], Path(folder, "back"))
        if "labelstudio" in (first, second):
            close = partial(math.isclose, rel_tol=0, abs_tol=1e-6)
            assert_same(there, source, close)
            assert_same(back, source, close)
            again = written(back, FORMATS[first], Path(folder, "again"))
            assert_same(again, back)  # exact from the second trip on
        else:
            assert_same(there, source)
            assert_same(back, source)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), max_size=5), st.integers(1, 30_000))
def test_percentages_come_back_exactly_the_second_time(pixels: list[float], length: int) -> None:
    first = [value * length / 100 for value in percent(np.array(pixels), length)]
    assert np.allclose(first, pixels, rtol=0, atol=1e-6)
    second = [value * length / 100 for value in percent(np.array(first), length)]
    assert second == first


def stated_sizes(folder: Path, name: str) -> tuple[int, int]:
    """Width and height as the written file states them, read without this package."""
    if name == "cvat":
        image = ET.parse(folder / "annotations.xml").find("image")
        assert image is not None
        return int(image.attrib["width"]), int(image.attrib["height"])
    if name == "labelme":
        tree = json.loads((folder / "images" / "a.json").read_text())
        return tree["imageWidth"], tree["imageHeight"]
    tree = json.loads((folder / "annotations.json").read_text())
    if name == "coco":
        return tree["images"][0]["width"], tree["images"][0]["height"]
    region = tree[0]["annotations"][0]["result"][0]
    return region["original_width"], region["original_height"]


@pytest.mark.parametrize("name", ["cvat", "labelme", "coco", "labelstudio"])
@pytest.mark.parametrize(("kind", "orientation"), [("JPEG", 6), ("JPEG", 3), ("PNG", 8)])
def test_stated_sizes_are_those_of_the_upright_image(
    name: str, kind: str, orientation: int, tmp_path: Path
) -> None:
    content = encoded(7, 3, kind, orientation)
    source = dataset_of([("a.jpg", "train", [(1.0, 2.0)], content)], tmp_path / "source")
    convert(source, tmp_path / "new", FORMATS[name])
    assert stated_sizes(tmp_path / "new", name) == ((7, 3) if orientation == 3 else (3, 7))


def simple(folder: Path) -> Dataset:
    picture = encoded(4, 4, "PNG", 1)
    rows: list[Row] = [("a.png", "train", [(1.0, 2.0)], picture), ("b.png", "train", [], picture)]
    return dataset_of(rows, folder)


def test_rendered_images_become_png_files(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    samples = tuple(Sample(name, image.copy) for name in ("one", "two.png", "three.jpg"))
    convert(Dataset("synthetic", "7", samples), tmp_path / "new", FORMATS["folder"])
    read = FORMATS["folder"].read(tmp_path / "new")
    assert [sample.name for sample in read.samples] == ["one.png", "three.jpg.png", "two.png"]
    for sample in read.samples:
        assert np.array_equal(np.asarray(sample.open()), np.asarray(image))


def test_withheld_points_are_not_written(tmp_path: Path) -> None:
    source = simple(tmp_path / "source")
    hidden = Dataset("test", "", tuple(sample.without_labels() for sample in source.samples))
    for name, layout in FORMATS.items():
        convert(hidden, tmp_path / name, layout)
        assert not any(sample.labelled for sample in layout.read(tmp_path / name).samples)


def test_progress_counts_every_image(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    convert(
        simple(tmp_path / "source"),
        tmp_path / "new",
        FORMATS["coco"],
        lambda done, total: calls.append((done, total)),
    )
    assert calls == [(0, 2), (1, 2), (2, 2)]


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path) -> None:
    source = simple(tmp_path / "source")
    taken = tmp_path / "taken"
    taken.mkdir()
    convert(source, taken, FORMATS["txt"])  # empty: fine
    before = sorted(taken.rglob("*"))
    with pytest.raises(InputError, match="already exists"):
        convert(source, taken, FORMATS["csv"])
    assert sorted(taken.rglob("*")) == before
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        convert(source, file, FORMATS["csv"])
    assert file.read_text() == "mine"


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path) -> None:
    source = simple(tmp_path / "source")
    Path(str(source.samples[1].path)).write_bytes(b"no image")
    for name, layout in FORMATS.items():
        with pytest.raises(InputError, match=r"1\.bin"):
            convert(source, tmp_path / name, layout)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "name", ["../a.png", "/a.png", "a//b.png", ".a.png", "a\0.png", "a\\b.png"]
)
def test_names_that_are_no_file_names_are_refused(name: str, tmp_path: Path) -> None:
    rows: list[Row] = [(name, "train", None, encoded(2, 2, "PNG", 1))]
    with pytest.raises(InputError, match="rename"):
        convert(dataset_of(rows, tmp_path / "source"), tmp_path / "new", FORMATS["txt"])


def test_two_images_that_would_be_one_file_are_refused(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 2))
    samples = (Sample("a", image.copy), Sample("a.png", image.copy))
    with pytest.raises(InputError, match="rename one"):
        convert(Dataset("test", "", samples), tmp_path / "new", FORMATS["txt"])


def test_a_layout_that_is_only_read_is_refused(tmp_path: Path) -> None:
    source = simple(tmp_path / "source")
    layout = Layout("sha", "", lambda path: False, lambda path: source)
    with pytest.raises(InputError, match="choose folder, txt, csv"):
        convert(source, tmp_path / "new", layout)


def test_the_command(tmp_path: Path) -> None:
    convert(simple(tmp_path / "source"), tmp_path / "old", FORMATS["txt"])
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    result = CliRunner().invoke(app, ["convert", old, new, "--to", "coco"])
    assert result.exit_code == 0, result.output
    line = " ".join(result.output.split())
    assert "2 images (2 labelled, 1 point) as coco" in line
    assert_same(FORMATS["coco"].read(Path(new)), FORMATS["txt"].read(Path(old)))
    wrong = CliRunner().invoke(app, ["convert", old, new + "2", "--to", "excel"])
    assert wrong.exit_code == 2
    assert "labelstudio" in wrong.output
    taken = CliRunner().invoke(app, ["convert", old, new, "--to", "coco"])
    assert isinstance(taken.exception, InputError)
