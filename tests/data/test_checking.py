from __future__ import annotations

import json
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from p3net.data.checking import Fault, check, histogram
from p3net.data.images import open_image
from p3net.errors import InputError
from p3net.structures import Dataset, Marks, Sample, as_points


def noise(path: Path, size_wh: tuple[int, int] = (40, 30), mode: str = "RGB") -> Path:
    pixels = np.random.default_rng(1).integers(0, 256, (*size_wh[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def marks(points: list[list[float]], declared: int | None = None) -> Marks:
    return Marks(as_points(points), declared)


def member(
    path: Path, points: list[list[float]] | None = None, declared: int | None = None
) -> Sample:
    read = None if points is None else partial(marks, points, declared)
    return Sample(path.name, partial(open_image, path), read, path=path)


def dataset(*samples: Sample, kind: str = "folder", orphans: tuple[Path, ...] = ()) -> Dataset:
    return Dataset(kind, "here", samples, orphans)


def test_the_numbers_by_hand(tmp_path):
    report = check(
        dataset(
            member(noise(tmp_path / "a.png", (40, 30)), [[1, 1], [2, 2], [3, 3], [39.9, 29.9]]),
            member(noise(tmp_path / "b.png", (60, 20)), []),
            member(noise(tmp_path / "c.png", (50, 50)), [[1, 1]] + [[i, 2] for i in range(30)]),
            member(noise(tmp_path / "d.png", (41, 30))),
            kind="folder",
        ),
        crop=20,
    )
    assert (report.images, report.readable, report.labelled, report.points) == (4, 4, 3, 35)
    assert (report.smallest_hw, report.largest_hw) == ((30, 40), (50, 50))
    assert report.counts is not None
    assert asdict(report.counts) == {"least": 0, "median": 4, "mean": 35 / 3, "most": 31}
    assert report.histogram.edges == (0, 5, 10, 15, 20, 25, 30, 35)
    assert report.histogram.images == (2, 0, 0, 0, 0, 0, 1)
    assert report.splits == {"train": 4}
    assert report.faults == ()
    assert report.clean
    json.dumps(asdict(report))


def test_grey_and_colourless(tmp_path):
    noise(tmp_path / "l.png", mode="L")
    noise(tmp_path / "one.png", mode="1")
    Image.open(tmp_path / "l.png").convert("RGB").save(tmp_path / "rgb.png")
    noise(tmp_path / "colour.jpg")
    names = ("l.png", "one.png", "rgb.png", "colour.jpg")
    report = check(dataset(*(member(tmp_path / name) for name in names)), crop=None)
    assert (report.grey, report.colourless) == (2, 1)


def test_orientation_counts_for_sizes_and_points(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=exif)
    report = check(dataset(member(tmp_path / "a.jpg", [[25, 35]])), crop=None)
    assert report.largest_hw == (40, 30)
    assert report.faults == ()
    wrong = check(dataset(member(tmp_path / "a.jpg", [[35, 25]])), crop=None)
    assert [fault.kind for fault in wrong.faults] == ["outside"]


def only(report_faults: tuple[Fault, ...]) -> tuple[str, str, str]:
    (fault,) = report_faults
    return Path(fault.file).name, fault.kind, fault.message


def test_every_fault_with_its_file(tmp_path):
    whole = noise(tmp_path / "whole.jpg")
    content = whole.read_bytes()
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(content[: len(content) // 2])
    name, kind, message = only(check(dataset(member(cut)), crop=None).faults)
    assert (name, kind) == ("cut.jpg", "image")
    assert "truncated" in message
    (tmp_path / "text.jpg").write_text("no")
    assert only(check(dataset(member(tmp_path / "text.jpg", [[1, 1]]))).faults)[:2] == (
        "text.jpg",
        "image",
    )
    assert only(check(dataset(member(tmp_path / "gone.jpg"))).faults)[:2] == ("gone.jpg", "image")

    points = [[1, 1], [40, 5], [5, -0.1]]
    found = only(check(dataset(member(whole, points)), crop=None).faults)
    assert found == ("whole.jpg", "outside", "2 of 3 points, the first at (40, 5)")
    points = [[1, 1], [1, 1], [2, 1], [1, 1]]
    found = only(check(dataset(member(whole, points)), crop=None).faults)
    assert found == ("whole.jpg", "duplicate", "2 of 4 points are repeated")
    found = only(check(dataset(member(whole, [[1, 1]], declared=7)), crop=None).faults)
    assert found == ("whole.jpg", "number", "states 7, holds 1 points")
    assert check(dataset(member(whole, [[1, 1]], declared=1)), crop=None).faults == ()
    orphan = dataset(member(whole), orphans=(tmp_path / "GT_IMG_9.mat",))
    assert only(check(orphan, crop=None).faults)[:2] == ("GT_IMG_9.mat", "orphan")


def test_an_annotation_that_cannot_be_read_names_its_own_file(tmp_path):
    def refuse() -> Marks:
        raise InputError("line 3: expected x y", source="a.txt")

    broken = Sample("a.jpg", partial(open_image, noise(tmp_path / "a.jpg")), refuse)
    report = check(dataset(broken), crop=None)
    assert report.faults == (Fault("a.txt", "annotation", "line 3: expected x y"),)
    assert (report.labelled, report.readable) == (0, 1)
    assert not report.clean


def test_repeated_points_are_a_warning(tmp_path):
    report = check(dataset(member(noise(tmp_path / "a.jpg"), [[1, 1], [1, 1]])), crop=None)
    assert [(fault.kind, fault.severity) for fault in report.faults] == [("duplicate", "warning")]
    assert report.clean
    assert report.points == 2


def test_points_as_shares_of_the_size_are_a_fault(tmp_path):
    path = noise(tmp_path / "a.jpg")
    report = check(dataset(member(path, [[0.2, 0.7], [0.9, 1.0]])), crop=None)
    assert [(fault.kind, fault.severity) for fault in report.faults] == [("corner", "error")]
    assert check(dataset(member(path, [[0.2, 0.7]])), crop=None).clean  # one head may be there


@pytest.mark.parametrize(("most", "kinds"), [(4095, ["dark"]), (4096, []), (65535, [])])
def test_twelve_bits_in_sixteen_are_a_warning(tmp_path, most, kinds):
    numbers = np.random.default_rng(0).integers(0, most + 1, (30, 40)).astype(np.uint16)
    numbers[0, 0] = most
    Image.fromarray(numbers).save(tmp_path / "a.tiff")
    report = check(dataset(member(tmp_path / "a.tiff")), crop=None)
    assert [fault.kind for fault in report.faults] == kinds
    assert report.clean


def test_small_images_are_a_warning(tmp_path):
    wide = member(noise(tmp_path / "a.jpg", (300, 100)))
    report = check(dataset(wide), crop=101)
    assert only(report.faults) == ("a.jpg", "small", "300 × 100 px, the crop is 101")
    assert report.faults[0].severity == "warning"
    assert report.clean
    assert check(dataset(wide), crop=100).faults == ()
    assert check(dataset(wide), crop=None).faults == ()


def test_a_missing_annotation_is_a_fault_of_a_benchmark_only(tmp_path):
    plain = member(noise(tmp_path / "a.jpg"))
    assert check(dataset(plain, kind="folder"), crop=None).faults == ()
    found = only(check(dataset(plain, kind="sha"), crop=None).faults)
    assert found == ("a.jpg", "missing", "no annotation")
    test = Sample("a.jpg", plain.open, split="test", path=plain.path)
    assert check(dataset(test, kind="nwpu"), crop=None).faults == ()
    assert not check(dataset(test, kind="jhu"), crop=None).clean


def test_withheld_points_are_not_looked_at(tmp_path):
    hidden = member(noise(tmp_path / "a.jpg"), [[1, 1]]).without_labels()
    report = check(dataset(hidden, kind="sha"), crop=None)
    assert (report.labelled, report.points, report.faults) == (0, 0, ())


def test_grave_faults_come_first_and_order_is_kept(tmp_path):
    samples = [member(noise(tmp_path / f"{i}.jpg"), [[1, 1], [1, 1]]) for i in range(9)]
    report = check(dataset(*samples, member(tmp_path / "gone.jpg")), crop=256)
    kinds = [fault.kind for fault in report.faults]
    assert kinds == ["image"] + ["duplicate"] * 9 + ["small"] * 9
    assert [Path(f.file).stem for f in report.faults[1:10]] == [str(i) for i in range(9)]


def test_progress_counts_every_image_in_the_callers_thread(tmp_path):
    path = noise(tmp_path / "a.jpg")
    samples = [Sample(f"{i}.jpg", partial(open_image, path)) for i in range(5)]
    calls: list[tuple[int, int]] = []
    threads = set()

    def note(done: int, total: int) -> None:
        calls.append((done, total))
        threads.add(threading.current_thread())

    check(dataset(*samples), progress=note)
    assert calls == [(i, 5) for i in range(1, 6)]
    assert threads == {threading.current_thread()}


def test_an_interrupt_does_not_wait_for_the_rest(tmp_path):
    path = noise(tmp_path / "a.jpg")
    opened: list[int] = []

    def count(i: int) -> Image.Image:
        opened.append(i)
        return open_image(path)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    samples = [Sample(f"{i}.jpg", partial(count, i)) for i in range(5000)]
    with pytest.raises(KeyboardInterrupt):
        check(dataset(*samples), progress=stop)
    assert len(opened) < 5000


def test_nothing_labelled_and_nothing_at_all(tmp_path):
    report = check(dataset(member(noise(tmp_path / "a.jpg"))), crop=None)
    assert report.counts is None
    assert report.histogram.images == ()
    empty = check(dataset())
    assert (empty.images, empty.smallest_hw, empty.clean) == (0, None, True)


@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=60), st.integers(1, 12))
def test_the_histogram_holds_every_image_once(counts, bins):
    found = histogram(counts, bins)
    assert found.edges[0] == 0
    steps = {high - low for low, high in zip(found.edges, found.edges[1:], strict=False)}
    assert len(steps) == 1
    assert str(steps.pop()).rstrip("0") in {"1", "2", "5"}
    assert len(found.images) <= bins
    for low, high, images in zip(found.edges, found.edges[1:], found.images, strict=False):
        assert images == sum(low <= count < high for count in counts)
    assert sum(found.images) == len(counts)
    assert found.images[-1] > 0
