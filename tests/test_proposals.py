"""What to mark next: against a slow double loop, and cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from p3net.errors import InputError
from p3net.proposals import describe, propose

points = st.lists(
    st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=12, unique=True
)


@given(points, st.data())
def test_each_choice_is_the_best_of_a_double_loop(where, data):
    doubts = data.draw(
        st.lists(st.floats(0.1, 5), min_size=len(where), max_size=len(where)), "doubts"
    )
    marked = data.draw(st.lists(st.integers(0, len(where) - 1), unique=True), "marked")
    chosen = propose(where, marked=marked, doubts=doubts, number=5)
    assert len(chosen) == min(5, len(where) - len(marked))
    assert not {each.index for each in chosen} & set(marked)
    taken = list(marked)
    for each in chosen:
        scores = {
            i: doubts[i] * min((math.dist(where[i], where[j]) for j in taken), default=1.0)
            for i in range(len(where))
            if i not in taken
        }
        assert scores[each.index] >= max(scores.values()) * (1 - 1e-6) - 1e-12
        taken.append(each.index)


def test_without_doubts_the_farthest_comes_first_and_all_are_proposed():
    line = [[0.0], [1.0], [10.0], [4.0]]
    assert [each.index for each in propose(line, marked=[0])] == [2, 3, 1]
    assert [round(each.novelty, 3) for each in propose(line, marked=[0])] == [1.0, 0.4, 0.1]


def test_the_first_of_all_is_the_most_ordinary():
    assert propose([[0.0], [5.0], [11.0]], number=1)[0].index == 1
    assert propose([[0.0], [5.0], [11.0]], doubts=[3.0, 1.0, 1.0], number=1)[0].index == 0


def test_unknown_doubts_count_as_the_mean_of_the_known():
    first = propose([[0.0], [1.0], [2.0]], doubts=[1.0, math.nan, 3.0], number=3)
    assert {each.index: round(each.doubt, 4) for each in first} == {2: 1.0, 0: 0.3333, 1: 0.6667}


def test_nothing_to_propose_and_equal_images():
    assert propose([[1.0]], marked=[0]) == []
    assert len(propose([[1.0], [1.0], [1.0]], marked=[1])) == 2
    assert [each.doubt for each in propose([[1.0], [2.0]], doubts=[0.0, 0.0])] == [1.0, 1.0]


@pytest.mark.parametrize("doubts", [[1.0], [math.inf, 1.0], [-1.0, 1.0]])
def test_wrong_doubts_are_refused(doubts):
    with pytest.raises(InputError, match="doubts must be 2"):
        propose([[0.0], [1.0]], doubts=doubts)


def test_wrong_features_are_refused():
    with pytest.raises(InputError, match="N×D"):
        propose([0.0, 1.0])
    with pytest.raises(InputError, match="N×D"):
        propose([[math.nan]])


def test_a_description_by_hand():
    """The left half red, the right half black: 16 colours of three, no texture."""
    image = Image.new("RGB", (64, 64))
    image.paste((255, 0, 0), (0, 0, 32, 64))
    found = describe(image)
    assert found.shape == (96,)
    colours = found[:48].reshape(4, 4, 3)
    assert np.array_equal(colours[:, :2, 0], np.ones((4, 2)))
    assert colours.sum() == 8
    assert not found[48:].any()
    stripes = np.zeros((32, 32, 3), np.uint8)
    stripes[:, ::2] = 255  # in every block half the pixels are 0 and half 1: deviation 1/2, twice
    assert np.allclose(describe(Image.fromarray(stripes))[48:], 1.0)
