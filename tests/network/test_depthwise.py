from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from p3net.network import depthwise as module
from p3net.network.depthwise import depthwise


@pytest.mark.parametrize("size_hw", [(9, 12), (5, 5), (6, 7)])
@pytest.mark.parametrize(("stride", "padding"), [(1, 2), (1, 0), (2, 0), (2, 2), (1, 1)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_a_convolution_with_its_gradients(size_hw, stride, padding, with_bias):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    x, weight = draw(2, 3, *size_hw).requires_grad_(), draw(3, 1, 5, 5).requires_grad_()
    bias = draw(3).requires_grad_() if with_bias else None
    inputs = [each for each in (x, weight, bias) if each is not None]
    plain = F.conv2d(x, weight, bias, stride, padding, groups=3)
    ours = depthwise(x, weight, bias, stride, padding)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    direction = draw(*plain.shape)
    expected = torch.autograd.grad(plain, inputs, direction)
    found = torch.autograd.grad(ours, inputs, direction)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_channels_last_maps_give_the_same_gradients():
    torch.manual_seed(0)
    x = torch.randn(4, 32, 16, 16).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(32, 1, 5, 5, requires_grad=True)
    (found,) = torch.autograd.grad(depthwise(x, weight, None, 1, 2).square().sum(), weight)
    plain = F.conv2d(x, weight, None, 1, 2, groups=32)
    (expected,) = torch.autograd.grad(plain.square().sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_pieces_are_made_only_where_a_wide_filter_learns():
    x, wide, narrow = torch.randn(1, 4, 8, 8), torch.randn(4, 1, 5, 5), torch.randn(4, 1, 3, 3)
    with patch.object(module, "_InPieces") as pieces:
        depthwise(x, wide, None, 1, 2)
        depthwise(x, narrow.requires_grad_(), None, 1, 1)
        with torch.no_grad():
            depthwise(x, wide.requires_grad_(), None, 1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            depthwise(x, wide, None, 1, 2)
        assert not pieces.apply.called
        depthwise(x, wide, None, 1, 2)
        assert pieces.apply.called
