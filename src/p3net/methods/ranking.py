"""Learning to rank (L2R, Liu et al. 2018): a part of an unlabelled image holds no more than all.

Shapes: K concentric crops, B images, H×W pixels.
"""

from __future__ import annotations

from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p3net.data.loading import Step
from p3net.errors import InputError
from p3net.losses.ranking import ranking
from p3net.methods.base import Divisors, Losses
from p3net.methods.supervised import Labelled, Supervised
from p3net.network.p3net import Output

CROPS = 5
FACTOR = 0.75


def concentric(images: Tensor, *, crops: int = CROPS, factor: float = FACTOR) -> list[Tensor]:
    """B×3×H×W → K tensors of the same shape, from the whole image inwards.

    Each crop has the centre of the one before and `factor` of its sides, to whole pixels, and is
    enlarged to H×W; every crop lies within the one before.
    """
    height, width = images.shape[-2:]
    smallest = factor ** (crops - 1)
    if crops < 2 or not 0 < factor < 1 or min(height, width) * smallest < 1:
        raise InputError(
            f"{crops} crops, each {factor:g} of the one before, cannot be cut from "
            f"{width}×{height} px; at least 2, each smaller, the last of a pixel or more"
        )
    result = [images]
    for k in range(1, crops):
        rows, columns = round(height * factor**k), round(width * factor**k)
        top, left = (height - rows) // 2, (width - columns) // 2
        part = images[..., top : top + rows, left : left + columns]
        result.append(
            F.interpolate(part, size=(height, width), mode="bilinear", align_corners=False)
        )
    return result


class Ranking(Supervised):
    """A labelled loss, and a penalty wherever a crop out-counts one that contains it.

    Every crop passes through the network by itself.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        crops: int = CROPS,
        factor: float = FACTOR,
        **labelled: Unpack[Labelled],
    ) -> None:
        super().__init__(network, **labelled)
        self.crops = crops
        self.factor = factor

    def forward(self, step: Step, divisors: Divisors) -> Losses:
        """The labelled loss under its name, and "l2r"."""
        terms = super().forward(step, divisors).terms
        if step.unlabelled is not None:
            terms["l2r"] = self.unlabelled_loss(step.unlabelled.images, divisors)
        return Losses(terms)

    def unlabelled_loss(self, images: Tensor, divisors: Divisors) -> Tensor:
        """Mean over the step's unlabelled images of Σ max(0, C(inner) − C(outer)), in people."""
        counts = [
            cast("Output", self.network(part)).density.sum(dim=(1, 2))
            for part in concentric(images, crops=self.crops, factor=self.factor)
        ]
        return ranking(torch.stack(counts)).sum() / divisors.unlabelled
