"""Learning from labelled crops alone: what is read, what is divided, what the loss is."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from p3net.data.loading import Step
from p3net.errors import InputError
from p3net.intervals import PUBLISHED
from p3net.methods.base import Divisors, Losses
from p3net.methods.supervised import LABELLED, Supervised
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.structures import Batch

TINY = Architecture(backbone="small", layers=1, hidden=32, heads=2, dropout=0.0)


def network(seed: int = 0) -> P3Net:
    torch.manual_seed(seed)
    return P3Net(TINY).eval()


def labelled(*seeds: int, size: int = 32, heads: int = 5) -> Batch:
    """Random crops with random heads."""
    draws = [np.random.default_rng(seed) for seed in seeds]
    images = [torch.tensor(d.random((3, size, size)), dtype=torch.float32) for d in draws]
    points = tuple(torch.tensor(d.uniform(0, size, (heads, 2))) for d in draws)
    return Batch(torch.stack(images), points, tuple(map(str, seeds)), (64.0,) * len(seeds))


def unlabelled(*seeds: int, size: int = 32) -> Batch:
    batch = labelled(*seeds, size=size)
    return Batch(batch.images, None, batch.names, batch.shorter_sides)


def value(losses: Losses, name: str) -> Tensor:
    return losses.terms[name]


def target_by_hand(points_xy: Tensor, size: int, sigma: float = 8.0) -> np.ndarray:
    """Mass of every head in every cell of 8×8 px, by sums over a fine grid, each head to 1."""
    fine = (np.arange(size * 8) + 0.5) / 8
    target = np.zeros((size // 8, size // 8))
    for x, y in points_xy.tolist():
        along_x = np.exp(-((fine - x) ** 2) / (2 * sigma**2)).reshape(-1, 64).sum(1)
        along_y = np.exp(-((fine - y) ** 2) / (2 * sigma**2)).reshape(-1, 64).sum(1)
        mass = np.outer(along_y, along_x)
        target += mass / mass.sum()
    return target


def test_the_labelled_loss_is_the_sum_worked_by_hand():
    net, batch = network(), labelled(1, 2)
    losses = Supervised(net)(Step(0, batch, None), Divisors(2, 1))
    with torch.no_grad():
        output = net(batch.images)
    total = 0.0
    for image in range(2):
        target = target_by_hand(batch.points_xy[image], 32)
        for branch, intervals in enumerate(PUBLISHED):
            p = output.probabilities[branch][image].double().numpy()
            for row in range(4):
                for column in range(4):
                    label = sum(border < target[row, column] for border in intervals.borders)
                    cumulative = 0.0
                    for j in range(25):
                        cumulative += p[j, row, column]
                        total += ((j >= label) - cumulative) ** 2
    assert value(losses, "pdm").item() == pytest.approx(total / 2, rel=1e-4)


def test_per_cell_divides_by_the_cells():
    batch, divisors = labelled(1), Divisors(1, 1)
    summed = Supervised(network())(Step(0, batch, None), divisors)
    mean = Supervised(network(), per_cell=True)(Step(0, batch, None), divisors)
    torch.testing.assert_close(value(mean, "pdm") * 16, value(summed, "pdm"))


def test_the_crops_counts_are_learned_on_request():
    net, batch, divisors = network(), labelled(1, 2), Divisors(2, 1)
    assert set(Supervised(net)(Step(0, batch, None), divisors).terms) == {"pdm"}
    losses = Supervised(net, total=True, per_cell=True)(Step(0, batch, None), divisors)
    with torch.no_grad():
        counts = net(batch.images).density.sum((1, 2)).tolist()
    off = [abs(c - len(points)) for c, points in zip(counts, batch.points_xy, strict=True)]
    assert value(losses, "total").item() == pytest.approx(sum(off) / 2 / 16, rel=1e-4)
    value(losses, "total").backward()
    assert net.tokens[0].grad.abs().sum() > 0


@pytest.mark.parametrize("loss", LABELLED)
def test_a_batch_of_two_is_the_mean_of_two_batches_of_one(loss):
    method = Supervised(network(), loss=loss)
    both = method(Step(0, labelled(1, 2), None), Divisors(2, 1))
    each = [method(Step(0, labelled(seed), None), Divisors(1, 1)) for seed in (1, 2)]
    mean = (value(each[0], loss) + value(each[1], loss)) / 2
    torch.testing.assert_close(value(both, loss), mean, rtol=1e-5, atol=1e-5)


def test_the_gradient_reaches_every_parameter():
    net = network()
    losses = Supervised(net)(Step(0, labelled(1, 2, size=64), None), Divisors(2, 1))
    value(losses, "pdm").backward()
    unmoved = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert unmoved == []


def test_unlabelled_crops_are_not_looked_at():
    method, nan = Supervised(network()), unlabelled(3)
    nan = Batch(nan.images * float("nan"), None, nan.names, nan.shorter_sides)
    alone = method(Step(0, labelled(1), None), Divisors(1, 1))
    beside = method(Step(0, labelled(1), nan), Divisors(1, 1))
    assert torch.equal(value(alone, "pdm"), value(beside, "pdm"))
    assert set(beside.terms) == {"pdm"}
    assert method(Step(0, None, unlabelled(3)), Divisors(1, 1)).terms == {}


@pytest.mark.parametrize("loss", ["bl", "dm"])
def test_a_regressor_learns_by_bl_and_dm(loss):
    torch.manual_seed(0)
    net = Regressor(RegressorArchitecture(backbone="small"))
    method = Supervised(net, loss=loss)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-4)
    before = copy.deepcopy(net.state_dict())
    values = []
    for _ in range(3):
        optimiser.zero_grad()
        losses = method(Step(0, labelled(1, 2), None), Divisors(2, 1))
        value(losses, loss).backward()
        optimiser.step()
        values.append(float(value(losses, loss).detach()))
    assert values[-1] < values[0]
    assert any(not torch.equal(before[n], t) for n, t in net.state_dict().items())


def test_what_cannot_be_learned_is_refused():
    with pytest.raises(InputError, match=r"unknown loss 'l2'; use one of pdm, .*dm"):
        Supervised(network(), loss="l2")
    with pytest.raises(InputError, match="'pdm' needs density intervals; a regressor takes bl"):
        Supervised(Regressor(RegressorArchitecture(backbone="small")), loss="pdm")
    with pytest.raises(InputError, match="labelled crops were expected"):
        Supervised(network())(Step(0, unlabelled(1), None), Divisors(1, 1))
