from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from PIL import Image

from p3net.app import figures
from p3net.counting import Prediction
from p3net.errors import InputError
from p3net.evaluation import ImageResult
from p3net.structures import as_points


def lightness(rgb: np.ndarray) -> np.ndarray:
    """CIE L* of sRGB colours, from the standard's formulas."""
    c = rgb / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    y = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.where(y > 0.008856, 116 * np.cbrt(y) - 16, 903.3 * y)


def test_more_people_are_lighter_at_an_even_pace():
    ramp = np.asarray(figures.colours(np.linspace(0, 1, 256)[None]))[0].astype(float)
    steps = np.diff(lightness(ramp)[::15])
    assert (steps > 0).all()
    assert steps.max() < 2.5 * steps.min()


def test_differences_of_either_sign_are_equally_dark():
    ramp = np.asarray(figures.colours(np.linspace(0, 1, 101)[None], figures.SIGNED))[0]
    light = lightness(ramp.astype(float))
    assert light.argmax() == 50
    assert np.abs(light - light[::-1]).max() < 8
    assert ramp[0, 2] > ramp[0, 0]  # too few: blue
    assert ramp[-1, 0] > ramp[-1, 2]  # too many: red


def test_a_cell_is_drawn_where_it_lies():
    cells = np.zeros((3, 4), np.float32)
    cells[1, 2] = 1
    picture = np.asarray(figures.heat(cells, (24, 32)).convert("L")).astype(float)
    y, x = np.unravel_index(picture.argmax(), picture.shape)
    assert 8 <= y < 16
    assert 16 <= x < 24


def test_cells_beyond_the_image_are_cut_not_squeezed():
    cells = np.zeros((2, 3), np.float32)
    cells[:, 1] = 1
    whole = np.asarray(figures.heat(cells, (16, 24)))
    cut = np.asarray(figures.heat(cells, (16, 20)))  # the last cell is half outside
    assert cut.shape == (16, 20, 3)
    assert np.abs(whole[:, :16].astype(int) - cut[:, :16]).max() <= 2


def test_peak_is_the_lightest_and_zero_the_darkest():
    picture = np.asarray(figures.heat(np.array([[0.0, 2.0]]), (8, 16), peak=2.0))
    assert tuple(picture[4, 0]) == figures.HEAT[0]
    assert tuple(picture[4, -1]) == figures.HEAT[-1]


def test_overlay_leaves_empty_places_as_they_are():
    image = Image.new("RGB", (32, 16), (10, 200, 30))
    cells = np.zeros((2, 4), np.float32)
    cells[:, 3] = 1
    drawn = np.asarray(figures.overlay(image, cells))
    assert (drawn[:, :12] == (10, 200, 30)).all()
    assert (drawn[:, -1] != (10, 200, 30)).any()


@pytest.fixture
def prediction() -> Prediction:
    density = np.zeros((4, 5), np.float32)
    density[1, 1] = 2.5
    return Prediction(2.5, density, (64, 80), (16.0, 16.0))  # counted at half size


def test_true_density_lies_on_the_predictions_grid(prediction):
    points = as_points([[24.0, 24.0], [24.0, 24.0], [-5.0, 3.0]])  # one is outside
    cells = figures.truth_cells(points, prediction)
    assert cells.shape == (4, 5)
    assert cells.sum() == pytest.approx(2, abs=1e-5)
    assert np.unravel_index(cells.argmax(), cells.shape) == (1, 1)


def test_a_head_beyond_the_last_whole_cell_is_left_out():
    """Networks that drop partial cells, as the authors' does, count 96 of 100 pixels."""
    prediction = Prediction(0.0, np.zeros((12, 12), np.float32), (100, 100), (8.0, 8.0))
    points = np.array([[50.0, 50.0], [99.0, 99.0]])
    assert figures.truth_cells(points, prediction).sum() == pytest.approx(1)
    red = np.asarray(figures.heat(np.eye(12), (100, 100)))[..., 0]
    assert red[92, 92] > 150  # the last cell lies where it is, not stretched to the edge
    assert red[99, 99] < 50


def test_a_panel_holds_four_pictures_and_the_difference_has_the_right_sign(prediction):
    image = Image.new("RGB", (80, 64), (0, 90, 0))
    points = as_points([[60.0, 40.0]])
    four = figures.tiles(image, points, prediction, width=80)
    assert [each.size for each in four] == [(80, 64)] * 4
    difference = np.asarray(four.difference).astype(int)
    there, missed = difference[24, 24], difference[40, 60]
    assert there[0] > there[2] + 50  # counted, nobody there: red
    assert missed[2] > missed[0]  # there, not counted: blue
    sheet = figures.panel(image, points, prediction, title="a name " * 30)
    assert sheet.width > 4 * 320
    assert sheet.height > 256
    two = figures.stack([sheet, sheet])
    assert two.height >= 2 * sheet.height


RESULTS = [ImageResult("a", 0, 0.4, {}), ImageResult("b", 90, 60.0, {}), ImageResult("c", 7, 9, {})]


def read(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGBA"))


def test_the_scatter_has_a_dot_for_every_image():
    one, all_three = (read(figures.scatter({"m": part})) for part in (RESULTS[1:2], RESULTS))
    grey = np.array([0x7A, 0x87, 0x94])

    def dots(picture: np.ndarray) -> int:
        near = np.abs(picture[..., :3].astype(int) - grey).max(axis=-1) < 12
        return int((near & (picture[..., 3] > 150)).sum())

    assert dots(all_three) > 2 * dots(one) > 0


def test_plots_are_transparent_and_read_on_white():
    png = figures.scatter({"a": RESULTS, "b": RESULTS}, dark=True)
    assert read(png)[0, 0, 3] == 0
    assert figures.on_white(png).getpixel((0, 0)) == (255, 255, 255)


def log(steps: int, *, ecr: bool, validation: bool) -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "losses": {"pdm": 1.0 / step} | ({"ecr": 0.1} if ecr else {}),
            "records": {"disagreement": 0.5} if ecr else {},
            "validation": {"mae": 3.0} if validation and step % 5 == 0 else None,
        }
        for step in range(1, steps + 1)
    ]


def test_curves_show_only_what_was_recorded():
    alone = read(figures.curves({"labels": log(10, ecr=False, validation=False)}))
    three = read(
        figures.curves(
            {
                "labels": log(10, ecr=False, validation=True),
                "p3net": log(10, ecr=True, validation=True),
            }
        )
    )
    assert three.shape[1] == pytest.approx(3 * alone.shape[1], abs=5)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"p3net\[figures\]"):
        figures.scatter({"m": RESULTS})
