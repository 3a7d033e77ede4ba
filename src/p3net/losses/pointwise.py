"""Losses that compare interval by interval: the CE and MSE rows of tab:dm_loss.

Neither knows that the intervals are ordered: both give the same value to the predictions A and
B of the paper's example, one of which is nearer to the label. `pdm` tells them apart.

Shapes: B images, C intervals, H×W cells of the stride-8 grid.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from p3net.losses.pdm import check_labels


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`−log softmax(logits)[label]`, summed over the cells.

    In the paper's example it is −ln 0.3 = 1.204 for A and B (the paper prints −0.3 ln 0.3).

    >>> a, b = [0.2, 0.3, 0.5, 0.0], [0.2, 0.3, 0.0, 0.5]
    >>> logits = torch.tensor([a, b]).reshape(2, 4, 1, 1).log()
    >>> cross_entropy(logits, torch.ones(2, 1, 1, dtype=torch.long))
    tensor([1.2040, 1.2040])

    Args:
        logits: B×C×H×W, before the softmax.
        labels: B×H×W integers, the interval of every cell, from 0.

    Returns:
        B values, each the sum over the cells of an image.
    """
    check_labels(logits, labels)
    return F.cross_entropy(logits, labels, reduction="none").sum(dim=(1, 2))


def squared_error(probabilities: Tensor, labels: Tensor) -> Tensor:
    """`Σ_j (p_j − y_j)²` with the label y as a one-hot distribution, summed over the cells.

    In the paper's example it is .2² + .7² + .5² = 0.78 for A and B.

    >>> a, b = [0.2, 0.3, 0.5, 0.0], [0.2, 0.3, 0.0, 0.5]
    >>> predictions = torch.tensor([a, b]).reshape(2, 4, 1, 1)
    >>> squared_error(predictions, torch.ones(2, 1, 1, dtype=torch.long))
    tensor([0.7800, 0.7800])

    Args:
        probabilities: B×C×H×W, a distribution over the intervals in every cell.
        labels: B×H×W integers, the interval of every cell, from 0.

    Returns:
        B values, each the sum over the cells of an image.
    """
    check_labels(probabilities, labels)
    intervals = torch.arange(probabilities.shape[1], device=labels.device).reshape(-1, 1, 1)
    one_hot = intervals == labels.unsqueeze(1)
    return (probabilities - one_hot.to(probabilities.dtype)).square().sum(dim=(1, 2, 3))
