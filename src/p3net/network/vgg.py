"""VGG-19, the paper's backbone, and a variant that sees small heads more finely.

Shapes: B images, H×W pixels, h×w = H/stride×W/stride positions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p3net.network.backbone import Backbone, Stage
from p3net.network.fusion import upsample
from p3net.network.winograd import Conv3x3


class VGG19(Backbone):
    """Configuration E without the last pool: stride 16, 512 channels, 20.024 M parameters.

    Modules are numbered as in torchvision, whose ImageNet weights load unchanged.
    """

    stride = 16
    channels = 512
    multiple = 16
    plan = (64, 64, "M", 128, 128, "M", 256, 256, 256, 256, "M", 512, 512, 512, 512, "M",
            512, 512, 512, 512)  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for entry in self.plan:
            if isinstance(entry, str):
                layers.append(nn.MaxPool2d(2))
                continue
            convolution = Conv3x3(inputs, entry)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            layers += [convolution, nn.ReLU(inplace=True)]
            inputs = entry
        self.features = _Fused(*layers)

    def stages(self) -> tuple[Stage, ...]:
        """Two blocks to stride 4, which take most of the memory; three more to stride 16."""
        return (
            Stage(self._wide_maps, 4, 128, halo=8, multiple=4, tile=512),
            Stage(self.features[10:], 4, 512, halo=28, multiple=4, tile=384),
        )

    def _wide_maps(self, normalised: Tensor) -> Tensor:
        """B×3×H×W → B×128×H/4×W/4, image by image: one's maps fit the cache, a batch's do not."""
        lower: Callable[[Tensor], Tensor] = self.features[:10]
        if len(normalised) == 1 or normalised.device.type != "cpu" or torch.compiler.is_compiling():
            return lower(normalised)
        return torch.cat([lower(image[None]) for image in normalised])

    def blocks(self) -> list[nn.Module]:
        """The five blocks between the pools."""
        pools = [i for i, layer in enumerate(self.features) if isinstance(layer, nn.MaxPool2d)]
        edges = [0, *pools, len(self.features)]
        return [self.features[a:b] for a, b in pairwise(edges)]


class VGG19Merged(VGG19):
    """VGG-19, its maps of strides 8 and 16 merged: stride 8, 256 channels.

    Not the paper's: small heads are seen twice as finely as at stride 16. Nothing in VGG-19
    bounds its activations, so each position's channels are first scaled to a mean square of one.
    """

    stride = 8
    channels = 256
    added = ("laterals", "smooth")

    def __init__(self) -> None:
        super().__init__()
        self.laterals = nn.ModuleDict(
            {stride: nn.Conv2d(512, self.channels, 1) for stride in ("8", "16")}
        )
        self.smooth = Conv3x3(self.channels, self.channels)

    def stages(self) -> tuple[Stage, ...]:
        """To stride 4, where the memory goes; to stride 8; then deeper and back."""
        return (
            Stage(self._wide_maps, 4, 128, halo=8, multiple=4, tile=512),
            Stage(self.features[10:27], 2, 512, halo=12, multiple=2, tile=384),
            Stage(self._merge, 1, self.channels, halo=10, multiple=2, tile=192),
        )

    def _merge(self, x: Tensor) -> Tensor:
        """B×512×h×w of stride 8 → B×256×h×w: the maps of strides 8 and 16 added."""
        fine = self.laterals["8"](_of_length_one(x))
        coarse = self.laterals["16"](_of_length_one(self.features[27:](x)))
        merged = fine + upsample(coarse, (fine.shape[-2], fine.shape[-1]))
        return F.relu(self.smooth(F.relu(merged)))


def _of_length_one(x: Tensor) -> Tensor:
    """Every position's channels scaled to a mean square of one."""
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)


class _Fused(nn.Sequential):
    """Layers in sequence; a convolution does the ReLU and the pool that follow it on its way."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            layer = layers.pop(0)
            if isinstance(layer, Conv3x3) and layers and isinstance(layers[0], nn.ReLU):
                layers.pop(0)
                pool = bool(layers) and isinstance(layers[0], nn.MaxPool2d)
                layers = layers[pool:]
                x = layer(x, relu=True, pool=pool)
            else:
                x = layer(x)
        return x
