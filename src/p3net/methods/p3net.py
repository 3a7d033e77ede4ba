"""The paper on one page: PDM on labelled images, ECR on unlabelled ones (Algorithm 1).

Every labelled image is matched, cell by cell, to the interval its density falls into; on every
unlabelled image the two interleaved branches are asked to agree on the expected density
wherever both are sure. The loop adds them up: L = L_P + λ·L_E.

Shapes: B images, C intervals, h×w cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from p3net.data.loading import Step
from p3net.losses.ecr import confidence_mask, ecr
from p3net.methods.base import Divisors, Losses
from p3net.methods.supervised import Labelled, Supervised
from p3net.methods.teacher import Teacher
from p3net.methods.views import strong_view
from p3net.network.p3net import Output

Consistency = Callable[[Output, Output, Tensor], Tensor]
"""(output, plain, mask B×h×w) → B losses, each summed over the cells of the mask."""


def _densities(output: Output, plain: Output, mask: Tensor) -> Tensor:
    """ECR as printed on one view; across two, each branch against the other's plain one."""
    first, second = output.expectations
    if plain is output:
        return ecr(first, second, mask)
    other_first, other_second = plain.expectations
    return ecr(first, other_second, mask) + ecr(second, other_first, mask)


def _relative(output: Output, plain: Output, mask: Tensor) -> Tensor:
    """Across two views, each squared difference divided by the density there.

    The variance of a count grows with it: so weighed, dense cells do not rule the sum. Below the
    line stands what is being drawn, without a gradient, as in a Poisson's likelihood. If the plain
    density stood there, low ones among those that look alike would weigh more than high ones, and
    what they agree on would be their harmonic mean instead of their mean: dense crowds too low.
    """
    first, second = output.expectations
    other_first, other_second = (each.detach() for each in plain.expectations)
    weigh = torch.where(mask, 1 / (output.density.detach() + FEW), 0.0)
    apart = (first - other_second).square() + (second - other_first).square()
    return (apart * weigh).sum(dim=(1, 2))


FEW = 0.05
"""Heads per cell below which a difference counts as on bare ground."""

CONSISTENCIES: dict[str, Consistency] = {"densities": _densities, "relative": _relative}
"""How far the branches are apart: as in eq:consistency, or (not the paper's) relative to it."""


class P3NetMethod(Supervised):
    """PDM (or another labelled loss) and inter-branch Expectation Consistency Regularisation.

    Not in the paper, and off by default: with `strong`, `hidden` or `soft` above 0 the branches are
    compared across two views. Each branch's answer on a stronger view is drawn to the other
    branch's expectation on the plain one, which carries no gradient; the mask is that of the plain
    view. With `teacher` above 0 averaged weights with that decay look at the plain view.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        threshold: float = 0.5,
        strong: float = 0.0,
        hidden: float = 0.0,
        consistency: str = "densities",
        teacher: float = 0.0,
        **labelled: Unpack[Labelled],
    ) -> None:
        super().__init__(network, **labelled)
        self.threshold = threshold
        self.strong = strong
        self.hidden = hidden
        self.consistency = CONSISTENCIES[consistency]
        self.teacher = Teacher(network, teacher) if teacher else None

    def after_step(self, step: int) -> None:
        """The teacher follows."""
        if self.teacher is not None:
            self.teacher.follow(self.network, step)

    def forward(self, step: Step, divisors: Divisors) -> Losses:
        """The labelled losses under their names, and "ecr"; one pass through the network."""
        batches = [batch for batch in (step.labelled, step.unlabelled) if batch is not None]
        images = [batch.images for batch in batches]
        if step.labelled is not None:
            images[0] = self.labelled_view(step.labelled)
        plain = None
        if step.unlabelled is not None and (
            self.strong or self.hidden or self.soft or self.teacher
        ):
            with torch.no_grad():
                plain = cast("Output", (self.teacher or self.network)(step.unlabelled.images))
            images[-1] = strong_view(
                step.unlabelled.images, step.unlabelled.seeds, self.strong, self.hidden, self.soft
            )
        output = cast("Output", self.network(torch.cat(images)))
        terms: dict[str, Tensor] = {}
        records: dict[str, float] = {}
        labelled = len(step.labelled) if step.labelled is not None else 0
        if step.labelled is not None:
            part = _images(output, slice(0, labelled))
            terms |= self.labelled_terms(part, step.labelled, divisors)
        if step.unlabelled is not None:
            part = _images(output, slice(labelled, None))
            terms["ecr"], records = self.unlabelled_loss(part, plain or part, divisors)
        return Losses(terms, records)

    def unlabelled_loss(
        self, output: Output, plain: Output, divisors: Divisors
    ) -> tuple[Tensor, dict[str, float]]:
        """Mean over the step's unlabelled images of ECR (eq:consistency), and where it acts."""
        p, q = plain.probabilities
        mask = confidence_mask(p, q, self.threshold)
        each = self.consistency(output, plain, mask)
        if self.per_cell:
            each = each / mask[0].numel()
        with torch.no_grad():
            dense = (output.density * mask).sum() / mask.sum().clamp_min(1)
            apart = (output.expectations[0] - plain.expectations[1]).abs().sum()
            apart = apart / plain.density.sum().clamp_min(1e-6)
        records = {
            "mask_share": float(mask.float().mean()),
            "mask_density": float(dense),
            "disagreement": float(apart),
        }
        return each.sum() / divisors.unlabelled, records


def _images(output: Output, part: slice) -> Output:
    """The output for some images of the batch."""
    return Output(
        output.density[part],
        tuple(each[part] for each in output.logits),
        tuple(each[part] for each in output.probabilities),
        tuple(each[part] for each in output.expectations),
    )
