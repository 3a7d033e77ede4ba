from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from p3net.errors import InputError
from p3net.network.decoder import Attention, Decoder


def pair(layers: int = 2) -> tuple[Decoder, nn.TransformerDecoder]:
    """Ours and torch's with the same, random weights."""
    torch.manual_seed(3)
    layer = nn.TransformerDecoderLayer(16, 4, 24, 0.1, batch_first=True)
    theirs = nn.TransformerDecoder(layer, layers).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = Decoder(layers, 16, 4, 24, 0.1).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


@torch.no_grad()
def test_a_layer_stack_is_torchs_with_the_same_state_dict():
    ours, theirs = pair()
    tokens, features = torch.randn(3, 7, 16), torch.randn(3, 16, 4, 5)
    expected = theirs(tokens, features.flatten(2).transpose(1, 2))
    torch.testing.assert_close(ours(tokens, features), expected, rtol=1e-5, atol=1e-5)


def test_gradients_are_torchs_too():
    ours, theirs = pair()
    tokens, features = torch.randn(2, 7, 16), torch.randn(2, 16, 3, 3)
    weight = torch.randn(2, 7, 16)
    (ours(tokens, features) * weight).sum().backward()
    (theirs(tokens, features.flatten(2).transpose(1, 2)) * weight).sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_attention_and_its_weights_are_torchs():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, 0.1, batch_first=True).eval()
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = Attention(16, 4, 0.1).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    query, memory = torch.randn(2, 5, 16), torch.randn(2, 11, 16)
    mixed, weights = theirs(query, memory, memory, need_weights=True, average_attn_weights=True)
    torch.testing.assert_close(ours(query, memory), mixed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.weights(query, memory), weights, rtol=1e-5, atol=1e-6)


def test_turned_queries_are_the_same_attention():
    """Three queries of two heads in a width of 16 are turned; projected positions say the same."""
    torch.manual_seed(3)
    attention = Attention(16, 2, 0.0)
    nn.init.normal_(attention.in_proj_bias)
    query = torch.randn(2, 3, 16, requires_grad=True)
    memory = torch.randn(2, 20, 16, requires_grad=True)
    assert attention._turns(query, memory)
    inputs = (query, memory, *attention.parameters())
    ours = attention(query, memory)
    with patch.object(Attention, "_turns", return_value=False):
        plain = attention(query, memory)
    torch.testing.assert_close(ours, plain)
    direction = torch.randn_like(ours)
    found = torch.autograd.grad(ours, inputs, direction)
    expected = torch.autograd.grad(plain, inputs, direction)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dropout_of_turned_queries_drops_values_and_their_bias():
    """With all weights dropped nothing is left but the last projection's own bias."""
    torch.manual_seed(3)
    attention = Attention(16, 2, 0.999999).train()
    nn.init.ones_(attention.in_proj_bias)
    query, memory = torch.randn(2, 3, 16), torch.randn(2, 20, 16)
    assert attention._turns(query, memory)
    torch.testing.assert_close(
        attention(query, memory), attention.out_proj.bias.expand(2, 3, 16), rtol=0, atol=0
    )


def test_positions_are_projected_where_queries_are_many():
    attention = Attention(16, 2, 0.0)
    memory = torch.randn(1, 20, 16)
    assert not attention._turns(torch.randn(1, 8, 16), memory)  # 8 · 2 is not below 16
    assert not attention._turns(memory, memory)
    assert not attention._turns(torch.randn(1, 3, 16), memory.to("meta"))


@torch.no_grad()
def test_attention_maps_of_every_layer_are_torchs():
    """Caught on their way through torch's decoder."""
    ours, theirs = pair(layers=3)
    tokens, features = torch.randn(2, 7, 16), torch.randn(2, 16, 4, 5)
    memory = features.flatten(2).transpose(1, 2)
    expected = []
    x = tokens
    for layer in theirs.layers:
        asked = layer.norm1(x + layer._sa_block(x, None, None))
        _, weights = layer.multihead_attn(asked, memory, memory, need_weights=True)
        expected.append(weights.view(2, 7, 4, 5))
        x = layer(x, memory)
    maps = ours.attention_maps(tokens, features)
    assert maps.shape == (2, 3, 7, 4, 5)
    torch.testing.assert_close(maps, torch.stack(expected, 1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(maps.sum((-2, -1)), torch.ones(2, 3, 7))


def test_dropout_acts_in_training_only():
    ours, _ = pair()
    tokens, features = torch.randn(1, 7, 16), torch.randn(1, 16, 2, 2)
    assert torch.equal(ours(tokens, features), ours(tokens, features))
    ours.train()
    assert not torch.equal(ours(tokens, features), ours(tokens, features))


def test_layers_start_apart():
    one, two = Decoder(2, 16, 4, 24, 0.0).layers
    for name in ("self_attn.in_proj_weight", "linear1.weight"):
        assert not torch.equal(one.get_parameter(name), two.get_parameter(name))


def test_heads_must_divide_the_channels():
    with pytest.raises(InputError, match="3 heads do not divide 16 channels"):
        Decoder(1, 16, 3, 24, 0.0)
