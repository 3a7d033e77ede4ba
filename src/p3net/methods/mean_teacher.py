"""Mean Teacher (Tarvainen and Valpola 2017): agree with one's own average on unlabelled images.

Shapes: B images, h×w cells.
"""

from __future__ import annotations

from typing import Unpack, cast

from torch import Tensor, nn

from p3net.averaging import even
from p3net.data.loading import Step
from p3net.methods.base import Divisors, Losses
from p3net.methods.supervised import Labelled, Supervised
from p3net.methods.teacher import Teacher
from p3net.methods.views import strong_view
from p3net.network.p3net import Output
from p3net.structures import Batch


class MeanTeacher(Supervised):
    """A labelled loss, and the student's density on one view drawn to the teacher's on another.

    Works with every network: distributions and regressors alike. The teacher is the average of the
    student over the steps and gets no gradient.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        strong: float = 0.5,
        hidden: float = 0.0,
        decay: float = 0.99,
        **labelled: Unpack[Labelled],
    ) -> None:
        super().__init__(network, **labelled)
        self.strong = strong
        self.hidden = hidden
        self.teacher = Teacher(network, decay, warmup=even)

    def forward(self, step: Step, divisors: Divisors) -> Losses:
        """The labelled loss under its name, and "mt"."""
        terms = super().forward(step, divisors).terms
        if step.unlabelled is not None:
            terms["mt"] = self.unlabelled_loss(step.unlabelled, divisors)
        return Losses(terms)

    def unlabelled_loss(self, batch: Batch, divisors: Divisors) -> Tensor:
        """Mean over the step's unlabelled images and their cells of (student − teacher)²."""
        other_seeds = [seed ^ 1 for seed in batch.seeds]
        seen = strong_view(batch.images, batch.seeds, self.strong, self.hidden, self.soft)
        also = strong_view(batch.images, other_seeds, self.strong, self.hidden, self.soft)
        student = cast("Output", self.network(seen)).density
        teacher = cast("Output", self.teacher(also)).density
        return (student - teacher).square().mean(dim=(1, 2)).sum() / divisors.unlabelled

    def after_step(self, step: int) -> None:
        """The teacher follows."""
        self.teacher.follow(self.network, step)
