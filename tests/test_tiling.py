from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from p3net import tiling
from p3net.errors import InputError
from p3net.network.backbone import Backbone
from p3net.network.backbones import BACKBONES
from p3net.network.decoder import Attention
from p3net.network.lite0 import Lite0
from p3net.network.p3net import Architecture, Output, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture


@torch.no_grad()
def lively(backbone: Backbone) -> Backbone:
    """Weights that keep the variance, without which a fresh Lite0 forgets its input."""
    if isinstance(backbone, Lite0):
        for module in backbone.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
    return backbone.eval()


def picture(height: int, width: int) -> NDArray[np.uint8]:
    """Noise under a slow wave: every tile looks different."""
    noise = np.random.default_rng(0).integers(0, 100, (height, width, 3))
    wave = 75 + 75 * np.sin(np.arange(width) / 40 + np.arange(height)[:, None] / 60)
    return (noise + wave[..., None]).astype(np.uint8)


def as_batch(pixels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


def p3net(backbone: str, **more: object) -> P3Net:
    torch.manual_seed(0)
    network = P3Net(
        Architecture(backbone=backbone, layers=2, hidden=16, scaled_logits=True, **more)
    )
    lively(network.backbone)
    return network.eval()


# --- what the tiles stand on -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("vgg19", 0),
        ("vgg19", 1),
        ("vgg19-merged", 1),
        ("vgg19-merged", 2),
        ("small", 0),
        ("lite0", 0),
        ("lite0", 1),
        ("lite0-deep", 1),
    ],
)
@torch.no_grad()
def test_beyond_its_halo_nothing_has_any_influence(name, number):
    """In double precision, where convolutions are plain sums: exactly none. A halo one multiple
    narrower would not do."""
    torch.manual_seed(0)
    backbone = lively(BACKBONES[name]().double())
    channels = (3, *(stage.channels for stage in backbone.stages()))[number]
    stage = backbone.stages()[number]
    start = -(-2 * stage.halo // stage.multiple) * stage.multiple
    stop = start + 2 * stage.multiple
    height = stage.multiple
    x = torch.rand(1, channels, height, stop + start, dtype=torch.float64)
    window = slice(start // stage.stride, stop // stage.stride)
    expected = stage.run(x)[..., window]

    def disturbed(halo: int) -> Tensor:
        other = 3 * torch.randn_like(x)
        other[..., start - halo : stop + halo] = x[..., start - halo : stop + halo]
        return stage.run(other)[..., window]

    assert torch.equal(disturbed(stage.halo), expected)
    assert not torch.equal(disturbed(stage.halo - stage.multiple), expected)
    assert stage.halo % stage.multiple == 0


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_stages_lead_to_the_map(name):
    backbone = BACKBONES[name]()
    strides = [stage.stride for stage in backbone.stages()]
    assert np.prod(strides) == backbone.stride
    assert backbone.stages()[-1].channels == backbone.channels


@given(
    st.integers(1, 9),
    st.integers(1, 7),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_some_rows_of_an_upsampled_map(height, width, factor, corners, data):
    maps = torch.rand(1, 2, height, width)
    # corners: any size, as in the authors' code; otherwise a whole factor
    size_hw = (
        (data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20)))
        if corners
        else (height * factor, width * factor)
    )
    first = data.draw(st.integers(0, size_hw[0] - 1))
    last = data.draw(st.integers(first + 1, size_hw[0]))
    whole = F.interpolate(maps, size=size_hw, mode="bilinear", align_corners=corners)
    found = tiling.upsample_rows(maps, size_hw, (first, last), corners=corners)
    torch.testing.assert_close(found, whole[..., first:last, :], rtol=1e-6, atol=1e-6)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(0.1, 300))
@settings(deadline=None, max_examples=30)
def test_a_running_softmax_is_the_softmax(sizes, scale):
    """Large scores too: the exponentials are taken relative to the largest so far."""
    torch.manual_seed(0)
    attention = Attention(8, 2, 0.0).eval()
    query, memory = scale * torch.randn(2, 3, 8), torch.randn(2, sum(sizes), 8)
    with torch.no_grad():
        torch.testing.assert_close(
            attention(query, memory.split(sizes, dim=1)),
            attention(query, memory),
            rtol=1e-4,
            atol=1e-5,
        )


@given(st.integers(0, 50), st.integers(1, 300), st.integers(1, 80), st.sampled_from([1, 4, 8]))
def test_edges_cut_all_of_it(start, length, at_most, step):
    edges = tiling._edges(start, start + length, at_most, step)
    lengths = np.diff(edges)
    assert edges[0] == start
    assert edges[-1] == start + length
    assert (lengths > 0).all()
    assert lengths.max() < max(at_most, step) + step
    assert all((edge - start) % step == 0 for edge in edges[:-1])


