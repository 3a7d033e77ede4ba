"""Named polygons of an image: people in each, and people per m².

Coordinates are pixels of the upright image, as in `structures`. A polygon may be concave; its
edges must not cross or touch. What lies beyond the image is cut off. Shapes: N vertices, h×w
cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as show

import numpy as np
from numpy.typing import ArrayLike, NDArray

from p3net.data.annotations import dict_of, json_of, list_of, pair_of, points_of, text_of
from p3net.errors import InputError
from p3net.structures import Points, as_points

OWN_KEYS = {"regions", "homography", "metres_per_pixel"}


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One polygon with a name.

    Attributes:
        name: not empty.
        polygon_xy: N×2 pixels, at least 3 vertices in either direction; the last is joined to
            the first, and of equal vertices in a row one is kept.
    """

    name: str
    polygon_xy: Points

    def __post_init__(self) -> None:
        """Check the polygon and bring it into its plain form."""
        if not self.name:
            raise InputError("a region needs a name")
        polygon = as_points(self.polygon_xy)
        polygon = as_points(polygon[(polygon != np.roll(polygon, -1, axis=0)).any(axis=1)])
        if len(polygon) < 3:
            raise InputError(
                f"region {show(self.name)} needs at least 3 different vertices, got {len(polygon)}"
            )
        if crossing := _crossing(polygon):
            raise InputError(
                f"region {show(self.name)} crosses or touches itself: edges {crossing[0]} and "
                f"{crossing[1]} meet; draw it as separate polygons"
            )
        object.__setattr__(self, "polygon_xy", polygon)


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The regions of one view, and what a pixel is on the ground, where it is known.

    Attributes:
        each: the regions; their names differ.
        homography: 3×3, takes pixels (x, y, 1) to metres on the ground.
        metres_per_pixel: for a view straight from above, instead of a homography.
    """

    each: tuple[Region, ...]
    homography: NDArray[np.float64] | None = None
    metres_per_pixel: float | None = None

    def __post_init__(self) -> None:
        """Check names and scale."""
        if not self.each:
            raise InputError("there is no region; give at least one polygon with a name")
        names = [region.name for region in self.each]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two regions are called {show(name)}; give each its own name")
        if self.homography is not None:
            if self.metres_per_pixel is not None:
                raise InputError("give homography or metres_per_pixel, not both")
            object.__setattr__(self, "homography", _homography(self.homography))
        scale = self.metres_per_pixel
        if scale is not None and not 0 < scale < np.inf:
            raise InputError(f"metres_per_pixel must be a number above 0, got {scale}")

    def __iter__(self) -> Iterator[Region]:
        return iter(self.each)

    def __len__(self) -> int:
        return len(self.each)

    def area_m2(self, region: Region, size_hw: tuple[int, int]) -> float | None:
        """Area on the ground, of what lies in the image; None where no scale is known.

        A homography takes straight edges to straight edges, so the image of the vertices is
        enough, as long as the horizon stays outside.

        >>> square = Region("square", as_points([[0, 0], [10, 0], [10, 10], [0, 10]]))
        >>> Regions((square,), metres_per_pixel=0.5).area_m2(square, (100, 100))
        25.0
        """
        polygon = clip(region.polygon_xy, size_hw)
        if self.metres_per_pixel is not None:
            return abs(_signed_area(polygon)) * self.metres_per_pixel**2
        if self.homography is None:
            return None
        if not len(polygon):
            return 0.0
        ground = np.column_stack([polygon, np.ones(len(polygon))]) @ self.homography.T
        depth = ground[:, 2]
        if np.abs(np.sign(depth).sum()) < len(depth):
            raise InputError(
                f"region {show(region.name)} reaches the horizon of the homography, beyond which "
                "there is no ground; end it below the horizon, or correct the homography"
            )
        return abs(_signed_area(ground[:, :2] / depth[:, None]))


def read_regions(path: str | Path) -> Regions:
    """Read a JSON file of regions, in any of three forms.

    - `{"regions": [{"name": "gate", "polygon": [[x, y], …]}, …]}`;
    - GeoJSON: a FeatureCollection of Polygons in pixels, each with `properties.name`;
    - LabelMe: the polygons among its shapes, named by their labels.

    Beside them may stand `"homography": [[…], […], […]]`, from pixels to metres on the ground,
    or `"metres_per_pixel": 0.02`.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", source=path) from None
    tree = dict_of(json_of(data, path), "the file", path)
    if tree.get("type") == "FeatureCollection":
        named = _geojson(tree, path)
    elif "shapes" in tree:
        named = _labelme(tree, path)
    elif "regions" in tree:
        named = _own(tree, path)
    else:
        raise InputError(
            'expected "regions": [{"name": …, "polygon": [[x, y], …]}], a GeoJSON '
            f"FeatureCollection or LabelMe shapes, got {show(sorted(tree))}",
            source=path,
        )
    try:
        return Regions(
            tuple(Region(name, polygon) for name, polygon in named),
            homography=_matrix(tree.get("homography"), path),
            metres_per_pixel=_scale(tree.get("metres_per_pixel"), path),
        )
    except InputError as error:
        raise InputError(error.message, source=path) from None


