from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3net.errors import InputError
from p3net.metrics import METRICS, Estimate, mae, nae, rmse, summarise

TRUTH = np.array([100.0, 50.0, 0.0, 10.0])
COUNTED = np.array([90.0, 56.0, 2.0, 10.0])


def test_by_hand():
    assert mae(TRUTH, COUNTED) == (10 + 6 + 2 + 0) / 4
    assert rmse(TRUTH, COUNTED) == math.sqrt((100 + 36 + 4) / 4)
    assert nae(TRUTH, COUNTED) == pytest.approx((0.1 + 0.12 + 0) / 3)  # the empty image is left out
    assert math.isnan(nae(np.zeros(2), np.ones(2)))
    assert mae(TRUTH, TRUTH) == rmse(TRUTH, TRUTH) == nae(TRUTH, TRUTH) == 0
    assert {"mae": mae, "rmse": rmse, "nae": nae} == METRICS


lists = st.lists(
    st.tuples(st.integers(0, 5000), st.floats(0, 5000, allow_nan=False)), min_size=1, max_size=20
)


@given(lists)
@settings(max_examples=50, deadline=None)
def test_against_sums_over_lists(pairs):
    truth, counted = (np.array(each, float) for each in zip(*pairs, strict=True))
    errors = [abs(c - t) for t, c in pairs]
    assert mae(truth, counted) == pytest.approx(math.fsum(errors) / len(errors))
    squares = math.fsum(e * e for e in errors)
    assert rmse(truth, counted) == pytest.approx(math.sqrt(squares / len(errors)))
    assert rmse(truth, counted) >= mae(truth, counted) - 1e-9
    shares = [e / t for e, (t, _) in zip(errors, pairs, strict=True) if t]
    if shares:
        assert nae(truth, counted) == pytest.approx(math.fsum(shares) / len(shares))


def test_the_interval_holds_the_value_and_repeats():
    rng = np.random.default_rng(0)
    truth = rng.integers(1, 500, 60).astype(float)
    counted = truth + rng.normal(0, 20, 60)
    first = summarise(truth, counted)
    assert set(first) == {"mae", "rmse", "nae"}
    for name, estimate in first.items():
        assert estimate.value == METRICS[name](truth, counted)
        assert estimate.low < estimate.value < estimate.high
    assert summarise(truth.tolist(), counted.tolist()) == first
    other = summarise(truth, counted, seed=1)
    assert other["mae"].value == first["mae"].value
    assert other["mae"].low != first["mae"].low


def test_the_interval_against_the_normal_approximation():
    """The mean of many errors: its bootstrap interval is ±1.96 standard errors, nearly."""
    rng = np.random.default_rng(3)
    errors = rng.exponential(10, 400)
    found = summarise(np.zeros(400), errors, draws=2000)["mae"]
    half = 1.96 * errors.std() / math.sqrt(400)
    assert found.low == pytest.approx(errors.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(errors.mean() + half, abs=0.15 * half)
    narrow = summarise(np.zeros(400), errors, draws=2000, level=0.5)["mae"]
    assert found.low < narrow.low < narrow.high < found.high


def test_one_image_and_nobody():
    assert summarise([10], [12])["mae"] == Estimate(2.0, 2.0, 2.0)
    empty = summarise([0, 0], [1, 3])["nae"]
    assert all(map(math.isnan, (empty.value, empty.low, empty.high)))
    # draws without people have no NAE; the others make the interval
    mixed = summarise([0, 10], [1, 13])["nae"]
    assert (mixed.value, mixed.low, mixed.high) == (0.3, 0.3, 0.3)


@pytest.mark.parametrize(
    ("truth", "counted", "words"),
    [
        ([], [], "non-empty"),
        ([1, 2], [1], "equal"),
        ([[1]], [[1]], "lists"),
        ([1, np.nan], [1, 2], "finite"),
        ([1, 2], [np.inf, 2], "finite"),
    ],
)
def test_lists_that_cannot_be_compared(truth, counted, words):
    with pytest.raises(InputError, match=words):
        summarise(truth, counted)
