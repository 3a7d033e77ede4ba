from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from p3net.errors import InputError
from p3net.prediction import OVERLAY_SIDE, Interval, Prediction, RegionCount, open_source


def prediction(**more: Any) -> Prediction:
    """Nine heads in one of 4×6 cells; an image of 32×48 px."""
    density = np.zeros((4, 6), np.float32)
    density[1, 4] = 9
    fields = {"count": 9.0, "density": density, "size_hw": (32, 48), "cell_xy": (8.0, 8.0)}
    return Prediction(**{**fields, **more})


@pytest.mark.parametrize(
    ("low", "high", "level", "words"),
    [
        (-1, 2, 0.9, "0 <= low <= high"),
        (3, 2, 0.9, "0 <= low <= high"),
        (float("nan"), 2, 0.9, "0 <= low <= high"),
        (1, 2, 1.0, "between 0 and 1"),
        (1, 2, 0.0, "between 0 and 1"),
        (1, 2, 90, "between 0 and 1"),
    ],
)
def test_intervals_are_checked(low, high, level, words):
    with pytest.raises(InputError, match=words):
        Interval(low, high, level, calibrated=True)


def test_people_per_square_metre():
    assert RegionCount("a", 12.0, area_m2=4.0).per_m2 == 3.0
    assert RegionCount("a", 12.0).per_m2 is None
    assert RegionCount("a", 0.0, area_m2=0.0).per_m2 is None  # outside the image


def test_to_dict_is_json_without_arrays():
    regions = {"gate": RegionCount("gate", 3.0, Interval(1.0, 5.0, 0.9, calibrated=False), 2.0)}
    own = prediction(
        interval=Interval(8.0, 11.0, 0.9, calibrated=True), regions=regions, source=Path("a.jpg")
    )
    assert json.loads(json.dumps(own.to_dict())) == {
        "source": "a.jpg",
        "count": 9.0,
        "interval": {"low": 8.0, "high": 11.0, "level": 0.9, "calibrated": True},
        "width": 48,
        "height": 32,
        "regions": {
            "gate": {
                "count": 3.0,
                "interval": {"low": 1.0, "high": 5.0, "level": 0.9, "calibrated": False},
                "area_m2": 2.0,
                "per_m2": 1.5,
            }
        },
    }
    plain = prediction(source=b"...").to_dict()
    assert plain["source"] is None
    assert plain["interval"] is None
    assert plain["regions"] == {}


# --- overlays ----------------------------------------------------------------------------------


def test_colour_lies_where_the_people_are():
    grey = np.full((32, 48, 3), 128, np.uint8)
    drawn = np.asarray(prediction(source=grey).overlay(opacity=0.5)).astype(int)
    assert drawn.shape == (32, 48, 3)
    red, _, blue = drawn[12, 36]  # the middle of the full cell: halfway to the warmest colour
    assert drawn[12, 36].tolist() == [(128 + 220) // 2, (128 + 30) // 2, (128 + 30) // 2]
    assert red > blue
    np.testing.assert_array_equal(drawn[:, :20], 128)  # two cells away nothing changes
    np.testing.assert_array_equal(drawn[24:], 128)


def test_nobody_and_no_opacity_leave_the_image_alone():
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    empty = prediction(density=np.zeros((4, 6), np.float32), source=image)
    np.testing.assert_array_equal(np.asarray(empty.overlay()), image)
    np.testing.assert_array_equal(np.asarray(prediction(source=image).overlay(opacity=0)), image)


def test_points_are_drawn_where_they_are():
    black = np.zeros((32, 48, 3), np.uint8)
    own = prediction(source=black)
    drawn = np.asarray(own.overlay(opacity=0, points=True)).sum(axis=2)
    rows, columns = np.nonzero(drawn)
    points = own.points().xy
    assert len(points) == 9
    assert abs(rows.mean() - points[:, 1].mean()) < 2
    assert abs(columns.mean() - points[:, 0].mean()) < 2


def test_large_overlays_are_shrunk(tmp_path):
    path = tmp_path / "wide.png"
    Image.new("L", (5000, 100), 60).save(path)
    density = np.zeros((13, 625), np.float32)
    density[6, 312] = 1  # at 2500, 52 px
    own = Prediction(1.0, density, (100, 5000), (8.0, 8.0), source=path)
    drawn = own.overlay()
    assert drawn.size == (OVERLAY_SIDE, round(100 * OVERLAY_SIDE / 5000))
    _, columns = np.nonzero(np.asarray(drawn).astype(int).std(axis=2))
    assert abs(columns.mean() - 2500 * OVERLAY_SIDE / 5000) < 3


def test_cells_that_do_not_reach_the_border():
    """The authors' grid drops partial cells: 35×50 px have 4×6 of them."""
    own = prediction(size_hw=(35, 50), source=np.full((35, 50, 3), 9, np.uint8))
    assert own.overlay().size == (50, 35)


def test_another_image_underneath():
    other = Image.new("RGB", (48, 32), (1, 2, 3))
    assert np.asarray(prediction().overlay(image=other))[0, 0].tolist() == [1, 2, 3]


def test_overlays_that_cannot_be_drawn(tmp_path):
    with pytest.raises(InputError, match="give it: overlay"):
        prediction().overlay()
    with pytest.raises(InputError, match="opacity lies between 0 and 1, got 3"):
        prediction(source=np.zeros((32, 48), np.uint8)).overlay(opacity=3)
    with pytest.raises(InputError, match="cannot read"):
        prediction(source=tmp_path / "gone.jpg").overlay()


# --- what is counted ---------------------------------------------------------------------------


def test_arrays_of_bytes_are_not_copied():
    pixels = np.zeros((20, 30, 3), np.uint8)
    opened = open_source(pixels)
    assert isinstance(opened, np.ndarray)
    assert np.shares_memory(opened, pixels)


def test_floats_are_rounded_to_bytes_and_grey_is_repeated():
    opened = open_source(np.array([[0.0, 0.5], [0.999, 1.0]]))
    assert isinstance(opened, np.ndarray)
    assert opened[..., 0].tolist() == [[0, 128], [255, 255]]
    assert (opened == opened[..., :1]).all()
    assert opened.shape == (2, 2, 3)
