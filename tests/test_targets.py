import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.stats import norm

from p3net.errors import InputError
from p3net.targets import adaptive_sigma, densities, density, grid_hw


def reference(
    points: np.ndarray, size_hw: tuple[int, int], sigma: np.ndarray, cell: int = 8
) -> np.ndarray:
    """Cell masses by scipy's normal distribution over the whole grid, a point at a time."""
    rows, columns = -(-size_hw[0] // cell), -(-size_hw[1] // cell)
    total = np.zeros((rows, columns))
    for (x, y), s in zip(points, sigma, strict=True):
        across = np.diff(norm.cdf(np.arange(columns + 1) * cell, x, s))
        down = np.diff(norm.cdf(np.arange(rows + 1) * cell, y, s))
        total += np.outer(down / down.sum(), across / across.sum())
    return total


def random_points(count: int, size_hw: tuple[int, int], seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.uniform((0, 0), (size_hw[1], size_hw[0]), (count, 2)))


@pytest.mark.parametrize("size_hw", [(64, 64), (120, 200), (8, 8), (77, 531), (1040, 96)])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_cells_equal_scipy(size_hw: tuple[int, int], count: int) -> None:
    points = random_points(count, size_hw)
    expected = reference(points.numpy(), size_hw, np.full(count, 8.0))
    ours = density(points, size_hw).numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6 * expected.max())
    populated = expected > 1e-3  # and there relative to the cell itself
    np.testing.assert_allclose(ours[populated], expected[populated], rtol=1e-6)


def test_cells_equal_a_fine_grid() -> None:
    """Against a numerical integral: the Gaussian sampled 64 times a pixel."""
    x, y, sigma, fine = 30.3, 17.9, 8.0, 64
    axis = (np.arange(64 * fine) + 0.5) / fine
    across = np.exp(-((axis - x) ** 2) / (2 * sigma**2)).reshape(8, -1).sum(1)
    down = np.exp(-((axis - y) ** 2) / (2 * sigma**2)).reshape(8, -1).sum(1)
    expected = np.outer(down / down.sum(), across / across.sum())
    ours = density(torch.tensor([[x, y]]), (64, 64)).numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-6 * expected.max())


def test_adaptive_sigma_against_a_full_distance_matrix() -> None:
    points = random_points(50, (300, 300), seed=4)
    distances = np.sort(cdist(points, points), axis=1)[:, 1:4]
    expected = np.clip(0.3 * distances.mean(1), 1, 16)
    np.testing.assert_allclose(adaptive_sigma(points), expected)
    ours = density(points, (300, 300), sigma=adaptive_sigma(points))
    theirs = reference(points.numpy(), (300, 300), expected)
    np.testing.assert_allclose(ours, theirs, atol=2e-6 * theirs.max())


def test_adaptive_sigma_of_few_points() -> None:
    assert adaptive_sigma(torch.empty(0, 2)).tolist() == []
    assert adaptive_sigma(torch.tensor([[5.0, 5.0]])).tolist() == [16.0]
    assert adaptive_sigma(torch.tensor([[5.0, 5.0], [15.0, 5.0]])).tolist() == [3.0, 3.0]


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(8, 700), st.integers(8, 700)),
    count=st.integers(0, 40),
    sigma=st.floats(0.5, 40),
    seed=st.integers(0, 99),
)
def test_a_target_sums_to_its_points(
    size: tuple[int, int], count: int, sigma: float, seed: int
) -> None:
    target = density(random_points(count, size, seed), size, sigma=sigma)
    assert tuple(target.shape) == grid_hw(size)
    assert float(target.sum(dtype=torch.float64)) == pytest.approx(count, rel=1e-5, abs=1e-6)
    assert float(target.min()) >= 0


def test_a_batch_equals_its_images() -> None:
    batch = [random_points(n, (96, 128), seed=n) for n in (0, 1, 70)]
    together = densities(batch, (96, 128))
    for each, points in zip(together, batch, strict=True):
        torch.testing.assert_close(each, density(points, (96, 128)))
    assert densities([], (96, 128)).shape == (0, 12, 16)


def test_many_points_on_a_large_image_stay_exact_over_strips_and_chunks() -> None:
    size = (1100, 520)
    points = random_points(6000, size, seed=8)
    expected = reference(points.numpy(), size, np.full(6000, 8.0))
    np.testing.assert_allclose(density(points, size), expected, atol=2e-6 * expected.max())


def test_twenty_thousand_points_in_bounded_memory() -> None:
    size = (4096, 4096)
    before = peak_mb()
    target = density(random_points(20_000, size), size)
    assert float(target.sum(dtype=torch.float64)) == pytest.approx(20_000, rel=1e-5)
    assert peak_mb() - before < 150


def peak_mb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(
    ("points", "size", "sigma", "message"),
    [
        ([[math.nan, 1.0]], (64, 64), 8.0, "NaN"),
        ([[math.inf, 1.0]], (64, 64), 8.0, "NaN or infinite"),
        ([[64.0, 1.0]], (64, 64), 8.0, "outside the image"),
        ([[1.0, -0.5]], (64, 64), 8.0, "outside the image"),
        ([[1.0, 1.0, 1.0]], (64, 64), 8.0, "N×2"),
        ([1.0, 1.0], (64, 64), 8.0, "N×2"),
        ([[1.0, 1.0]], (7, 64), 8.0, "smaller than one cell"),
        ([[1.0, 1.0]], (64, 64), 0.0, "positive"),
        ([[1.0, 1.0]], (64, 64), math.nan, "positive"),
    ],
)
def test_bad_input(points: list, size: tuple[int, int], sigma: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        density(torch.tensor(points), size, sigma=sigma)


def test_sigma_of_the_wrong_length() -> None:
    with pytest.raises(InputError, match="σ of shape"):
        density(torch.ones(2, 2), (64, 64), sigma=torch.ones(3))
    with pytest.raises(InputError, match="values of sigma"):
        densities([torch.ones(2, 2)], (64, 64), sigma=[8.0, 8.0])


def test_nobody_is_an_answer() -> None:
    assert float(density(torch.empty(0, 2), (64, 64)).sum()) == 0
