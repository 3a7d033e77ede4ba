from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p3net.errors import InputError
from p3net.losses.ranking import ranking


def test_by_hand() -> None:
    counts = torch.tensor([[9.0, 1.0, 5.0], [5.0, 2.0, 5.0], [1.0, 4.0, 5.0]])
    assert ranking(counts).tolist() == [0.0, 1 + 3 + 2, 0.0]


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6))
def test_equals_a_slow_loop(column: list[int]) -> None:
    expected = 0
    for inner in range(len(column)):
        for outer in range(inner):
            expected += max(0, column[inner] - column[outer])
    counts = torch.tensor([column, sorted(column, reverse=True)], dtype=torch.float64).T
    assert ranking(counts).tolist() == [expected, 0]


def test_gradient() -> None:
    counts = torch.tensor([[5.0], [7.0], [4.0], [6.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ranking(counts).sum(), counts)
    # 7−5, 6−5 and 6−4 are the broken pairs.
    assert gradient.flatten().tolist() == [-2.0, 1.0, -1.0, 2.0]
    assert torch.autograd.gradcheck(ranking, (counts,))


@pytest.mark.parametrize("shape", [(1, 3), (0, 3), (3,), (2, 3, 1)])
def test_refuses_fewer_than_two_crops_and_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="K×B"):
        ranking(torch.zeros(shape))
