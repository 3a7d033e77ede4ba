from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn

from p3net.errors import InputError
from p3net.network.regressor import EncoderLayer, Regressor, RegressorArchitecture


def tiny(**fields: Any) -> Regressor:
    torch.manual_seed(2)
    return Regressor(RegressorArchitecture(backbone="small", hidden=16, **fields)).eval()


@torch.no_grad()
def test_an_encoder_layer_is_torchs_with_the_same_state_dict():
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(16, 4, 24, 0.1, batch_first=True).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = EncoderLayer(16, 4, 24, 0.1).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [0, 2])
@torch.no_grad()
def test_a_batch_is_its_images_and_no_count_is_negative(layers):
    network = tiny(encoder_layers=layers)
    images = torch.rand(3, 3, 41, 70)
    output = network(images)
    assert output.density.shape == (3, 6, 9)
    assert (output.logits, output.probabilities, output.expectations) == ((), (), ())
    assert (output.density >= 0).all()
    for index in range(3):
        alone = network(images[index : index + 1]).density[0]
        torch.testing.assert_close(output.density[index], alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_head_by_plain_torch():
    network = tiny()
    images = torch.rand(1, 3, 32, 48)
    x = F.interpolate(network.backbone(images), size=(4, 6), mode="bilinear")
    state = network.head.state_dict()
    x = F.relu(F.conv2d(x, state["0.weight"], state["0.bias"], padding=1))
    x = F.relu(F.conv2d(x, state["2.weight"], state["2.bias"], padding=1))
    x = F.conv2d(x, state["4.weight"], state["4.bias"])
    torch.testing.assert_close(network(images).density, x[:, 0].abs(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_the_encoder_looks_at_the_whole_image():
    """A change in one corner reaches the far one, which no convolution here could do."""
    images = torch.rand(1, 3, 256, 256)
    changed = images.clone()
    changed[..., :32, :32] = 0

    def far(network: Regressor) -> bool:
        before, after = network(images).density, network(changed).density
        return bool((before[0, -1, -1] - after[0, -1, -1]).abs() > 0)

    assert far(tiny(encoder_layers=1))
    assert not far(tiny())


def test_gradients_reach_every_parameter():
    network = tiny(encoder_layers=1).train()
    network(torch.rand(1, 3, 32, 32)).density.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_inputs_that_cannot_be_used():
    with pytest.raises(InputError, match="smaller than one cell"):
        tiny()(torch.zeros(1, 3, 7, 64))
    with pytest.raises(ValidationError):
        RegressorArchitecture(encoder_layers=-1)
