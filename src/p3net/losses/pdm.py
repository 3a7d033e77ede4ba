"""Pixel-wise Distribution Matching (PDM): the paper's supervised loss, eq:pdm.

Shapes: B images, C intervals, H×W cells of the stride-8 grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p3net.errors import InputError


def pdm(probabilities: Tensor, labels: Tensor, *, norm: int = 2, rooted: bool = False) -> Tensor:
    """Distance of the cumulative distributions of prediction and label (eq:pdm).

    With `G(p, j) = p_1 + … + p_j`, the loss of an image is the sum over its cells of
    `Σ_j |G(y, j) − G(p, j)|^l`, to the power 1/l when `rooted`. With l = 1 a cell's value is
    the Wasserstein distance between prediction and label, in intervals.

    The paper prints the root, yet its worked example does without: label [0, 1, 0, 0] and the
    predictions A = [.2, .3, .5, 0] and B = [.2, .3, 0, .5] are .2² + .5² + 0² = 0.29 and
    .2² + .5² + .5² = 0.54 apart.

    >>> a, b = [0.2, 0.3, 0.5, 0.0], [0.2, 0.3, 0.0, 0.5]
    >>> predictions = torch.tensor([a, b]).reshape(2, 4, 1, 1)
    >>> pdm(predictions, torch.ones(2, 1, 1, dtype=torch.long))
    tensor([0.2900, 0.5400])
    >>> pdm(predictions, torch.ones(2, 1, 1, dtype=torch.long), norm=1)
    tensor([0.7000, 1.2000])

    Args:
        probabilities: B×C×H×W, a distribution over the intervals in every cell.
        labels: B×H×W integers, the interval of every cell, from 0.
        norm: l, 1 or 2.
        rooted: take the l-th root in every cell; its gradient at a perfect cell is 0.

    Returns:
        B values, each the sum over the cells of an image.
    """
    check_labels(probabilities, labels)
    if norm not in (1, 2):
        raise InputError(f"the norm of PDM is 1 or 2, got {norm!r}")
    # The label's cumulative sum is a step: 0 before its interval, 1 from there on.
    intervals = torch.arange(probabilities.shape[1], device=labels.device).reshape(-1, 1, 1)
    step = intervals >= labels.unsqueeze(1)
    gap = probabilities.cumsum(dim=1) - step.to(probabilities.dtype)
    if rooted or norm == 1:
        cells: Tensor = torch.linalg.vector_norm(gap, ord=norm, dim=1)
    else:
        cells = gap.square().sum(dim=1)
    return cells.sum(dim=(1, 2))


def check_labels(distribution: Tensor, labels: Tensor) -> None:
    """Refuse labels (B×H×W) that do not name an interval for every cell of B×C×H×W."""
    if distribution.ndim != 4 or labels.shape != (len(distribution), *distribution.shape[2:]):
        raise InputError(
            "expected distributions B×C×H×W and labels B×H×W of the same grid, "
            f"got {tuple(distribution.shape)} and {tuple(labels.shape)}"
        )
    if labels.dtype != torch.long:
        raise InputError(f"labels are interval numbers (torch.long), got {labels.dtype}")
    count = distribution.shape[1]
    wrong = labels[(labels < 0) | (labels >= count)]
    if len(wrong):
        raise InputError(
            f"labels of {count} intervals run from 0 to {count - 1}, got {int(wrong[0])}; "
            "label the targets with the intervals of this branch"
        )
