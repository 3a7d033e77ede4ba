"""A teacher: averaged weights of the network that learns, asked without gradients."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from p3net.averaging import Warmup, averaged, follow, forgetful
from p3net.network.p3net import Output


class Teacher(nn.Module):
    """Follows a student after every step; its answers carry no gradient.

    It is saved with the method's own state, apart from the weights that counting needs.
    """

    def __init__(self, student: nn.Module, decay: float, warmup: Warmup = forgetful) -> None:
        super().__init__()
        self.network = averaged(student).eval()
        self.decay = decay
        self.warmup = warmup

    def train(self, mode: bool = True) -> Teacher:  # noqa: FBT001, FBT002, ARG002 (torch's own signature)
        """Stays in eval mode: a teacher drops nothing out."""
        return super().train(mode=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Output:
        """B×3×H×W in [0, 1] → what the averaged weights say of them."""
        return cast("Output", self.network(images))

    def follow(self, student: nn.Module, step: int) -> None:
        """Move towards the student after step `step` (from 0)."""
        follow(self.network, student, self.decay, step, self.warmup)
