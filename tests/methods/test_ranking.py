"""Learning to rank: crops within crops, counted one by one; a part must not out-count the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from p3net.configuration import settings
from p3net.data.loading import Step
from p3net.errors import InputError
from p3net.experiment import prepare
from p3net.methods.base import Divisors
from p3net.methods.ranking import Ranking, concentric
from p3net.methods.supervised import Supervised
from p3net.network.p3net import Architecture, Output, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.structures import Batch

TINY = Architecture(backbone="small", layers=1, hidden=32, heads=2, dropout=0.0)


def network() -> P3Net:
    torch.manual_seed(0)
    return P3Net(TINY).eval()


def crops(*seeds: int, points: bool = False, size: int = 32) -> Batch:
    draws = [np.random.default_rng(seed) for seed in seeds]
    images = [torch.tensor(d.random((3, size, size)), dtype=torch.float32) for d in draws]
    heads = tuple(torch.tensor(d.uniform(0, size, (5, 2))) for d in draws)
    names = tuple(map(str, seeds))
    return Batch(torch.stack(images), heads if points else None, names, (64.0,) * len(seeds), seeds)


def alone(images: Tensor) -> Batch:
    number = len(images)
    return Batch(images, None, ("a",) * number, (64.0,) * number, (0,) * number)


class Brightness(nn.Module):
    """Counts w people for every pixel of full brightness, in a row of cells for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Output:
        self.sizes.append(tuple(images.shape))
        return Output(self.w * images.mean(dim=1))


# --- crops --------------------------------------------------------------------------------------


@given(
    height=st.integers(8, 70),
    width=st.integers(8, 70),
    crops=st.integers(2, 5),
    factor=st.floats(0.6, 0.95),
)
def test_every_crop_is_centred_lies_in_the_one_before_and_is_enlarged(height, width, crops, factor):
    """Pixels that hold their own row and column show which ones a crop was cut from."""
    rows = torch.arange(height).float().view(1, 1, -1, 1).expand(1, 1, height, width)
    columns = torch.arange(width).float().view(1, 1, 1, -1).expand(1, 1, height, width)
    images = torch.cat((rows, columns, rows), dim=1)
    parts = concentric(images, crops=crops, factor=factor)
    assert len(parts) == crops
    assert torch.equal(parts[0], images)
    before = [(0.0, height - 1.0), (0.0, width - 1.0)]
    for k, part in enumerate(parts[1:], start=1):
        assert part.shape == images.shape
        for axis, side in ((0, height), (1, width)):
            low, high = round(float(part[0, axis].min()), 3), round(float(part[0, axis].max()), 3)
            assert high - low + 1 == pytest.approx(side * factor**k, abs=0.51)
            assert abs(low + high - (side - 1)) <= 1.001  # centred to half a pixel
            assert before[axis][0] <= low
            assert high <= before[axis][1]
            before[axis] = (low, high)


def test_the_usual_sides_of_a_crop_of_128():
    """128·0.75ᵏ = 128, 96, 72, 54, 40.5 and its rounding to 40."""
    columns = torch.arange(128).float().expand(1, 3, 128, 128)
    sides = [float(p.max() - p.min()) + 1 for p in concentric(columns)]
    assert sides == [128, 96, 72, 54, 40]


@pytest.mark.parametrize("how", [{"crops": 1}, {"factor": 1.0}, {"factor": 0.0}, {"crops": 40}])
def test_crops_that_cannot_be_cut(how):
    with pytest.raises(InputError, match=r"cannot be cut from 32×16 px"):
        concentric(torch.zeros(1, 3, 16, 32), **how)


# --- the loss -----------------------------------------------------------------------------------


