from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.special import logsumexp
from torch import Tensor

from p3net.errors import InputError
from p3net.losses import transport
from p3net.losses.transport import dm_count, sinkhorn


def problem(
    seed: int, sources: int = 7, destinations: int = 5, span: float = 30.0
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(sources, 2, generator=random, dtype=torch.float64) * span
    y = torch.rand(destinations, 2, generator=random, dtype=torch.float64) * span
    a = torch.rand(sources, generator=random, dtype=torch.float64)
    b = torch.rand(destinations, generator=random, dtype=torch.float64)
    return torch.cdist(x, y).square(), a / a.sum(), b / b.sum()


def exact(cost: Tensor, a: Tensor, b: Tensor) -> float:
    """Optimal transport as a linear programme."""
    rows, columns = cost.shape
    margins = np.zeros((rows + columns, rows * columns))
    for i in range(rows):
        margins[i, i * columns : (i + 1) * columns] = 1
    for j in range(columns):
        margins[rows + j, j::columns] = 1
    answer = linprog(cost.numpy().ravel(), A_eq=margins, b_eq=np.concatenate([a, b]))
    assert answer.status == 0
    return float(answer.fun)


def plain(
    cost: Tensor, a: Tensor, b: Tensor, entropic: float, iterations: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sinkhorn with scaling vectors, without logarithms: for small costs only."""
    kernel = np.exp(-cost.numpy() / entropic)
    u = np.ones(len(a))
    for _ in range(iterations):
        v = 1 / (kernel.T @ (a.numpy() * u))
        u = 1 / (kernel @ (b.numpy() * v))
    return entropic * np.log(u), entropic * np.log(v)


def dual(f: Tensor, g: Tensor, a: Tensor, b: Tensor) -> float:
    return float((a * f).sum() + (b * g).sum())


@pytest.mark.parametrize("iterations", [1, 2, 7])
def test_iterates_equal_plain_scaling(iterations: int) -> None:
    cost, a, b = problem(0)
    f, g = sinkhorn(cost, a, b, entropic=50.0, iterations=iterations)
    expected_f, expected_g = plain(cost, a, b, 50.0, iterations)
    np.testing.assert_allclose(f, expected_f, rtol=1e-10)
    np.testing.assert_allclose(g, expected_g, rtol=1e-10)


@pytest.mark.parametrize("entropic", [0.05, 3.0])
def test_fixed_plans_and_logarithms_agree(entropic: float, monkeypatch: pytest.MonkeyPatch) -> None:
    cost, a, b = problem(1, sources=20, destinations=15)
    fast = sinkhorn(cost, a, b, entropic=entropic, iterations=60)
    monkeypatch.setattr(transport, "DRIFT", 0.0)  # every iteration in the log domain
    slow = sinkhorn(cost, a, b, entropic=entropic, iterations=60)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", [6, 9])  # 100 px² wrong if the plan stayed fixed throughout
def test_single_precision_follows_logarithms_over_long_ways(seed: int) -> None:
    cost, a, b = problem(seed, sources=30, destinations=20, span=200.0)
    f, g = np.zeros(30), np.zeros(20)
    c = cost.numpy()
    for _ in range(300):
        g = -10 * logsumexp((f[:, None] - c) / 10, axis=0, b=a.numpy()[:, None])
        f = -10 * logsumexp((g - c) / 10, axis=1, b=b.numpy())
    got_f, got_g = sinkhorn(cost.float(), a.float(), b.float(), entropic=10.0, iterations=300)
    np.testing.assert_allclose(got_f, f, atol=0.5)
    np.testing.assert_allclose(got_g, g, atol=0.5)


def test_margins_of_the_plan() -> None:
    cost, a, b = problem(2)
    f, g = sinkhorn(cost, a, b, entropic=5.0, iterations=2000)
    plan = a[:, None] * b * ((f[:, None] + g - cost) / 5.0).exp()
    torch.testing.assert_close(plan.sum(1), a, rtol=1e-9, atol=0)
    torch.testing.assert_close(plan.sum(0), b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", [3, 4])
def test_approaches_the_exact_optimum_with_falling_entropic(seed: int) -> None:
    cost, a, b = problem(seed)
    start, entropic = None, float(cost.max())
    while entropic > 0.01:
        entropic *= 0.75
        start, g = sinkhorn(cost, a, b, entropic=entropic, iterations=50, start=start)
    assert start is not None
    assert dual(start, g, a, b) == pytest.approx(exact(cost, a, b), rel=1e-3)


def test_a_warm_start_continues_where_it_stopped() -> None:
    cost, a, b = problem(5)
    f, _ = sinkhorn(cost, a, b, entropic=1.0, iterations=30)
    continued = sinkhorn(cost, a, b, entropic=1.0, iterations=20, start=f)
    torch.testing.assert_close(continued, sinkhorn(cost, a, b, entropic=1.0, iterations=50))


def test_huge_costs_and_empty_masses_stay_finite() -> None:
    cost = torch.tensor([[0.0, 1e6], [1e6, 0.0], [4e6, 1e6]])
    a, b = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 0.5])
    f, g = sinkhorn(cost, a, b, entropic=0.01, iterations=50)
    assert dual(f, g, a, b) == pytest.approx(0, abs=0.1)
    # Where there is no mass the potential is what mass would pay: 1e6 to the second head.
    assert float(f[2] + g[1]) == pytest.approx(1e6, rel=1e-5)
    f, g = sinkhorn(cost.T, b, a, entropic=0.01, iterations=50)
    assert dual(f, g, b, a) == pytest.approx(0, abs=0.1)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.5, 100))
def test_dual_grows_and_never_passes_the_regularised_optimum(seed: int, entropic: float) -> None:
    cost, a, b = problem(seed, sources=4, destinations=3)
    few, more, many = (
        dual(*sinkhorn(cost, a, b, entropic=entropic, iterations=n), a, b) for n in (1, 5, 500)
    )
    assert few <= more + 1e-9
    assert more <= many + 1e-9
    # The independent plan a⊗b has the margins and no divergence: an upper bound.
    assert many <= float((a[:, None] * b * cost).sum()) + 1e-9


def scene(seed: int) -> tuple[Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(seed)
    density = torch.rand(3, 3, 4, generator=random, dtype=torch.float64)
    heads = [
        torch.rand(count, 2, generator=random, dtype=torch.float64) * torch.tensor([32.0, 24.0])
        for count in (4, 0, 2)
    ]
    return density, heads


def terms(image: Tensor, points: Tensor) -> tuple[float, Tensor, float]:
    """Count term, cost matrix and variation term by plain loops."""
    height, width = image.shape
    marks = np.zeros((height, width))
    for x, y in points.tolist():
        marks[int(y // 8), int(x // 8)] += 1
    cost = [
        [(8 * c + 4 - x) ** 2 + (8 * r + 4 - y) ** 2 for x, y in points.tolist()]
        for r in range(height)
        for c in range(width)
    ]
    total, people = float(image.sum()), len(points)
    shape = np.abs(image.numpy() / total - marks / people).sum()
    return abs(total - people), torch.tensor(cost, dtype=torch.float64), 0.01 * people * shape


def test_value_is_count_transport_and_variation() -> None:
    density, heads = scene(0)
    values = dm_count(density, heads, entropic=0.5, iterations=3000).tolist()
    for index in (0, 2):
        count, cost, variation = terms(density[index], heads[index])
        people = len(heads[index])
        share = density[index].flatten() / density[index].sum()
        even = torch.full((people,), 1 / people, dtype=torch.float64)
        least = count + 0.1 * exact(cost, share, even) + variation
        # The divergence from a⊗b is between 0 and the entropy of b, log N.
        assert least - 1e-6 <= values[index] <= least + 0.1 * 0.5 * math.log(people)
    assert values[1] == pytest.approx(float(density[1].sum()))


def test_terms_can_be_weighed_and_left_out() -> None:
    density, heads = scene(1)
    only_count = dm_count(density, heads, transport=0, variation=0)
    expected = [abs(float(image.sum()) - len(h)) for image, h in zip(density, heads, strict=True)]
    assert only_count.tolist() == pytest.approx(expected)
    _, _, variation = terms(density[0], heads[0])
    with_variation = dm_count(density, heads, transport=0)
    assert float(with_variation[0] - only_count[0]) == pytest.approx(variation)


def test_gradient_equals_finite_differences_at_convergence() -> None:
    density, heads = scene(2)
    density.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda d: dm_count(d, heads, entropic=60.0, iterations=400), (density,), atol=1e-4
    )


def test_gradient_of_transport_is_the_dual_formula() -> None:
    density, heads = scene(3)
    image = density[:1].clone().requires_grad_()
    with_it = dm_count(image, heads[:1], transport=1.0, variation=0)
    without = dm_count(image, heads[:1], transport=0, variation=0)
    (gradient,) = torch.autograd.grad((with_it - without).sum(), image)
    _, cost, _ = terms(density[0], heads[0])
    flat, total = density[0].flatten(), density[0].sum()
    beta, _ = plain(cost, flat / total, torch.full((4,), 0.25).double(), 10.0, 100)
    expected = torch.as_tensor(beta) / total - (torch.as_tensor(beta) * flat).sum() / total**2
    torch.testing.assert_close(gradient.flatten(), expected, rtol=1e-6, atol=1e-8)
    assert float((gradient * density[:1]).sum()) == pytest.approx(0, abs=1e-9)  # scale-free


def test_batches_and_order_of_points_do_not_matter() -> None:
    density, heads = scene(4)
    together = dm_count(density, heads)
    alone = [dm_count(density[i : i + 1], heads[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=0)
    turned = [points.flip(0) for points in heads]
    torch.testing.assert_close(dm_count(density, turned), together, rtol=1e-9, atol=0)


def test_density_on_its_heads_costs_nothing_and_far_density_costs_more() -> None:
    heads = [torch.tensor([[4.0, 4.0], [28.0, 20.0]], dtype=torch.float64)]
    values = []
    for column in range(4):
        density = torch.zeros(1, 3, 4, dtype=torch.float64)
        density[0, 2, 3] = 1
        density[0, 0, column] += 1
        values.append(float(dm_count(density, heads, entropic=0.1)))
    assert values[0] == pytest.approx(0, abs=0.05)
    assert values == sorted(values)
    assert values[1] == pytest.approx(0.1 * 64 / 2 + 0.01 * 2, abs=0.05)


def test_empty_density_and_empty_points_have_finite_gradients() -> None:
    density = torch.zeros(2, 2, 2, requires_grad=True)
    value = dm_count(density, [torch.tensor([[4.0, 4.0]]), torch.zeros(0, 2)])
    assert value.tolist() == [1.0, 0.0]
    (gradient,) = torch.autograd.grad(value.sum(), density)
    assert gradient[0].tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    assert gradient[1].isfinite().all()


def test_cells_without_density_have_a_finite_gradient() -> None:
    density = torch.tensor([[[2.0, 0.0, 0.0]]], requires_grad=True)
    value = dm_count(density, [torch.tensor([[20.0, 4.0]])], variation=0)
    (gradient,) = torch.autograd.grad(value.sum(), density)
    # One head: f is the cost, so 0.1·(f − <f, share>)/2 with f = 256, 64, 0; and 1 for the count.
    assert gradient.flatten().tolist() == pytest.approx([1.0, 1 - 9.6, 1 - 12.8])


def test_points_on_the_border_count_in_the_nearest_cell() -> None:
    density = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
    inside = dm_count(density, [torch.tensor([[15.5, 7.5]])], transport=0)
    beyond = dm_count(density, [torch.tensor([[16.0, 8.0]])], transport=0)
    assert inside.tolist() == beyond.tolist() == [0.0]


def test_lower_precision_is_widened() -> None:
    density, heads = scene(5)
    rounded = density.bfloat16()
    expected = dm_count(rounded.double(), heads).float()
    torch.testing.assert_close(dm_count(rounded, heads), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = dm_count(rounded.float(), heads)
    torch.testing.assert_close(wide, expected, rtol=1e-4, atol=1e-4)


GRID, HEADS = torch.ones(1, 2, 2), [torch.ones(1, 2)]


@pytest.mark.parametrize(
    ("density", "heads", "message"),
    [
        (GRID[0], HEADS, "B×H×W"),
        (GRID, [], "1 images but 0 lists"),
        (GRID, [torch.ones(2)], "N×2"),
        (GRID, [torch.tensor([[1.0, math.nan]])], "not a finite number"),
        (GRID, [torch.tensor([[1.0, 30.0]])], "outside the grid"),
        (GRID, [torch.tensor([[-9.0, 1.0]])], "outside the grid"),
        (-GRID, HEADS, "must not be negative"),
    ],
)
def test_refuses_what_does_not_fit(density: Tensor, heads: list[Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dm_count(density, heads)


def test_refuses_impossible_settings() -> None:
    cost, a, b = torch.ones(2, 3), torch.ones(2) / 2, torch.ones(3) / 3
    with pytest.raises(InputError, match="side of a cell"):
        dm_count(GRID, HEADS, cell=0)
    with pytest.raises(InputError, match="M×N"):
        sinkhorn(cost.T, a, b, entropic=1.0, iterations=1)
    with pytest.raises(InputError, match="2 potentials"):
        sinkhorn(cost, a, b, entropic=1.0, iterations=1, start=b)
    for entropic, iterations in ((0.0, 1), (math.nan, 1), (1.0, 0)):
        with pytest.raises(InputError, match="entropic"):
            sinkhorn(cost, a, b, entropic=entropic, iterations=iterations)
    for wrong in (torch.tensor([1.5, -0.5]), torch.zeros(2)):
        with pytest.raises(InputError, match="masses a"):
            sinkhorn(cost, wrong, b, entropic=1.0, iterations=1)
        with pytest.raises(InputError, match="masses b"):
            sinkhorn(cost.T, b, wrong, entropic=1.0, iterations=1)
