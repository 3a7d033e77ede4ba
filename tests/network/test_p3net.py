from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.export import Dim

from p3net.errors import InputError
from p3net.intervals import PUBLISHED, Intervals
from p3net.network.backbones import BACKBONES
from p3net.network.p3net import PLANS, Architecture, P3Net

PAIR = (
    Intervals((0.01, 0.1, 0.5), (0.0, 0.05, 0.3, 1.0)),
    Intervals((0.02, 0.2, 1.0), (0.0, 0.1, 0.5, 2.0)),
)


def tiny(**fields: Any) -> P3Net:
    torch.manual_seed(5)
    fields = {"backbone": "small", "layers": 2, "hidden": 16, **fields}
    network = P3Net(Architecture(**fields), PAIR).eval()
    for module in network.modules():  # sharper distributions than fresh weights give
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.05, 0.4)
    return network


# --- batches and sizes -------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
@torch.no_grad()
def test_three_images_at_once_are_three_images(backbone):
    network = tiny(backbone=backbone)
    images = torch.rand(3, 3, 64, 64) * torch.tensor([0.3, 0.7, 1.0]).view(3, 1, 1, 1)
    together = network(images)
    for index, image in enumerate(images):
        alone = network(image[None])
        for many, one in zip(together.probabilities, alone.probabilities, strict=True):
            torch.testing.assert_close(many[index], one[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(together.density[index], alone.density[0], rtol=0, atol=1e-5)
    if not backbone.startswith("lite0"):  # whose fresh weights hardly look at the image
        assert not torch.allclose(together.density[0], together.density[2], atol=1e-4)


@pytest.mark.parametrize("size_hw", [(8, 8), (64, 64), (65, 71), (75, 133), (33, 17), (40, 48)])
@pytest.mark.parametrize("backbone", ["small", "lite0", "lite0-deep"])
@torch.no_grad()
def test_the_grid_covers_every_pixel(backbone, size_hw):
    rows, columns = ((side + 7) // 8 for side in size_hw)
    output = tiny(backbone=backbone)(torch.rand(2, 3, *size_hw))
    assert output.density.shape == (2, rows, columns)
    for maps in (*output.logits, *output.probabilities):
        assert maps.shape == (2, 4, rows, columns)
    for expectation in output.expectations:
        assert expectation.shape == (2, rows, columns)
    for p in output.probabilities:
        torch.testing.assert_close(p.sum(1), torch.ones(2, rows, columns))


@torch.no_grad()
def test_cells_are_counted_from_the_upper_left_corner():
    """Position (i, j) of a map spreads around cells 2i, 2i+1 × 2j, 2j+1, whatever is cut off."""
    maps = torch.zeros(1, 1, 5, 9)
    maps[0, 0, 2, 4] = 1
    cells = tiny().resample(maps, (9, 17))[0, 0]  # of an image of 72×136 px, padded to 80×144
    assert cells.shape == (9, 17)
    # bilinear between centres: 3/4 in the position's own cells, 1/4 in their neighbours
    weights = torch.tensor([0.25, 0.75, 0.75, 0.25])
    expected = torch.zeros(9, 17)
    expected[3:7, 7:11] = weights[:, None] * weights
    torch.testing.assert_close(cells, expected)
    assert torch.equal(tiny(backbone="lite0").resample(maps, (5, 7)), maps[..., :7])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 64, 64), "B×3×H×W, got"),
        ((1, 1, 64, 64), "B×3×H×W, got"),
        ((1, 3, 7, 64), "64×7 px is smaller than one cell"),
        ((1, 3, 64, 0), "smaller than one cell"),
    ],
)
def test_images_that_cannot_be_used(shape, words):
    with pytest.raises(InputError, match=words):
        tiny()(torch.zeros(shape))


def test_the_authors_grid_needs_one_position():
    network = tiny(grid="authors")
    assert network(torch.zeros(1, 3, 16, 31)).density.shape == (1, 2, 3)
    with pytest.raises(InputError, match="31×15 px is smaller than one position of 16 px"):
        network(torch.zeros(1, 3, 15, 31))


# --- what the branches share -------------------------------------------------------------------


def test_distributions_and_counts_are_never_in_half_precision():
    network = tiny()
    images = torch.rand(1, 3, 64, 64)
    exact = network(images)
    with torch.autocast("cpu", torch.bfloat16):
        found = network(images)
    for part in (found.density, *found.logits, *found.probabilities, *found.expectations):
        assert part.dtype == torch.float32
    for p in found.probabilities:
        torch.testing.assert_close(p.sum(1), torch.ones_like(p[:, 0]), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.density, exact.density, rtol=0.05, atol=0.05)


# decoders, tokens, intervals: the paper's variants, row by row; True where they are shared
SHARED = {
    "p3net": (False, False, False),
    "sdds": (True, False, False),
    "stds": (False, True, False),
    "stss": (False, True, True),
    "dtss": (False, False, True),
}


