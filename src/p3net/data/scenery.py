"""Camera, ground, walls, light and lens of the synthetic scenes.

Like `sprites`, only `random` and `integers` of a generator and the correctly rounded
+ − × ÷ of arrays are used: no transcendental function, matrix product or float sum, whose
last bit changes with the processor, the threads or the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

SPACING_M = 0.45
"""Distance of neighbours in the thickest crowd, in metres."""


class Style(NamedTuple):
    """How a kind of scene looks; every scene draws its own colours on top.

    Attributes:
        light: gains of red, green, blue.
        haze: how much of the far end is fog, 0 to 1.
        sun: strength of shadows beyond the ordinary, 0 to 1.
        noise: deviation of the camera's noise, of 255.
        lamps: strength of the pools of light.
    """

    name: str
    grounds: tuple[str, ...]
    backs: tuple[str, ...]
    light: tuple[float, float, float]
    haze: float = 0.0
    sun: float = 0.0
    noise: float = 3.0
    lamps: float = 0.0


STYLES = (
    Style(
        "sun", ("tiles", "plain", "cobbles"), ("sky", "facade", "trees"), (1.1, 1.06, 1), sun=0.6
    ),
    Style("park", ("grass", "plain"), ("trees", "sky"), (1, 1.04, 0.94), sun=0.4),
    Style("overcast", ("tiles", "plain", "lanes"), ("facade", "sky"), (0.86, 0.9, 0.95), haze=0.15),
    Style("haze", ("plain", "lanes", "grass"), ("sky", "trees"), (0.95, 0.95, 0.97), haze=0.75),
    Style("dusk", ("cobbles", "lanes", "tiles"), ("sky", "facade"), (1.05, 0.76, 0.62), sun=0.3),
    Style("night", ("plain", "lanes"), ("facade", "trees"), (0.3, 0.32, 0.42), noise=11, lamps=1.5),
    Style("hall", ("tiles", "plain"), ("curtain", "seats"), (0.8, 0.75, 0.64), noise=6, lamps=0.4),
    Style("stadium", ("grass", "seats"), ("seats",), (1, 1, 1), sun=0.3),
)

BASES: Mapping[str, tuple[int, int, int]] = {
    "plain": (140, 136, 130),
    "tiles": (160, 150, 138),
    "cobbles": (128, 120, 112),
    "lanes": (92, 92, 96),
    "grass": (86, 112, 62),
    "seats": (112, 92, 104),
    "sky": (178, 196, 214),
    "facade": (158, 138, 120),
    "trees": (66, 82, 50),
    "curtain": (118, 84, 78),
}
PITCH_M: Mapping[str, float] = {
    "tiles": 0.9,
    "cobbles": 0.35,
    "seats": 0.55,
    "facade": 2.2,
    "trees": 0.4,
    "curtain": 0.8,
}


def between(rng: Generator, low: float, high: float) -> float:
    """A number from low to high; `Generator.uniform` may round otherwise elsewhere."""
    return low + (high - low) * float(rng.random())


def pick(rng: Generator, colours: tuple[tuple[int, ...], ...], count: int, spread: int) -> Floats:
    """`count` × 3 colours of a list, each moved by up to ±spread in light and a third in hue."""
    rows = np.array(colours, np.float32)[rng.integers(len(colours), size=count)]
    light = rng.integers(-spread, spread + 1, (count, 1))
    hue = rng.integers(-(spread // 3), spread // 3 + 1, (count, 3))
    return rows + (light + hue).astype(np.float32)


@dataclass(frozen=True, slots=True)
class View:
    """A camera over flat ground: a thing standing at row y has scale (y − horizon) / height_m.

    Attributes:
        edge: px, the row where the ground ends; at most 0 when it fills the picture.
        near: px per metre at the bottom of the picture.
        far: px per metre at the edge.
    """

    size_hw: tuple[int, int]
    edge: float
    near: float
    far: float

    @property
    def height_m(self) -> float:
        """Height of the camera."""
        return (self.size_hw[0] - self.edge) / (self.near - self.far)

    @property
    def horizon(self) -> float:
        """The row at which scale is zero."""
        return self.edge - self.height_m * self.far

    @property
    def focal(self) -> float:
        """Focal length in px: scale × depth."""
        return 1.1 * self.size_hw[1]

    def lattice(self) -> Doubles:
        """Places to stand, nodes × (x m, depth m), nearest row first."""
        height, width = self.size_hw
        closest = min(1.5 * self.near, (height - self.horizon) / (self.height_m - 1.6))
        rows = []
        for depth in np.arange(self.focal / closest, self.focal / self.far, SPACING_M).tolist():
            half = int(width * depth / self.focal / 2 / SPACING_M)
            x = np.arange(-half, half + 1) * SPACING_M
            rows.append(np.stack([x, np.full(len(x), depth)], axis=1))
        return np.concatenate(rows)

    def project(self, ground: Doubles) -> tuple[Doubles, Doubles, Doubles]:
        """Ground (x m, depth m) → x px, y px, px per metre."""
        scale = self.focal / ground[:, 1]
        x = self.size_hw[1] / 2 + ground[:, 0] * scale
        return x, self.horizon + self.height_m * scale, scale


def noise(rng: Generator, size_hw: tuple[int, int], cell: int) -> Floats:
    """Smooth noise in [0, 1): random values `cell` px apart, interpolated."""
    field = rng.random((size_hw[0] // cell + 2, size_hw[1] // cell + 2), dtype=np.float32)
    for side in size_hw:  # rows, then columns: each turn transposes
        place = np.arange(side, dtype=np.float32) / np.float32(cell)
        low = place.astype(np.int64)
        step = place - low.astype(np.float32)
        step = (step * step * (3 - 2 * step))[:, None]
        field = (field[low] * (1 - step) + field[low + 1] * step).T
    return field


def texture(kind: str, x: Floats, y: Floats, fine: Floats) -> Floats:
    """Brightness around 1 of a surface at places in metres; `fine` is noise in [0, 1)."""
    if kind not in PITCH_M:
        amount = 0.6 if kind == "grass" else 0.16
        stripe = np.abs(x / 3 - np.floor(x / 3) - 0.5) < 0.03 if kind == "lanes" else 0
        return 1 - amount / 2 + amount * fine + np.float32(0.7) * stripe
    j = np.floor(y / PITCH_M[kind])
    brick = 0.0 if kind in ("tiles", "facade", "curtain") else 0.5
    column = x / PITCH_M[kind] + brick * (j - 2 * np.floor(j / 2))
    i = np.floor(column)
    a, b = column - i - 0.5, y / PITCH_M[kind] - j - 0.5
    mix = (i.astype(np.int64) * 7919 + j.astype(np.int64) * 104729) & 0xFFFF
    chance = ((mix * mix >> 5) & 255).astype(np.float32) / 255  # one number a tile
    dome = 1 - 5 * (a * a + b * b)  # cobbles, seats and leaves: round, lit from above
    shape: Floats = np.where(
        dome > 0, 0.6 + (0.15 + 0.3 * chance) * (0.7 + dome - 0.4 * b), 0.5 + 0.3 * fine
    )
    if kind == "tiles":
        shape = 0.85 + 0.2 * chance + 0.1 * fine - 0.3 * (np.maximum(a * a, b * b) > 0.22)
    elif kind == "curtain":
        shape = 0.75 + 0.9 * a * a + 0.2 * chance
    elif kind == "facade":
        vase = (a * a + (b - 0.15) * (b - 0.15) < 0.02) & (chance > 0.7)  # at the window
        glass = np.where(vase, np.float32(0.35), 0.5 + 0.7 * chance)
        shape = np.where((a * a < 0.07) & (b * b < 0.1), glass, 0.9 + 0.15 * fine)
    return shape


def background(rng: Generator, view: View, style: Style, fog: Floats) -> Floats:
    """The ground up to its edge and what stands behind it, H×W×3 in 0..255 before the light."""
    height, width = view.size_hw
    rows = np.arange(height, dtype=np.float32)[:, None]
    columns = np.arange(width, dtype=np.float32)[None, :] - width / 2
    floor = style.grounds[int(rng.integers(len(style.grounds)))]
    wall = style.backs[int(rng.integers(len(style.backs)))]
    coarse = 0.85 + 0.3 * noise(rng, view.size_hw, max(height // 5, 8))
    fine = 0.5 * noise(rng, view.size_hw, 3) + 0.5 * noise(rng, view.size_hw, 12)
    scale = np.maximum((rows - view.horizon) / view.height_m, view.far)
    grain = texture(floor, columns / scale, view.focal / scale, fine) - 1
    grain *= np.minimum(scale / 60, 1)  # far patterns are finer than a pixel
    floor_rgb = ((1 + grain) * coarse)[:, :, None] * pick(rng, (BASES[floor],), 1, 36)[0]
    mist = (style.haze * view.far / scale)[:, :, None]
    scene: Floats = floor_rgb + (fog - floor_rgb) * mist
    top = max(int(view.edge), 0)
    behind = texture(wall, columns / view.far, rows[:top] / view.far, fine[:top]) * coarse[:top]
    wall_rgb = behind[:, :, None] * pick(rng, (BASES[wall],), 1, 36)[0]
    scene[:top] = wall_rgb + (fog - wall_rgb) * style.haze
    return scene


def photograph(rng: Generator, scene: Floats, style: Style) -> NDArray[np.uint8]:
    """Light the scene, H×W×3 in 0..255, and take the picture."""
    height, width = scene.shape[:2]
    y = (np.arange(height, dtype=np.float32) / height - 0.5)[:, None]
    x = (np.arange(width, dtype=np.float32) / width - 0.5)[None, :]
    light = 1 + between(rng, -0.5, 0.5) * x + between(rng, -0.4, 0.4) * y
    for _ in range(int(rng.integers(2, 7)) if style.lamps else 0):
        across, down = x - between(rng, -0.5, 0.5), y - between(rng, -0.5, 0.5)
        reach = between(rng, 0.005, 0.06)
        square = across * across + down * down
        light = light + between(rng, 0.2, 1) * style.lamps / (1 + square / reach)
    gain = np.array(style.light, np.float32) * between(rng, 0.75, 1.2)
    gain *= 1 + pick(rng, ((0, 0, 0),), 1, 21)[0] / 150  # white balance
    image = scene * light[:, :, None] * gain
    image = (image - 110) * between(rng, 0.65, 1.2) + (110 + between(rng, -12, 18))
    if rng.random() < 0.06:  # a grey camera
        image[:] = 0.3 * image[:, :, :1] + 0.59 * image[:, :, 1:2] + 0.11 * image[:, :, 2:]
    for _ in range(int(rng.integers(0, 3))):  # out of focus: the binomial 1 2 1 both ways
        image[1:-1] = (image[:-2] + 2 * image[1:-1] + image[2:]) / 4
        image[:, 1:-1] = (image[:, :-2] + 2 * image[:, 1:-1] + image[:, 2:]) / 4
    grain = rng.integers(0, 256, (2, *image.shape), dtype=np.uint8).astype(np.int16)
    image += (grain[0] - grain[1]).astype(np.float32) * (style.noise / 104)  # deviation ≈ noise
    pixels: NDArray[np.uint8] = np.clip(image, 0, 255).astype(np.uint8)
    return pixels