def test_the_term_is_the_sum_over_pairs_of_crops_counted_one_by_one():
    net, unseen = network(), crops(3, 4)
    terms = Ranking(net)(Step(0, crops(1, points=True), unseen), Divisors(1, 2)).terms
    assert set(terms) == {"pdm", "l2r"}
    total = 0.0
    for image in unseen.images:
        with torch.no_grad():
            counts = [float(net(part).density.sum()) for part in concentric(image[None])]
        for i in range(5):
            for j in range(i + 1, 5):
                total += max(0.0, counts[j] - counts[i]) / 2
    assert total > 0
    assert float(terms["l2r"].detach()) == pytest.approx(total, rel=1e-4)
    only = Supervised(net)(Step(0, crops(1, points=True), None), Divisors(1, 2))
    torch.testing.assert_close(terms["pdm"], only.terms["pdm"])


def test_ordered_counts_cost_nothing_and_leave_everything_as_it_is():
    """A bright rim round a dark middle: every crop inwards counts less."""
    image = torch.ones(1, 3, 64, 64)
    image[..., 20:44, 20:44] = 0
    net = Brightness()
    method = Ranking(net, loss="bl")
    loss = method(Step(0, None, alone(image)), Divisors(1, 1)).terms["l2r"]
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(net.w.grad) == 0
    assert net.sizes == [(1, 3, 64, 64)] * 5  # each crop passes by itself


def test_a_part_that_counts_more_than_the_whole_is_pushed_down():
    """A bright middle: crops inwards are brighter. Counting less per pixel mends it."""
    image = torch.zeros(1, 3, 64, 64)
    image[..., 24:40, 24:40] = 1
    net = Brightness()
    method = Ranking(net, loss="bl")
    step = Step(0, None, alone(image))
    loss = method(step, Divisors(1, 1)).terms["l2r"]
    loss.backward()
    assert float(loss.detach()) > 0
    assert float(net.w.grad) == pytest.approx(float(loss.detach()) / 2)  # w = 2 and L ∝ w
    with torch.no_grad():
        net.w -= 1e-4 * net.w.grad
    assert float(method(step, Divisors(1, 1)).terms["l2r"].detach()) < float(loss.detach())


def test_the_inner_count_falls_and_the_outer_rises():
    """The slope of the term is +1 for a crop that out-counts and −1 for the one out-counted."""
    from p3net.losses.ranking import ranking

    counts = torch.tensor([[5.0], [7.0], [6.5]], requires_grad=True)
    ranking(counts).sum().backward()
    assert counts.grad is not None
    assert counts.grad.flatten().tolist() == [-2, 1, 1]


@pytest.mark.parametrize("kind", ["p3net", "regressor"])
def test_the_gradient_reaches_the_whole_network(kind):
    torch.manual_seed(0)
    architecture = RegressorArchitecture(backbone="small", dropout=0.0)
    net: nn.Module = P3Net(TINY) if kind == "p3net" else Regressor(architecture)
    loss = Ranking(net.eval(), loss="bl")(Step(0, None, crops(1, 2, size=64)), Divisors(1, 2))
    assert float(loss.terms["l2r"].detach()) > 0
    loss.terms["l2r"].backward()
    untouched = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert untouched == []


def test_a_batch_of_two_is_the_mean_of_two_batches_of_one():
    method = Ranking(network())
    both = method(Step(0, crops(1, 2, points=True), crops(3, 4)), Divisors(2, 2)).terms
    ones = [
        method(Step(0, crops(a, points=True), crops(b)), Divisors(1, 1)).terms
        for a, b in ((1, 3), (2, 4))
    ]
    for name in ("pdm", "l2r"):
        mean = (ones[0][name] + ones[1][name]) / 2
        torch.testing.assert_close(both[name], mean, rtol=1e-5, atol=1e-5)


def test_settings_build_it_with_unlabelled_images():
    small = {"backbone": "small", "layers": 1, "hidden": 32, "heads": 2}
    given: dict[str, Any] = {
        "data": "synthetic:3?train=8&val=2&test=2&size=96x128",
        "labelled": "3",
        "weights": "none",
        "network": small,
        "method": "l2r",
        "recipe": {"terms": {"l2r": {"weight": 0.5}}},
    }
    prepared = prepare(settings(given))
    assert isinstance(prepared.method, Ranking)
    assert len(prepared.stream.lanes) == 2
