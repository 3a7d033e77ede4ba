"""How far off a count may be: a spread from the predicted distributions, scaled by experience.

Every cell has a distribution, but cells are not independent: a network that takes bushes for
heads does so all over an image. Taken as independent, the spread of a total is √Σσ²; taken as
fully dependent, it is Σσ. The truth lies near the second, and no formula knows how near. Split
conformal prediction does: on n images with known counts that the network has not learned from,
the scores s = (truth − count) / u, with u the spread, are ranked. If the next image is
exchangeable with them, its score falls among theirs at a random place, and an interval as
wide as their quantile holds the truth with at least the probability asked for, whatever the
distribution (Lei et al. 2018). `docs/results.md` compares choices of u. That is a promise over all
images: dense ones, which a network misjudges most, would get too little and sparse ones too
much. So an image is ranked among those counted about as high, wherever there are enough of them
(Mondrian conformal prediction), and the promise holds for each such group.

Shapes: B images, h×w cells.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from p3net.errors import InputError
from p3net.network.fusion import FUSIONS
from p3net.network.p3net import Output, P3Net
from p3net.prediction import Grid, Interval

KEY = "calibration"
"""Where a model's metadata keep its calibration."""


def cell_variance(network: P3Net, output: Output) -> Tensor:
    """B×h×w: the variance of each cell's fused distribution.

    Fusion makes a mixture of the branches' distributions p and q. With weights ω and 1−ω its
    variance is ω·(Var p + (E p − m)²) + (1−ω)·(Var q + (E q − m)²), m = ω·E p + (1−ω)·E q: what
    each branch is unsure of, and how far the branches are apart.
    """
    fuse = FUSIONS[network.architecture.fusion]
    p, q = output.probabilities
    pairs = tuple(zip(network.intervals, (p, q), strict=True))
    one, two = (intervals.expectation(each, dim=1) for intervals, each in pairs)
    mean = fuse(p, q, one, two)
    first, second = (
        intervals.variance(each, dim=1) + (own - mean).square()
        for (intervals, each), own in zip(pairs, (one, two), strict=True)
    )
    return fuse(p, q, first, second)


def spread(variance: Grid, share: NDArray[np.float32] | None = None) -> float:
    """The spread u = 3 + Σσ of a total in heads: h×w variances σ² → a number above 0.

    The 3 stand for what an image that looks empty may hide.

    With `share`, h×w in [0, 1], only that part of each cell counts.
    """
    deviations = np.sqrt(variance)
    part = deviations if share is None else deviations * share
    return 3 + float(part.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a model's errors were, in units of its own spread, on images it had not learned from.

    Attributes:
        scores: (truth − count) / u of every image.
        data: which images these were.
        counts: what was counted in each, if that is known; both are kept in ascending order of
            these, or of the scores.
        chose: whether the model was chosen for its errors on these very images, which are then
            smaller than on others: they scale its intervals and do not make them calibrated.
    """

    scores: tuple[float, ...]
    data: str = ""
    counts: tuple[float, ...] = ()
    chose: bool = False

    def __post_init__(self) -> None:
        """Check and sort."""
        counts = self.counts or (0.0,) * len(self.scores)
        if not self.scores or not all(map(math.isfinite, (*self.scores, *counts))):
            raise InputError("a calibration needs scores, all of them finite")
        pairs = sorted(
            (float(count), float(each)) for count, each in zip(counts, self.scores, strict=True)
        )
        object.__setattr__(self, "scores", tuple(each for _, each in pairs))
        if self.counts:
            object.__setattr__(self, "counts", tuple(count for count, _ in pairs))

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Calibration | None:
        """The calibration that a model's metadata hold, if any."""
        record = metadata.get(KEY)
        if record is None:
            return None
        try:
            counts = tuple(record.get("counts", ()))
            chose = bool(record.get("chose", False))
            return cls(tuple(record["scores"]), str(record.get("data", "")), counts, chose)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError("the model's calibration is damaged; calibrate it again") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        known = {"counts": list(self.counts)} if self.counts else {}
        return {
            "scores": list(self.scores),
            **known,
            "images": len(self.scores),
            "data": self.data,
            "chose": self.chose,
        }

    def peers(self, count: float, level: float) -> tuple[float, ...]:
        """The scores of the images counted about as high as `count`.

        Groups of equal size, at least `GROUP` images and three times what the level takes, so that
        not the largest score alone decides; all of them where there are no more than that.
        """
        images = len(self.scores)
        least = max(GROUP, math.ceil(round(3 * level / (1 - level), 9)))
        groups = max(1, images // least) if self.counts else 1
        place = bisect.bisect_left(self.counts, count) if self.counts else 0
        own = min(place * groups // images, groups - 1)
        first, last = (-(-edge * images // groups) for edge in (own, own + 1))
        return self.scores[first:last]

    def multiplier(self, level: float, count: float) -> tuple[float, bool]:
        """How many spreads to either side of a count to go, and whether that is calibrated.

        With too few images for the level it is the largest there was, which is not; nor is it by
        images that chose the model. Both go no less far than a standard deviation would, since a
        few images may happen to be counted well.
        """
        sizes = sorted(map(abs, self.peers(count, level)))
        at = rank(level, len(sizes))
        if at <= len(sizes) and not self.chose:
            return sizes[at - 1], True
        return max(sizes[min(at, len(sizes)) - 1], normal(level)), False


GROUP = 30
"""Images that are enough for ranking a count among its like alone."""


def normal(level: float) -> float:
    """How many standard deviations to either side hold this share of a normal distribution."""
    return NormalDist().inv_cdf((1 + level) / 2)


def rank(level: float, images: int) -> int:
    """Which of n ranked scores bounds an interval: ⌈(n + 1)·level⌉; more than n: none does.

    >>> rank(0.9, 9), rank(0.9, 8), rank(0.9, 100)
    (9, 9, 91)
    """
    return math.ceil(round((images + 1) * level, 9))


def interval(
    count: float,
    unit: float,
    level: float,
    calibration: Calibration | None,
    *,
    part_of: float | None = None,
) -> Interval:
    """An interval around a count with spread `unit`.

    Without a calibration, or with too few images for the level, it is said to be uncalibrated;
    the spread is then taken for a standard deviation, or is as large as the worst image had it. So
    is that of a part of an image, of which whole images say little: it is ranked among the images
    like its own, which holds `part_of` in all.
    """
    if calibration is None:
        times, calibrated = normal(level), False
    else:
        times, calibrated = calibration.multiplier(level, count if part_of is None else part_of)
    reach = times * unit
    return Interval(max(0.0, count - reach), count + reach, level, calibrated and part_of is None)
