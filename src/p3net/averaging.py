"""Weights averaged over the steps of a run: what counts in the end, and what teaches meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def averaged(network: Network) -> Network:
    """A copy to be moved by `follow` alone."""
    return copy.deepcopy(network).requires_grad_(requires_grad=False)


Warmup = Callable[[int], float]
"""The largest decay after step t (from 0)."""


def forgetful(step: int) -> float:
    """The first weights are soon forgotten: about the last ninth of the steps counts."""
    return (1 + step) / (10 + step)


def even(step: int) -> float:
    """The mean of all steps so far: Mean Teacher's 1 − 1/(t+1)."""
    return 1 - 1 / (step + 1)


@torch.no_grad()
def follow(
    average: nn.Module,
    network: nn.Module,
    decay: float,
    step: int,
    warmup: Warmup = forgetful,
) -> None:
    """Average ← d·average + (1−d)·network after step `step` (from 0), d rising to `decay`."""
    keep = min(decay, warmup(step))
    # Not by names: two names of one shared tensor would move it twice.
    for own, other in zip(average.parameters(), network.parameters(), strict=True):
        own.lerp_(other, 1 - keep)
    for kept, new in zip(average.buffers(), network.buffers(), strict=True):
        kept.copy_(new)