def test_five_plans():
    assert set(PLANS) == set(SHARED)


@pytest.mark.parametrize("plan", sorted(SHARED))
def test_a_plan_shares_what_its_row_says_and_nothing_else(plan):
    decoders, tokens, intervals = SHARED[plan]
    network = tiny(plan=plan)
    one, two = (dict(each.named_parameters()) for each in network.decoders)
    assert one.keys() == two.keys()
    assert {one[name] is two[name] for name in one} == {decoders}
    assert (network.tokens[0] is network.tokens[1]) is tokens
    assert (network.intervals[0] is network.intervals[1]) is intervals
    assert network.intervals == ((PAIR[1], PAIR[1]) if intervals else PAIR)
    # and nothing is shared by the back door: another object over the same memory
    places = [p.data_ptr() for p in network.parameters()]
    assert len(places) == len(set(places))
    per_decoder = sum(p.numel() for p in one.values())
    expected = sum(p.numel() for p in network.backbone.parameters())
    expected += per_decoder * (1 if decoders else 2) + 4 * 128 * (1 if tokens else 2)
    assert sum(p.numel() for p in network.parameters()) == expected


@pytest.mark.parametrize("plan", sorted(SHARED))
def test_the_branches_of_no_plan_are_the_same(plan):
    with torch.no_grad():
        output = tiny(plan=plan)(torch.rand(1, 3, 32, 32))
    assert not torch.allclose(*output.logits, atol=1e-3)


def test_intervals_of_the_paper_unless_given():
    network = P3Net(Architecture(backbone="small", layers=1, hidden=8))
    assert network.intervals == PUBLISHED
    assert network.tokens[0].shape == (25, 128)


def test_branches_need_as_many_intervals():
    with pytest.raises(InputError, match="same number of intervals, got 4 and 2"):
        P3Net(Architecture(backbone="small"), (PAIR[0], Intervals((0.1,), (0.0, 1.0))))


# --- starts ------------------------------------------------------------------------------------


def test_two_decoders_start_apart_unless_asked():
    one, two = (dict(d.named_parameters()) for d in tiny().decoders)
    for name in ("layers.0.self_attn.in_proj_weight", "layers.1.linear2.weight"):
        assert not torch.equal(one[name], two[name])


def test_copies_start_equal_in_every_layer_and_are_trained_apart():
    torch.manual_seed(0)
    arch = Architecture(backbone="small", layers=3, hidden=8, decoders="copies")
    network = P3Net(arch, PAIR)
    layers = [layer for decoder in network.decoders for layer in decoder.layers]
    assert len(layers) == 6
    first = dict(layers[0].named_parameters())
    for layer in layers[1:]:
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, first[name])
            assert parameter is not first[name]
            assert parameter.data_ptr() != first[name].data_ptr()


def test_tokens_at_the_start():
    zeros = P3Net(Architecture(backbone="small", layers=1, hidden=8, tokens="zeros"), PAIR)
    assert all(not token.any() for token in zeros.tokens)
    start = P3Net(Architecture(backbone="small", layers=1, hidden=8)).tokens
    normal = torch.cat([token.detach() for token in start])
    assert abs(float(normal.mean())) < 0.05
    assert abs(float(normal.std()) - 1) < 0.05


def test_gradients_reach_the_tokens_of_both_branches_and_the_backbone():
    network = tiny().train()
    output = network(torch.rand(2, 3, 32, 32))
    for branch in range(2):
        network.zero_grad()
        output.expectations[branch].sum().backward(retain_graph=True)
        used, other = network.tokens[branch], network.tokens[1 - branch]
        assert used.grad is not None
        assert used.grad.abs().min(dim=0).values.max() > 0  # not one token alone
        assert other.grad is None
        assert all(p.grad is not None for p in network.decoders[branch].parameters())
        assert all(p.grad is not None for p in network.backbone.parameters())
    network.zero_grad()
    output.density.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


# --- random queries ----------------------------------------------------------------------------


def test_random_queries_are_drawn_anew_for_every_image_in_training():
    network = tiny(queries="random", dropout=0.0).train()
    assert not any("tokens" in name for name, _ in network.named_parameters())
    one, two = network.queries(3)
    assert one.shape == two.shape == (3, 4, 128)
    draws = [*one, *two, *network.queries(3)[0]]
    for i, j in product(range(9), range(9)):
        assert torch.equal(draws[i], draws[j]) == (i == j)
    image = torch.rand(1, 3, 32, 32)
    assert not torch.equal(network(image).density, network(image).density)


