"""Density → points by OT-M: optimal transport and minimisation in turn (Lin & Chan 2023).

n = round(ΣD) points share the density equally. Entropic optimal transport says which part of
it belongs to which point, every point moves to the barycentre of its part, and again, until
they rest.

The plan is sparse: a piece of density may go to its `NEAREST` points only, so a tile of M pieces
takes M×NEAREST numbers whatever its number of heads; where there are no more points than that,
it is the dense plan. Pieces are cells, or equal parts of a cell that holds much. Lengths inside
are in sides of a cell, so ε is in areas of a cell.

Shapes: h×w cells, M pieces, N points, K candidates of every piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from p3net.errors import InputError
from p3net.losses.transport import DRIFT

NEAREST = 8
"""K: the candidates of a piece of density."""

ROUNDS = 16
"""Transport and movement alternate at most so often."""

STILL = 1.0
"""Points that move less, on average and in pixels of the image, have arrived."""

SHARPEST, COOLING = 0.01, 0.75
"""ε falls from the largest cost to the first by this factor."""

ITERATIONS = 10
"""Sinkhorn's, at every ε."""

REACH = 3.0
"""Radius of a head in cells: 3σ of a target's Gaussian, which hold 99 % of it."""

PIECE = 0.25
"""Heads; a cell that holds more is cut into equal parts, so that points in it can part."""

HAZE = 0.01
"""The lightest cells, which hold this share of the people together, place nobody."""

