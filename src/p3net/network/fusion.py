"""From tokens and features to a density: modulation, decoding and fusion, as pure functions.

Shapes: B images, C intervals, d channels, h×w positions or cells.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from p3net.intervals import Intervals


def modulate(tokens: Tensor, features: Tensor) -> Tensor:
    """Logits T̃·Fᵀ of eq:classification: B×C×d, B×d×h×w → B×C×h×w; softmax over C follows."""
    logits = tokens @ features.flatten(2)
    return logits.view(*logits.shape[:2], *features.shape[-2:])


def upsample(maps: Tensor, size_hw: tuple[int, int], *, corners: bool = False) -> Tensor:
    """Bilinear resampling of B×·×h×w maps to another size; `corners` aligns the corner centres."""
    if not torch.compiler.is_exporting() and tuple(maps.shape[-2:]) == size_hw:
        return maps  # an exported graph holds for any size
    return F.interpolate(maps, size=size_hw, mode="bilinear", align_corners=corners)


def crop(maps: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """The upper left h×w part of ·×h'×w' maps."""
    rows, columns = size_hw
    if torch.compiler.is_exporting():  # a slice would fix whether it cuts; a look-up does not
        down = torch.arange(rows, device=maps.device)
        across = torch.arange(columns, device=maps.device)
        return maps.index_select(-2, down).index_select(-1, across)
    return maps[..., :rows, :columns]


def by_expectation(probabilities: Tensor, intervals: Intervals) -> Tensor:
    """p·v: B×C×h×w → B×h×w heads per cell."""
    flat = intervals.expectation(probabilities.flatten(2), dim=1)  # exports for every h and w
    return flat.view(-1, *probabilities.shape[2:])


def by_maximum(probabilities: Tensor, intervals: Intervals) -> Tensor:
    """The value of the likeliest interval (UEPNet): B×C×h×w → B×h×w; carries no gradient."""
    values = torch.tensor(intervals.values, dtype=probabilities.dtype, device=probabilities.device)
    return values[probabilities.argmax(dim=1)]


def by_confidence(p: Tensor, q: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """ω·d₁ + (1−ω)·d₂ with ω = max p / (max p + max q) (eq:confidence).

    p, q: B×C×h×w distributions; first, second: B×h×w densities of the branches.

    >>> p, q = torch.tensor([0.6, 0.4]).view(1, 2, 1, 1), torch.tensor([0.9, 0.1]).view(1, 2, 1, 1)
    >>> one, two = torch.tensor([[[1.0]]]), torch.tensor([[[2.0]]])
    >>> round(float(by_confidence(p, q, one, two)), 4)  # ω = 0.6 / 1.5
    1.6
    """
    sure_p, sure_q = p.amax(dim=1), q.amax(dim=1)
    omega = sure_p / (sure_p + sure_q)
    return omega * first + (1 - omega) * second


def by_average(p: Tensor, q: Tensor, first: Tensor, second: Tensor) -> Tensor:  # noqa: ARG001 (one signature for all fusions)
    """The plain mean of the branches' densities."""
    return (first + second) / 2


DECODINGS: dict[str, Callable[[Tensor, Intervals], Tensor]] = {
    "expectation": by_expectation,
    "maximum": by_maximum,
}
FUSIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "confidence": by_confidence,
    "average": by_average,
}
