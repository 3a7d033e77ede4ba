"""People and objects for the synthetic scenes, painted back to front.

A sprite is made of parts, painted over one another in units of one head, standing at (0, 0)
with v downwards. Sprites go into a buffer of twice the picture's resolution as codes
`thing << 11 | part << 8 | shade`; colours are looked up afterwards, and the same buffer says
how much of every head is seen. Code 0 is the ground.

Only integers and the correctly rounded + − × ÷ of arrays are used, so that the result is
the same bit for bit everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p3net.randomness import generator

Floats = NDArray[np.float32]
Codes = NDArray[np.uint32]

HEAD_M = 0.24
"""Height of a head in metres; a standing person has seven."""

SKIN, HAIR, HAT, CLOTH, SLEEVE, LEGS, ACCENT = range(1, 8)
"""The parts of a sprite; the first three are the head."""

HEADS = ("fringe", "back", "cap", "left", "right", "hood", "brim", "bald")
BODIES = ("plain", "bag", "arms up", "seated")


class Things(NamedTuple):
    """People and objects as columns of one length.

    Attributes:
        x: px, where it stands.
        y: px, the row where it stands.
        scale: px per metre.
        variant: head + 8 × body for a person, `FIRST_OBJECT` + n for an object.
        colours: things × 8 parts × RGB.
    """

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    scale: NDArray[np.float64]
    variant: NDArray[np.int64]
    colours: Floats


def back_to_front(*groups: Things) -> Things:
    """All things of the groups, the farthest first."""
    y = np.concatenate([group.y for group in groups])
    order = np.argsort(y, kind="stable")
    return Things(
        x=np.concatenate([group.x for group in groups])[order],
        y=y[order],
        scale=np.concatenate([group.scale for group in groups])[order],
        variant=np.concatenate([group.variant for group in groups])[order],
        colours=np.concatenate([group.colours for group in groups])[order],
    )


class Sprite(NamedTuple):
    """A picture of one thing at twice the resolution.

    Attributes:
        codes: rows × columns of `part << 8 | shade`; shade 128 leaves a colour as it is.
        mask: where there is a part.
        foot: row and column of the point it stands on.
        head: row and column of the centre of the head.
        area: pixels of the head; 0 for an object.
    """

    codes: Codes
    mask: NDArray[np.bool_]
    foot: tuple[int, int]
    head: tuple[float, float]
    area: int


class Brush:
    """Paints rounded parts on a grid of head units."""

    def __init__(self, unit: int, half_width: float, height: float, light: int) -> None:
        self.unit, self.light = unit, light
        self.foot = (int(height * unit), int(half_width * unit))
        self.codes = np.zeros((self.foot[0] + unit // 3 + 1, 2 * self.foot[1] + 1), np.uint32)

    def _span(self, axis: int, centre: float, radius: float) -> tuple[slice, Floats]:
        """The pixels within `radius` along an axis and their places from −1 to 1."""
        first = max(int((centre - radius) * self.unit + self.foot[axis]) - 1, 0)
        last = min(int((centre + radius) * self.unit + self.foot[axis]) + 2, self.codes.shape[axis])
        places = np.arange(first, max(first, last), dtype=np.float32) - self.foot[axis]
        return slice(first, max(first, last)), (places / np.float32(self.unit) - centre) / radius

    def blob(
        self,
        part: int,
        place_uv: tuple[float, float],
        radii_uv: tuple[float, float],
        *,
        square: bool = False,
        sides: tuple[float, float] = (-1, 1),
        below: float = 1,
    ) -> None:
        """Paint an ellipse or rounded box, cut at `sides` and `below` (fractions of its radii)."""
        columns, a = self._span(1, place_uv[0], radii_uv[0])
        rows, b = self._span(0, place_uv[1], radii_uv[1])
        a, b = a[None, :], b[:, None]
        a2, b2 = a * a, b * b
        mask = (a2 * a2 + b2 * b2 if square else a2 + b2) <= 1
        mask &= (a >= sides[0]) & (a <= sides[1]) & (b <= below)
        bulge = 14 * a2 if square else 34 * (a2 + b2)
        shade = 138 - (14 if square else 30) * b - 26 * self.light * a - bulge
        np.copyto(self.codes[rows, columns], (part << 8) + shade.astype(np.uint32), where=mask)

    def box(self, part: int, place_uv: tuple[float, float], radii_uv: tuple[float, float]) -> None:
        """Paint a rounded box."""
        self.blob(part, place_uv, radii_uv, square=True)


def _person(brush: Brush, head: str, body: str) -> float:
    """Paint a person; gives the height v of the head's centre."""
    top = -4.9 if body == "seated" else -6.5
    for side in (-1, 1):
        brush.box(LEGS, (0.32 * side, (top + 3) / 2), (0.34, -(top + 3) / 2 + 0.1))
        brush.blob(ACCENT, (0.36 * side, 0.02), (0.36, 0.2))  # shoes
    for side in (-1, 1):
        arm = (0.98, -0.1, 1.25) if body == "arms up" else (0.84, 2.15, 1.35)
        brush.box(SLEEVE, (arm[0] * side, top + arm[1]), (0.23, arm[2]))
    brush.blob(CLOTH, (0, top + 1.2), (0.98, 0.55))  # shoulders
    brush.box(CLOTH, (0, top + 2.2), (0.72, 1.45))
    if body == "bag":
        brush.box(ACCENT, (0.1, top + 1.95), (0.55, 0.85))
    brush.blob(SLEEVE, (0, top + 0.6), (0.24, 0.22))  # neck
    whole = {"back": HAIR, "hood": HAT}.get(head, SKIN)
    brush.blob(whole, (0, top), (0.42, 0.5))
    if head in ("fringe", "left", "right"):
        brush.blob(HAIR, (0, top), (0.44, 0.52), below=-0.3)
    if head in ("left", "right"):
        sides = (-1, 0.1) if head == "left" else (-0.1, 1)
        brush.blob(HAIR, (0, top), (0.44, 0.52), sides=sides, below=0.6)
    if head == "cap":
        brush.blob(HAT, (0, top), (0.46, 0.54), below=-0.1)
    if head == "hood":
        brush.blob(SKIN, (0, top + 0.08), (0.27, 0.34))
    if head == "brim":
        brush.blob(HAT, (0, top - 0.1), (0.72, 0.2))
        brush.blob(HAT, (0, top - 0.25), (0.4, 0.28))
    return top


