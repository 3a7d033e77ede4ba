"""Density intervals: borders and representative values, and how to fit them to cells.

A set of C intervals cuts [0, ∞) at C−1 ascending borders; interval i has one representative
value inside it. The paper prints two such sets ("The setting of density interval
partitions"); both stand here by name, with their borders.

Shapes: C intervals, K = C−1 foreground intervals, M cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from p3net.errors import InputError

BACKGROUND = 0.00016
"""Heads per cell below which a cell is background: the first border of the published tables."""

COUNT = 25
"""C, the number of intervals of a branch in the paper."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """C density intervals of one branch, in heads per cell.

    Attributes:
        borders: C−1 finite, strictly ascending, positive numbers.
        values: C representative values, each inside its interval (the borders included).

    >>> thirds = Intervals(borders=(0.1, 1.0), values=(0.0, 0.5, 2.0))
    >>> thirds.label(torch.tensor([0.0, 0.1, 0.7, 5.0])).tolist()
    [0, 0, 1, 2]
    >>> round(float(thirds.expectation(torch.tensor([0.5, 0.25, 0.25]))), 6)
    0.625
    """

    borders: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the order of the borders and the place of every value."""
        borders = tuple(map(float, self.borders))
        values = tuple(map(float, self.values))
        if len(values) != len(borders) + 1 or len(values) < 2:
            raise InputError(
                f"C values need C−1 borders (C ≥ 2), got {len(values)} and {len(borders)}"
            )
        if not all(map(math.isfinite, borders + values)):
            raise InputError("borders and values of intervals must be finite numbers")
        if borders[0] <= 0:
            raise InputError(f"the first border must be positive, got {borders[0]}")
        for low, high in pairwise(borders):
            if low >= high:
                raise InputError(f"borders must ascend strictly, but {high} follows {low}")
        edges = (0.0, *borders, math.inf)
        for index, value in enumerate(values):
            if not edges[index] <= value <= edges[index + 1]:
                raise InputError(
                    f"value {value} of interval {index} is outside "
                    f"[{edges[index]}, {edges[index + 1]}]"
                )
        object.__setattr__(self, "borders", borders)
        object.__setattr__(self, "values", values)

    def __len__(self) -> int:
        """C."""
        return len(self.values)

    def label(self, density: Tensor) -> Tensor:
        """The interval of every cell: the number of borders strictly below its value.

        Any shape to the same shape, int64. Densities are finite and not negative.
        """
        borders = torch.tensor(self.borders, dtype=density.dtype, device=density.device)
        return torch.bucketize(density, borders)

    def expectation(self, probabilities: Tensor, dim: int = -1) -> Tensor:
        """Σ_j P(x_j) x_j (eq:distribution) over dimension `dim`, which has length C."""
        return self._moment(probabilities, dim, power=1)

    def variance(self, probabilities: Tensor, dim: int = -1) -> Tensor:
        """Σ_j P(x_j) x_j² − (Σ_j P(x_j) x_j)²: the spread of the distribution, never negative."""
        mean = self.expectation(probabilities, dim)
        return (self._moment(probabilities, dim, power=2) - mean.square()).clamp_min(0)

    def _moment(self, probabilities: Tensor, dim: int, power: int) -> Tensor:
        if probabilities.shape[dim] != len(self):
            raise InputError(
                f"a distribution over {len(self)} intervals was expected along dimension {dim}, "
                f"got shape {tuple(probabilities.shape)}"
            )
        values = torch.tensor(self.values, dtype=probabilities.dtype, device=probabilities.device)
        return probabilities.movedim(dim, -1) @ values.pow(power)

    def to_dict(self) -> dict[str, list[float]]:
        """Plain lists, for JSON; every bit of the numbers is kept."""
        return {"borders": list(self.borders), "values": list(self.values)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Sequence[float]]) -> Intervals:
        """The inverse of `to_dict`."""
        try:
            return cls(borders=tuple(record["borders"]), values=tuple(record["values"]))
        except (KeyError, TypeError) as error:
            raise InputError(f"intervals need 'borders' and 'values': {error!r}") from None


