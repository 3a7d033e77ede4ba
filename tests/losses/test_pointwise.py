from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import Tensor

from p3net.errors import InputError
from p3net.losses.pointwise import cross_entropy, squared_error

EXAMPLE = torch.tensor([[0.2, 0.3, 0.5, 0.0], [0.2, 0.3, 0.0, 0.5]])[:, :, None, None]
SECOND = torch.ones(2, 1, 1, dtype=torch.long)


def scene(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 5, 2, 4, generator=random, dtype=torch.float64)
    return values, torch.randint(5, (3, 2, 4), generator=random)


def test_the_papers_example_is_not_told_apart() -> None:
    assert cross_entropy(EXAMPLE.log(), SECOND).tolist() == pytest.approx([1.204, 1.204], abs=5e-4)
    assert squared_error(EXAMPLE, SECOND).tolist() == pytest.approx([0.78, 0.78])


def test_cross_entropy_equals_a_slow_loop() -> None:
    logits, labels = scene(0)
    expected = [
        -sum(log_softmax(image[:, r, c])[label[r, c]] for r in range(2) for c in range(4))
        for image, label in zip(logits.numpy(), labels.numpy(), strict=True)
    ]
    assert cross_entropy(logits, labels).tolist() == pytest.approx(expected, rel=1e-12)


def test_cross_entropy_is_stable_far_from_the_label() -> None:
    logits = torch.tensor([1e4, 0.0]).reshape(1, 2, 1, 1).requires_grad_()
    value = cross_entropy(logits, torch.ones(1, 1, 1, dtype=torch.long))
    assert value.tolist() == [1e4]
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient.flatten().tolist() == [1.0, -1.0]


def test_squared_error_equals_a_slow_loop() -> None:
    values, labels = scene(1)
    probabilities = values.softmax(dim=1)
    expected = [
        sum(
            ((image[:, r, c] - np.eye(5)[label[r, c]]) ** 2).sum()
            for r in range(2)
            for c in range(4)
        )
        for image, label in zip(probabilities.numpy(), labels.numpy(), strict=True)
    ]
    assert squared_error(probabilities, labels).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", [cross_entropy, squared_error])
def test_gradient_and_batches(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    values, labels = scene(2)
    alone = [loss(values[i : i + 1], labels[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(loss(values, labels), torch.cat(alone), rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(lambda v: loss(v, labels), (values.requires_grad_(),))


@pytest.mark.parametrize("loss", [cross_entropy, squared_error])
@pytest.mark.parametrize("label", [-100, -1, 4])
def test_refuses_labels_out_of_range(loss: Callable[[Tensor, Tensor], Tensor], label: int) -> None:
    with pytest.raises(InputError, match=f"from 0 to 3, got {label}"):
        loss(EXAMPLE, torch.full((2, 1, 1), label))


def test_zero_at_a_perfect_prediction() -> None:
    perfect = torch.eye(4)[1].repeat(2, 1)[:, :, None, None]
    assert squared_error(perfect, SECOND).tolist() == [0.0, 0.0]
    assert cross_entropy(perfect.log(), SECOND).tolist() == [0.0, 0.0]