def coverage(
    polygon_xy: Points,
    grid_hw: tuple[int, ...],
    cell_xy: tuple[float, float],
    size_hw: tuple[int, int] | None = None,
) -> NDArray[np.float32]:
    """The share of each cell inside a polygon that does not cross itself: h×w in [0, 1], exact.

    Edges are cut where they pass from cell to cell. A piece that descends by dy at a mean
    distance x from the left side of its cell covers, to its right, (1 − x)·dy of that cell and
    dy of all further cells of the row; with their signs these add up to the polygon, in time
    that grows with the cells the edges pass.

    Args:
        polygon_xy: N×2 pixels.
        grid_hw: rows and columns of cells.
        cell_xy: width and height of a cell in pixels.
        size_hw: of the image, in pixels; cells that reach beyond it count by their part inside,
            so a polygon around the image covers all of it. The whole grid if not given.

    >>> coverage(as_points([[0, 0], [16, 0], [16, 8]]), (1, 2), (8, 8)).tolist()
    [[0.25, 0.75]]
    """
    rows, columns = grid_hw
    limit_xy = (
        np.multiply(cell_xy, (columns, rows))
        if size_hw is None
        else np.minimum(size_hw[::-1], np.multiply(cell_xy, (columns, rows)))
    )
    polygon = clip(polygon_xy, (limit_xy[1], limit_xy[0])) / cell_xy
    covered = np.zeros((rows, columns + 1))
    for start, end in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        if start[1] == end[1]:
            continue
        places = start + _crossings(start, end)[:, None] * (end - start)
        middle = (places[1:] + places[:-1]) / 2
        column, row = np.minimum(middle.astype(np.intp), (columns - 1, rows - 1)).T
        descent = np.diff(places[:, 1])
        beside = descent * (middle[:, 0] - column)
        np.add.at(covered, (row, column), descent - beside)
        np.add.at(covered, (row, column + 1), beside)
    shares = covered.cumsum(axis=1)[:, :columns] * (-1 if _signed_area(polygon) > 0 else 1)
    inside_x, inside_y = (
        np.clip(limit / cell - np.arange(number), 0, 1)
        for limit, cell, number in zip(limit_xy, cell_xy, (columns, rows), strict=True)
    )
    there = np.outer(inside_y, inside_x)
    np.divide(shares, there, out=shares, where=there > 0)
    return shares.clip(0, 1).astype(np.float32)


def clip(polygon_xy: Points, size_hw: tuple[float, float]) -> Points:
    """A polygon's part in an image, by Sutherland and Hodgman: N×2 → any number of vertices.

    Where a concave polygon falls apart, its parts stay joined by edges along the border, there
    and back, which enclose nothing.
    """
    polygon = polygon_xy
    for axis, limit, sign in ((0, 0.0, 1), (0, size_hw[1], -1), (1, 0.0, 1), (1, size_hw[0], -1)):
        kept: list[NDArray[np.float64]] = []
        for start, end in zip(np.roll(polygon, 1, axis=0), polygon, strict=True):
            before, after = sign * (start[axis] - limit), sign * (end[axis] - limit)
            if (before < 0) != (after < 0):
                border = start + (end - start) * (before / (before - after))
                border[axis] = limit
                kept.append(border)
            if after >= 0:
                kept.append(end)
        polygon = np.array(kept).reshape(-1, 2)
    return polygon


