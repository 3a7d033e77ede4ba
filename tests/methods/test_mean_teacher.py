"""Mean Teacher: the student is drawn to its own average, which is never drawn to anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p3net import checkpoint
from p3net.configuration import PRESETS, settings
from p3net.data.catalogue import open_dataset
from p3net.data.loading import Step, paired
from p3net.data.transforms import Augmentation
from p3net.errors import InputError
from p3net.experiment import prepare
from p3net.methods.base import Divisors
from p3net.methods.mean_teacher import MeanTeacher
from p3net.methods.supervised import Supervised
from p3net.methods.views import strong_view
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.recipe import Recipe, Term
from p3net.structures import Batch
from p3net.training import train

TINY = Architecture(backbone="small", layers=1, hidden=32, heads=2, dropout=0.0)


def network(kind: str = "p3net", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "regressor":
        return Regressor(RegressorArchitecture(backbone="small", dropout=0.0)).eval()
    return P3Net(TINY).eval()


def crops(*seeds: int, points: bool = False, size: int = 32) -> Batch:
    draws = [np.random.default_rng(seed) for seed in seeds]
    images = [torch.tensor(d.random((3, size, size)), dtype=torch.float32) for d in draws]
    heads = tuple(torch.tensor(d.uniform(0, size, (5, 2))) for d in draws)
    names = tuple(map(str, seeds))
    return Batch(torch.stack(images), heads if points else None, names, (64.0,) * len(seeds), seeds)


def apart(method: MeanTeacher, by: float = 0.05) -> MeanTeacher:
    """Move the teacher's weights away from the student's."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in method.teacher.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=draws))
    return method


@pytest.mark.parametrize("kind", ["p3net", "regressor"])
def test_the_term_is_the_mean_square_between_two_views_worked_by_hand(kind):
    net, unseen = network(kind), crops(3, 8)
    method = apart(MeanTeacher(net, loss="bl", strong=0.7, hidden=0.3))
    terms = method(Step(0, crops(1, points=True), unseen), Divisors(1, 2)).terms
    assert set(terms) == {"bl", "mt"}
    with torch.no_grad():
        student = net(strong_view(unseen.images, (3, 8), 0.7, 0.3)).density.numpy()
        teacher = method.teacher(strong_view(unseen.images, (2, 9), 0.7, 0.3)).density.numpy()
    total = 0.0
    for image in range(2):
        for row in range(4):
            for column in range(4):
                difference = float(student[image, row, column]) - teacher[image, row, column]
                total += difference**2 / 16 / 2
    assert float(terms["mt"].detach()) == pytest.approx(total, rel=1e-4)
    alone = Supervised(net, loss="bl")(Step(0, crops(1, points=True), None), Divisors(1, 2))
    torch.testing.assert_close(terms["bl"], alone.terms["bl"])


@pytest.mark.parametrize("kind", ["p3net", "regressor"])
def test_the_gradient_reaches_all_of_the_student_and_nothing_of_the_teacher(kind):
    method = apart(MeanTeacher(network(kind), loss="bl"))
    before = [p.clone() for p in method.teacher.parameters()]
    loss = method(Step(0, None, crops(1, 2, size=64)), Divisors(1, 2)).terms["mt"]
    assert float(loss.detach()) > 0
    loss.backward()
    untouched = [
        name
        for name, p in method.network.named_parameters()
        if p.grad is None or not p.grad.abs().sum()
    ]
    assert untouched == []
    for parameter, old in zip(method.teacher.parameters(), before, strict=True):
        assert parameter.grad is None
        assert not parameter.requires_grad
        assert torch.equal(parameter, old)


def test_a_step_down_the_gradient_brings_the_student_nearer_to_the_teacher():
    method = apart(MeanTeacher(network()))
    step = Step(0, None, crops(1, 2))
    loss = method(step, Divisors(1, 2)).terms["mt"]
    loss.backward()
    with torch.no_grad():
        size = sum(float(p.grad.square().sum()) for p in method.network.parameters())  # type: ignore[union-attr]
        for parameter in method.network.parameters():
            parameter.sub_(0.1 * float(loss.detach()) / size * parameter.grad)  # type: ignore[operator]
    assert float(method(step, Divisors(1, 2)).terms["mt"].detach()) < float(loss.detach())


def test_equal_weights_on_equal_views_agree_and_other_light_parts_them():
    step = Step(0, None, crops(1, 2))
    same = MeanTeacher(network(), strong=0.0)(step, Divisors(1, 2)).terms["mt"]
    assert float(same.detach()) == 0
    lit = MeanTeacher(network(), strong=0.8)(step, Divisors(1, 2)).terms["mt"]
    assert float(lit.detach()) > 0


