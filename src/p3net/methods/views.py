"""Stronger views of unlabelled crops: colour, light, noise and hidden squares; same geometry.

Shapes: B images, H×W pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH = 32
"""Side of a hidden square in pixels."""


def strong_view(images: Tensor, strength: float, hidden: float = 0.0) -> Tensor:
    """B×3×H×W in [0, 1] → the same scene in other light, still in [0, 1].

    Per image: brightness and contrast, a gain for each colour, gamma, a share of grey, noise, and
    `hidden` of its squares of 32 px painted with the image's mean. Draws come from torch's global
    generator, which the loop sets by (seed, step, process).

    Args:
        images: B×3×H×W.
        strength: 0 leaves the light alone, 1 is strong.
        hidden: share of squares that are painted over.
    """
    count = len(images)

    def draw(*shape: int) -> Tensor:
        return torch.rand(count, *shape, 1, 1).to(images.device) * 2 - 1

    mean = images.mean((1, 2, 3), keepdim=True)
    x = (images - mean) * (1 + 0.5 * strength * draw(1)) + mean * (1 + 0.4 * strength * draw(1))
    x = x * (1 + 0.2 * strength * draw(3))
    grey = x.mean(1, keepdim=True)
    x = torch.lerp(x, grey.expand_as(x), (draw(1) * strength).clamp_min(0))
    x = x.clamp(1e-3, 1).pow(torch.exp(0.5 * strength * draw(1)))
    noise = torch.randn(x.shape).to(x.device)
    x = x + 0.05 * strength * draw(1).clamp_min(0) * noise
    if hidden:
        rows, columns = -(-x.shape[-2] // PATCH), -(-x.shape[-1] // PATCH)
        covered = (torch.rand(count, 1, rows, columns) < hidden).to(x)
        covered = F.interpolate(covered, scale_factor=PATCH)[..., : x.shape[-2], : x.shape[-1]]
        x = torch.where(covered.bool(), x.mean((2, 3), keepdim=True), x)
    return x.clamp(0, 1)