def _ball(brush: Brush) -> None:
    brush.blob(CLOTH, (0, -0.45), (0.45, 0.47))


def _bollard(brush: Brush) -> None:
    brush.box(LEGS, (0, -1.6), (0.32, 1.7))
    brush.blob(SLEEVE, (0, -3.3), (0.42, 0.46))


def _lamp(brush: Brush) -> None:
    brush.box(LEGS, (0, -6), (0.1, 6))
    for side, top in ((-0.8, -11.8), (0, -12.5), (0.8, -11.8)):
        brush.blob(CLOTH, (side, top), (0.42, 0.46))


def _sign(brush: Brush) -> None:
    brush.box(LEGS, (0, -4), (0.09, 4))
    brush.blob(CLOTH, (0, -8), (0.9, 0.9))
    brush.blob(SLEEVE, (0, -8), (0.6, 0.6))


def _bin(brush: Brush) -> None:
    brush.box(CLOTH, (0, -1.8), (0.95, 1.8))
    brush.blob(SLEEVE, (0, -3.5), (0.8, 0.4))


def _balloon(brush: Brush) -> None:
    brush.box(LEGS, (0, -4), (0.04, 4))
    brush.blob(CLOTH, (0, -8.2), (0.5, 0.62))


def _stall(brush: Brush) -> None:
    brush.box(LEGS, (0, -1.7), (2.8, 1.8))
    for row in range(3):
        for column in range(-3, 4):
            place = (0.74 * column + 0.3 * (row % 2), -3.9 + 0.42 * row)
            brush.blob(CLOTH + row % 2, place, (0.4, 0.42))


def _leaves(brush: Brush, half: float, low: float, high: float) -> None:
    rng = generator(0, int(half * 10))
    brush.box(LEGS, (0, -low / 2), (0.1 * half, low / 2 + 0.6))
    for part in (CLOTH, CLOTH, SLEEVE, ACCENT):  # dark below, light above
        for u, v, size in (2 * rng.random((int(7 * half * half), 3)) - 1).tolist():
            if u * u + v * v < 1:
                place = (0.85 * half * u, -(high + low) / 2 + 0.42 * (high - low) * v)
                brush.blob(part, place, (0.5 + 0.15 * size, 0.46 + 0.15 * size))


class Object(NamedTuple):
    """How to paint an object, its half width and height in heads, the most in one place."""

    paint: Callable[[Brush], None]
    half_width: float
    height: float
    most: int
    leafy: bool = False


OBJECTS = (
    Object(_ball, 0.5, 1, 160),
    Object(_bollard, 0.5, 4, 40),
    Object(_lamp, 1.4, 13.2, 6),
    Object(_sign, 1, 9, 5),
    Object(_bin, 1, 4, 8),
    Object(_balloon, 0.6, 9, 50),
    Object(_stall, 3, 4.6, 5),
    Object(partial(_leaves, half=2.0, low=0.2, high=4.0), 2.2, 4.4, 10, leafy=True),
    Object(partial(_leaves, half=4.5, low=7.0, high=15.0), 5.0, 15.5, 4, leafy=True),
)
FIRST_OBJECT = len(HEADS) * len(BODIES)