@torch.no_grad()
def test_random_queries_are_fixed_for_counting():
    network, again = tiny(queries="random"), tiny(queries="random")
    images = torch.rand(2, 3, 32, 32)
    first = network(images).density
    torch.manual_seed(99)
    assert torch.equal(network(images).density, first)
    assert torch.equal(again(images).density, first)
    torch.testing.assert_close(network(images[1:]).density[0], first[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_random_queries_obey_the_plan(training):
    shared = tiny(queries="random", plan="stds").train(training).queries(2)
    apart = tiny(queries="random").train(training).queries(2)
    assert torch.equal(*shared)
    assert not torch.equal(*apart)


# --- reading out -------------------------------------------------------------------------------


@pytest.mark.parametrize("decoding", ["maximum", "expectation"])
@pytest.mark.parametrize("fusion", ["average", "confidence"])
@torch.no_grad()
def test_the_density_of_every_cell_by_hand(decoding, fusion):
    network = tiny(decoding=decoding, fusion=fusion)
    output = network(torch.rand(2, 3, 40, 24))
    p, q = (logits.double().softmax(1) for logits in output.logits)
    for b, y, x in product(range(2), range(5), range(3)):
        branches = []
        for chances, intervals in zip((p, q), PAIR, strict=True):
            cell = chances[b, :, y, x].tolist()
            if decoding == "maximum":
                branches.append(intervals.values[max(range(4), key=cell.__getitem__)])
            else:
                branches.append(sum(c * v for c, v in zip(cell, intervals.values, strict=True)))
        sure, other = float(p[b, :, y, x].max()), float(q[b, :, y, x].max())
        omega = sure / (sure + other) if fusion == "confidence" else 0.5
        expected = omega * branches[0] + (1 - omega) * branches[1]
        assert float(output.density[b, y, x]) == pytest.approx(expected, rel=1e-4)
        for chances, intervals, got in zip((p, q), PAIR, output.expectations, strict=True):
            mean = float(chances[b, :, y, x] @ torch.tensor(intervals.values).double())
            assert float(got[b, y, x]) == pytest.approx(mean, rel=1e-4)  # whatever the decoding


@torch.no_grad()
def test_scaled_logits_are_divided_by_the_root_of_the_channels():
    images = torch.rand(1, 3, 32, 32)
    plain, scaled = tiny()(images), tiny(scaled_logits=True)(images)
    for a, b in zip(plain.logits, scaled.logits, strict=True):
        torch.testing.assert_close(a / 128**0.5, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_maps_of_both_branches():
    network = tiny()
    images = torch.rand(2, 3, 48, 80)
    maps = network.attention_maps(images)
    memory = network.backbone(images).flatten(2).transpose(1, 2)
    for tokens, decoder, got in zip(network.tokens, network.decoders, maps, strict=True):
        assert got.shape == (2, 2, 4, 3, 5)
        torch.testing.assert_close(got.sum((-2, -1)), torch.ones(2, 2, 4))
        layer = decoder.layers[0]  # the first layer's, by torch's own attention
        own, cross = (nn.MultiheadAttention(128, 4, batch_first=True).eval() for _ in range(2))
        own.load_state_dict(layer.self_attn.state_dict())
        cross.load_state_dict(layer.multihead_attn.state_dict())
        queries = tokens.expand(2, -1, -1)
        asked = layer.norm1(queries + own(queries, queries, queries)[0])
        _, weights = cross(asked, memory, memory, need_weights=True, average_attn_weights=True)
        torch.testing.assert_close(got[:, 0].flatten(2), weights, rtol=1e-4, atol=1e-6)


# --- architecture and export -------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"backbone": "resnet"},
        {"plan": "ssss"},
        {"layers": 0},
        {"dropout": 1.0},
        {"decoding": "median"},
        {"colour": 3},
    ],
)
def test_architectures_that_do_not_exist(fields):
    with pytest.raises(ValidationError):
        Architecture(**fields)


def test_an_architecture_cannot_be_changed_behind_a_network():
    with pytest.raises(ValidationError):
        tiny().architecture.layers = 9  # type: ignore[misc]


@pytest.mark.parametrize("backbone", ["small", "lite0", "lite0-deep"])
@torch.no_grad()
def test_export_with_dynamic_height_and_width(backbone):
    network = tiny(backbone=backbone, layers=1)
    sides = {2: Dim("height", min=64, max=4096), 3: Dim("width", min=64, max=4096)}
    program = torch.export.export(
        network, (torch.rand(1, 3, 75, 133),), dynamic_shapes={"images": sides}
    )
    exported = program.module()
    for size_hw in ((64, 64), (80, 97), (131, 96)):
        images = torch.rand(1, 3, *size_hw)
        got, expected = exported(images), network(images)
        assert got.density.shape == expected.density.shape
        torch.testing.assert_close(got.density, expected.density, rtol=1e-4, atol=1e-5)
        for a, b in zip(got.logits, expected.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
