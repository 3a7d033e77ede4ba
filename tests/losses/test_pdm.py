from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance
from torch import Tensor

from p3net.errors import InputError
from p3net.losses.pdm import pdm

A, B = [0.2, 0.3, 0.5, 0.0], [0.2, 0.3, 0.0, 0.5]


def one_cell(*distributions: list[float]) -> Tensor:
    return torch.tensor(distributions, dtype=torch.float64)[:, :, None, None]


def ones(count: int) -> Tensor:
    return torch.ones(count, 1, 1, dtype=torch.long)


def scene(seed: int = 0, images: int = 3, intervals: int = 5) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, intervals, 3, 4, generator=random, dtype=torch.float64)
    labels = torch.randint(intervals, (images, 3, 4), generator=random)
    return logits.softmax(dim=1), labels


@pytest.mark.parametrize(
    ("norm", "rooted", "expected"),
    [
        (2, False, (0.29, 0.54)),
        (2, True, (0.539, 0.735)),
        (1, False, (0.7, 1.2)),
        (1, True, (0.7, 1.2)),
    ],
)
def test_the_papers_example(norm: int, rooted: bool, expected: tuple[float, float]) -> None:
    values = pdm(one_cell(A, B), ones(2), norm=norm, rooted=rooted)
    assert values.tolist() == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("rooted", [False, True])
def test_equals_a_slow_loop_over_cells_and_intervals(norm: int, rooted: bool) -> None:
    probabilities, labels = scene()
    expected = []
    for image, label in zip(probabilities.numpy(), labels.numpy(), strict=True):
        total = 0.0
        for row in range(3):
            for column in range(4):
                one_hot = np.eye(5)[label[row, column]]
                cell = 0.0
                for j in range(5):
                    gap = one_hot[: j + 1].sum() - image[: j + 1, row, column].sum()
                    cell += abs(gap) ** norm
                total += cell ** (1 / norm) if rooted else cell
        expected.append(total)
    got = pdm(probabilities, labels, norm=norm, rooted=rooted)
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


def test_norm_one_is_the_wasserstein_distance() -> None:
    probabilities, labels = scene(seed=1)
    positions = np.arange(5)
    expected = [
        sum(
            wasserstein_distance(positions, [label[r, c]], image[:, r, c])
            for r in range(3)
            for c in range(4)
        )
        for image, label in zip(probabilities.numpy(), labels.numpy(), strict=True)
    ]
    assert pdm(probabilities, labels, norm=1).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_batch_of_three_is_three_batches_of_one() -> None:
    probabilities, labels = scene(seed=2)
    alone = [pdm(probabilities[i : i + 1], labels[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(pdm(probabilities, labels), torch.cat(alone), rtol=0, atol=0)


@pytest.mark.parametrize(("norm", "rooted"), [(1, False), (2, False), (2, True)])
def test_gradient_equals_finite_differences(norm: int, rooted: bool) -> None:
    probabilities, labels = scene(seed=3)
    # Through a softmax: off the simplex, norm 1 has a kink where the distribution sums to 1.
    assert torch.autograd.gradcheck(
        lambda logits: pdm(logits.softmax(dim=1), labels, norm=norm, rooted=rooted),
        (probabilities.log().requires_grad_(),),
    )


def test_the_root_has_a_finite_gradient_at_a_perfect_prediction() -> None:
    perfect = one_cell([0, 1, 0, 0]).requires_grad_()
    (gradient,) = torch.autograd.grad(pdm(perfect, ones(1), rooted=True).sum(), perfect)
    assert torch.equal(gradient, torch.zeros_like(gradient))


distributions = st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any)


@given(distributions, st.integers(0, 3), st.sampled_from([1, 2]), st.booleans())
def test_zero_only_for_the_label_itself(
    weights: list[int], label: int, norm: int, rooted: bool
) -> None:
    distribution = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    labels = torch.full((1, 1, 1), label)
    value = float(pdm(distribution.reshape(1, 4, 1, 1), labels, norm=norm, rooted=rooted))
    if weights[label] == sum(weights):
        assert value == pytest.approx(0, abs=1e-12)
    else:
        assert value > 1e-6


@given(st.floats(0.01, 1), st.integers(0, 6), st.sampled_from([1, 2]), st.booleans())
def test_grows_with_the_distance_of_misplaced_mass(
    mass: float, label: int, norm: int, rooted: bool
) -> None:
    values = []
    for place in range(7):
        distribution = torch.zeros(1, 7, 1, 1, dtype=torch.float64)
        distribution[0, label] += 1 - mass
        distribution[0, place] += mass
        labels = torch.full((1, 1, 1), label)
        values.append(float(pdm(distribution, labels, norm=norm, rooted=rooted)))
    assert all(near < far for near, far in pairwise(values[label:]))
    assert all(near < far for far, near in pairwise(values[: label + 1]))


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (torch.zeros(1, 4, 2, 2), torch.full((1, 2, 2), 4), "from 0 to 3, got 4"),
        (torch.zeros(1, 4, 2, 2), torch.full((1, 2, 2), -100), "from 0 to 3, got -100"),
        (torch.zeros(1, 4, 2, 2), torch.zeros(1, 2, 3, dtype=torch.long), "same grid"),
        (torch.zeros(1, 4, 2, 2), torch.zeros(2, 2, 2, dtype=torch.long), "same grid"),
        (torch.zeros(4, 2, 2), torch.zeros(4, 2, dtype=torch.long), "same grid"),
        (torch.zeros(1, 4, 2, 2), torch.zeros(1, 2, 2), "torch.long"),
    ],
)
def test_refuses_labels_that_do_not_fit(
    probabilities: Tensor, labels: Tensor, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        pdm(probabilities, labels)


@pytest.mark.parametrize("norm", [0, 3])
def test_refuses_other_norms(norm: int) -> None:
    with pytest.raises(InputError, match="1 or 2"):
        pdm(one_cell(A), ones(1), norm=norm)