def test_a_batch_of_two_is_the_mean_of_two_batches_of_one():
    method = apart(MeanTeacher(network()))
    both = method(Step(0, crops(1, 2, points=True), crops(3, 4)), Divisors(2, 2)).terms
    ones = [
        method(Step(0, crops(a, points=True), crops(b)), Divisors(1, 1)).terms
        for a, b in ((1, 3), (2, 4))
    ]
    for name in ("pdm", "mt"):
        mean = (ones[0][name] + ones[1][name]) / 2
        torch.testing.assert_close(both[name], mean, rtol=1e-5, atol=1e-6)


def test_the_teacher_follows_and_stays_itself():
    """At a late step: t ← 0.9·t + 0.1·s, for every weight."""
    method = apart(MeanTeacher(network(), decay=0.9))
    expected = [
        0.9 * t.double() + 0.1 * s.double()
        for t, s in zip(method.teacher.parameters(), method.network.parameters(), strict=True)
    ]
    method.after_step(1000)
    for parameter, value in zip(method.teacher.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.double(), value, rtol=1e-5, atol=1e-6)
    own = {p.data_ptr() for p in method.network.parameters()}
    assert not own & {p.data_ptr() for p in method.teacher.parameters()}


def test_the_weight_rises_as_the_exponential_of_the_square():
    term = Term(weight=3.0, start=2, ramp=4, shape="sigmoid")
    got = [term.at(step, epoch=0) for step in (1, 2, 3, 4, 5, 9)]
    done = (0.25, 0.5, 0.75, 1, 1)
    assert got == pytest.approx([0, *(3 * math.exp(-5 * (1 - t) ** 2) for t in done)])


# --- in the loop --------------------------------------------------------------------------------


def run(folder: Path, steps: int, **more: Any) -> nn.Module:
    samples = open_dataset("synthetic:3?train=6&val=0&test=0&size=96x128").samples
    torch.manual_seed(0)
    return train(
        MeanTeacher(P3Net(TINY), per_cell=True, decay=0.9),
        paired(samples[:3], samples[3:], labelled_per_batch=2, unlabelled_per_batch=2),
        Augmentation(crop=64),
        Recipe(steps=steps, workers=0, learning_rate=1e-3, save_every=2, terms={"mt": Term()}),
        folder=folder,
        seed=5,
        metadata={},
        **more,
    )


def test_the_teacher_is_kept_apart_from_what_counts_and_resumes_bit_for_bit(tmp_path):
    run(tmp_path / "whole", 4)
    run(tmp_path / "halves", 2)
    run(tmp_path / "halves", 4, resume=True)
    one, two = (checkpoint.read(tmp_path / n / "last.safetensors")[0] for n in ("whole", "halves"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    taught = [name for name in one if name.startswith("method.teacher.")]
    assert len(taught) == sum(name.startswith("network.") for name in one)
    moved = [n for n in taught if not torch.equal(one[n], one[n.removeprefix("method.teacher.")])]
    assert len(moved) > len(taught) / 2  # it lags behind the student
    model = checkpoint.read(tmp_path / "whole" / "model.safetensors")[0]
    assert all(name.startswith("network.") for name in model)
    assert torch.equal(model["network.tokens.0"], one["network.tokens.0"])
    assert checkpoint.load(tmp_path / "whole").count(torch.zeros(3, 64, 64)).count >= 0


# --- settings -----------------------------------------------------------------------------------

DATA = "synthetic:3?train=8&val=2&test=2&size=96x128"


def test_settings_build_it_and_ask_for_a_teacher():
    small = {"backbone": "small", "layers": 1, "hidden": 32, "heads": 2}
    given: dict[str, Any] = {"data": DATA, "labelled": "3", "weights": "none", "network": small}
    given |= {"method": "mean-teacher", "strong": 0.25, "hidden": 0.5}
    prepared = prepare(settings({**given, "teacher": 0.95}))
    method = prepared.method
    assert isinstance(method, MeanTeacher)
    assert (method.teacher.decay, method.strong, method.hidden) == (0.95, 0.25, 0.5)
    assert len(prepared.stream.lanes) == 2
    with pytest.raises(InputError, match="needs two views that differ; set strong"):
        settings(given | {"strong": 0, "hidden": 0}, preset="paper")
    with pytest.raises(InputError, match=r"mean-teacher needs a teacher; set teacher: 0\.99"):
        settings({**given, "teacher": 0})


@pytest.mark.parametrize("preset", PRESETS)
def test_rivals_are_as_their_papers_have_them_unless_told_otherwise(preset):
    chosen = settings({"data": DATA, "method": "mean-teacher"}, preset=preset)
    term = chosen.recipe.terms["mt"]
    weights = [term.at(step, 0) for step in (0, term.ramp - 1)]
    assert chosen.strong
    assert weights == pytest.approx([term.weight * math.exp(-5), term.weight], rel=0.01)
    own = settings({"data": DATA, "method": "mean-teacher", "strong": 0.1}, preset=preset)
    assert own.strong == 0.1
    ranked = settings({"data": DATA, "method": "l2r"}, preset=preset)
    assert ranked.recipe.terms["l2r"].weight == 0.01
