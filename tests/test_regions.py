from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3net.errors import InputError
from p3net.regions import Region, Regions, clip, coverage, read_regions

ELL = [[10, 10], [50, 10], [50, 30], [30, 30], [30, 60], [10, 60]]  # concave


def star(seed: int, vertices: int = 9, span: float = 60, centre: float = 32) -> np.ndarray:
    """A polygon seen whole from its centre: it cannot cross itself, and is mostly concave."""
    rng = np.random.default_rng(seed)
    angle = np.sort(rng.uniform(0, 2 * np.pi, vertices))
    radius = rng.uniform(0.2, 1, vertices) * span
    return centre + np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def shoelace(polygon: list) -> float:
    total = 0.0
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
        total += x0 * y1 - x1 * y0
    return total / 2


def cut(polygon: list, inside: tuple[float, float, float]) -> list:
    """One half-plane a·x + b·y <= c of Sutherland and Hodgman, vertex by vertex."""
    a, b, c = inside
    result = []
    for k, (x1, y1) in enumerate(polygon):
        x0, y0 = polygon[k - 1]
        before, after = a * x0 + b * y0 - c, a * x1 + b * y1 - c
        if before * after < 0:
            t = before / (before - after)
            result.append((x0 + t * (x1 - x0), y0 + t * (y1 - y0)))
        if after <= 0:
            result.append((x1, y1))
    return result


def by_cells(
    polygon: np.ndarray,
    grid: tuple[int, int],
    cell: tuple[float, float],
    size: tuple[float, float] = (math.inf, math.inf),
) -> np.ndarray:
    """Cell by cell: cut the polygon to the cell, then to the image, and take its area."""
    shares = np.zeros(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            left, top = column * cell[0], row * cell[1]
            right, bottom = min(left + cell[0], size[1]), min(top + cell[1], size[0])
            if right <= left or bottom <= top:
                continue
            part = [tuple(vertex) for vertex in polygon]
            for plane in ((-1, 0, -left), (1, 0, right), (0, -1, -top), (0, 1, bottom)):
                part = cut(part, plane) if part else part
            shares[row, column] = abs(shoelace(part)) / ((right - left) * (bottom - top))
    return shares


@pytest.mark.parametrize("seed", range(6))
def test_coverage_equals_cutting_cell_by_cell(seed: int) -> None:
    polygon = star(seed)[:: -1 if seed % 2 else 1]
    grid, cell = (7, 9), (8.0, 9.5)
    ours = coverage(polygon, grid, cell)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, by_cells(polygon, grid, cell), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_coverage_at_the_border_of_the_image(seed: int) -> None:
    polygon, size = star(seed, span=90), (51, 61)
    grid, cell = (7, 8), (8.0, 8.0)
    ours = coverage(polygon, grid, cell, size)
    np.testing.assert_allclose(ours, by_cells(polygon, grid, cell, size), atol=1e-6)


def test_coverage_equals_sampling() -> None:
    """64×64 points a cell, each inside by the even-odd rule."""
    polygon, cell = star(3, vertices=14, span=30), 8.0
    at = (np.arange(8 * 64) + 0.5) * cell / 64
    x, y = np.meshgrid(at, at)
    inside = np.zeros(x.shape, dtype=bool)
    for (x0, y0), (x1, y1) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        inside ^= ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) / (y1 - y0) * (x1 - x0))
    sampled = inside.reshape(8, 64, 8, 64).mean(axis=(1, 3))
    np.testing.assert_allclose(coverage(polygon, (8, 8), (cell, cell)), sampled, atol=0.01)


@settings(max_examples=80, deadline=None)
@given(
    corners=st.lists(
        st.tuples(st.integers(-20, 90), st.integers(-20, 90)), min_size=3, max_size=3, unique=True
    ),
    cell=st.tuples(st.integers(3, 17), st.integers(3, 17)),
)
def test_coverage_of_triangles_on_whole_numbers(
    corners: list[tuple[int, int]], cell: tuple[int, int]
) -> None:
    """Vertices and edges on the lines of the grid, upright, level and flat ones included."""
    polygon = np.array(corners, dtype=np.float64)
    ours = coverage(polygon, (5, 6), cell)
    np.testing.assert_allclose(ours, by_cells(polygon, (5, 6), cell), atol=1e-6)


def test_coverage_of_all_and_of_nothing() -> None:
    whole = np.array([[-5, -5], [500, -5], [500, 500], [-5, 500]], dtype=np.float64)
    assert (coverage(whole, (3, 4), (8, 8), (20, 29)) == 1).all()
    assert (coverage(whole + 1000, (3, 4), (8, 8), (20, 29)) == 0).all()


