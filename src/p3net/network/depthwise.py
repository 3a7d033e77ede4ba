"""5×5 convolutions of each channel by itself, with a fast gradient of their filters on CPUs.

oneDNN has a kernel for the gradient of depthwise filters up to three columns wide. Wider ones fall
to the kernel for groups of sixteen channels, which does sixteen times the arithmetic. A filter's
columns do not know of each other: the gradient of columns 0 to 2 and that of columns 2 to 4 are
those of two filters three columns wide over two parts of the input (`benchmarks/depthwise.py`).

Shapes: B images, C channels, H×W positions of the input, h×w of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDE = 5


def depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """B×C×H×W and C filters C×1×k×k → B×C×h×w, as `conv2d` with as many groups as channels."""
    if (
        weight.shape[-2:] == (WIDE, WIDE)
        and weight.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    ):
        found: Tensor = _InPieces.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]
        return found
    return F.conv2d(x, weight, bias, stride, padding, groups=len(weight))


class _InPieces(torch.autograd.Function):
    """The convolution, its filters' gradient in two pieces of three columns."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, bias, stride, padding, groups=len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding = ctx.stride, ctx.padding
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _gradients(gradient, x, weight, stride, (padding, padding), of=0)
        if ctx.needs_input_grad[1]:
            left, right = (  # over the padded input less its last two columns, less its first two
                _gradients(gradient, F.pad(x, columns), weight[..., :3], stride, (padding, 0), of=1)
                for columns in ((padding, padding - 2), (padding - 2, padding))
            )
            of_weight = torch.cat((left, right[..., 1:]), dim=-1)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum((0, 2, 3))
        return of_x, of_weight, of_bias, None, None


def _gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: int, padding: tuple[int, int], *, of: int
) -> Tensor:
    """Of a convolution's input (0) or filters (1).

    `torch.nn.grad` would lose the input's order in memory on the way, which costs more than it.
    """
    wanted = [of == each for each in range(3)]
    transposed, extra = False, (0, 0)
    found: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, (stride,) * 2, padding, (1, 1), transposed, extra, len(weight),
        wanted,
    )  # fmt: skip
    return found[of]
