"""Stronger views of crops: sharpness, colour, light, noise and hidden squares; same geometry.

Shapes: B images, H×W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from p3net.errors import InputError

PATCH = 32
"""Side of a hidden square in pixels."""


def strong_view(
    images: Tensor,
    seeds: Sequence[int],
    strength: float,
    hidden: float = 0.0,
    soft: float = 0.0,
) -> Tensor:
    """B×3×H×W in [0, 1] → the same scenes in other light, still in [0, 1].

    Per image: sharpness, brightness and contrast, a gain for each colour, gamma, a share of grey,
    noise, and `hidden` of its squares of 32 px painted with the image's mean.

    Args:
        images: B×3×H×W.
        seeds: B numbers that decide the draws, one an image: `Batch.seeds`.
        strength: 0 leaves the light alone, 1 is strong.
        hidden: share of squares that are painted over.
        soft: the share of its detail that an image may lose; every second one keeps all.
    """
    if len(seeds) != len(images):
        raise InputError(f"{len(images)} images need as many seeds, got {len(seeds)}")
    views = [
        _view(image, torch.Generator().manual_seed(seed), strength, hidden, soft)
        for image, seed in zip(images, seeds, strict=True)
    ]
    return torch.stack(views)


def _view(
    image: Tensor, draws: torch.Generator, strength: float, hidden: float, soft: float
) -> Tensor:
    """3×H×W → 3×H×W."""
    if soft:
        lost, some = torch.rand(2, generator=draws).tolist()
        if some < 0.5:
            image = _blurred(image, 1 - soft * lost)

    def draw(*shape: int) -> Tensor:
        """Uniform in ±strength."""
        return (torch.rand(*shape, generator=draws) * 2 - 1).mul(strength).to(image.device)

    mean = image.mean()
    x = (image - mean) * (1 + 0.5 * draw(1)) + mean * (1 + 0.4 * draw(1))
    x = x * (1 + 0.2 * draw(3, 1, 1))
    x = torch.lerp(x, x.mean(0, keepdim=True).expand_as(x), draw(1).clamp_min(0))
    x = x.clamp(1e-3, 1).pow(torch.exp(0.5 * draw(1)))
    noise = torch.randn(x.shape, generator=draws).to(image.device)
    x = x + 0.05 * draw(1).clamp_min(0) * noise
    if hidden:
        height, width = x.shape[-2:]
        grid = (1, 1, -(-height // PATCH), -(-width // PATCH))
        covered = (torch.rand(grid, generator=draws) < hidden).to(x)
        covered = F.interpolate(covered, scale_factor=PATCH)[0, :, :height, :width]
        x = torch.where(covered.bool(), x.mean((1, 2), keepdim=True), x)
    return x.clamp(0, 1)


def _blurred(image: Tensor, kept: float) -> Tensor:
    """3×H×W → 3×H×W with the detail of an image of `kept` times the size: made small, and large."""
    size = image.shape[-2:]
    small = [max(1, round(side * kept)) for side in size]
    small_image = F.interpolate(image[None], small, mode="bilinear", antialias=True)
    return F.interpolate(small_image, size, mode="bilinear")[0]
