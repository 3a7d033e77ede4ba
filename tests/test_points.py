from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array
from scipy.spatial.distance import cdist

from p3net.errors import InputError
from p3net.points import Points, place
from p3net.targets import density


def lattice(
    rows: int, columns: int, gap: float, seed: int, jitter: float = 0.25
) -> tuple[np.ndarray, tuple[int, int]]:
    """Heads at random places, at least (1 − 2·jitter)·gap apart and half a gap from the border."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:rows, :columns]
    heads = (np.stack([x.ravel(), y.ravel()], axis=1) + 1) * gap
    heads = heads + rng.uniform(-jitter * gap, jitter * gap, heads.shape)
    return heads, (int((rows + 1) * gap), int((columns + 1) * gap))


def cells(heads: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    return density(torch.from_numpy(heads), size_hw).numpy()


def errors(heads: np.ndarray, found: Points) -> np.ndarray:
    """Distances in pixels of the best one-to-one matching."""
    distance = cdist(heads, found.xy)
    return distance[linear_sum_assignment(distance)]


def transport_cost(masses: np.ndarray, points: np.ndarray) -> float:
    """Least cost in px² per head to bring cells of 8 px to the points: a linear programme."""
    row, column = np.nonzero(masses > 1e-4)
    centres = np.stack([column, row], axis=1) * 8.0 + 4
    mass = masses[row, column].astype(np.float64)
    mass *= len(points) / mass.sum()
    cost = cdist(centres, points, "sqeuclidean")
    count, number = cost.shape
    entry = np.arange(cost.size)
    margins = coo_array(
        (
            np.ones(2 * cost.size),
            (np.concatenate([entry // number, count + entry % number]), np.tile(entry, 2)),
        )
    )
    sides = np.concatenate([mass, np.ones(number)])
    answer = linprog(cost.ravel(), A_eq=margins.tocsr()[:-1], b_eq=sides[:-1], method="highs")
    assert answer.status == 0
    return float(answer.fun) / number


@pytest.mark.parametrize("seed", range(3))
def test_lone_heads_are_found_where_they_stand(seed: int) -> None:
    heads, size = lattice(4, 5, 96, seed)
    found = place(cells(heads, size), (8, 8), size)
    assert len(found) == 20
    assert errors(heads, found).max() < 1
    assert found.scores.min() > 0.95  # 99 % of a Gaussian lie within 3σ


@pytest.mark.parametrize("seed", range(3))
def test_heads_that_overlap_are_found_within_a_few_pixels(seed: int) -> None:
    heads, size = lattice(8, 8, 30, seed, jitter=0.15)  # 21 px and more apart: 2.6 σ
    distance = errors(heads, place(cells(heads, size), (8, 8), size))
    assert np.median(distance) < 3
    assert np.mean(distance < 8) > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_no_dearer_than_the_true_heads(seed: int) -> None:
    """OT-M lowers the cost of transport, which the true heads do not minimise either.

    It ends in a minimum nearby, and before its last pixel: 5 % are left to that.
    """
    rng = np.random.default_rng(seed)
    heads = rng.uniform(8, 112, (14, 2))
    masses = cells(heads, (120, 120))
    found = place(masses, (8, 8), (120, 120))
    assert transport_cost(masses, found.xy) <= 1.05 * transport_cost(masses, heads)


def test_two_heads_by_hand() -> None:
    masses = np.zeros((5, 20))
    masses[2, 3], masses[2, 4], masses[1, 16] = 0.5, 0.5, 1.0
    found = place(masses, (10, 20), (100, 200))
    np.testing.assert_allclose(found.xy, [[165, 30], [40, 50]], atol=0.05)
    np.testing.assert_allclose(found.scores, 1)


def test_scores_tell_a_head_from_haze() -> None:
    heads = np.array([[60.0, 60.0]])
    haze = np.zeros((60, 60))
    haze[20:, 20:] = 1 / 1600
    found = place(cells(heads, (480, 480)) + haze, (8, 8), (480, 480))
    head = int(np.argmin(np.hypot(*(found.xy - heads[0]).T)))
    assert len(found) == 2
    assert found.scores[head] > 0.9
    # π·3² of 40² cells lie within reach.
    assert found.scores[1 - head] == pytest.approx(np.pi * 9 / 1600, rel=0.3)


def test_a_full_cell_holds_its_people_apart() -> None:
    masses = np.zeros((3, 3))
    masses[1, 1] = 5
    found = place(masses, (8, 8), (24, 24))
    assert ((found.xy > 8) & (found.xy < 16)).all()
    apart = cdist(found.xy, found.xy) + 100 * np.eye(5)
    assert apart.min() > 1.5  # five equal parts of 64 px² are about 3.6 px wide


def test_tiles_place_as_well_as_the_whole() -> None:
    heads, size = lattice(16, 16, 30, seed=1, jitter=0.3)
    masses = cells(heads, size)
    whole, tiled = (place(masses, (8, 8), size, tile=tile) for tile in (10**6, 500))
    assert len(whole) == len(tiled) == 256
    assert (whole.xy != tiled.xy).any()
    assert errors(heads, tiled).mean() < errors(heads, whole).mean() + 0.75
    for axis in (0, 1):  # nobody is made or lost on either side
        middle = size[1 - axis] / 2
        assert abs((tiled.xy[:, axis] < middle).sum() - (heads[:, axis] < middle).sum()) <= 4


def test_the_size_of_the_image_scales_the_points() -> None:
    heads, size = lattice(3, 3, 64, seed=0)
    masses = cells(heads, size)
    large = place(masses, (24.0, 24.0), (3 * size[0], 3 * size[1]))
    assert errors(3 * heads, large).max() < 3


def test_many_heads_in_bounded_memory() -> None:
    size = (800, 1040)
    heads = np.random.default_rng(0).uniform((0, 0), size[::-1], (600, 2))
    masses = cells(heads, size)
    place(masses[:20, :20], (8, 8), (160, 160))  # imports
    tracemalloc.start()
    found = place(masses, (8, 8), size, tile=2048)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 600
    assert peak < 10e6  # a dense plan of 600 × 13,000 entries takes 62 MB
    true, ours = (
        np.histogram2d(*xy.T, bins=(4, 2), range=((0, 1040), (0, 800)))[0]
        for xy in (heads, found.xy)
    )
    assert np.abs(true - ours).max() < 10  # in eighths of the image, of 75 heads each


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    grid=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    power=st.floats(0.2, 12),
    total=st.floats(0, 60),
    cell=st.tuples(st.floats(1, 30), st.floats(1, 30)),
    short=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)),
    tile=st.sampled_from([1, 20, 10_000]),
)
def test_exactly_the_rounded_count_inside_the_image(
    seed: int,
    grid: tuple[int, int],
    power: float,
    total: float,
    cell: tuple[float, float],
    short: tuple[float, float],
    tile: int,
) -> None:
    masses = np.random.default_rng(seed).random(grid) ** power
    masses *= total / masses.sum()
    size = tuple(max(1, int((grid[i] - short[i]) * cell[1 - i])) for i in (0, 1))
    found = place(masses, cell, size, tile=tile)
    again = place(masses, cell, size, tile=tile)
    assert found.xy.shape == (round(float(masses.sum())), 2)
    assert found.xy.dtype == found.scores.dtype == np.float32
    assert ((found.xy >= 0) & (found.xy < size[::-1])).all()
    assert ((found.scores >= 0) & (found.scores <= 1)).all()
    np.testing.assert_array_equal(found.xy, again.xy)
    np.testing.assert_array_equal(found.scores, again.scores)


def test_the_result_is_read_only() -> None:
    found = place(np.full((4, 4), 0.25), (8, 8), (32, 32))
    with pytest.raises(ValueError, match="read-only"):
        found.xy[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        found.scores[0] = 0


@pytest.mark.parametrize("masses", [np.zeros((4, 4)), np.full((4, 4), 0.03), np.zeros((0, 4))])
def test_nobody(masses: np.ndarray) -> None:
    found = place(masses, (8, 8), (32, 32))
    assert len(found) == 0
    assert found.xy.shape == (0, 2)
    assert found.scores.shape == (0,)


@pytest.mark.parametrize(
    ("masses", "options", "message"),
    [
        ([[1.0, -0.1]], {}, "not be negative"),
        ([[1.0, np.nan]], {}, "finite"),
        ([[1.0, np.inf]], {}, "finite"),
        ([1.0, 2.0], {}, "h×w, got shape"),
        ([[1.0]], {"cell_xy": (0, 8)}, "sides of a cell"),
        ([[1.0]], {"cell_xy": (8, np.nan)}, "sides of a cell"),
        ([[1.0]], {"size_hw": (0, 8)}, "1×1 px"),
        ([[1.0]], {"tile": 0}, "at least one piece"),
    ],
)
def test_bad_input(masses: list, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        place(masses, **({"cell_xy": (8, 8), "size_hw": (8, 16)} | options))
