from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from p3net.network import winograd
from p3net.network.winograd import Conv3x3, pays, winograd_conv2d

SIZES = [(1, 1, 1, 1, 1), (1, 2, 3, 5, 7), (2, 3, 4, 8, 12), (3, 5, 2, 13, 4), (2, 4, 3, 2, 18)]


def case(
    n: int, c: int, k: int, h: int, w: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n + 10 * c + 100 * k + 1000 * h + 10000 * w)
    x = torch.randn(n, c, h, w, generator=g, dtype=torch.float64)
    weight = torch.randn(k, c, 3, 3, generator=g, dtype=torch.float64)
    bias = torch.randn(k, generator=g, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def relative(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).abs().max() / expected.abs().max()).detach())


def gradients(y: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(5)
    dy = torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad(y, inputs, dy)


def test_matrices_satisfy_the_minimal_filtering_equation() -> None:
    """Aᵀ[(G g) ⊙ (Bᵀ d)] is the correlation of 6 values with 3, for every pair of unit vectors."""
    bt, g, at = (
        torch.tensor(rows, dtype=torch.float64)
        for rows in (winograd._BT, winograd._G_BY_24, winograd._AT)
    )
    for i in range(6):
        for j in range(3):
            expected = [1.0 if i == out + j else 0.0 for out in range(4)]
            assert (at @ (g[:, j] / 24 * bt[:, i])).tolist() == pytest.approx(expected, abs=1e-14)


def test_sums_are_the_matrix() -> None:
    got = torch.empty(6, 6, dtype=torch.float64)
    winograd._bt(torch.eye(6, dtype=torch.float64), got)
    assert got.tolist() == [list(row) for row in winograd._BT]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_equals_the_direct_convolution(
    size: tuple[int, int, int, int, int], order: torch.memory_format
) -> None:
    x, weight, bias = case(*size)
    expected = F.conv2d(x, weight, bias, padding=1)
    y = winograd_conv2d(x.to(memory_format=order), weight, bias)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert y.is_contiguous(memory_format=torch.channels_last)
    without = winograd_conv2d(x, weight)
    torch.testing.assert_close(without, F.conv2d(x, weight, padding=1), rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 3),
    c=st.integers(1, 4),
    k=st.integers(1, 4),
    h=st.integers(1, 21),
    w=st.integers(1, 21),
    strip=st.sampled_from([1, 7, 256]),
    relu=st.booleans(),
)
def test_any_size_and_any_strip(
    n: int, c: int, k: int, h: int, w: int, strip: int, relu: bool
) -> None:
    """Values and all three gradients are those of the direct convolution."""
    inputs = tuple(t.requires_grad_() for t in case(n, c, k, h, w))
    x, weight, bias = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "STRIP_TILES", strip)
        y = winograd_conv2d(x, weight, bias, relu=relu)
        got = gradients(y, inputs)
    direct = F.conv2d(x, weight, bias, padding=1)
    direct = F.relu(direct) if relu else direct
    torch.testing.assert_close(y, direct, rtol=0, atol=1e-11)
    for ours, theirs in zip(got, gradients(direct, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_strips_cover_every_tile_once_and_split_large_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(winograd, "STRIP_TILES", 12)  # two rows of five tiles
    seen = torch.zeros(3, 6, dtype=torch.int64)
    strips = list(winograd._strips(torch.empty(3, 21, 18, 2)))
    for images, rows in strips:
        assert (images.stop - images.start) * (rows.stop - rows.start) <= 2
        seen[images, rows] += 1
    assert len(strips) == 9
    assert torch.equal(seen, torch.ones_like(seen))


def test_scratch_memory_does_not_grow_with_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "STRIP_TILES", 32)

    def bytes_kept(height: int) -> int:
        monkeypatch.setattr(winograd, "_memory", type(winograd._memory)())
        winograd_conv2d(*case(1, 4, 4, height, 32, torch.float32))
        return sum(t.numel() * t.element_size() for t in vars(winograd._memory).values())

    assert bytes_kept(1024) == bytes_kept(128) < 4 << 16


@pytest.mark.parametrize(("c", "k", "size"), [(64, 64, 40), (128, 64, 21), (256, 128, 16)])
def test_float32_is_close_to_float64(c: int, k: int, size: int) -> None:
    """Values to 2e-5 and gradients to 1e-4 of their largest."""
    exact = tuple(t.requires_grad_() for t in case(2, c, k, size, size + 3))
    single = tuple(t.detach().float().requires_grad_() for t in exact)
    expected = F.conv2d(*exact, padding=1)
    y = winograd_conv2d(*single)
    assert y.dtype == torch.float32
    assert relative(y.double(), expected) < 2e-5
    for ours, theirs in zip(gradients(y, single), gradients(expected, exact), strict=True):
        assert relative(ours.double(), theirs) < 1e-4


@pytest.mark.parametrize("needed", [(True, True, True), (True, False, False), (False, True, False)])
def test_gradcheck(needed: tuple[bool, bool, bool]) -> None:
    inputs = tuple(
        t.requires_grad_(need) for t, need in zip(case(2, 2, 3, 5, 6), needed, strict=True)
    )
    assert torch.autograd.gradcheck(winograd_conv2d, inputs)
    assert torch.autograd.gradcheck(partial(winograd_conv2d, relu=True), inputs)


def test_gradients_that_are_not_needed_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError

    x, weight, bias = case(1, 2, 2, 6, 6)
    with monkeypatch.context() as patch:  # the first layer: nobody asks for the image's gradient
        patch.setattr(winograd, "_transform_input_gradient", refuse)
        winograd_conv2d(x, weight.requires_grad_(), bias.requires_grad_()).sum().backward()
    with monkeypatch.context() as patch:  # frozen weights
        patch.setattr(winograd, "_transform_weight_gradient", refuse)
        winograd_conv2d(x.requires_grad_(), weight.detach(), bias.detach()).sum().backward()
    assert x.grad is not None


def test_a_second_derivative_is_refused() -> None:
    x, weight, _ = case(1, 1, 1, 4, 4)
    (dx,) = torch.autograd.grad(
        winograd_conv2d(x.requires_grad_(), weight).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_an_in_place_relu_may_follow() -> None:
    x, weight, bias = case(1, 2, 3, 6, 6)
    x.requires_grad_()
    (got,) = gradients(F.relu(winograd_conv2d(x, weight, bias), inplace=True), (x,))
    (expected,) = gradients(F.relu(F.conv2d(x, weight, bias, padding=1)), (x,))
    torch.testing.assert_close(got, expected)


def test_buffers_made_in_inference_mode_serve_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "_memory", type(winograd._memory)())
    x, weight, bias = case(1, 2, 3, 6, 6)
    with torch.inference_mode():
        first = winograd_conv2d(x, weight, bias)
    again = winograd_conv2d(x, weight.requires_grad_(), bias)
    again.sum().backward()
    assert torch.equal(first, again.detach())


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(1, 2, 4, 4), torch.zeros(3, 2, 5, 5)),
        (torch.zeros(1, 2, 4, 4), torch.zeros(3, 1, 3, 3)),
        (torch.zeros(0, 2, 4, 4), torch.zeros(3, 2, 3, 3)),
        (torch.zeros(1, 2, 4, 4, device="meta"), torch.zeros(3, 2, 3, 3)),
    ],
)
def test_what_it_cannot_do_is_refused(x: Tensor, weight: Tensor) -> None:
    with pytest.raises(ValueError, match="K×C×3×3"):
        winograd_conv2d(x, weight)


