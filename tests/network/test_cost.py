from __future__ import annotations

import pytest
import torch
from torch import nn

from p3net.errors import InputError
from p3net.network.cost import PAPER_MODELS, Cost, cost

# parameters and multiply-adds in full, then those a counter of modules sees; as printed
PRINTED = {
    "BL": ("21.50", "60.73", "21.50", "60.73"),
    "VGG19+Trans": ("34.11", "69.34", "29.91", "65.57"),
    "P³Net": ("53.68", "60.66", "36.85", "57.75"),
}


@pytest.mark.parametrize("model", PRINTED)
def test_all_figures_of_the_table(model):
    assert set(PAPER_MODELS) == set(PRINTED)
    found = cost(PAPER_MODELS[model], (384, 384))
    figures = (
        f"{found.parameters / 1e6:.2f}",
        f"{found.multiply_adds / 1e9:.2f}",
        f"{found.module_parameters / 1e6:.2f}",
        f"{found.module_multiply_adds / 1e9:.2f}",
    )
    assert figures == PRINTED[model]


class Toy(nn.Module):
    """A convolution of stride 2, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, 2, padding=1)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.convolution(x).flatten(2).transpose(1, 2)))


def test_a_toy_by_hand():
    positions = 8 * 12
    weights = positions * 4 * 27 + positions * 5 * 4
    assert cost(Toy, (16, 24)) == Cost(
        parameters=4 * 27 + 4 + 8 + 20,
        multiply_adds=weights,
        module_parameters=4 * 27 + 4 + 8 + 20,
        module_multiply_adds=weights + 2 * positions * 4,
    )


def test_convolutions_grow_with_the_area():
    small, large = (cost(PAPER_MODELS["BL"], (side, side)) for side in (64, 128))
    assert large.multiply_adds == 4 * small.multiply_adds
    assert large.parameters == small.parameters


@pytest.mark.parametrize("size_hw", [(0, 384), (384, 7), (-8, -8)])
def test_sizes_without_a_cell(size_hw):
    with pytest.raises(InputError, match="smaller than one cell"):
        cost(PAPER_MODELS["BL"], size_hw)
