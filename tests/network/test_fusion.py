from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p3net.intervals import Intervals
from p3net.network.fusion import (
    DECODINGS,
    FUSIONS,
    by_average,
    by_confidence,
    by_expectation,
    by_maximum,
    crop,
    modulate,
    upsample,
)

ONE = Intervals((0.1, 0.5, 1.0), (0.0, 0.3, 0.8, 2.0))
TWO = Intervals((0.2, 0.7, 3.0), (0.0, 0.5, 1.0, 4.0))


def distributions(seed: int, shape: tuple[int, ...] = (2, 4, 3, 5)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(1)


def test_modulation_is_an_inner_product_at_every_position():
    tokens, features = torch.randn(2, 3, 6).double(), torch.randn(2, 6, 4, 5).double()
    logits = modulate(tokens, features)
    assert logits.shape == (2, 3, 4, 5)
    for b in range(2):
        for c in range(3):
            for y in range(4):
                for x in range(5):
                    by_hand = sum(
                        float(tokens[b, c, d]) * float(features[b, d, y, x]) for d in range(6)
                    )
                    assert math.isclose(float(logits[b, c, y, x]), by_hand, abs_tol=1e-12)


@pytest.mark.parametrize("fusion", sorted(FUSIONS))
@pytest.mark.parametrize("decoding", sorted(DECODINGS))
def test_decoding_and_fusion_cell_by_cell(decoding, fusion):
    p, q = distributions(1), distributions(2)
    decode = DECODINGS[decoding]
    fused = FUSIONS[fusion](p, q, decode(p, ONE), decode(q, TWO))
    assert fused.shape == (2, 3, 5)
    for b in range(2):
        for y in range(3):
            for x in range(5):
                densities = []
                for chances, intervals in ((p[b, :, y, x], ONE), (q[b, :, y, x], TWO)):
                    listed = chances.tolist()
                    if decoding == "maximum":
                        densities.append(intervals.values[listed.index(max(listed))])
                    else:
                        densities.append(
                            sum(c * v for c, v in zip(listed, intervals.values, strict=True))
                        )
                omega = 0.5
                if fusion == "confidence":
                    sure = max(p[b, :, y, x].tolist())
                    omega = sure / (sure + max(q[b, :, y, x].tolist()))
                by_hand = omega * densities[0] + (1 - omega) * densities[1]
                assert math.isclose(float(fused[b, y, x]), by_hand, rel_tol=1e-12)


def test_the_names_are_what_they_say():
    assert {"expectation": by_expectation, "maximum": by_maximum} == DECODINGS
    assert {"confidence": by_confidence, "average": by_average} == FUSIONS


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_the_fused_density_lies_between_the_branches(seed):
    p, q = distributions(seed), distributions(seed + 1)
    first, second = by_expectation(p, ONE), by_expectation(q, TWO)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    for fuse in FUSIONS.values():
        fused = fuse(p, q, first, second)
        assert (fused >= low - 1e-12).all()
        assert (fused <= high + 1e-12).all()


def test_the_surer_branch_weighs_more():
    sure = torch.tensor([0.97, 0.01, 0.01, 0.01]).view(1, 4, 1, 1)
    unsure = torch.full((1, 4, 1, 1), 0.25)
    zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    assert float(by_confidence(unsure, sure, zero, one)) == pytest.approx(0.97 / 1.22)
    assert float(by_average(unsure, sure, zero, one)) == 0.5


def test_gradients_of_decodings():
    p = distributions(1).requires_grad_()
    by_expectation(p, ONE).sum().backward()
    expected = torch.tensor(ONE.values, dtype=torch.float64).view(1, 4, 1, 1)
    assert torch.equal(p.grad, expected.expand_as(p))
    assert not by_maximum(p, ONE).requires_grad


def bilinear(values: list[float], size: int, *, corners: bool) -> list[float]:
    """One row resampled by the definition: centres (or the corners' centres) are aligned."""
    n, result = len(values), []
    for i in range(size):
        place = i * (n - 1) / (size - 1) if corners else (i + 0.5) * n / size - 0.5
        place = min(max(place, 0.0), n - 1.0)
        left = min(int(place), n - 2)
        share = place - left
        result.append((1 - share) * values[left] + share * values[left + 1])
    return result


@pytest.mark.parametrize("corners", [False, True])
def test_upsampling_by_the_definition(corners):
    row, column = [1.0, 5.0, 2.0], [1.0, 3.0]
    maps = torch.tensor(column).view(1, 1, 2, 1) * torch.tensor(row).view(1, 1, 1, 3)
    across, down = bilinear(row, 7, corners=corners), bilinear(column, 4, corners=corners)
    expected = torch.tensor(down).view(1, 1, 4, 1) * torch.tensor(across).view(1, 1, 1, 7)
    torch.testing.assert_close(upsample(maps, (4, 7), corners=corners), expected)


def test_nothing_to_resample():
    maps = torch.rand(1, 2, 3, 4)
    assert upsample(maps, (3, 4)) is maps


def test_crop_keeps_the_upper_left():
    maps = torch.arange(24.0).view(1, 4, 6)
    assert crop(maps, (2, 3)).tolist() == [[[0, 1, 2], [6, 7, 8]]]
