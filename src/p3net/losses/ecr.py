"""Expectation Consistency Regularization (ECR): the paper's loss without labels, eq:consistency.

Shapes: B images, C intervals, H×W cells of the stride-8 grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p3net.errors import InputError


def confidence_mask(p: Tensor, q: Tensor, threshold: float) -> Tensor:
    """The cells where both branches are confident: `max p > ξ` and `max q > ξ`, strictly.

    This is the mask ℰ below eq:consistency; it carries no gradient.

    >>> p = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.5, 0.5]]).T.reshape(1, 2, 1, 3)
    >>> q = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.1, 0.9]]).T.reshape(1, 2, 1, 3)
    >>> confidence_mask(p, q, 0.5)
    tensor([[[ True, False, False]]])

    Args:
        p: B×C×H×W, the distributions of branch 1.
        q: B×C×H×W, those of branch 2; the two may differ in C.
        threshold: ξ in [0, 1).

    Returns:
        B×H×W booleans.
    """
    if p.ndim != 4 or q.ndim != 4 or p[:, 0].shape != q[:, 0].shape:
        raise InputError(
            "expected two distributions B×C×H×W on one grid, "
            f"got {tuple(p.shape)} and {tuple(q.shape)}"
        )
    if not 0 <= threshold < 1:
        raise InputError(f"the confidence threshold ξ lies in [0, 1), got {threshold}")
    return (p.detach().amax(dim=1) > threshold) & (q.detach().amax(dim=1) > threshold)


def ecr(p_expectation: Tensor, q_expectation: Tensor, mask: Tensor) -> Tensor:
    """Squared difference of the branches' expected densities where the mask holds (eq:consistency).

    `Σ_cells ℰ (p·v₁ − q·v₂)²`. The gradient reaches both branches. Cells outside the mask count
    for nothing whatever they hold, so an empty mask is exactly 0 with a gradient of 0.

    Here (3 − 1)² + (2 − 2.5)² = 4.25; the last cell is left out.

    >>> p, q = torch.tensor([[[3.0, 2.0, 9.0]]]), torch.tensor([[[1.0, 2.5, 0.0]]])
    >>> ecr(p, q, torch.tensor([[[True, True, False]]]))
    tensor([4.2500])

    Args:
        p_expectation: B×H×W, the density branch 1 expects in every cell.
        q_expectation: B×H×W, that of branch 2.
        mask: B×H×W booleans, from `confidence_mask`.

    Returns:
        B values, each the sum over the cells of an image.
    """
    shapes = [tuple(tensor.shape) for tensor in (p_expectation, q_expectation, mask)]
    if mask.ndim != 3 or len(set(shapes)) != 1:
        raise InputError(f"expected two expectations and a mask, all B×H×W, got {shapes}")
    if mask.dtype != torch.bool:
        raise InputError(f"the mask of ECR is boolean, got {mask.dtype}")
    # Chosen, not multiplied: 0 times an infinite difference would be NaN.
    gap = torch.where(mask, p_expectation - q_expectation, 0.0)
    return gap.square().sum(dim=(1, 2))
