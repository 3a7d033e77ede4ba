"""Targets: annotated points → heads per cell on the output grid, exactly.

Every point is a 2-D Gaussian; a cell holds its mass over a square of `cell` pixels. Over a
square a Gaussian integrates to a product of two differences of erf, so no map of full
resolution is made. Each point's mass on the grid is renormalised to 1: a target sums to its
number of points.

Shapes: N points, B images, H×W pixels, h×w = ⌈H/cell⌉×⌈W/cell⌉ cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p3net.errors import InputError

CELL = 8
"""Side of a cell of the output grid in pixels."""

SIGMA = 8.0
"""Standard deviation of a head's Gaussian in pixels at network input resolution."""

REACH = 6.0
"""A Gaussian is followed at least this many σ to every side; 2e-9 of its mass lies beyond."""

_STRIP = 64  # rows of cells made at a time
_CHUNK = 4096  # points at a time


def grid_hw(size_hw: tuple[int, int], cell: int = CELL) -> tuple[int, int]:
    """Rows and columns of cells that cover an image.

    >>> grid_hw((512, 769))
    (64, 97)
    """
    height, width = size_hw
    if height < cell or width < cell:
        raise InputError(
            f"an image of {width}×{height} px is smaller than one cell of {cell}×{cell} px"
        )
    return -(-height // cell), -(-width // cell)


def density(
    points_xy: Tensor,
    size_hw: tuple[int, int],
    *,
    sigma: float | Tensor = SIGMA,
    cell: int = CELL,
) -> Tensor:
    """Heads per cell of one image: N×2 pixels → h×w, float32, summing to N.

    Args:
        points_xy: N×2, finite and inside the image; N may be 0.
        size_hw: the image's height and width in pixels.
        sigma: one σ in pixels, or N of them (see `adaptive_sigma`).
        cell: side of a cell in pixels.

    >>> two = density(torch.tensor([[20.0, 20.0], [44.0, 12.0]]), (64, 64))
    >>> tuple(two.shape), round(float(two.sum()), 5)
    ((8, 8), 2.0)
    """
    return densities([points_xy], size_hw, sigma=[sigma], cell=cell)[0]


def densities(
    points_xy: Sequence[Tensor],
    size_hw: tuple[int, int],
    *,
    sigma: float | Sequence[float | Tensor] = SIGMA,
    cell: int = CELL,
) -> Tensor:
    """Heads per cell of B images of one size: B tensors N×2 → B×h×w, float32.

    Memory beyond the result is bounded, whatever the number of points and the size.
    """
    grid = grid_hw(size_hw, cell)
    sigmas = [sigma] * len(points_xy) if isinstance(sigma, int | float) else list(sigma)
    if len(sigmas) != len(points_xy):
        raise InputError(f"{len(points_xy)} images but {len(sigmas)} values of sigma")
    if not points_xy:
        return torch.zeros(0, *grid)
    for points in points_xy:
        _check_points(points, size_hw)
    result = torch.zeros(len(points_xy), *grid, device=points_xy[0].device)
    for target, points, spread in zip(result, points_xy, sigmas, strict=True):
        _add_points(target, points.detach().double(), _check_sigma(spread, points), cell)
    return result


def _add_points(target: Tensor, points_xy: Tensor, sigma: float | Tensor, cell: int) -> None:
    """Add N points to an h×w target, strip by strip of its rows.

    With Y (points × rows of the strip) and X (points × columns) holding each point's mass
    along the two axes, a strip is the matrix product YᵀX.
    """
    if not len(points_xy):
        return
    rows, columns = target.shape
    widest = float(sigma.max()) if isinstance(sigma, Tensor) else sigma
    radius = math.ceil(widest * REACH / cell)
    if rows > _STRIP:  # points in the order of their rows, so that a strip's are neighbours
        order = points_xy[:, 1].argsort()
        points_xy = points_xy[order]
        sigma = sigma[order] if isinstance(sigma, Tensor) else sigma
    limit = points_xy.new_tensor((columns * cell, rows * cell))
    number, mass = _axis_masses(points_xy.T.contiguous(), sigma, radius, limit, cell)
    for top in range(0, rows, _STRIP):
        strip = target[top : top + _STRIP]
        first, last = 0, len(points_xy)
        if rows > _STRIP:
            reach = number.new_tensor((top - radius, top + len(strip) + radius))
            first, last = torch.searchsorted(number[1], reach).tolist()
        for start in range(first, last, _CHUNK):
            part = slice(start, min(start + _CHUNK, last))
            x = _spread_out(number[0, part], mass[0, part], columns)
            y = _spread_out(number[1, part] - top, mass[1, part], len(strip))
            strip.addmm_(y.T, x)


def _axis_masses(
    position: Tensor, sigma: float | Tensor, radius: int, limit: Tensor, cell: int
) -> tuple[Tensor, Tensor]:
    """Along both axes: 2×N positions → 2×N cell numbers and 2×N×(2·radius+1) masses around them.

    Beyond the grid, which ends at `limit` (2), there is no mass; the masses of a point sum to 1.
    Differences of erf lose digits in the tails, so they are taken in double precision.
    """
    number = position.div(cell, rounding_mode="floor")
    steps = torch.arange(-radius, radius + 2, dtype=position.dtype, device=position.device)
    edges = torch.add(steps * cell, number[..., None], alpha=cell)
    edges = edges.clamp_min_(0).minimum(limit[:, None, None]).sub_(position[..., None])
    scale = (sigma[:, None] if isinstance(sigma, Tensor) else sigma) * math.sqrt(2)
    cumulative = edges.div_(scale).erf_()
    total = cumulative[..., -1:] - cumulative[..., :1]
    return number.long(), cumulative.diff().div_(total).float()


def _spread_out(number: Tensor, mass: Tensor, cells: int) -> Tensor:
    """Windows → dense rows: N cell numbers and N×(2·radius+1) masses → N×cells."""
    radius = mass.shape[1] // 2
    margin = 2 * radius  # a point up to `radius` cells outside still reaches in
    dense = mass.new_zeros(len(mass), cells + 2 * margin)
    window = torch.arange(margin - radius, margin + radius + 1, device=mass.device)
    dense.scatter_(1, number[:, None] + window, mass)
    return dense[:, margin : margin + cells]


def adaptive_sigma(
    points_xy: Tensor, *, factor: float = 0.3, limits: tuple[float, float] = (1.0, 16.0)
) -> Tensor:
    """Geometry-adaptive σ: factor × mean distance to the three nearest heads, within limits.

    N×2 → N. A head with fewer than three others uses those there are; a lone head gets the
    upper limit. Compute it on the whole image, before cropping.

    >>> adaptive_sigma(torch.tensor([[0.0, 0.0], [30.0, 0.0], [0.0, 40.0]])).tolist()
    [10.5, 12.0, 13.5]
    """
    from scipy.spatial import cKDTree

    low, high = limits
    if len(points_xy) < 2:
        return torch.full((len(points_xy),), high, dtype=torch.float64)
    neighbours = min(3, len(points_xy) - 1)
    points = points_xy.detach().cpu().double().numpy()
    distances, _ = cKDTree(points).query(points, k=neighbours + 1)
    mean = torch.from_numpy(distances[:, 1:]).mean(dim=1)
    return (factor * mean).clamp(low, high).to(points_xy.device)


def _check_points(points_xy: Tensor, size_hw: tuple[int, int]) -> None:
    if points_xy.ndim != 2 or points_xy.shape[1] != 2:
        raise InputError(f"points must be N×2 (x, y), got shape {tuple(points_xy.shape)}")
    inside = (points_xy >= 0) & (points_xy < points_xy.new_tensor((size_hw[1], size_hw[0])))
    if bool(inside.all()):
        return
    if not bool(torch.isfinite(points_xy).all()):
        raise InputError("points hold NaN or infinite coordinates; correct or remove them")
    outside = points_xy[~inside.all(dim=1)]
    raise InputError(
        f"{len(outside)} of {len(points_xy)} points lie outside the image of "
        f"{size_hw[1]}×{size_hw[0]} px, first {outside[0].tolist()}; drop or correct them"
    )


def _check_sigma(sigma: float | Tensor, points_xy: Tensor) -> float | Tensor:
    if not isinstance(sigma, Tensor):
        if not 0 < sigma < math.inf:
            raise InputError(f"σ must be a positive number of pixels, got {sigma}")
        return float(sigma)
    if sigma.shape != points_xy.shape[:1]:
        raise InputError(f"{len(points_xy)} points but σ of shape {tuple(sigma.shape)}")
    if not bool((torch.isfinite(sigma) & (sigma > 0)).all()):
        raise InputError("every σ must be a positive number of pixels")
    return sigma.to(points_xy.device, torch.float64)