def _crossings(start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where an edge meets the lines of a unit grid: from 0 at its start to 1 at its end."""
    times = [np.array([0.0, 1.0])]
    for a, b in zip(start, end, strict=True):
        low, high = min(a, b), max(a, b)
        lines = np.arange(np.floor(low) + 1, np.ceil(high))
        if len(lines):
            times.append((lines - a) / (b - a))
    return np.sort(np.concatenate(times))


def _signed_area(polygon_xy: Points) -> float:
    """The area in the plane, above 0 when x turns towards y along the polygon."""
    if not len(polygon_xy):
        return 0.0
    x, y = (polygon_xy - polygon_xy[0]).T  # small numbers lose fewer digits
    return float(np.dot(x, np.roll(y, -1)) - np.dot(np.roll(x, -1), y)) / 2


def _crossing(polygon_xy: Points) -> tuple[int, int] | None:
    """The numbers, from 1, of two edges that meet elsewhere than at their common vertex."""
    start, end = polygon_xy, np.roll(polygon_xy, -1, axis=0)
    low, high = np.minimum(start, end), np.maximum(start, end)
    step, number = end - start, len(polygon_xy)
    following = np.roll(step, -1, axis=0)
    back = (_cross(step, following) == 0) & ((step * following).sum(axis=1) < 0)
    if back.any():
        first = int(np.argmax(back))
        return first + 1, (first + 1) % number + 1
    for edge in range(number - 2):
        others = slice(edge + 2, number - 1 if edge == 0 else number)
        apart = (low[others] > high[edge]).any(axis=1) | (high[others] < low[edge]).any(axis=1)
        sides = [np.sign(_cross(step[edge], ends[others] - start[edge])) for ends in (start, end)]
        own = [np.sign(_cross(step[others], place[edge] - start[others])) for place in (start, end)]
        meet = ~apart & (sides[0] * sides[1] <= 0) & (own[0] * own[1] <= 0)
        if meet.any():
            return edge + 1, edge + 3 + int(np.argmax(meet))
    return None


def _cross(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    product: NDArray[np.float64] = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    return product


def _homography(values: ArrayLike) -> NDArray[np.float64]:
    matrix = np.array(values, dtype=np.float64)
    if matrix.shape != (3, 3) or not np.isfinite(matrix).all():
        raise InputError(f"a homography must be 3×3 finite numbers, got {show(matrix.tolist())}")
    if np.linalg.matrix_rank(matrix / max(np.abs(matrix).max(), 1e-300)) < 3:
        raise InputError("the homography cannot be inverted: it takes the image to a line")
    matrix.flags.writeable = False
    return matrix


# The three forms of a file: (name, polygon) of every region.


def _own(tree: dict[str, object], source: Path) -> Iterator[tuple[str, Points]]:
    if unknown := sorted(set(tree) - OWN_KEYS):
        raise InputError(f"unknown {show(unknown)}; use {sorted(OWN_KEYS)}", source=source)
    for value in list_of(tree["regions"], "regions", source):
        region = dict_of(value, "a region", source)
        name = text_of(region.get("name"), "the name of a region", source)
        yield name, _polygon(region.get("polygon"), f"the polygon of {show(name)}", source)


def _geojson(tree: dict[str, object], source: Path) -> Iterator[tuple[str, Points]]:
    for value in list_of(tree.get("features"), "features", source):
        feature = dict_of(value, "a feature", source)
        properties = dict_of(feature.get("properties"), "the properties of a feature", source)
        name = text_of(properties.get("name"), "properties.name of a feature", source)
        shape = dict_of(feature.get("geometry"), f"the geometry of {show(name)}", source)
        rings = shape.get("coordinates")
        if shape.get("type") != "Polygon" or not isinstance(rings, list) or len(rings) != 1:
            raise InputError(
                f"{show(name)} must be a Polygon of one ring, without holes; "
                "give several parts as several regions",
                source=source,
            )
        yield name, _polygon(rings[0], f"the ring of {show(name)}", source)


def _labelme(tree: dict[str, object], source: Path) -> Iterator[tuple[str, Points]]:
    for value in list_of(tree["shapes"], "shapes", source):
        shape = dict_of(value, "a shape", source)
        if shape.get("shape_type", "polygon") != "polygon":
            continue  # points and rectangles mark heads, perhaps in the same file
        name = text_of(shape.get("label"), "the label of a shape", source)
        yield name, _polygon(shape.get("points"), f"the points of {show(name)}", source)


def _polygon(value: object, what: str, source: Path) -> Points:
    return points_of((pair_of(row, source) for row in list_of(value, what, source)), source)


def _real(value: object, what: str, source: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        raise InputError(f"{what} must be a finite number, got {show(value)}", source=source)
    return float(value)


def _scale(value: object, source: Path) -> float | None:
    return None if value is None else _real(value, "metres_per_pixel", source)


def _matrix(value: object, source: Path) -> NDArray[np.float64] | None:
    if value is None:
        return None
    rows = [
        [
            _real(entry, "an entry of the homography", source)
            for entry in list_of(row, "a row of the homography", source)
        ]
        for row in list_of(value, "homography", source)
    ]
    if [len(row) for row in rows] != [3, 3, 3]:
        raise InputError("homography must be 3 rows of 3 numbers", source=source)
    return _homography(rows)