TILE = 1 << 16
"""Pieces of density worked on at a time: about 30 MB."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """People found in one image, from the top down.

    Attributes:
        xy: N×2 float32, pixels of the image, inside it; read-only.
        scores: N float32 in [0, 1]: the share of a point's part of the density that lies within
            `REACH` cells of it. 0.99 for a lone head as targets draw it, less for density that
            was gathered from far around; read-only.
    """

    xy: NDArray[np.float32]
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.xy)


def place(
    density: ArrayLike,
    cell_xy: tuple[float, float],
    size_hw: tuple[int, int],
    *,
    tile: int = TILE,
) -> Points:
    """Density h×w in heads per cell → exactly round(ΣD) points. Nothing is drawn at random.

    Args:
        density: none negative, all finite.
        cell_xy: width and height of a cell in pixels of the image.
        size_hw: the image's height and width in pixels; cells may reach beyond it.
        tile: pieces of density worked on at a time. Larger maps are cut, where few heads stand,
            into tiles with whole numbers of heads.

    >>> place([[0.25, 0.25], [0.25, 0.25]], (8, 8), (16, 16)).xy.tolist()
    [[8.0, 8.0]]
    """
    cells = np.asarray(density, dtype=np.float64)
    _check(cells, cell_xy, size_hw, tile)
    number = round(float(cells.sum()))
    found: list[tuple[Array, Array]] = []
    if number:
        aspect = np.array(cell_xy) / sqrt(cell_xy[0] * cell_xy[1])
        still = STILL / sqrt(cell_xy[0] * cell_xy[1])
        xy, mass = _pieces(cells, aspect)
        mass *= number / mass.sum()
        for part, heads in _bisect(xy, mass, number, pieces=tile):
            found.append(_transport(xy[part], mass[part], heads, still))
        xy_cells, scores = (np.concatenate(each) for each in zip(*found, strict=True))
        xy_pixels = xy_cells / aspect * cell_xy
    else:
        xy_pixels, scores = np.empty((0, 2)), np.empty(0)
    edge = np.nextafter(np.array(size_hw[::-1], dtype=np.float32), np.float32(0))
    placed = np.clip(xy_pixels.astype(np.float32), 0, edge)
    order = np.lexsort(placed.T)
    result = Points(placed[order], scores[order].astype(np.float32).clip(0, 1))
    result.xy.flags.writeable = result.scores.flags.writeable = False
    return result


def _pieces(cells: Array, aspect: Array) -> tuple[Array, Array]:
    """Cells with mass → M×2 centres in sides of a cell and M masses, at most `PIECE` each."""
    flat = cells.ravel()
    light = np.argsort(flat, kind="stable")
    kept = np.sort(light[np.searchsorted(np.cumsum(flat[light]), HAZE * flat.sum(), "right") :])
    parts = np.ceil(np.sqrt(flat[kept] / PIECE)).clip(1).astype(np.int64)
    source = np.repeat(kept, parts**2)
    side = np.repeat(parts, parts**2)
    start = np.repeat(np.cumsum(parts**2) - parts**2, parts**2)
    row, column = np.divmod(np.arange(len(source)) - start, side)
    y, x = np.divmod(source, cells.shape[1])
    xy = np.stack([x + (column + 0.5) / side, y + (row + 0.5) / side], axis=1)
    return xy * aspect, flat[source] / side**2


def _bisect(
    xy: Array, mass: Array, heads: int, *, pieces: int = 0
) -> Iterator[tuple[NDArray[np.intp], int]]:
    """Cut along lines until a part has one head, or few enough pieces: (indices, heads) of each.

    A cut gives both sides a whole number of heads, at least one. The best leaves the least mass
    to the wrong side of that number and passes the least mass within half a cell.
    """
    waiting = [(np.arange(len(mass)), heads)]
    while waiting:
        part, count = waiting.pop()
        best = (np.inf, 0, 0.0, 0)
        if count > 1 and len(part) > pieces:
            best = min(_cut(xy[part, axis], mass[part], count, axis) for axis in (0, 1))
        cost, axis, line, left = best
        if cost == np.inf:
            yield part, count
            continue
        lower = xy[part, axis] < line
        waiting += [(part[~lower], count - left), (part[lower], left)]


def _cut(x: Array, mass: Array, heads: int, axis: int) -> tuple[float, int, float, int]:
    """The best cut across one axis: its cost in heads, the axis, where, and the heads below."""
    line, index = np.unique(x, return_inverse=True)
    if len(line) < 2:
        return np.inf, axis, 0.0, 0
    below = np.cumsum(np.bincount(index, weights=mass))
    below *= heads / below[-1]
    middle = (line[1:] + line[:-1]) / 2
    padded = np.concatenate([[0.0], below])
    ends = np.searchsorted(line, middle[:, None] + (-0.5, 0.5))
    seam = padded[ends[:, 1]] - padded[ends[:, 0]]
    left = np.rint(below[:-1]).clip(1, heads - 1)
    cost = np.abs(below[:-1] - left) + seam
    # Cuts far from the middle would make long lists of small parts.
    central = np.abs(below[:-1] / heads - 0.5) <= 0.25
    if central.any():
        cost = np.where(central, cost, np.inf)
    at = int(np.argmin(cost))
    return float(cost[at]), axis, float(middle[at]), int(left[at])


def _transport(xy: Array, mass: Array, heads: int, still: float) -> tuple[Array, Array]:
    """OT-M in one tile: M pieces → N×2 points and N scores."""
    from scipy.spatial import cKDTree

    # A part has more than one head only where all its mass stands in one place.
    seeds = [
        [np.average(xy[part], axis=0, weights=mass[part])] * count
        for part, count in _bisect(xy, mass, heads)
    ]
    points = np.concatenate(seeds)
    share = mass.sum() / heads
    potential = np.zeros(heads)
    nearest = min(NEAREST, heads)
    for _ in range(ROUNDS):
        distance, index = cKDTree(points).query(xy, k=nearest)
        cost = np.square(distance).reshape(len(xy), nearest)
        near = index.reshape(cost.shape).astype(np.int32)
        plan, potential = _plan(cost, near, mass, share, potential)
        gathered = np.bincount(near.ravel(), plan.ravel(), heads)
        moved = np.stack(
            [np.bincount(near.ravel(), (plan * x[:, None]).ravel(), heads) for x in xy.T], axis=1
        )
        moved = np.where(gathered[:, None] > 0, moved / gathered.clip(1e-300)[:, None], points)
        step = np.linalg.norm(moved - points, axis=1).mean()
        points = moved
        if step < still:
            break
    close = np.square(xy[:, None] - points[near]).sum(axis=2) <= REACH**2
    scores = np.bincount(near.ravel(), (plan * close).ravel(), heads) / gathered.clip(1e-300)
    return points, scores


def _plan(
    cost: Array, near: NDArray[np.int32], mass: Array, share: float, potential: Array
) -> tuple[Array, Array]:
    """Entropic transport of M masses to N points of equal share, by Sinkhorn with ε-scaling.

    Candidates near (M×K) at the cost (M×K) → the plan (M×K), whose rows add up to the masses,
    and the N potentials g, to start from the next time. With `P_ij = a_i softmax_j((g_j −
    C_ij)/ε)`, an iteration is `g_j += ε log(share / Σ_i P_ij)`; at one ε it is two products with
    a fixed kernel.
    """
    from scipy.sparse import csr_array

    shape = len(mass), len(potential)
    row_ends = np.arange(shape[0] + 1, dtype=np.int32) * cost.shape[1]
    entropic = max(float(cost.max()), SHARPEST)
    while True:
        weight = _softmax((potential[near] - cost) / entropic)
        kernel = csr_array((weight.ravel(), near.ravel(), row_ends), shape=shape)
        kernel_t = kernel.T
        scale = np.ones(shape[1])
        for _ in range(ITERATIONS):
            gathered = kernel_t @ (mass / (kernel @ scale)) * scale
            scale *= share / gathered.clip(1e-9 * share)
            if np.abs(np.log(scale)).max() > DRIFT:
                break
        potential = potential + entropic * np.log(scale)
        if entropic <= SHARPEST:
            return _softmax((potential[near] - cost) / entropic) * mass[:, None], potential
        entropic = max(entropic * COOLING, SHARPEST)


def _softmax(score: Array) -> Array:
    """Over the last axis, in place."""
    score -= score.max(axis=1, keepdims=True)
    np.exp(score, out=score)
    score /= score.sum(axis=1, keepdims=True)
    return score


def _check(cells: Array, cell_xy: tuple[float, float], size_hw: tuple[int, int], tile: int) -> None:
    if cells.ndim != 2:
        raise InputError(f"a density must be h×w, got shape {cells.shape}")
    if not np.isfinite(cells).all() or (cells < 0).any():
        raise InputError("a density must be finite and must not be negative")
    if not all(np.isfinite(side) and side > 0 for side in cell_xy):
        raise InputError(f"the sides of a cell must be above 0 px, got {cell_xy}")
    if min(size_hw) < 1:
        raise InputError(f"an image must have at least 1×1 px, got height and width {size_hw}")
    if tile < 1:
        raise InputError(f"a tile must hold at least one piece of density, got {tile}")
