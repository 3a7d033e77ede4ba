"""The backbones by name, and the smallest of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p3net.network.backbone import Backbone, Stage
from p3net.network.lite0 import Lite0, Lite0Deep
from p3net.network.vgg import VGG19, VGG19Merged


class Small(Backbone):
    """Nine 3×3 convolutions for CPUs and tests: stride 16, 128 channels, 0.6 M parameters.

    Each pixel's channels are normalised on their own, which needs no batch and stays local.
    """

    stride = 16
    channels = 128
    multiple = 16
    widths = (16, 32, 64, 96, 128)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_NormalisedConv(3, self.widths[0], 1)]
        for inputs, outputs in pairwise(self.widths):
            layers += [_NormalisedConv(inputs, outputs, 2), _NormalisedConv(outputs, outputs, 1)]
        self.layers = nn.Sequential(*layers)

    def stages(self) -> tuple[Stage, ...]:
        """All at once."""
        return (Stage(self.layers, 16, 128, halo=48, multiple=16, tile=512),)

    def blocks(self) -> list[nn.Module]:
        """Its nine convolutions."""
        return list(self.layers)


class _NormalisedConv(nn.Module):
    """3×3 convolution, normalisation over each pixel's channels, ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.scale = nn.Parameter(torch.ones(outputs, 1, 1))
        self.shift = nn.Parameter(torch.zeros(outputs, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        variance, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
        return F.relu((x - mean) * torch.rsqrt(variance + 1e-5) * self.scale + self.shift)


BACKBONES: dict[str, Callable[[], Backbone]] = {
    "vgg19": VGG19,
    "vgg19-merged": VGG19Merged,
    "lite0": Lite0,
    "lite0-deep": Lite0Deep,
    "small": Small,
}
