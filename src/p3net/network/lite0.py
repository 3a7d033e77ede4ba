"""EfficientNet-Lite0, for CPUs and few labels, and a variant with more between its taps.

Shapes: B images, H×W pixels, h×w = H/stride×W/stride positions.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p3net.network.backbone import Backbone, Stage
from p3net.network.depthwise import depthwise
from p3net.network.fusion import upsample
from p3net.network.winograd import Conv3x3


class Lite0(Backbone):
    """EfficientNet-Lite0, its maps of strides 8, 16 and 32 merged: stride 8, 128 channels.

    Module names are those of the published ImageNet weights. Batch statistics stay frozen, so
    that small batches, other batches and other processes change nothing.
    """

    stride = 8
    channels = 128
    multiple = 32
    added: tuple[str, ...] = ("laterals", "smooth")
    # kernel, stride, expansion, outputs, repeats; the strides 8, 16 and 32 end after these blocks
    plan = ((3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (5, 2, 6, 40, 2), (3, 2, 6, 80, 3),
            (5, 1, 6, 112, 3), (5, 2, 6, 192, 4), (3, 1, 6, 320, 1))  # fmt: skip
    taps = MappingProxyType({4: 40, 10: 112, 15: 320})
    lower = 5  # blocks down to stride 8

    def __init__(self) -> None:
        super().__init__(mean=(0.5,) * 3, deviation=(0.5,) * 3)
        self._conv_stem = _SameConv(3, 32, 3, 2)
        self._bn0 = _frozen_norm(32)
        blocks: list[nn.Module] = []
        inputs = 32
        for kernel, stride, expansion, outputs, repeats in self.plan:
            for index in range(repeats):
                step = stride if index == 0 else 1
                blocks.append(_InvertedBottleneck(inputs, outputs, kernel, step, expansion))
                inputs = outputs
        self._blocks = nn.ModuleList(blocks)
        self.laterals = nn.ModuleDict(
            {
                str(block): nn.Conv2d(width, self.channels, 1, dilation=spread(1))
                for block, width in self.taps.items()
            }
        )
        self.smooth = Conv3x3(self.channels, self.channels)

    def stages(self) -> tuple[Stage, ...]:
        """To stride 8, where the memory goes; then deeper, where the window grows, and back."""
        return (
            Stage(self._descend, 8, 40, halo=40, multiple=8, tile=768),
            Stage(self._merge, 1, self.channels, halo=56, multiple=4, tile=256),
        )

    def _descend(self, normalised: Tensor) -> Tensor:
        """B×3×H×W → B×40×H/8×W/8, channels last: depthwise filters are faster so."""
        if not torch.compiler.is_exporting():
            normalised = normalised.contiguous(memory_format=torch.channels_last)
        x = F.relu6(_normed(self._conv_stem, self._bn0, normalised))
        for block in self._blocks[: self.lower]:
            x = block(x)
        return x

    def _merge(self, x: Tensor) -> Tensor:
        """B×40×h×w of stride 8 → B×128×h×w: the maps of strides 8, 16 and 32 added."""
        maps = [self.laterals[str(self.lower - 1)](x)]
        for index, block in enumerate(self._blocks[self.lower :], start=self.lower):
            x = block(x)
            if index in self.taps:
                maps.append(self.laterals[str(index)](x))
        size_hw = (maps[0].shape[-2], maps[0].shape[-1])
        merged = torch.stack([upsample(each, size_hw) for each in maps]).sum(0)
        return F.relu(self.smooth(F.relu(merged)))

    def blocks(self) -> list[nn.Module]:
        """The stem and the sixteen bottlenecks."""
        return [nn.ModuleList((self._conv_stem, self._bn0)), *self._blocks]

    def train(self, mode: bool = True) -> Lite0:  # noqa: FBT001, FBT002 (torch's signature)
        """As in torch, but batch normalisation stays in eval mode."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def spread(kernel: int) -> int:
    """The dilation of a convolution that looks at neighbours at a distance of one.

    A 1×1 filter has no neighbours, so any dilation is the same; torch, with one thread and fewer
    than 16 images, takes a slow path for it unless there is one (`benchmarks/pointwise.py`).
    """
    return 2 if kernel == 1 else 1


