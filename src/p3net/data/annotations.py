"""Annotation files of one image each, bytes to marks and back: text, csv, npy, JSON.

Nothing here touches the disk. A parser takes the bytes of a file and the path to name in an
error; whatever the bytes, it gives finite points or an `InputError`. A box stands for the
point at its centre; other regions (polygons, lines, masks) are not people and are left out.
`exports` has the files that hold many images, with the same helpers.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as show
from typing import NoReturn

import numpy as np

from p3net.errors import InputError
from p3net.structures import Marks, Points, as_points

MAX_COORDINATE = 1e6
"""Pixels; no image is as long, so a larger coordinate is a fault of the file."""

_DECIMAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_SEPARATOR = re.compile(r"\s*[,;]\s*|\s+")


@dataclass(frozen=True, slots=True)
class Item:
    """One image to be written: its path below the folder, upright size, marks or None."""

    image: str
    size_hw: tuple[int, int]
    marks: Marks | None

    @property
    def rows(self) -> list[list[float]]:
        """The points as plain numbers; none for an unlabelled image."""
        return [] if self.marks is None else self.marks.points_xy.tolist()


# What parsers share: every value is checked before it is used.


def number(value: object, source: Path) -> float:
    """A finite number of at most `MAX_COORDINATE`; no bool, no text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) <= MAX_COORDINATE:  # false for NaN
            return float(value)
        raise InputError(f"{show(value)} cannot be a coordinate in pixels", source=source)
    raise InputError(f"expected a number, got {show(value)}", source=source)


def decimal(text: str, source: Path) -> float:
    """A number written in decimal digits."""
    return number(float(text) if _DECIMAL.fullmatch(text) else text, source)


def points_of(rows: Iterable[Sequence[object]], source: Path) -> Points:
    """Rows of two checked numbers."""
    return as_points([[number(value, source) for value in row] for row in rows], source=source)


def pair_of(value: object, source: Path) -> list[object]:
    """A list `[x, y]`."""
    pair = list_of(value, "a point", source)
    if len(pair) != 2:
        raise InputError(f"a point must be [x, y], got {show(pair)}", source=source)
    return pair


def json_of(data: bytes, source: Path) -> object:
    """What a JSON file holds; NaN and Infinity, which JSON does not have, are refused."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError:
        raise InputError("not readable as JSON: nested too deeply", source=source) from None
    except ValueError as error:
        raise InputError(f"not readable as JSON: {error}", source=source) from None


def dict_of(value: object, what: str, source: Path) -> dict[str, object]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise InputError(f"{what} must be an object {{…}}, got {show(value)}", source=source)
    return value


def list_of(value: object, what: str, source: Path) -> list[object]:
    """A JSON list."""
    if not isinstance(value, list):
        raise InputError(f"{what} must be a list […], got {show(value)}", source=source)
    return value


def text_of(value: object, what: str, source: Path) -> str:
    """A name that is not empty."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise InputError(f"{what} must be a name, got {show(value)}", source=source)
    return value


# Text and csv: `x y` a line, separated by comma, semicolon, tab or space, header or not.


def parse_text(data: bytes, source: Path) -> Marks:
    """Two numbers a line; with a header, the columns called x and y among any others."""
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise InputError("not a text file in UTF-8", source=source) from None
    rows = [_SEPARATOR.split(line.strip()) for line in lines if line.strip()]
    columns = (0, 1)
    width = 2
    if rows and not any(_DECIMAL.fullmatch(field) for field in rows[0]):
        header = [field.strip("\"'#").lower() for field in rows.pop(0)]
        if header.count("x") != 1 or header.count("y") != 1:
            raise InputError(f"expected a column x and one y, got {show(header)}", source=source)
        columns = (header.index("x"), header.index("y"))
        width = len(header)
    for row in rows:
        if len(row) != width:
            raise InputError(
                f"expected {width} values a line, got {len(row)}: {show(row)}; with more than "
                "x and y, name the columns in a first line, such as x,y,label",
                source=source,
            )
    numbers = [[decimal(row[column], source) for column in columns] for row in rows]
    return Marks(as_points(numbers, source=source))


def emit_text(item: Item) -> bytes:
    """`x y` a line."""
    return "".join(f"{x!r} {y!r}\n" for x, y in item.rows).encode()


def emit_csv(item: Item) -> bytes:
    """`x,y` a line under a header."""
    return "".join(["x,y\n", *(f"{x!r},{y!r}\n" for x, y in item.rows)]).encode()


