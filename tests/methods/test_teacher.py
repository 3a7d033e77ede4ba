"""The averaged copy: what it follows, what it never does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p3net.averaging import averaged, follow
from p3net.methods.teacher import Teacher
from p3net.network.p3net import Architecture, P3Net

TINY = Architecture(backbone="small", layers=1, hidden=32, heads=2, dropout=0.5)


def test_an_average_is_the_weighted_sum_of_what_it_saw():
    network = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        network.weight.fill_(1.0)
    average = averaged(network)
    seen = [4.0, -2.0, 3.0]
    for step, value in enumerate(seen):
        with torch.no_grad():
            network.weight.fill_(value)
        follow(average, network, 0.15, step)
    # decays (1+t)/(10+t), at most 0.15: 0.1, 0.15, 0.15
    expected = ((1.0 * 0.1 + 4 * 0.9) * 0.15 - 2 * 0.85) * 0.15 + 3 * 0.85
    assert float(average.weight.detach()) == pytest.approx(expected, rel=1e-6)


def test_tensors_that_two_names_share_move_once_and_buffers_are_copied():
    network = nn.Module()
    network.one = nn.Parameter(torch.zeros(1))
    network.two = network.one
    network.register_buffer("seen", torch.zeros(1))
    average = averaged(network)
    with torch.no_grad():
        network.one.fill_(1.0)
        network.seen.fill_(7.0)
    follow(average, network, 0.5, step=100)
    assert average.one is average.two
    assert float(average.one) == 0.5
    assert float(average.seen) == 7


def test_a_teacher_answers_without_gradient_and_never_in_training_mode():
    torch.manual_seed(0)
    student = P3Net(TINY).train()
    teacher = Teacher(student, 0.9)
    holder = nn.ModuleList((student, teacher)).train()
    assert holder.training
    assert not teacher.network.training
    images = torch.rand(1, 3, 32, 32)
    answer = teacher(images)
    assert not answer.density.requires_grad
    torch.testing.assert_close(answer.density, teacher(images).density)  # dropout would differ
    assert all(not parameter.requires_grad for parameter in teacher.parameters())
    assert not {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}


def test_a_teacher_lags_behind_its_student():
    torch.manual_seed(0)
    student = P3Net(TINY)
    teacher = Teacher(student, 0.9)
    before = teacher.network.tokens[0].clone()
    with torch.no_grad():
        student.tokens[0].add_(1.0)
    teacher.follow(student, step=1000)
    torch.testing.assert_close(teacher.network.tokens[0], before + 0.1)
