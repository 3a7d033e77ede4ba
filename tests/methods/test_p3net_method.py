"""PDM on labelled crops and ECR on unlabelled ones: values, gradients, what stays unread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p3net.data.catalogue import open_dataset
from p3net.data.loading import Step, loader, mixed, paired
from p3net.data.transforms import Augmentation
from p3net.methods.base import Divisors
from p3net.methods.p3net import CONSISTENCIES, P3NetMethod
from p3net.methods.supervised import Supervised
from p3net.methods.views import strong_view
from p3net.network.p3net import Architecture, Output, P3Net
from p3net.structures import Batch

TINY = Architecture(backbone="small", layers=1, hidden=32, heads=2, dropout=0.0)


def network(**changes: object) -> P3Net:
    torch.manual_seed(0)
    return P3Net(TINY.model_copy(update=changes)).eval()


def crops(*seeds: int, points: bool, size: int = 32) -> Batch:
    draws = [np.random.default_rng(seed) for seed in seeds]
    images = [torch.tensor(d.random((3, size, size)), dtype=torch.float32) for d in draws]
    heads = tuple(torch.tensor(d.uniform(0, size, (5, 2))) for d in draws)
    names = tuple(map(str, seeds))
    sides = (64.0,) * len(seeds)
    return Batch(torch.stack(images), heads if points else None, names, sides, seeds)


def test_the_two_terms_are_the_labelled_loss_and_a_masked_square_worked_by_hand():
    net = network()
    seen, unseen = crops(1, 2, points=True), crops(3, 4, 5, points=False)
    threshold = 0.1
    losses = P3NetMethod(net, threshold=threshold)(Step(0, seen, unseen), Divisors(2, 3))
    alone = Supervised(net)(Step(0, seen, None), Divisors(2, 3))
    torch.testing.assert_close(losses.terms["pdm"], alone.terms["pdm"], rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        output = net(unseen.images)
    p, q = (each.double().numpy() for each in output.probabilities)
    v, w = (np.array(each.values) for each in net.intervals)
    total, kept = 0.0, 0
    for image in range(3):
        for row in range(4):
            for column in range(4):
                a, b = p[image, :, row, column], q[image, :, row, column]
                if a.max() > threshold and b.max() > threshold:
                    total += (a @ v - b @ w) ** 2
                    kept += 1
    assert kept > 0
    assert float(losses.terms["ecr"].detach()) == pytest.approx(total / 3, rel=1e-4)
    assert losses.records["mask_share"] == pytest.approx(kept / 48)


def test_ecr_reaches_both_branches_and_pdm_everything():
    net = network()
    losses = P3NetMethod(net, threshold=0.0)(
        Step(0, None, crops(1, 2, points=False, size=64)), Divisors(1, 2)
    )
    assert set(losses.terms) == {"ecr"}
    losses.terms["ecr"].backward()
    unmoved = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert unmoved == []


def test_an_empty_mask_is_zero_with_a_gradient_of_zero():
    net = network(scaled_logits=True)
    losses = P3NetMethod(net, threshold=0.99)(Step(0, None, crops(1, points=False)), Divisors(1, 1))
    losses.terms["ecr"].backward()
    assert float(losses.terms["ecr"].detach()) == 0
    assert all(not p.grad.abs().sum() for p in net.parameters() if p.grad is not None)


def test_a_batch_of_two_pairs_is_the_mean_of_two_batches_of_one_pair():
    method = P3NetMethod(network(), threshold=0.0)
    both = method(
        Step(0, crops(1, 2, points=True), crops(3, 4, points=False)), Divisors(2, 2)
    ).terms
    singles = [
        method(Step(0, crops(a, points=True), crops(b, points=False)), Divisors(1, 1)).terms
        for a, b in ((1, 3), (2, 4))
    ]
    for name in ("pdm", "ecr"):
        mean = (singles[0][name] + singles[1][name]) / 2
        torch.testing.assert_close(both[name], mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["paired", "mixed"])
def test_points_of_unlabelled_images_are_never_read(kind, monkeypatch):
    dataset = open_dataset("synthetic:3?train=6&val=0&test=0&size=96x128")
    read: list[str] = []
    samples = []
    for sample in dataset.samples:

        def marks(own=sample.read_marks, key=sample.key):
            read.append(key)
            return own()

        samples.append(
            type(sample)(
                **{
                    name: marks if name == "read_marks" else getattr(sample, name)
                    for name in sample.__dataclass_fields__
                }
            )
        )
    seen, unseen = samples[:2], samples[2:]
    stream = (
        paired(seen, unseen, labelled_per_batch=2, unlabelled_per_batch=2)
        if kind == "paired"
        else mixed(seen, unseen, batch=3)
    )
    method, divisors = P3NetMethod(network(), threshold=0.0), Divisors.of(stream)
    names = set()
    for step in loader(stream, Augmentation(crop=64), seed=1, steps=4):
        method(step, divisors)
        if step.unlabelled is not None:
            assert step.unlabelled.points_xy is None
            names |= set(step.unlabelled.names)
    assert set(read) == {sample.key for sample in seen}
    assert names == {sample.key for sample in unseen}


def test_a_stronger_view_draws_both_branches_to_the_plain_one():
    """With the light left alone both views agree, so each branch is drawn to the other: twice."""
    net, step = network(), Step(0, None, crops(1, 2, points=False))
    plain = P3NetMethod(net, threshold=0.0)(step, Divisors(1, 2)).terms["ecr"]
    hidden = P3NetMethod(net, threshold=0.0, hidden=1e-12)(step, Divisors(1, 2)).terms["ecr"]
    torch.testing.assert_close(hidden, 2 * plain, rtol=1e-2, atol=1e-4)


def test_the_relative_consistency_is_a_weighted_square_across_views_worked_by_hand():
    net = network()
    unseen = crops(3, 4, points=False)
    threshold = 0.1
    method = P3NetMethod(
        net, threshold=threshold, strong=0.8, consistency="relative", teacher=0.9, soft=0.6
    )
    with torch.no_grad():  # a teacher that differs from its student
        for parameter in method.teacher.network.parameters():
            parameter.add_(0.01)
    losses = method(Step(0, None, unseen), Divisors(1, 2))
    with torch.no_grad():
        plain = method.teacher.network(unseen.images)
        strong = net(strong_view(unseen.images, unseen.seeds, 0.8, soft=0.6))
    total, kept = 0.0, 0
    for image, row, column in np.ndindex(2, 4, 4):
        cell = (image, row, column)
        sure = [float(each[image, :, row, column].max()) for each in plain.probabilities]
        if min(sure) > threshold:
            kept += 1
            for branch, other in ((0, 1), (1, 0)):
                gap = float(strong.expectations[branch][cell] - plain.expectations[other][cell])
                total += gap**2 / (float(strong.density[cell]) + 0.05)
    assert kept > 0
    assert float(losses.terms["ecr"].detach()) == pytest.approx(total / 2, rel=1e-3)


def test_the_relative_consistency_aims_at_the_mean():
    """Cells that look alike but are 0.1 and 0.9 dense for the teacher: the student rests at 0.5.

    Divided by the teacher's density it would rest at their harmonic mean, 0.18 to 0.22.
    """
    taught = torch.tensor([[[0.1, 0.9]]])
    everywhere = torch.ones(1, 1, 2, dtype=torch.bool)
    plain = Output(taught, (), (), (taught, taught))
    guess = torch.tensor(0.3, requires_grad=True)
    optimiser = torch.optim.SGD([guess], lr=0.01)
    for _ in range(400):
        density = guess.expand(1, 1, 2)
        student = Output(density, (), (), (density, density))
        optimiser.zero_grad()
        CONSISTENCIES["relative"](student, plain, everywhere).sum().backward()
        optimiser.step()
    assert float(guess.detach()) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(("light", "soft"), [(0.7, 0.0), (0.0, 0.9), (0.7, 0.9)])
def test_labelled_crops_are_learned_from_in_other_light_and_soft(light, soft):
    net, seen = network(), crops(1, 2, points=True)
    lit = crops(1, 2, points=True)
    shown = strong_view(lit.images, lit.seeds, light, soft=soft)
    other = Batch(shown, lit.points_xy, lit.names, lit.shorter_sides, (0, 0))
    for method in (Supervised, P3NetMethod):
        ours = method(net, light=light, soft=soft)
        ours = ours(Step(0, seen, None), Divisors(2, 1)).terms["pdm"]
        plain = method(net)(Step(0, seen, None), Divisors(2, 1)).terms["pdm"]
        by_hand = method(net)(Step(0, other, None), Divisors(2, 1)).terms["pdm"]
        torch.testing.assert_close(ours, by_hand)
        assert float(ours.detach()) != pytest.approx(float(plain.detach()))


@pytest.mark.parametrize("consistency", ["densities", "relative"])
def test_consistency_reaches_the_student_and_never_the_teacher(consistency: str):
    net = network()
    method = P3NetMethod(net, threshold=0.0, strong=0.5, consistency=consistency, teacher=0.9)
    before = [p.clone() for p in method.teacher.parameters()]
    losses = method(Step(0, None, crops(1, 2, points=False, size=64)), Divisors(1, 2))
    losses.terms["ecr"].backward()
    assert all(p.grad is None for p in method.teacher.parameters())
    unmoved = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert unmoved == []
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1)
    method.after_step(5)
    after = list(method.teacher.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