class _SameConv(nn.Conv2d):
    """Convolution without bias whose padding is that of the published weights (TensorFlow's)."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1
    ) -> None:
        super().__init__(
            inputs, outputs, kernel, stride, dilation=spread(kernel), groups=groups, bias=False
        )
        total = kernel - stride  # for inputs that the stride divides
        self.pads = (total // 2, total - total // 2) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same with other weights."""
        even = self.pads[0] == self.pads[1]
        if not even:
            x = F.pad(x, self.pads)
        padding = self.pads[0] if even else 0
        if self.groups > 1:
            return depthwise(x, weight, bias, self.stride[0], padding)
        return F.conv2d(x, weight, bias, self.stride, padding, self.dilation)


def _frozen_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _normed(convolution: _SameConv, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """A convolution and its frozen normalisation as one convolution: one pass over the map."""
    assert norm.running_var is not None and norm.running_mean is not None  # noqa: S101, PT018
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    bias = norm.bias - norm.running_mean * scale
    return convolution.run(x, convolution.weight * scale.view(-1, 1, 1, 1), bias)


class _InvertedBottleneck(nn.Module):
    """Expand by 1×1, filter each channel, project by 1×1; added to the input where they match."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        if expansion != 1:
            self._expand_conv = _SameConv(inputs, hidden, 1, 1)
            self._bn0 = _frozen_norm(hidden)
        self.expands = expansion != 1
        self._depthwise_conv = _SameConv(hidden, hidden, kernel, stride, groups=hidden)
        self._bn1 = _frozen_norm(hidden)
        self._project_conv = _SameConv(hidden, outputs, 1, 1)
        self._bn2 = _frozen_norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(x, self.expand(x))

    def expand(self, x: Tensor) -> Tensor:
        """The wide map that is filtered."""
        return F.relu6(_normed(self._expand_conv, self._bn0, x)) if self.expands else x

    def contract(self, x: Tensor, wide: Tensor) -> Tensor:
        """The block's output, from its input and that map."""
        y = F.relu6(_normed(self._depthwise_conv, self._bn1, wide))
        y = _normed(self._project_conv, self._bn2, y)
        return torch.add(x, y) if self.adds else y


class Lite0Deep(Lite0):
    """EfficientNet-Lite0 with wider taps and more between them: stride 8, 128 channels.

    The maps are taken where a block has expanded them (240 and 672 channels instead of 40 and
    112), which costs nothing, and pass through bottlenecks of their own on the way back up.
    """

    added = (*Lite0.added, "coarse", "fine")
    taps = MappingProxyType({5: 240, 11: 672, 15: 320})

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Sequential(_Residual(self.channels))
        self.fine = nn.Sequential(_Residual(self.channels), _Residual(self.channels))

    def stages(self) -> tuple[Stage, ...]:
        """As before; what is new looks eight positions further."""
        below, above = super().stages()
        return below, above._replace(halo=above.halo + 8)

    def _merge(self, x: Tensor) -> Tensor:
        """B×40×h×w of stride 8 → B×128×h×w: from stride 32 up to 16 and up to 8."""
        maps = []
        for index, block in enumerate(self._blocks[self.lower :], start=self.lower):
            bottleneck = cast("_InvertedBottleneck", block)
            wide = bottleneck.expand(x)
            if index in (5, 11):  # the first of their stride, before they halve the map
                maps.append(self.laterals[str(index)](wide))
            x = bottleneck.contract(x, wide)
        fine, middle = maps
        merged = middle + upsample(self.laterals["15"](x), (middle.shape[-2], middle.shape[-1]))
        merged = self.coarse(F.relu(merged))
        merged = fine + upsample(merged, (fine.shape[-2], fine.shape[-1]))
        return F.relu(self.smooth(self.fine(F.relu(merged))))


class _Residual(nn.Module):
    """Expand by 1×1, filter each channel 5×5, project by 1×1, add; the identity at first."""

    def __init__(self, channels: int, expansion: int = 3) -> None:
        super().__init__()
        hidden = channels * expansion
        self.expand = nn.Conv2d(channels, hidden, 1, dilation=spread(1))
        self.filter = nn.Conv2d(hidden, hidden, 5, padding=2, groups=hidden)
        self.project = nn.Conv2d(hidden, channels, 1, dilation=spread(1))
        for parameter in self.project.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.expand(x))
        wide = F.relu(depthwise(wide, self.filter.weight, self.filter.bias, padding=2))
        return torch.add(x, self.project(wide))
