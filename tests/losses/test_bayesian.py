from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from p3net.errors import InputError
from p3net.losses import bayesian as module
from p3net.losses.bayesian import bayesian

SIDES = [90.0, 120.0, 512.0]


def scene(seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(seed)
    density = torch.rand(3, 4, 6, generator=random, dtype=torch.float64)
    heads = [
        torch.rand(count, 2, generator=random, dtype=torch.float64) * torch.tensor([48.0, 32.0])
        for count in (5, 0, 2)
    ]
    return density, heads


def slow(density: np.ndarray, heads: np.ndarray, side: float) -> float:
    """The definition, cell by cell, with plain exponentials."""
    received = np.zeros(len(heads) + 1)
    for row in range(density.shape[0]):
        for column in range(density.shape[1]):
            centre = np.array([8 * column + 4.0, 8 * row + 4.0])
            distances = [math.dist(centre, head) for head in heads]
            weights = [math.exp(-(d**2) / 128) for d in distances]
            weights.append(math.exp(-((0.15 * side - min(distances)) ** 2) / 128))
            received += density[row, column] * np.array(weights) / sum(weights)
    return float(np.abs(1 - received[:-1]).sum() + abs(received[-1]))


def test_by_hand() -> None:
    # Two heads 16 px apart, cells under each, the background out of reach: a cell gives
    # 1/(1 + e⁻²) of itself to its own head and the rest to the other.
    density = torch.tensor([[[1.0, 0.0, 3.0]]], dtype=torch.float64)
    heads = [torch.tensor([[4.0, 4.0], [20.0, 4.0]])]
    own = 1 / (1 + math.exp(-2))
    expected = abs(1 - own - 3 * (1 - own)) + abs(1 - (1 - own) - 3 * own)
    assert float(bayesian(density, heads, [1e4])) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("chunk", [module.CHUNK, 60, 1])
def test_equals_a_slow_loop_in_any_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    density, heads = scene()
    expected = [
        slow(density[0].numpy(), heads[0].numpy(), SIDES[0]),
        float(density[1].sum()),
        slow(density[2].numpy(), heads[2].numpy(), SIDES[2]),
    ]
    assert bayesian(density, heads, SIDES).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("chunk", [module.CHUNK, 60])
def test_gradient_equals_finite_differences(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    density, heads = scene(1)
    assert torch.autograd.gradcheck(
        lambda d: bayesian(d, heads, SIDES), (density.requires_grad_(),)
    )


def test_batches_and_order_of_points_do_not_matter() -> None:
    density, heads = scene(2)
    together = bayesian(density, heads, SIDES)
    alone = [bayesian(density[i : i + 1], heads[i : i + 1], SIDES[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-14, atol=0)
    turned = [points.flip(0) for points in heads]
    torch.testing.assert_close(bayesian(density, turned, SIDES), together, rtol=1e-13, atol=0)


def test_descends_to_one_per_head() -> None:
    _, heads = scene(3)
    density = torch.full((1, 4, 6), 0.5, dtype=torch.float64)
    for _ in range(400):
        density.requires_grad_()
        (gradient,) = torch.autograd.grad(bayesian(density, heads[:1], [4e3]).sum(), density)
        density = (density.detach() - 0.005 * gradient).clamp(min=0)
    assert float(bayesian(density, heads[:1], [4e3])) < 0.5  # from 7: 24 cells of 0.5 for 5 heads
    assert float(density.sum()) == pytest.approx(5, abs=0.5)


def test_far_heads_do_not_underflow() -> None:
    density = torch.ones(1, 2, 2, requires_grad=True)
    value = bayesian(density, [torch.tensor([[5000.0, 4.0], [9000.0, 4.0]])], [1e6])
    # Every cell is some 10⁵ units of exponent away from both heads and belongs to the nearer.
    assert value.tolist() == pytest.approx([abs(1 - 4) + 1])
    (gradient,) = torch.autograd.grad(value.sum(), density)
    assert gradient.tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


def test_lower_precision_is_widened() -> None:
    density, heads = scene(4)
    rounded = density.bfloat16()
    expected = bayesian(rounded.double(), heads, SIDES)
    torch.testing.assert_close(bayesian(rounded, heads, SIDES), expected.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(bayesian(rounded.float(), heads, SIDES), expected.float())


GRID, HEADS = torch.zeros(1, 2, 2), [torch.zeros(1, 2)]


@pytest.mark.parametrize(
    ("density", "heads", "sides", "message"),
    [
        (GRID[0], HEADS, [9.0], "B×H×W"),
        (torch.zeros(1, 0, 2), HEADS, [9.0], "B×H×W"),
        (GRID, HEADS * 2, [9.0], "1 images but 2 lists of points"),
        (GRID, HEADS, [9.0, 9.0], "1 shorter sides"),
        (GRID, HEADS, [0.0], "above 0 px"),
        (GRID, HEADS, [math.nan], "above 0 px"),
        (GRID, [torch.zeros(3)], [9.0], "N×2"),
        (GRID, [torch.zeros(1, 3)], [9.0], "N×2"),
        (GRID, [torch.tensor([[math.nan, 1.0]])], [9.0], "not a finite number"),
    ],
)
def test_refuses_what_does_not_fit(
    density: Tensor, heads: list[Tensor], sides: list[float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        bayesian(density, heads, sides)


@pytest.mark.parametrize("wrong", [{"cell": 0}, {"sigma": 0.0}, {"background": -0.1}])
def test_refuses_impossible_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="above 0"):
        bayesian(GRID, HEADS, [9.0], **wrong)
