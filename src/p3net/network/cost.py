"""What a network costs: parameters and multiply-adds, counted in full and the paper's way.

The figures of tab:cost come from a counter that visits modules: it sees convolutions, linear
layers and normalisations, and misses what attention does inside, projections included. Both
counts are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from p3net.network.decoder import Attention
from p3net.network.p3net import P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.network.winograd import Conv3x3
from p3net.targets import grid_hw


@dataclass(frozen=True, slots=True)
class Cost:
    """Parameters and multiply-adds of one forward pass of one image."""

    parameters: int
    multiply_adds: int
    module_parameters: int
    module_multiply_adds: int


PAPER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "BL": Regressor,
    "VGG19+Trans": lambda: Regressor(RegressorArchitecture(encoder_layers=4)),
    "P³Net": P3Net,
}
"""The columns of tab:cost."""


def cost(build: Callable[[], nn.Module], size_hw: tuple[int, int]) -> Cost:
    """Count a network for one image of H×W pixels, on torch's `meta` device: nothing is computed.

    >>> bl = cost(PAPER_MODELS["BL"], (384, 384))
    >>> round(bl.parameters / 1e6, 2), round(bl.multiply_adds / 1e9, 2)
    (21.5, 60.73)
    """
    grid_hw(size_hw)
    with torch.device("meta"):
        network = build().eval().requires_grad_(requires_grad=False)
        image = torch.empty(1, 3, *size_hw)
    seen = 0

    def see(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal seen
        if isinstance(module, Conv3x3):  # a position each, though its output may be pooled already
            seen += inputs[0][:, 0].numel() * module.weight.numel()
        elif isinstance(module, nn.Conv2d | nn.Linear):  # a number sums over a row of the weight
            seen += output.numel() * module.weight[0].numel()
        else:  # a normalisation scales and shifts twice
            seen += output.numel() * 2

    for module in _visible(network):
        module.register_forward_hook(see)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(image)
    return Cost(
        parameters=sum(p.numel() for p in network.parameters()),
        multiply_adds=counter.get_total_flops() // 2,
        module_parameters=sum(p.numel() for m in _visible(network) for p in m.parameters()),
        module_multiply_adds=seen,
    )


def _visible(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a counter of modules knows: not those inside an attention."""
    if isinstance(module, nn.Conv2d | nn.Linear | nn.LayerNorm):
        yield module
    elif not isinstance(module, Attention):
        for child in module.children():
            yield from _visible(child)