def test_pays_for_wide_layers_on_large_maps_only() -> None:
    wide = torch.zeros(64, 64, 3, 3)
    x = torch.zeros(1, 64, 64, 64)
    assert pays(x, wide)
    assert not pays(torch.zeros(1, 3, 512, 512), torch.zeros(64, 3, 3, 3))  # VGG's first
    assert not pays(torch.zeros(1, 64, 16, 16), wide)
    assert not pays(torch.zeros(0, 64, 64, 64), wide)
    assert not pays(x, torch.zeros(64, 64, 1, 1))
    assert not pays(x.double(), wide.double())
    assert not pays(x.bfloat16(), wide.bfloat16())
    assert not pays(x.to("meta"), wide.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not pays(x, wide)
    deep = torch.zeros(512, 512, 3, 3)
    assert not pays(torch.zeros(1, 512, 16, 16), deep)  # VGG's last, one crop of 256 px
    assert pays(torch.zeros(2, 512, 16, 16), deep)
    assert not pays(torch.zeros(3, 512, 12, 12), deep)
    assert pays(torch.zeros(4, 512, 12, 12), deep)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that are transformed from now on."""
    calls: list[tuple[int, ...]] = []
    transform = winograd._transform_weight

    def record(weight: Tensor) -> Tensor:
        calls.append(tuple(weight.shape))
        return transform(weight)

    monkeypatch.setattr(winograd, "_transform_weight", record)
    return calls


@pytest.mark.parametrize("grad", [False, True])
def test_module_is_a_conv2d(monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    """Same keys, same values, by Winograd where it pays and the ordinary way elsewhere."""
    calls = spy(monkeypatch)
    for c, size, fast in ((64, 48, True), (64, 9, False), (3, 48, False)):
        ours, theirs = Conv3x3(c, 64), nn.Conv2d(c, 64, 3, padding=1)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        x = case(1, c, 1, size, size + 3, torch.float32)[0]
        calls.clear()
        with torch.set_grad_enabled(grad):
            y = theirs(x)
            assert relative(ours(x), y) < 2e-5
            assert relative(ours(x, relu=True), y.relu()) < 2e-5
            assert relative(ours(x, pool=True), F.max_pool2d(y, 2)) < 2e-5
            assert relative(ours(x, relu=True, pool=True), F.max_pool2d(y.relu(), 2)) < 2e-5
        assert bool(calls) == fast
    assert "bias" not in Conv3x3(2, 2, bias=False).state_dict()


def change_in_place(layer: Conv3x3) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def change_data(layer: Conv3x3) -> None:
    layer.weight.data = layer.weight.data * 2


def change_parameter(layer: Conv3x3) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def change_by_loading(layer: Conv3x3) -> None:
    layer.load_state_dict({name: t * 2 for name, t in layer.state_dict().items()}, assign=True)


def change_by_training(layer: Conv3x3) -> None:
    """A fused optimiser, which does not say that it changes the weight."""
    layer.train()
    optimiser = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(1, 64, 48, 48)).sum().backward()
    optimiser.step()
    layer.eval()


@pytest.mark.parametrize(
    "change",
    [change_in_place, change_data, change_parameter, change_by_loading, change_by_training],
)
def test_a_transformed_weight_is_kept_until_the_weight_changes(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Conv3x3], None]
) -> None:
    calls = spy(monkeypatch)
    layer = Conv3x3(64, 64).eval()
    x = case(1, 64, 1, 48, 48, torch.float32)[0]
    for expected in (1, 1):  # twice the same: transformed once
        with torch.no_grad():
            layer(x)
        assert len(calls) == expected
    before = layer.weight.detach().clone()
    change(layer)
    assert not torch.equal(layer.weight, before)
    with torch.no_grad():
        assert relative(layer(x), F.conv2d(x, layer.weight, layer.bias, padding=1)) < 2e-5


def test_copies_and_pickles_go_without_the_transformed_weight() -> None:
    layer = Conv3x3(64, 64).eval()
    x = case(1, 64, 1, 48, 48, torch.float32)[0]
    with torch.no_grad():
        y = layer(x)
        assert layer._kept is not None
        assert set(layer.state_dict()) == {"weight", "bias"}
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other._kept is None
            assert torch.equal(other(x), y)
            other.weight.zero_()
            assert torch.equal(layer(x), y)


def test_a_weight_made_in_inference_mode_serves() -> None:
    with torch.inference_mode():
        layer = Conv3x3(64, 64).eval()
        x = case(1, 64, 1, 48, 48, torch.float32)[0]
        layer(x)
        layer.weight.mul_(2)
        assert relative(layer(x), F.conv2d(x, layer.weight, layer.bias, padding=1)) < 2e-5


def test_exported_graph_holds_the_ordinary_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy(monkeypatch)
    model = nn.Sequential(Conv3x3(3, 64), nn.ReLU(inplace=True), Conv3x3(64, 64))
    program = torch.export.export(model, (torch.zeros(1, 3, 48, 48),))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.conv2d.default") == 2
    assert len(targets) == 3
    assert not calls


def test_arithmetic_is_counted_on_the_meta_device() -> None:
    layer = Conv3x3(64, 128).to("meta")
    with FlopCounterMode(display=False) as counter:
        layer(torch.zeros(1, 64, 32, 32, device="meta"))
    assert counter.get_total_flops() == 2 * 9 * 64 * 128 * 32 * 32