Pair = tuple[Intervals, Intervals]
"""The intervals of branch 1 and branch 2."""

# Fitted by UEPNet (Wang et al., ICCV 2021) on ShanghaiTech A with geometry-adaptive kernels and
# published with the authors' code; the paper prints the representative values.
_BRANCH_1 = Intervals(
    borders=(
        0.00016, 0.001929451850323205, 0.008082773401606307, 0.016486622634959903,
        0.027201606048777624, 0.040376651083361484, 0.05635653159451606, 0.07564311114549255,
        0.09873047409540833, 0.1263212381117904, 0.15925543689080027, 0.19863706203617743,
        0.24597249461239232, 0.3025175130111165, 0.3707221162631514, 0.4537206813235279,
        0.5560940547912038, 0.6838185522926952, 0.8476390438597705, 1.0642417040590761,
        1.3645639664610938, 1.8055319029995607, 2.541316177212592, 3.87642023839676,
    ),
    values=(
        0.0, 0.0008736941759623788, 0.00460105649110827, 0.011909992029514994,
        0.021447560775165905, 0.03335742127399603, 0.04785158393927123, 0.06538952954794941,
        0.08647975537451662, 0.11168024780931907, 0.14175821026385504, 0.17778540202168958,
        0.22097960677712483, 0.2724192081348686, 0.3344926685808885, 0.40938709885499597,
        0.5012436541947841, 0.6149288298909453, 0.7585325340575756, 0.9452185066011628,
        1.1967563985336944, 1.5541906336372862, 2.0969205546489382, 2.9970217618726727,
        4.51882041862729,
    ),
)  # fmt: skip
_BRANCH_2 = Intervals(
    borders=(
        0.00016, 0.0048202634789049625, 0.01209819596260786, 0.02164922095835209,
        0.03357841819524765, 0.04810526967048645, 0.06570728123188019, 0.08683456480503082,
        0.11207923293113708, 0.1422334909439087, 0.17838051915168762, 0.22167329490184784,
        0.2732916474342346, 0.33556100726127625, 0.41080838441848755, 0.5030269622802734,
        0.6174761652946472, 0.762194037437439, 0.9506691694259644, 1.2056223154067993,
        1.5706151723861694, 2.138580322265625, 3.233219861984253, 7.914860725402832,
    ),
    values=(0.0, *_BRANCH_1.borders[1:], 8.247815291086832),
)  # fmt: skip

PUBLISHED: Pair = (_BRANCH_1, _BRANCH_2)
"""The paper's interleaved tables."""


# --- fitting -----------------------------------------------------------------------------------

Edges = Callable[[NDArray[np.float64], int], list[float]]
"""Sorted foreground cells and K → at most K upper borders but for the last, ascending."""


def _uniform_error(cells: NDArray[np.float64], count: int) -> list[float]:
    """UEP: (cells in the interval) × (its length) is one constant E for all intervals.

    For a given E a sweep upwards closes an interval at the first value where the product
    reaches E; E is bisected until there are `count` intervals, what remains being the last.
    """

    def sweep(error: float) -> list[float]:
        borders: list[float] = []
        start, low = 0, BACKGROUND
        while len(borders) < count:
            # (j−start+1)·(cells[j]−low) rises with j: bisect for the first j that reaches E.
            below, reached = start - 1, len(cells)
            while reached - below > 1:
                middle = (below + reached) // 2
                if (middle - start + 1) * (cells[middle] - low) >= error:
                    reached = middle
                else:
                    below = middle
            if reached == len(cells):
                break
            low = float(cells[reached])
            start = int(np.searchsorted(cells, low, side="right"))
            if start == len(cells):
                break
            borders.append(low)
        return borders

    few, many = len(cells) * float(cells[-1]), 0.0  # E that gives one interval; E that gives most
    for _ in range(200):
        middle = (few + many) / 2
        if len(sweep(middle)) >= count:
            many = middle
        else:
            few = middle
    return sweep(few)


