"""Learning to rank (L2R, Liu et al. 2018): a part of an image holds no more people than the whole.

Shapes: K concentric crops, B images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p3net.errors import InputError


def ranking(counts: Tensor) -> Tensor:
    """`Σ_{i<j} max(0, C_j − C_i)`: by how much inner crops out-count the crops around them.

    The counts 5, 7, 4, 6 break the order by 7−5, 6−5 and 6−4: 2 + 1 + 2 = 5.

    >>> ranking(torch.tensor([[5.0], [7.0], [4.0], [6.0]]))
    tensor([5.])

    Args:
        counts: K×B, each column one image's crops from the outermost to the innermost.

    Returns:
        B values, each the sum over the K(K−1)/2 pairs of crops of an image.
    """
    if counts.ndim != 2 or len(counts) < 2:
        raise InputError(f"expected counts of K×B, K at least 2 crops, got {tuple(counts.shape)}")
    outer, inner = torch.triu_indices(len(counts), len(counts), offset=1, device=counts.device)
    return (counts[inner] - counts[outer]).clamp(min=0).sum(dim=0)
