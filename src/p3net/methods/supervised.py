"""Learning from the labelled images alone, by any loss of the core.

Shapes: B images, C intervals, h×w cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, cast

from torch import Tensor, nn

from p3net.data.loading import Step
from p3net.errors import InputError
from p3net.intervals import Pair
from p3net.losses.bayesian import bayesian
from p3net.losses.pdm import pdm
from p3net.losses.pointwise import cross_entropy, squared_error
from p3net.losses.transport import dm_count
from p3net.methods.base import Divisors, Losses, Method
from p3net.methods.views import strong_view
from p3net.network.p3net import Output
from p3net.structures import Batch
from p3net.targets import SIGMA, densities

LabelledLoss = Callable[[Output, Batch, Tensor, Pair], Tensor]
"""(output, batch, target B×h×w, intervals) → B losses, each summed over cells."""


def _over_branches(loss: Callable[[Output, int, Tensor], Tensor]) -> LabelledLoss:
    """A loss on each branch's distribution against its own labels, added up."""

    def both(output: Output, _batch: Batch, target: Tensor, intervals: Pair) -> Tensor:
        one = loss(output, 0, intervals[0].label(target))
        return one + loss(output, 1, intervals[1].label(target))

    return both


def _pdm(norm: int, *, rooted: bool) -> LabelledLoss:
    return _over_branches(
        lambda output, branch, labels: pdm(
            output.probabilities[branch], labels, norm=norm, rooted=rooted
        )
    )


LABELLED: dict[str, LabelledLoss] = {
    "pdm": _pdm(2, rooted=False),
    "pdm-rooted": _pdm(2, rooted=True),
    "pdm-l1": _pdm(1, rooted=False),
    "ce": _over_branches(lambda output, branch, y: cross_entropy(output.logits[branch], y)),
    "mse": _over_branches(lambda output, branch, y: squared_error(output.probabilities[branch], y)),
    "bl": lambda output, batch, _target, _intervals: bayesian(
        output.density, _points(batch), batch.shorter_sides
    ),
    "dm": lambda output, batch, _target, _intervals: dm_count(output.density, _points(batch)),
}
"""Losses on labelled images; all but bl and dm need a network with intervals (tab:dm_loss)."""


TOTAL = "total"
"""The name of the loss on a crop's count."""


def _points(batch: Batch) -> tuple[Tensor, ...]:
    if batch.points_xy is None:
        raise InputError("labelled crops were expected, these have no points")
    return batch.points_xy


class Labelled(TypedDict, total=False):
    """How every method learns from its labelled images: the words of `Supervised`."""

    loss: str
    sigma: float
    per_cell: bool
    light: float
    soft: float
    total: bool


class Supervised(Method):
    """One loss on the labelled part of a step.

    Not in the paper, and off by default: with `total` there is a second one, how far each crop's
    count is off. A squared distance of distributions hardly minds a little probability on every
    cell of bare ground, but a count adds it all up.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        loss: str = "pdm",
        sigma: float = SIGMA,
        per_cell: bool = False,
        light: float = 0.0,
        soft: float = 0.0,
        total: bool = False,
    ) -> None:
        super().__init__(network)
        if loss not in LABELLED:
            raise InputError(f"unknown loss {loss!r}; use one of {', '.join(LABELLED)}")
        if loss not in ("bl", "dm") and not hasattr(network, "intervals"):
            raise InputError(f"loss {loss!r} needs density intervals; a regressor takes bl or dm")
        self.loss = loss
        self.sigma = sigma
        self.per_cell = per_cell
        self.light = light
        self.soft = soft
        self.total = total

    def forward(self, step: Step, divisors: Divisors) -> Losses:
        """The loss under its own name, and "total"; unlabelled crops are not looked at."""
        if step.labelled is None:
            return Losses({})
        output = cast("Output", self.network(self.labelled_view(step.labelled)))
        return Losses(self.labelled_terms(output, step.labelled, divisors))

    def labelled_view(self, batch: Batch) -> Tensor:
        """The labelled crops as they are learned from: in other `light`, and `soft`."""
        if not (self.light or self.soft):
            return batch.images
        return strong_view(batch.images, batch.seeds, self.light, soft=self.soft)

    def labelled_terms(self, output: Output, batch: Batch, divisors: Divisors) -> dict[str, Tensor]:
        """Means over the step's labelled images of the losses, summed over cells (or averaged)."""
        size_hw = (batch.images.shape[-2], batch.images.shape[-1])
        target = densities(_points(batch), size_hw, sigma=self.sigma)
        target = target.to(output.density.device)
        intervals = getattr(self.network, "intervals", None)
        losses = {self.loss: LABELLED[self.loss](output, batch, target, cast("Pair", intervals))}
        if self.total:
            losses[TOTAL] = (output.density.sum((1, 2)) - target.sum((1, 2))).abs()
        scale = divisors.labelled * (target[0].numel() if self.per_cell else 1)
        return {name: each.sum() / scale for name, each in losses.items()}
