"""Weights averaged over the steps of a run: what counts in the end, and what teaches meanwhile."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def averaged(network: Network) -> Network:
    """A copy to be moved by `follow` alone."""
    return copy.deepcopy(network).requires_grad_(requires_grad=False)


@torch.no_grad()
def follow(average: nn.Module, network: nn.Module, decay: float, step: int) -> None:
    """Average ← d·average + (1−d)·network after step `step` (from 0).

    d rises to `decay` as (1+t)/(10+t), so that the first weights are soon forgotten.
    """
    keep = min(decay, (1 + step) / (10 + step))
    # Not by names: two names of one shared tensor would move it twice.
    for own, other in zip(average.parameters(), network.parameters(), strict=True):
        own.lerp_(other, 1 - keep)
    for kept, new in zip(average.buffers(), network.buffers(), strict=True):
        kept.copy_(new)
