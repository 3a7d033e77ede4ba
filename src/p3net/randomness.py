"""Randomness that is counted, not carried.

What step k draws is a function of (seed, k, position) alone, so that a run resumes bit
for bit and the order of data is the same for any number of workers or processes.
"""

from __future__ import annotations

import numpy as np
import torch


def generator(seed: int, *counters: int) -> np.random.Generator:
    """A numpy generator for one place in the counted sequence.

    >>> float(generator(7, 3, 0).random()) == float(generator(7, 3, 0).random())
    True
    >>> float(generator(7, 3, 0).random()) == float(generator(7, 3, 1).random())
    False
    """
    return np.random.default_rng((seed, *counters))


def torch_generator(seed: int, *counters: int) -> torch.Generator:
    """The same place in the counted sequence, as a torch generator on the CPU."""
    words = np.random.SeedSequence((seed, *counters)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
