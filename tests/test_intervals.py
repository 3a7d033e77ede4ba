import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p3net.errors import InputError
from p3net.intervals import BACKGROUND, PARTITIONS, PUBLISHED, Intervals, fit

ONE, TWO = PUBLISHED


def test_published_tables_are_the_papers() -> None:
    # The lists printed in "The setting of density interval partitions", to the digits there.
    printed_2 = [0, 0.0019, 0.0081, 0.0165, 0.0272, 0.0404, 0.056, 0.076, 0.099, 0.126, 0.159,
                 0.199, 0.246, 0.303, 0.371, 0.454, 0.556, 0.684, 0.848, 1.06, 1.36, 1.8, 2.5,
                 3.9, 8.2]  # fmt: skip
    printed_1 = [0, 0.00087, 0.0046, 0.0119, 0.0214, 0.0333, 0.048, 0.065, 0.086, 0.112, 0.142,
                 0.178, 0.221, 0.272, 0.334, 0.409, 0.501, 0.615, 0.759, 0.945, 1.197, 1.55, 2.1,
                 3.0, 4.5]  # fmt: skip
    assert len(ONE) == len(TWO) == 25
    np.testing.assert_allclose(TWO.values, printed_2, rtol=0.025, atol=5e-5)
    np.testing.assert_allclose(ONE.values, printed_1, rtol=0.025, atol=5e-5)
    assert TWO.values[1:24] == ONE.borders[1:]


def test_label_counts_borders_strictly_below() -> None:
    cells = np.random.default_rng(0).exponential(0.5, 500)
    cells[:24] = ONE.borders
    slow = [sum(border < cell for border in ONE.borders) for cell in cells]
    assert ONE.label(torch.from_numpy(cells)).tolist() == slow
    assert ONE.label(torch.zeros(2, 3)).shape == (2, 3)


def test_moments_against_a_double_loop() -> None:
    p = torch.rand(2, 25, 3, dtype=torch.float64).softmax(1)
    mean, variance = ONE.expectation(p, dim=1), ONE.variance(p, dim=1)
    for b in range(2):
        for n in range(3):
            m = sum(float(p[b, j, n]) * ONE.values[j] for j in range(25))
            v = sum(float(p[b, j, n]) * (ONE.values[j] - m) ** 2 for j in range(25))
            assert float(mean[b, n]) == pytest.approx(m, rel=1e-12)
            assert float(variance[b, n]) == pytest.approx(v, rel=1e-9)


def test_certain_distribution_has_no_variance() -> None:
    sure = torch.nn.functional.one_hot(torch.arange(25), 25).float()
    assert ONE.expectation(sure).tolist() == pytest.approx(ONE.values)
    assert float(ONE.variance(sure).max()) == 0


def test_json_keeps_every_bit() -> None:
    assert Intervals.from_dict(json.loads(json.dumps(TWO.to_dict()))) == TWO


@pytest.mark.parametrize(
    ("borders", "values", "message"),
    [
        ((0.2, 0.1), (0, 0.15, 1), "ascend"),
        ((0.1, 0.1), (0, 0.1, 1), "ascend"),
        ((0.1, 0.2), (0, 0.3, 1), "outside"),
        ((0.1, 0.2), (0.11, 0.15, 1), "outside"),
        ((0.1,), (0, 0.1, 1), "C−1"),
        ((), (0,), "C ≥ 2"),
        ((-0.1, 0.2), (0, 0.1, 1), "positive"),
        ((0.1, math.nan), (0, 0.15, 1), "finite"),
        ((0.1, 0.2), (0, 0.15, math.inf), "finite"),
    ],
)
def test_wrong_intervals_are_refused(
    borders: tuple[float, ...], values: tuple[float, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Intervals(borders, values)


def test_wrong_records_and_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="borders"):
        Intervals.from_dict({"values": [1.0]})
    with pytest.raises(InputError, match="25 intervals"):
        ONE.expectation(torch.ones(24))


# --- fitting


def products(cells: np.ndarray, intervals: Intervals) -> np.ndarray:
    """(cells in the interval) × (length) for the foreground intervals, by a slow count."""
    edges = [*intervals.borders, cells.max()]
    number = [((cells > a) & (cells <= b)).sum() for a, b in pairwise(edges)]
    return np.array(number) * np.diff(edges)


def test_uep_makes_the_product_constant() -> None:
    cells = np.random.default_rng(1).exponential(0.3, 200_000)
    _, two = fit(cells)
    product = products(cells, two)
    assert len(two) == 25
    assert np.abs(product[:-1] / product[:-1].mean() - 1).max() < 0.05


def test_uniform_length_and_number() -> None:
    cells = np.random.default_rng(2).uniform(0.01, 2, 100_000)
    _, length = fit(cells, partition="uniform-length", count=11)
    np.testing.assert_allclose(
        np.diff([*length.borders, cells.max()]), (cells.max() - BACKGROUND) / 10
    )
    _, number = fit(cells, partition="uniform-number", count=11)
    counts = np.bincount(number.label(torch.from_numpy(cells)).numpy())[1:]
    assert set(counts) == {10_000}


def test_values_are_means_and_branches_interleave() -> None:
    cells = np.random.default_rng(3).gamma(0.5, 0.4, 50_000)
    one, two = fit(cells)
    for intervals in (one, two):
        labels = intervals.label(torch.from_numpy(cells)).numpy()
        assert intervals.values[0] == 0
        for j in range(1, 25):
            assert intervals.values[j] == pytest.approx(cells[labels == j].mean(), rel=1e-9)
    assert one.borders[1:] == two.values[1:-1]
    assert fit(cells, interleaved=False)[0] == two


@settings(max_examples=150, deadline=None)
@given(
    cells=hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(0, 5, width=32)),
    count=st.integers(2, 30),
    partition=st.sampled_from(sorted(PARTITIONS)),
)
def test_any_cells_give_populated_intervals_or_a_clear_error(
    cells: np.ndarray, count: int, partition: str
) -> None:
    if not (cells > BACKGROUND).any():
        with pytest.raises(InputError, match="cannot be fitted"):
            fit(cells, partition=partition, count=count)
        return
    one, two = fit(cells, partition=partition, count=count)
    assert len(one) == len(two) <= count
    for intervals in (one, two):
        labels = intervals.label(torch.from_numpy(cells[cells > BACKGROUND]))
        assert set(labels.tolist()) == set(range(1, len(intervals)))


def test_fewer_distinct_values_than_intervals_are_stated() -> None:
    one, two = fit([0.5, 0.5, 1.0, 2.0])
    assert len(one) == len(two) == 4
    assert two.values == (0.0, 0.5, 1.0, 2.0)


@pytest.mark.parametrize(
    ("cells", "arguments", "message"),
    [
        ([0.0, 0.0], {}, "none of the 2 cells"),
        ([], {}, "none of the 0 cells"),
        ([math.nan, 1.0], {}, "finite"),
        ([-1.0, 1.0], {}, "not negative"),
        ([1.0], {"partition": "uniform"}, "unknown partition"),
        ([1.0], {"count": 1}, "at least 2"),
    ],
)
def test_cells_that_cannot_be_fitted(cells: list[float], arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(cells, **arguments)