# --- tiled equals untiled ----------------------------------------------------------------------

CASES = [
    ("small", "cover", (197, 301), (64, 100, 256, None)),
    ("small", "authors", (101, 149), (64,)),  # runs whole
    ("lite0", "cover", (133, 181), (64, 128, None)),
    ("lite0-deep", "cover", (133, 181), (64, None)),
    ("vgg19", "cover", (69, 101), (64,)),
    ("vgg19-merged", "cover", (69, 101), (64,)),
    ("vgg19-merged", "authors", (69, 101), (64,)),  # runs whole
    ("vgg19", "authors", (69, 101), (64, None)),
]


@pytest.mark.parametrize(("backbone", "grid", "size_hw", "tiles"), CASES)
@torch.no_grad()
def test_tiled_equals_untiled(backbone, grid, size_hw, tiles, monkeypatch):
    network = p3net(backbone, grid=grid)
    pixels = picture(*size_hw)
    expected = network(as_batch(pixels))
    assert expected.density.std() > 1e-3  # the image matters
    for tile in tiles:
        if tile is not None:
            monkeypatch.setattr(tiling, "AT_ONCE", 7)
            monkeypatch.setattr(tiling, "STRIP", 90)
        found = tiling.run(network, pixels, tile)
        torch.testing.assert_close(found.density, expected.density[0], rtol=1e-5, atol=1e-5)
        total = float(expected.density.sum())
        assert float(found.density.sum()) == pytest.approx(total, rel=1e-5)
        for branch, own in zip(found.branches, expected.expectations, strict=True):
            torch.testing.assert_close(branch, own[0], rtol=1e-5, atol=1e-5)
        assert found.variance is not None
        assert found.variance.shape == found.density.shape
        monkeypatch.undo()


@pytest.mark.parametrize(("backbone", "layers"), [("small", 0), ("lite0", 0), ("small", 1)])
@torch.no_grad()
def test_regressors_too(backbone, layers, monkeypatch):
    torch.manual_seed(0)
    network = Regressor(
        RegressorArchitecture(backbone=backbone, encoder_layers=layers, hidden=16)
    ).eval()
    lively(network.backbone)
    pixels = picture(133, 181)
    expected = network(as_batch(pixels)).density[0]
    monkeypatch.setattr(tiling, "STRIP", 60)
    found = tiling.run(network, pixels, 64)
    torch.testing.assert_close(found.density, expected, rtol=1e-5, atol=1e-5)
    assert found.branches == ()
    assert found.variance is None


@pytest.mark.parametrize("backbone", ["small", "lite0"])
def test_the_image_becomes_float_tile_by_tile(backbone, monkeypatch):
    network = p3net(backbone)
    seen = []

    def watched(pixels: Tensor) -> Tensor:
        seen.append(pixels.shape[1] * pixels.shape[2])
        return pixels.permute(0, 3, 1, 2).float() / 255

    monkeypatch.setattr(tiling, "to_float", watched)
    tiling.run(network, picture(256, 384), 64)
    stage = network.backbone.stages()[0]
    assert len(seen) == 4 * 6
    assert max(seen) <= (64 + 2 * stage.halo) ** 2


# --- the edges of it ---------------------------------------------------------------------------


class Foreign(nn.Module):
    """A network of somebody else's, such as an exported one: no parameters, no distributions."""

    def forward(self, images: Tensor) -> Output:
        return Output(F.avg_pool2d(images.mean(dim=1), 8))


def test_a_network_of_somebody_elses_is_run_whole():
    pixels = picture(32, 48)
    found = tiling.run(Foreign(), pixels)
    blocks = pixels.mean(axis=2).reshape(4, 8, 6, 8).mean(axis=(1, 3)) / 255
    np.testing.assert_allclose(found.density, blocks, rtol=1e-5)
    assert found.variance is None


class ForeignOutput(Output):
    variance: Tensor | None = None


def test_it_may_bring_its_variance_along():
    class Exported(nn.Module):
        def forward(self, images: Tensor) -> Output:
            ones = torch.ones(1, 4, 6)
            output = ForeignOutput(ones, expectations=(2 * ones, 3 * ones))
            output.variance = 4 * ones
            return output

    found = tiling.run(Exported(), picture(32, 48))
    assert [each.unique().tolist() for each in found.branches] == [[2.0], [3.0]]
    assert found.variance is not None
    assert found.variance.unique().tolist() == [4.0]


def test_the_mode_is_restored_and_dropout_is_off():
    network = p3net("small").train()
    first, second = (tiling.run(network, picture(64, 64)).density for _ in range(2))
    assert torch.equal(first, second)
    assert network.training


def test_tiles_have_a_least_size():
    with pytest.raises(InputError, match="at least 64 px, got 8"):
        tiling.run(p3net("small"), picture(64, 64), 8)
