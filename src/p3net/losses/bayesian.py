"""Bayesian loss (BL, Ma et al. 2019): the BL row of tab:dm_loss, on a density grid.

Shapes: B images, N heads (a different number in every image), H×W cells of the stride-8 grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from p3net.errors import InputError

CHUNK = 2**22
"""Heads × cells worked on at once: 16 MB in float32 for every intermediate result."""


def bayesian(
    density: Tensor,
    points_xy: Sequence[Tensor],
    shorter_sides: Sequence[float],
    *,
    cell: int = 8,
    sigma: float = 8.0,
    background: float = 0.15,
) -> Tensor:
    """Every head should receive a density of 1, the background 0.

    A cell m, its centre at x_m, belongs to head n at z_n with a posterior p(n|m) proportional
    to `exp(−‖x_m − z_n‖² / 2σ²)`, and to the background in proportion to
    `exp(−(ρs − min_n ‖x_m − z_n‖)² / 2σ²)`. The loss of an image is
    `Σ_n |1 − Σ_m p(n|m) D(m)| + |Σ_m p(0|m) D(m)|`; without heads everything is background,
    which leaves `|Σ_m D(m)|`.

    Time is 2·N·H·W exponentials an image. Memory is bounded: the posterior is made in chunks of
    rows, once for the value and once for the gradient, and nothing of size N×H×W is kept.

    Below, a head sits at the centre of the only cell and (ρs)²/2σ² = ln 3: a density of 2 gives
    3/4 of itself to the head and 1/4 to the background, |1 − 1.5| + 0.5 = 1.

    >>> from math import log, sqrt
    >>> density, head = torch.tensor([[[2.0]]]), torch.tensor([[4.0, 4.0]])
    >>> round(float(bayesian(density, [head], [sqrt(128 * log(3)) / 0.15])), 4)
    1.0

    Args:
        density: B×H×W, people in every cell.
        points_xy: B tensors N×2, pixels of the crop.
        shorter_sides: B lengths s in px, the shorter side of the scaled image before cropping.
        cell: side of a cell in px; the centre of column i is at (i + 0.5)·cell.
        sigma: σ in px.
        background: ρ, the distance of the background as a share of the shorter side.

    Returns:
        B values, each the sum over the heads and the background of an image.
    """
    if cell <= 0 or sigma <= 0 or background < 0:
        raise InputError(
            "cell and sigma must be above 0 and background not below, "
            f"got {cell}, {sigma} and {background}"
        )
    density, heads = aligned(density, points_xy)
    if len(shorter_sides) != len(density) or not all(side > 0 for side in shorter_sides):
        raise InputError(f"expected {len(density)} shorter sides above 0 px, got {shorter_sides}")
    # Images one by one: their numbers of heads differ a thousandfold, padding would cost more.
    values = []
    for image, points, side in zip(density, heads, shorter_sides, strict=True):
        if len(points) == 0:
            values.append(image.sum().abs())
            continue
        offset, slope = _line(
            image.detach(), points, reach=background * side, cell=cell, sigma=sigma
        )
        values.append(offset + (slope * image).sum())
    return torch.stack(values)


@torch.no_grad()
def _line(
    image: Tensor, points: Tensor, *, reach: float, cell: int, sigma: float
) -> tuple[Tensor, Tensor]:
    """The loss is piecewise linear in the density: its offset, and its slope (H×W), at `image`."""
    x, y = cell_centres(image, cell)
    rows = max(1, CHUNK // (len(points) * len(x)))
    slabs = list(zip(torch.split(image, rows), torch.split(y, rows), strict=True))
    target = torch.cat([image.new_ones(len(points)), image.new_zeros(1)])
    with torch.autocast(image.device.type, enabled=False):
        received = torch.zeros_like(target)
        for slab, y_slab in slabs:
            received += _posterior(points, x, y_slab, reach, sigma) @ slab.flatten()
        sign = (received - target).sign()
        slope = [sign @ _posterior(points, x, y_slab, reach, sigma) for _, y_slab in slabs]
    return -(sign * target).sum(), torch.cat(slope).view_as(image)


def _posterior(points: Tensor, x: Tensor, y: Tensor, reach: float, sigma: float) -> Tensor:
    """To which of N heads, or to the background (last), cells at x × y belong: (N+1)×cells."""
    x_squared = (x - points[:, :1]).square()
    y_squared = (y - points[:, 1:]).square()
    squared = (y_squared.unsqueeze(2) + x_squared.unsqueeze(1)).flatten(1)
    beyond = (reach - squared.amin(dim=0, keepdim=True).sqrt()).square()
    return torch.cat([squared, beyond]).div_(-2 * sigma**2).softmax(dim=0)


def cell_centres(grid: Tensor, cell: int) -> tuple[Tensor, Tensor]:
    """Pixel coordinates of the centres of …×H×W cells: W values of x and H values of y.

    >>> cell_centres(torch.zeros(1, 3), 8)
    (tensor([ 4., 12., 20.]), tensor([4.]))
    """
    height, width = grid.shape[-2:]
    steps = torch.arange(max(height, width), dtype=grid.dtype, device=grid.device)
    centres = (steps + 0.5) * cell
    return centres[:width], centres[:height]


def aligned(density: Tensor, points_xy: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Check a density (B×H×W) and its B lists of heads (N×2) and give both one type and device.

    Half precision becomes float32: squared distances in px exceed what it can hold.
    """
    if density.ndim != 3 or density.numel() == 0:
        raise InputError(f"expected a density of B×H×W, none of them 0, got {tuple(density.shape)}")
    if len(points_xy) != len(density):
        raise InputError(f"{len(density)} images but {len(points_xy)} lists of points")
    density = density.to(torch.promote_types(density.dtype, torch.float32))
    for index, points in enumerate(points_xy):
        if points.ndim != 2 or points.shape[1] != 2:
            raise InputError(
                f"points must be N×2 of x y, got {tuple(points.shape)} (image {index})"
            )
        if not bool(points.isfinite().all()):
            raise InputError(f"a point of image {index} is not a finite number; remove it")
    return density, [points.to(density) for points in points_xy]