def test_parts_add_up_to_the_count() -> None:
    """A cut through the image: both sides together hold everybody, whatever the edge's way."""
    rng = np.random.default_rng(0)
    density = rng.random((7, 9)).astype(np.float32)
    middle = [[33.3, 0], [41, 11.7], [20, 30.1], [37.77, 51]]
    left = Region("left", np.array([[0, 0], *middle, [0, 51]]))
    right = Region("right", np.array([[70, 0], *middle, [70, 51]]))
    shares = {r.name: coverage(r.polygon_xy, (7, 9), (8, 8), (51, 70)) for r in (left, right)}
    counts = {
        name: float((density * share).sum(dtype=np.float64)) for name, share in shares.items()
    }
    assert sum(counts.values()) == pytest.approx(float(density.sum(dtype=np.float64)), rel=1e-6)
    assert counts["left"] == pytest.approx(
        float((density * by_cells(left.polygon_xy, (7, 9), (8, 8), (51, 70))).sum()), rel=1e-5
    )


def test_clip_keeps_what_is_inside() -> None:
    assert clip(np.array(ELL, dtype=float), (100, 100)).tolist() == ELL
    inner = clip(np.array(ELL, dtype=float), (40, 40))
    assert abs(shoelace(inner.tolist())) == pytest.approx(30 * 20 + 20 * 10)


@pytest.mark.parametrize(
    ("homography", "scale", "expected"),
    [
        (None, None, None),
        (None, 0.1, 14.0),  # 40·20 + 20·30 = 1,400 px²
        ([[0.1, 0, 5], [0, 0.2, -3], [0, 0, 1]], None, 28.0),
        ([[-1, 0, 0], [0, -2, 0], [0, 0, -10]], None, 28.0),  # the same up to a factor
    ],
)
def test_area(homography: list | None, scale: float | None, expected: float | None) -> None:
    ell = Region("ell", np.array(ELL, dtype=float))
    regions = Regions((ell,), None if homography is None else np.array(homography), scale)
    area = regions.area_m2(ell, (100, 100))
    assert area == (None if expected is None else pytest.approx(expected))


def test_area_in_perspective_equals_the_integral_of_the_jacobian() -> None:
    matrix = np.array([[0.05, 0.01, 1], [0.002, 0.08, 2], [0.0004, 0.006, 1]])
    ell = Region("ell", np.array(ELL, dtype=float))
    area = Regions((ell,), matrix).area_m2(ell, (100, 100))
    at = (np.arange(1000) + 0.5) / 10
    x, y = np.meshgrid(at, at)
    inside = (x > 10) & (x < 50) & (y > 10) & (y < 60) & ((x < 30) | (y < 30))
    depth = matrix[2, 0] * x + matrix[2, 1] * y + matrix[2, 2]
    assert area == pytest.approx(
        (inside * abs(np.linalg.det(matrix)) / depth**3).sum() / 100, rel=1e-4
    )


def test_area_of_what_the_image_shows() -> None:
    square = Region("square", np.array([[-50, 10], [50, 10], [50, 20], [-50, 20]], dtype=float))
    beyond = Region("beyond", np.array([[-50, 0], [-10, 0], [-10, 9]], dtype=float))
    for regions in (
        Regions((square, beyond), metres_per_pixel=2.0),
        Regions((square, beyond), np.diag([2.0, 2.0, 1.0])),
    ):
        assert regions.area_m2(square, (100, 100)) == pytest.approx(50 * 10 * 4)
        assert regions.area_m2(beyond, (100, 100)) == 0


def test_no_area_beyond_the_horizon() -> None:
    """The horizon is the line y = 40; beyond the image it does not matter."""
    ell = Region("ell", np.array(ELL, dtype=float))
    regions = Regions((ell,), np.array([[1, 0, 0], [0, 1, 0], [0, 1, -40.0]]))
    with pytest.raises(InputError, match="horizon"):
        regions.area_m2(ell, (100, 100))
    assert regions.area_m2(ell, (39, 100)) is not None


OWN = {"regions": [{"name": "gate", "polygon": ELL}]}
GEOJSON = {
    "type": "FeatureCollection",
    "features": [
        {
            "type": "Feature",
            "properties": {"name": "gate"},
            "geometry": {"type": "Polygon", "coordinates": [[*ELL, ELL[0]]]},
        }
    ],
}
LABELME = {
    "version": "5.0.0",
    "shapes": [
        {"label": "head", "shape_type": "point", "points": [[1, 2]]},
        {"label": "gate", "shape_type": "polygon", "points": ELL},
    ],
    "imagePath": "a.jpg",
}


def write(folder: Path, tree: object) -> Path:
    path = folder / "regions.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


@pytest.mark.parametrize("tree", [OWN, GEOJSON, LABELME])
def test_three_forms_of_a_file(tmp_path: Path, tree: dict) -> None:
    regions = read_regions(write(tmp_path, tree))
    assert [region.name for region in regions] == ["gate"]
    assert len(regions) == 1
    assert regions.each[0].polygon_xy.tolist() == ELL
    assert regions.homography is regions.metres_per_pixel is None
    scaled = read_regions(str(write(tmp_path, tree | {"metres_per_pixel": 0.02})))
    assert scaled.metres_per_pixel == 0.02
    mapped = read_regions(write(tmp_path, tree | {"homography": np.eye(3).tolist()}))
    assert mapped.homography is not None
    np.testing.assert_array_equal(mapped.homography, np.eye(3))


