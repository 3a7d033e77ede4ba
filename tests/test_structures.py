from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from p3net.errors import InputError
from p3net.structures import Batch, Dataset, Marks, Sample, as_points, inside


def image() -> Image.Image:
    return Image.new("RGB", (8, 8))


def sample(name: str = "a.jpg", split: str = "train", **fields: Any) -> Sample:
    return Sample(name, image, split=split, **fields)


# --- points ------------------------------------------------------------------------------------


def test_points_are_copied_and_frozen():
    source = np.array([[1, 2], [3, 4]])
    points = as_points(source)
    source[0, 0] = 99
    assert points.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert points.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        points[0, 0] = 5


@pytest.mark.parametrize("empty", [[], (), [[]], np.zeros((0, 2)), np.zeros(0)])
def test_no_points(empty):
    assert as_points(empty).shape == (0, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 2], "N×2"),
        ([[1, 2, 3]], "N×2"),
        ([[[1, 2]]], "N×2"),
        ([[1, 2], [3]], "numbers, two a row"),
        ([["a", "b"]], "numbers, two a row"),
        ([[1, 2], [np.nan, 3]], "point 2 of 2 is not a finite number"),
        ([[np.inf, 2]], "point 1 of 1 is not a finite number"),
        (None, "N×2"),
    ],
)
def test_points_that_are_none(values, words):
    with pytest.raises(InputError, match=words) as caught:
        as_points(values, source="a.txt")
    assert caught.value.source == "a.txt"


@given(st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), max_size=20))
def test_inside_point_by_point(points):
    found = inside(as_points(points), (7, 10))
    assert found.tolist() == [0 <= x < 10 and 0 <= y < 7 for x, y in points]


# --- samples -----------------------------------------------------------------------------------


def test_marks_are_read_only_when_asked():
    calls = []

    def read() -> Marks:
        calls.append(1)
        return Marks(as_points([[1, 1]]), declared=1)

    one = sample(read_marks=read)
    assert one.labelled
    assert calls == []
    assert one.marks().declared == 1
    hidden = one.without_labels()
    assert not hidden.labelled
    with pytest.raises(InputError, match=r"train/a\.jpg: its points are withheld"):
        hidden.marks()
    assert len(calls) == 1
    assert one.labelled  # the original is as it was


def test_samples_without_annotation_and_wrong_ones():
    assert not sample().labelled
    with pytest.raises(InputError, match="no annotation"):
        sample().marks()
    with pytest.raises(InputError, match="needs a name"):
        sample("")
    with pytest.raises(InputError, match="unknown split 'dev'"):
        sample(split="dev")
    with pytest.raises(FrozenInstanceError):
        sample().name = "b"  # type: ignore[misc]


# --- datasets ----------------------------------------------------------------------------------


def test_parts_of_a_dataset_keep_the_order():
    samples = (sample("b"), sample("a", "test"), sample("a"), sample("c", "val"))
    data = Dataset("folder", "here", samples, (Path("z.txt"),))
    assert len(data) == 4
    assert [s.key for s in data.part("train").samples] == ["train/b", "train/a"]
    assert [s.key for s in data.where(lambda s: s.name == "a").samples] == ["test/a", "train/a"]
    picked = data.pick(key for key in ("val/c", "train/b"))
    assert [s.key for s in picked.samples] == ["val/c", "train/b"]
    assert (picked.kind, picked.root, picked.orphans) == ("folder", "here", (Path("z.txt"),))
    with pytest.raises(InputError, match="here: 2 images not found, first train/x"):
        data.pick(["train/x", "train/b", "test/y"])


def test_two_images_under_one_key():
    with pytest.raises(InputError, match="two images are called train/a"):
        Dataset("folder", "here", (sample("a"), sample("a")))
    assert len(Dataset("folder", "here", (sample("a"), sample("a", "test")))) == 2


# --- batches -----------------------------------------------------------------------------------


def batch(**changes: Any) -> Batch:
    fields: dict[str, Any] = {
        "images": torch.zeros(2, 3, 8, 8),
        "points_xy": (torch.zeros(1, 2), torch.zeros(0, 2)),
        "names": ("a", "b"),
        "shorter_sides": (8.0, 9.0),
    }
    return Batch(**{**fields, **changes})


def test_batches():
    assert len(batch()) == 2
    assert batch().labelled
    assert not batch(points_xy=None).labelled


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": torch.zeros(3, 8, 8)}, "B×3×H×W"),
        ({"images": torch.zeros(2, 1, 8, 8)}, "B×3×H×W"),
        ({"images": torch.zeros(1, 3, 8, 8)}, "1 images but"),
        ({"points_xy": (torch.zeros(1, 2),)}, "2 images but"),
        ({"names": ("a",)}, "2 images but"),
        ({"shorter_sides": ()}, "2 images but"),
    ],
)
def test_batches_whose_parts_disagree(changes, words):
    with pytest.raises(InputError, match=words):
        batch(**changes)