def _uniform_length(cells: NDArray[np.float64], count: int) -> list[float]:
    """UniformLen: intervals of equal length from the background's border to the largest cell."""
    borders = np.linspace(BACKGROUND, cells[-1], count + 1)[1:-1]
    return [float(border) for border in borders]


def _uniform_number(cells: NDArray[np.float64], count: int) -> list[float]:
    """UniformNum: the same number of cells in every interval, as far as ties allow."""
    ranks = np.arange(1, count) * len(cells) // count - 1
    return sorted({float(cells[max(int(rank), 0)]) for rank in ranks} - {float(cells[-1])})


PARTITIONS: dict[str, Edges] = {
    "uep": _uniform_error,
    "uniform-length": _uniform_length,
    "uniform-number": _uniform_number,
}
"""The partition strategies of tab:partition."""


def fit(
    cells: ArrayLike | Tensor,
    *,
    partition: str = "uep",
    count: int = COUNT,
    interleaved: bool = True,
) -> Pair:
    """Fit both branches' intervals to target cells (of the labelled images only).

    Branch 2 takes the partition's borders and the mean of the cells in each interval as its
    value. Branch 1 interleaves: its borders are the background's and branch 2's foreground
    values but the last, its values the means again. With `interleaved=False` both are branch 2.

    An interval that no cell falls into is joined to the one below, so that fewer distinct
    cells than `count` give fewer intervals: `len(pair[0])` states how many.

    Args:
        cells: M densities in heads per cell, any shape.
        partition: a key of `PARTITIONS`.
        count: C, the number of intervals wanted, the background's included; at least 2.
        interleaved: shift branch 1 by half an interval.

    >>> one, two = fit([0.0, 0.1, 0.2, 0.4, 0.8, 1.6], partition="uniform-number", count=3)
    >>> two.borders, [round(value, 3) for value in two.values]
    ((0.00016, 0.2), [0.0, 0.15, 0.933])
    >>> [round(border, 3) for border in one.borders]
    [0.0, 0.15]
    """
    if partition not in PARTITIONS:
        raise InputError(f"unknown partition {partition!r}; use one of {', '.join(PARTITIONS)}")
    if count < 2:
        raise InputError(f"at least 2 intervals are needed, got {count}")
    array = np.asarray(cells.detach().cpu() if isinstance(cells, Tensor) else cells, np.float64)
    array = array.ravel()
    if not np.isfinite(array).all() or (array < 0).any():
        raise InputError("cells must be finite and not negative to fit intervals to them")
    foreground = np.sort(array[array > BACKGROUND])
    if not foreground.size:
        raise InputError(
            f"none of the {array.size} cells holds more than {BACKGROUND} heads: intervals cannot "
            "be fitted; label an image with people in it, or use the published intervals"
        )
    second = _with_means(PARTITIONS[partition](foreground, count - 1), foreground)
    if not interleaved:
        return second, second
    return _with_means(list(second.values[1:-1]), foreground), second


def _with_means(inner: list[float], foreground: NDArray[np.float64]) -> Intervals:
    """Borders [background, *inner] less those of empty intervals, and the mean of each interval."""
    borders, values = [BACKGROUND], [0.0]
    start, upper = 0, BACKGROUND
    for border in (*inner, math.inf):
        end = int(np.searchsorted(foreground, border, side="right"))
        if end == start:
            continue
        if start:
            borders.append(upper)  # the border below this interval: the last one closed
        inside = foreground[start:end]
        values.append(float(inside.mean().clip(inside[0], inside[-1])))  # a mean of equals may not
        start, upper = end, border
    return Intervals(tuple(borders), tuple(values))