def own(*polygons: object, **more: object) -> dict:
    return {
        "regions": [{"name": f"r{k}", "polygon": each} for k, each in enumerate(polygons)]
    } | more


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("{", "JSON"),
        ('{"regions": [{"name": "a", "polygon": [[NaN, 1]]}]}', "NaN"),
        ([], "the file must be an object"),
        ({"zones": []}, "expected .*FeatureCollection"),
        ({"regions": []}, "no region"),
        ({"regions": [{"polygon": ELL}]}, "name of a region"),
        (own(ELL, metre_per_pixel=1), "unknown .*metre_per_pixel"),
        (own(None), "the polygon of 'r0'"),
        (own([[1, 2], [3, 4]]), "at least 3 different vertices, got 2"),
        (own([[1, 2], [3, 4], [3, 4], [1, 2]]), "at least 3 different vertices, got 2"),
        (own([[1, 2, 3]]), "a point must be"),
        (own([[1, "a"]]), "expected a number"),
        (own([[1, 1e9], [0, 0], [1, 1]]), "cannot be a coordinate"),
        (own([[0, 0], [9, 9], [9, 0], [0, 9]]), "edges 1 and 3 meet"),  # crossed
        (own([[0, 0], [9, 0], [9, 9], [4, 0], [0, 9]]), "edges 1 and 3 meet"),  # touches
        (own([[0, 0], [9, 0], [4, 0]]), "meet"),  # goes back
        (own([[0, 0], [9, 0], [9, 5], [5, 0], [2, 0], [0, 5]]), "meet"),  # along itself
        ({"regions": [{"name": "a", "polygon": ELL}] * 2}, "two regions are called 'a'"),
        (own(ELL, metres_per_pixel=0), "above 0"),
        (own(ELL, metres_per_pixel="1"), "must be a finite number"),
        (own(ELL, metres_per_pixel=10**400), "must be a finite number"),
        (own(ELL, metres_per_pixel=1, homography=np.eye(3).tolist()), "not both"),
        (own(ELL, homography=[[1, 2, 3]]), "3 rows of 3"),
        (own(ELL, homography=[[1, 2, True]] * 3), "must be a finite number"),
        (own(ELL, homography=[[1, 2, 3]] * 3), "cannot be inverted"),
        (own(ELL, homography=[[0, 0, 0]] * 3), "cannot be inverted"),
        ({"type": "FeatureCollection", "features": [{"properties": None}]}, "properties"),
        ({"type": "FeatureCollection", "features": [{"properties": {}}]}, "properties.name"),
        (json.loads(json.dumps(GEOJSON).replace('"Polygon"', '"MultiPolygon"')), "one ring"),
        ({"shapes": [{"shape_type": "polygon", "points": ELL}]}, "label of a shape"),
        ({"shapes": []}, "no region"),
    ],
)
def test_bad_files(tmp_path: Path, tree: object, message: str) -> None:
    path = write(tmp_path, tree)
    with pytest.raises(InputError, match=message) as caught:
        read_regions(path)
    assert caught.value.source == str(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_regions(tmp_path / "none.json")


def test_bad_values_without_a_file() -> None:
    ell = Region("ell", np.array(ELL, dtype=float))
    with pytest.raises(InputError, match="needs a name"):
        Region("", ell.polygon_xy)
    with pytest.raises(InputError, match="not a finite number"):
        Region("a", np.array([[0, 0], [1, 0], [np.inf, 1]]))
    with pytest.raises(InputError, match="3×3"):
        Regions((ell,), np.eye(2))
    with pytest.raises(InputError, match="3×3"):
        Regions((ell,), np.full((3, 3), np.nan))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=6, unique=True)
)
def test_crossings_are_found_as_by_rational_numbers(corners: list[tuple[int, int]]) -> None:
    """Every pair of edges in whole numbers, exactly; neighbours may share their vertex only."""

    def turn(a: tuple, b: tuple, c: tuple) -> int:
        return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])

    def on(a: tuple, b: tuple, c: tuple) -> bool:
        """Whether c lies on the segment from a to b."""
        between = all(min(a[i], b[i]) <= c[i] <= max(a[i], b[i]) for i in (0, 1))
        return turn(a, b, c) == 0 and between

    number = len(corners)
    edges = [(corners[k], corners[(k + 1) % number]) for k in range(number)]
    simple = True
    for i in range(number):
        for j in range(i):
            (a, b), (c, d) = edges[i], edges[j]
            shared = {a, b} & {c, d}
            ends = [(a, b, c), (a, b, d), (c, d, a), (c, d, b)]
            touching = any(on(p, q, r) for p, q, r in ends if r not in shared)
            proper = turn(a, b, c) * turn(a, b, d) < 0 and turn(c, d, a) * turn(c, d, b) < 0
            simple &= not (touching or proper)
    polygon = np.array(corners, dtype=np.float64)
    if simple:
        assert len(Region("a", polygon).polygon_xy) == number
    else:
        with pytest.raises(InputError, match="crosses or touches itself"):
            Region("a", polygon)
