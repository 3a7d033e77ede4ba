from __future__ import annotations

from itertools import product

import numpy as np
import torch

from p3net.randomness import generator, torch_generator


def test_a_place_is_what_numpy_draws_for_the_same_words():
    expected = np.random.default_rng([7, 3, 1]).random(5)
    assert generator(7, 3, 1).random(5).tolist() == expected.tolist()


def test_every_place_has_its_own_draws():
    places = list(product(range(4), range(4), range(4)))
    assert len({generator(*place).random() for place in places}) == len(places)
    draws = {float(torch.rand((), generator=torch_generator(*place))) for place in places}
    assert len(draws) > len(places) - 2  # 24 bits: two may meet
    assert generator(1, 2).random() != generator(1, 2, 1).random()
    assert generator(12).random() != generator(1, 2).random()


def test_torch_draws_repeat_and_leave_the_global_state_alone():
    before = torch.get_rng_state()
    first = torch.randn(5, generator=torch_generator(3, 1))
    assert torch.equal(torch.randn(5, generator=torch_generator(3, 1)), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_large_seeds():
    assert torch_generator(2**63, 2**40).initial_seed() >= 0
    assert generator(2**100).random() == generator(2**100).random()
