"""The paper on one page: PDM on labelled images, ECR on unlabelled ones (Algorithm 1).

Every labelled image is matched, cell by cell, to the interval its density falls into; on every
unlabelled image the two interleaved branches are asked to agree on the expected density
wherever both are sure. The loop adds them up: L = L_P + λ·L_E.

Shapes: B images, C intervals, h×w cells.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from p3net.data.loading import Step
from p3net.losses.ecr import confidence_mask, ecr
from p3net.methods.base import Divisors, Losses
from p3net.methods.supervised import Supervised
from p3net.methods.views import strong_view
from p3net.network.p3net import Output
from p3net.targets import SIGMA


class P3NetMethod(Supervised):
    """PDM (or another labelled loss) and inter-branch Expectation Consistency Regularisation.

    With `strong` above 0 (not in the paper) the branches are compared across two views: each
    branch's expectation on a stronger view is drawn to the other branch's on the plain one, which
    carries no gradient. The mask is that of the plain view.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        loss: str = "pdm",
        threshold: float = 0.5,
        sigma: float = SIGMA,
        per_cell: bool = False,
        strong: float = 0.0,
        hidden: float = 0.0,
    ) -> None:
        super().__init__(network, loss=loss, sigma=sigma, per_cell=per_cell)
        self.threshold = threshold
        self.strong = strong
        self.hidden = hidden

    def forward(self, step: Step, divisors: Divisors) -> Losses:
        """The labelled loss under its name, and "ecr"; one pass through the network for both."""
        batches = [batch for batch in (step.labelled, step.unlabelled) if batch is not None]
        images = [batch.images for batch in batches]
        plain = None
        if step.unlabelled is not None and (self.strong or self.hidden):
            with torch.no_grad():
                plain = cast("Output", self.network(step.unlabelled.images))
            images[-1] = strong_view(
                step.unlabelled.images, step.unlabelled.seeds, self.strong, self.hidden
            )
        output = cast("Output", self.network(torch.cat(images)))
        terms: dict[str, Tensor] = {}
        records: dict[str, float] = {}
        labelled = len(step.labelled) if step.labelled is not None else 0
        if step.labelled is not None:
            part = _images(output, slice(0, labelled))
            terms[self.loss] = self.labelled_loss(part, step.labelled, divisors)
        if step.unlabelled is not None:
            part = _images(output, slice(labelled, None))
            terms["ecr"], records = self.unlabelled_loss(part, plain or part, divisors)
        return Losses(terms, records)

    def unlabelled_loss(
        self, output: Output, plain: Output, divisors: Divisors
    ) -> tuple[Tensor, dict[str, float]]:
        """Mean over the step's unlabelled images of ECR (eq:consistency), and where it acts."""
        first, second = output.expectations
        p, q = plain.probabilities
        mask = confidence_mask(p, q, self.threshold)
        if plain is output:
            each = ecr(first, second, mask)
        else:
            other_first, other_second = plain.expectations
            each = ecr(first, other_second, mask) + ecr(second, other_first, mask)
        if self.per_cell:
            each = each / mask[0].numel()
        with torch.no_grad():
            dense = (output.density * mask).sum() / mask.sum().clamp_min(1)
            apart = (first - plain.expectations[1]).abs().sum()
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