def parse_npy(data: bytes, source: Path) -> Marks:
    """An N×2 array of numbers; the header's claim is held against the bytes that are there."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, by_column, dtype = header(stream)
    except Exception as error:  # noqa: BLE001  numpy reads the header as Python: anything goes
        raise InputError(f"not readable as npy: {error}", source=source) from None
    if 0 in shape:
        return Marks(as_points([]))
    if dtype.kind not in "iuf" or len(shape) != 2 or shape[1] != 2:
        raise InputError(f"expected N×2 numbers, got {dtype} {show(shape)}", source=source)
    content = memoryview(data)[stream.tell() :]
    if math.prod(shape) * dtype.itemsize != len(content):
        raise InputError(
            f"{show(shape)} numbers announced, {len(content)} bytes follow", source=source
        )
    with np.errstate(all="ignore"):  # too large a number becomes infinite, and is refused
        values = np.frombuffer(content, dtype).astype(np.float64)
    rows = values.reshape(shape, order="F" if by_column else "C").tolist()
    return Marks(points_of(rows, source))


def emit_npy(item: Item) -> bytes:
    """An N×2 array of float64."""
    stream = io.BytesIO()
    np.save(stream, np.array(item.rows, dtype=np.float64).reshape(-1, 2))
    return stream.getvalue()


def parse_list(data: bytes, source: Path) -> Marks:
    """A JSON list `[[x, y], …]`."""
    rows = list_of(json_of(data, source), "the file", source)
    return Marks(points_of((pair_of(row, source) for row in rows), source))


def emit_list(item: Item) -> bytes:
    """A JSON list `[[x, y], …]`."""
    return json.dumps(item.rows).encode()


# cclabeler and LabelMe: one JSON file an image.


def parse_cclabeler(data: bytes, source: Path) -> Marks:
    """`points: [{"x", "y"}, …]` or pairs; `human_num`, where given, is the declared number."""
    tree = dict_of(json_of(data, source), "the file", source)
    rows = [
        [row.get("x"), row.get("y")] if isinstance(row, dict) else pair_of(row, source)
        for row in list_of(tree.get("points"), "points", source)
    ]
    points = points_of(rows, source)
    declared = tree.get("human_num")
    if declared is None:
        return Marks(points)
    if isinstance(declared, int) and not isinstance(declared, bool) and 0 <= declared < 10**9:
        return Marks(points, declared)
    raise InputError(f"human_num must be a whole number, got {show(declared)}", source=source)


def emit_cclabeler(item: Item) -> bytes:
    """The file cclabeler writes, without boxes."""
    declared = None if item.marks is None else item.marks.declared
    tree = {
        "img_id": Path(item.image).stem,
        "human_num": len(item.rows) if declared is None else declared,
        "boxes": [],
        "points": [{"x": x, "y": y} for x, y in item.rows],
    }
    return json.dumps(tree).encode()


def parse_labelme(data: bytes, source: Path) -> Marks:
    """Shapes of type point, and rectangles by their centre."""
    rows: list[list[object]] = []
    for value in list_of(_labelme(data, source).get("shapes"), "shapes", source):
        shape = dict_of(value, "a shape", source)
        corners = list_of(shape.get("points"), "the points of a shape", source)
        if shape.get("shape_type") == "point":
            rows.extend(pair_of(corner, source) for corner in corners)
        elif shape.get("shape_type") == "rectangle":
            ends = points_of((pair_of(corner, source) for corner in corners), source)
            rows.append(list(ends.mean(axis=0).tolist()) if len(ends) else [None, None])
    return Marks(points_of(rows, source))


def labelme_image(data: bytes, source: Path) -> str:
    """The image a LabelMe file belongs to, seen from the file's folder."""
    return text_of(_labelme(data, source).get("imagePath"), "imagePath", source)


def _labelme(data: bytes, source: Path) -> dict[str, object]:
    return dict_of(json_of(data, source), "the file", source)


def emit_labelme(item: Item) -> bytes:
    """The file LabelMe writes beside an image, without a copy of the image inside."""
    height, width = item.size_hw
    shape: dict[str, object] = {
        "label": "head",
        "group_id": None,
        "shape_type": "point",
        "flags": {},
    }
    tree: dict[str, object] = {
        "version": "5.0.0",
        "flags": {},
        "shapes": [shape | {"points": [[x, y]]} for x, y in item.rows],
        "imagePath": item.image.rpartition("/")[2],
        "imageData": None,
        "imageHeight": height,
        "imageWidth": width,
    }
    return json.dumps(tree).encode()