@lru_cache(maxsize=2048)
def sprite(variant: int, unit: int, light: int) -> Sprite:
    """A person or object whose head is `unit` half pixels high, lit from the left (1) or right."""
    top = 0.0
    if variant >= FIRST_OBJECT:
        thing = OBJECTS[variant - FIRST_OBJECT]
        brush = Brush(unit, thing.half_width, thing.height, light)
        thing.paint(brush)
    else:
        brush = Brush(unit, 1.35, 7.9, light)
        top = _person(brush, HEADS[variant % len(HEADS)], BODIES[variant // len(HEADS)])
    head = (brush.foot[0] + top * unit + 0.5, brush.foot[1] + 0.5)
    area = int(np.count_nonzero(_of_head(brush.codes)))
    return Sprite(brush.codes, brush.codes > 0, brush.foot, head, area)


def _of_head(codes: Codes) -> NDArray[np.bool_]:
    part = codes >> 8 & 7
    return (part >= SKIN) & (part <= HAT)


@lru_cache(maxsize=512)
def _shadow(rows: int, columns: int) -> NDArray[np.uint8]:
    """A soft dark ellipse."""
    v = ((np.arange(rows) + 0.5) * 2 / rows - 1)[:, None]
    u = ((np.arange(columns) + 0.5) * 2 / columns - 1)[None, :]
    return np.clip(330 * (1 - u * u - v * v), 0, 255).astype(np.uint8)


def _overlap(
    canvas: tuple[int, ...], row: int, column: int, stamp: tuple[int, ...]
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """The overlap of a canvas and a stamp laid at (row, column), in both; may be empty."""
    top, left = max(row, 0), max(column, 0)
    bottom = max(min(row + stamp[0], canvas[0]), top)
    right = max(min(column + stamp[1], canvas[1]), left)
    here = slice(top, bottom), slice(left, right)
    return here, (slice(top - row, bottom - row), slice(left - column, right - column))


class Painting(NamedTuple):
    """What painting gives.

    Attributes:
        codes: 2H×2W.
        shadow: H×W, 0..255.
        heads_xy: things × 2, the centre of each head.
        seen: the share of each head that is in the picture and uncovered; 0 for an object.
    """

    codes: Codes
    shadow: NDArray[np.uint8]
    heads_xy: NDArray[np.float64]
    seen: NDArray[np.float64]


def paint(things: Things, size_hw: tuple[int, int], light: int) -> Painting:
    """Paint things in their order, which must be back to front; `light` also throws shadows."""
    codes = np.zeros((2 * size_hw[0], 2 * size_hw[1]), np.uint32)
    shadow = np.zeros(size_hw, np.uint8)
    heads = np.zeros((len(things.x), 2))
    areas = np.zeros(len(things.x), np.int64)
    columns = (things.x.tolist(), things.y.tolist(), things.scale.tolist(), things.variant.tolist())
    for number, (x, y, scale, variant) in enumerate(zip(*columns, strict=True)):
        unit = min(max(int(2 * HEAD_M * scale + 0.5), 4), 200)
        unit -= unit % (1 + unit // 16)  # few sizes of large sprites
        stamp = sprite(variant, unit, light)
        row, column = int(2 * y) - stamp.foot[0], int(2 * x) - stamp.foot[1]
        heads[number] = (column + stamp.head[1]) / 2, (row + stamp.head[0]) / 2
        areas[number] = stamp.area
        here, there = _overlap(codes.shape, row, column, stamp.codes.shape)
        np.copyto(codes[here], stamp.codes[there] + (number << 11), where=stamp.mask[there])
        dark = _shadow(unit // 3 + 1, unit * (3 if light else 1) + 1)
        left = int(x) - dark.shape[1] // 2 - light * dark.shape[1] * 2 // 5
        here, there = _overlap(shadow.shape, int(y) - dark.shape[0] // 2, left, dark.shape)
        np.maximum(shadow[here], dark[there], out=shadow[here])
    visible = np.bincount(codes[_of_head(codes)] >> 11, minlength=len(areas))
    return Painting(codes, shadow, heads, visible / np.maximum(areas, 1))


def resolve(codes: Codes, palette: Floats, ground: Floats) -> Floats:
    """Look up the colours: each pixel of H×W×3 is the mean of its four codes, over the ground.

    `palette` is things × 8 × RGB.
    """
    quarters = [codes[row::2, column::2] for row in (0, 1) for column in (0, 1)]
    place = np.nonzero(quarters[0] | quarters[1] | quarters[2] | quarters[3])
    rows = np.concatenate([np.zeros((8, 3), np.float32), palette.reshape(-1, 3)])
    total = np.zeros((len(place[0]), 3), np.float32)
    empty = np.zeros((len(place[0]), 1), np.float32)
    for quarter in quarters:
        code = quarter[place]
        total += rows.take((code >> 8) + 8, axis=0) * (code & 255).astype(np.float32)[:, None]
        empty += (code == 0)[:, None]
    scene = ground.copy()
    scene[place] = ground[place] * (empty / 4) + total / 512
    return scene
