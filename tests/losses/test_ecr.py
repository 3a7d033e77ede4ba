from __future__ import annotations

import math

import pytest
import torch

from p3net.errors import InputError
from p3net.losses.ecr import confidence_mask, ecr


def test_mask_equals_a_slow_loop() -> None:
    random = torch.Generator().manual_seed(0)
    p = (3 * torch.randn(3, 4, 5, 6, generator=random)).softmax(dim=1)
    q = (3 * torch.randn(3, 7, 5, 6, generator=random)).softmax(dim=1)
    mask = confidence_mask(p, q, 0.6)
    assert mask.dtype == torch.bool
    assert 0 < int(mask.sum()) < mask.numel()
    for image in range(3):
        for row in range(5):
            for column in range(6):
                both = [max(branch[image, :, row, column].tolist()) > 0.6 for branch in (p, q)]
                assert bool(mask[image, row, column]) == all(both)


def test_mask_is_strict_and_carries_no_gradient() -> None:
    p = torch.tensor([0.5, 0.5]).reshape(1, 2, 1, 1).requires_grad_()
    sure = torch.tensor([0.9, 0.1]).reshape(1, 2, 1, 1)
    assert confidence_mask(sure, sure, 0.5).all()
    assert not confidence_mask(p, sure, 0.5).any()
    assert not confidence_mask(sure, p, 0.5).any()
    mask = confidence_mask(p, p, 0.49)
    assert mask.all()
    assert not mask.requires_grad


def test_sums_squares_where_the_mask_holds() -> None:
    random = torch.Generator().manual_seed(1)
    p, q = torch.rand(2, 3, 4, 5, generator=random, dtype=torch.float64)
    mask = torch.rand(3, 4, 5, generator=random) > 0.5
    expected = [
        sum(
            (float(p[i, r, c]) - float(q[i, r, c])) ** 2
            for r in range(4)
            for c in range(5)
            if mask[i, r, c]
        )
        for i in range(3)
    ]
    assert ecr(p, q, mask).tolist() == pytest.approx(expected, rel=1e-12)
    alone = [ecr(p[i : i + 1], q[i : i + 1], mask[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(ecr(p, q, mask), torch.cat(alone), rtol=0, atol=0)


def test_gradient_reaches_both_branches_and_only_masked_cells() -> None:
    p = torch.tensor([[[3.0, 2.0]]], requires_grad=True)
    q = torch.tensor([[[1.0, 7.0]]], requires_grad=True)
    ecr(p, q, torch.tensor([[[True, False]]])).sum().backward()
    assert p.grad is not None
    assert q.grad is not None
    assert p.grad.tolist() == [[[4.0, 0.0]]]
    assert q.grad.tolist() == [[[-4.0, 0.0]]]


def test_gradient_equals_finite_differences() -> None:
    random = torch.Generator().manual_seed(2)
    p, q = torch.rand(2, 2, 3, 3, generator=random, dtype=torch.float64)
    mask = torch.rand(2, 3, 3, generator=random) > 0.5
    assert torch.autograd.gradcheck(
        lambda p, q: ecr(p, q, mask), (p.requires_grad_(), q.requires_grad_())
    )


def test_an_empty_mask_is_exactly_zero_with_zero_gradient_whatever_the_cells_hold() -> None:
    p = torch.tensor([[[math.inf, math.nan, 1.0]]], requires_grad=True)
    q = torch.tensor([[[math.inf, 0.0, 2.0]]], requires_grad=True)
    value = ecr(p, q, torch.zeros(1, 1, 3, dtype=torch.bool))
    assert value.tolist() == [0.0]
    for gradient in torch.autograd.grad(value.sum(), (p, q)):
        assert gradient.tolist() == [[[0.0, 0.0, 0.0]]]


def test_refuses_what_does_not_fit() -> None:
    grid, mask = torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool)
    with pytest.raises(InputError, match="all B×H×W"):
        ecr(grid, torch.zeros(1, 2, 3), mask)
    with pytest.raises(InputError, match="all B×H×W"):
        ecr(grid[0], grid[0], mask[0])
    with pytest.raises(InputError, match="boolean"):
        ecr(grid, grid, grid)
    with pytest.raises(InputError, match="on one grid"):
        confidence_mask(torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 3), 0.5)
    with pytest.raises(InputError, match="on one grid"):
        confidence_mask(grid, grid, 0.5)
    for threshold in (-0.1, 1.0, math.nan):
        with pytest.raises(InputError, match="threshold"):
            confidence_mask(torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2), threshold)
