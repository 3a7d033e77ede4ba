"""Optimal transport: Sinkhorn's algorithm, and DM-Count's loss (Wang et al. 2020), tab:dm_loss.

Shapes: B images, N heads (a different number in every image), H×W cells of the stride-8 grid;
for transport alone, M sources and N destinations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from p3net.errors import InputError
from p3net.losses.bayesian import aligned, cell_centres

EMPTY = 1e-6
"""A density that sums to less (in people) has no shape to compare."""

DRIFT = 20.0
"""How far, in natural logarithms, scalings may leave 1 before they enter the potentials."""


def dm_count(
    density: Tensor,
    points_xy: Sequence[Tensor],
    *,
    cell: int = 8,
    transport: float = 0.1,
    variation: float = 0.01,
    entropic: float = 10.0,
    iterations: int = 100,
) -> Tensor:
    """DM-Count: the number of people, and where they stand.

    With the density D̂ and the heads as a map z (each 1 in its cell), ‖·‖ the sum over the cells,
    `|‖D̂‖ − ‖z‖| + τ OT(D̂/‖D̂‖, heads/N) + υ ‖z‖ ‖D̂/‖D̂‖ − z/‖z‖‖₁`. OT moves the density from
    the centres of the cells to the heads themselves at their squared distance in px²; its value
    is the dual's, `<D̂/‖D̂‖, f> + <1/N, g>`, and its gradient flows through D̂ alone, the
    potentials held: `f/‖D̂‖ − <f, D̂>/‖D̂‖²`. Without heads, or without density, only the first
    term has a meaning and only it is left.

    100 iterations at ε = 10 px² are DM-Count's own and stop short: OT comes out up to 40 % low
    when density and heads are far apart. Memory is about 3 arrays of N×H×W an image while it
    runs; none is kept for the gradient.

    Below, half of the density stands on the head and half 8 px beside it:
    |1 − 1| + 0.1 · (½·0 + ½·64) + 0.01 · (½ + ½) = 3.21.

    >>> dm_count(torch.tensor([[[0.5, 0.5]]]), [torch.tensor([[4.0, 4.0]])])
    tensor([3.2100])

    Args:
        density: B×H×W, people in every cell, none negative.
        points_xy: B tensors N×2, pixels of the crop; a point up to one cell beyond the grid
            counts in the nearest cell.
        cell: side of a cell in px.
        transport: τ.
        variation: υ.
        entropic: ε of `sinkhorn`, in px².
        iterations: those of `sinkhorn`.

    Returns:
        B values, each for a whole image.
    """
    if cell <= 0:
        raise InputError(f"the side of a cell must be above 0, got {cell}")
    density, heads = aligned(density, points_xy)
    if bool((density < 0).any()):
        raise InputError("a density to transport must not be negative")
    x, y = cell_centres(density, cell)
    size = torch.tensor([len(x), len(y)], device=density.device)
    values = []
    for image, points in zip(density, heads, strict=True):
        mass, people = image.sum(), len(points)
        value = (mass - people).abs()
        if people and bool(mass > EMPTY):
            column, row = _cells(points, cell, size).unbind(dim=1)
            marks = torch.zeros_like(image)
            marks.index_put_((row, column), marks.new_ones(()), accumulate=True)
            share = image / mass
            x_squared = (x.unsqueeze(1) - points[:, 0]).square()
            y_squared = (y.unsqueeze(1) - points[:, 1]).square()
            cost = (y_squared.unsqueeze(1) + x_squared).flatten(0, 1)
            even = image.new_full((people,), 1 / people)
            f, g = sinkhorn(
                cost, share.detach().flatten(), even, entropic=entropic, iterations=iterations
            )
            moved = (share.flatten() * f).sum() + g.mean()
            misplaced = (share * people - marks).abs().sum()
            value = value + transport * moved + variation * misplaced
        values.append(value)
    return torch.stack(values)


def _cells(points: Tensor, cell: int, size_wh: Tensor) -> Tensor:
    """Column and row (N×2) of every point."""
    index = (points / cell).floor().long()
    if bool(((index < -1) | (index > size_wh)).any()):
        raise InputError(
            f"a point lies outside the grid of {size_wh.tolist()} columns and rows of {cell} px; "
            "give points in pixels of the crop"
        )
    return index.clamp(min=0).minimum(size_wh - 1)


@torch.no_grad()
def sinkhorn(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    entropic: float,
    iterations: int,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Potentials of entropic optimal transport, by Sinkhorn's algorithm in the log domain.

    They maximise `<a, f> + <b, g> − ε <a ⊗ b, exp((f ⊕ g − C)/ε) − 1>`, whose maximum is the
    least `<P, C> + ε KL(P | a ⊗ b)` over the plans P with margins a and b. The plan is
    `P = a ⊗ b · exp((f ⊕ g − C)/ε)`. One iteration is
    `g_j = −ε log Σ_i a_i exp((f_i − C_ij)/ε)`, then `f_i = −ε log Σ_j b_j exp((g_j − C_ij)/ε)`;
    so P has the margin a exactly, and f is finite also where a is 0. (Measured against the
    entropy of P alone, f would contain ε log a besides and be infinite there.)

    As long as the potentials move little, iterations are products with a fixed plan instead of
    logarithms of sums of exponentials: the same numbers, many times faster.

    For ε-scaling call it with falling values of `entropic`, each starting from the last f.
    With one destination everything goes there: f and g add up to the cost.

    >>> cost, a, b = torch.tensor([[3.0], [5.0]]), torch.tensor([0.5, 0.5]), torch.tensor([1.0])
    >>> f, g = sinkhorn(cost, a, b, entropic=0.1, iterations=1)
    >>> f + g
    tensor([3., 5.])

    Args:
        cost: C, M×N.
        a: M masses, none negative, of the same sum as b.
        b: N masses, none negative.
        entropic: ε, in the units of the cost.
        iterations: at least 1.
        start: M values of f to start from; 0 if not given.

    Returns:
        f of M and g of N values, without gradient.
    """
    if cost.shape != (len(a), len(b)) or a.ndim != 1 or b.ndim != 1:
        raise InputError(
            "expected a cost of M×N with M and N masses, "
            f"got {tuple(cost.shape)}, {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if start is not None and start.shape != a.shape:
        raise InputError(f"expected {len(a)} potentials to start from, got {tuple(start.shape)}")
    if not entropic > 0 or iterations < 1:
        raise InputError(
            f"entropic must be above 0 and iterations at least 1, got {entropic} and {iterations}"
        )
    for name, masses in (("a", a), ("b", b)):
        if bool((masses < 0).any()) or not float(masses.sum()) > 0:
            raise InputError(f"the masses {name} must not be negative and their sum above 0")
    with torch.autocast(cost.device.type, enabled=False):
        return _sinkhorn(cost, a, b, entropic=entropic, iterations=iterations, start=start)


def _sinkhorn(
    cost: Tensor, a: Tensor, b: Tensor, *, entropic: float, iterations: int, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    # All in units of ε: u = f/ε, v = g/ε, kernel = exp(u + v − C/ε), scaled by s and t.
    scaled, log_a, log_b = cost / entropic, a.log().unsqueeze(1), b.log()
    u = torch.zeros_like(a) if start is None else start.to(cost) / entropic
    v, s, t = torch.zeros_like(b), torch.ones_like(a), torch.ones_like(b)
    kernel: Tensor | None = None
    for _ in range(iterations):
        if kernel is not None:
            next_t = 1 / ((a * s) @ kernel)
            next_s = 1 / (kernel @ (b * next_t))
            # What the kernel has rounded to 0 cannot matter below this drift; written so that
            # NaN, from a sum that is 0, fails too.
            if float(torch.cat([next_s, next_t]).log().abs().max()) < DRIFT:
                s, t = next_s, next_t
                continue
            u = u + s.log()
        v = -torch.logsumexp(log_a + u.unsqueeze(1) - scaled, dim=0)
        u = -torch.logsumexp(log_b + v - scaled, dim=1)
        kernel = (u.unsqueeze(1) + v - scaled).exp_()
        s, t = torch.ones_like(a), torch.ones_like(b)
    return (u + s.log()) * entropic, (v + t.log()) * entropic
