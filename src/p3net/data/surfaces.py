"""Surfaces with nobody on them, `surfaces:SEED`: gravel, fruit, leaves, grass, water, heaps.

A counter that has only seen crowds takes any texture with the grain of heads for one. Some of
these among the labelled images teach it otherwise. Surface i is a function of (seed, i), the same
bit for bit on any machine (`scenery` says how).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qsl

import numpy as np
from numpy.random import Generator
from PIL import Image

from p3net.data.scenery import STYLES, Doubles, Floats, between, noise, photograph, pick
from p3net.errors import InputError
from p3net.randomness import generator
from p3net.structures import Dataset, Marks, Sample, as_points

SIZE_HW = (480, 640)


class Surface(NamedTuple):
    """A kind of surface: grains side by side, or heaped on one another.

    Attributes:
        stretch: range of a grain's width over its height.
        dome: how round it looks, 0 to 1; of a heap, how much its faces differ in light.
        gap: how dark it is between grains, 0 to 1.
        uneven: how much grains differ in light, of 255.
        colours: of which each picture takes two.
        heaped: grains lie over one another, every way round.
    """

    name: str
    stretch: tuple[float, float]
    dome: float
    gap: float
    uneven: int
    colours: tuple[tuple[int, int, int], ...]
    heaped: bool = False


SURFACES = (
    Surface(
        "gravel", (0.8, 1.4), 0.5, 0.6, 45, ((150, 142, 132), (120, 120, 124), (170, 150, 120))
    ),
    Surface("fruit", (0.9, 1.1), 0.9, 0.9, 18, ((210, 130, 40), (170, 50, 40), (120, 140, 50))),
    Surface("leaves", (0.4, 2.5), 0.2, 0.5, 40, ((70, 88, 44), (120, 84, 44), (160, 120, 60))),
    Surface("grass", (0.08, 0.3), 0.3, 0.5, 35, ((86, 112, 62), (110, 120, 60), (70, 100, 60))),
    Surface("water", (2.5, 7.0), 0.2, 0.3, 25, ((90, 120, 140), (60, 90, 110), (120, 140, 140))),
    Surface("cloth", (0.7, 1.5), 0.1, 0.2, 60, ((150, 60, 60), (60, 70, 120), (200, 190, 170))),
    Surface(
        "stones",
        (1.0, 2.0),
        0.8,
        0.9,
        30,
        ((150, 146, 140), (128, 128, 130), (176, 160, 140)),
        heaped=True,
    ),
    Surface(
        "straw",
        (6.0, 16.0),
        0.5,
        0.6,
        35,
        ((86, 112, 62), (150, 140, 90), (70, 90, 56)),
        heaped=True,
    ),
    Surface(
        "litter",
        (1.2, 4.0),
        0.4,
        0.7,
        35,
        ((96, 100, 58), (130, 92, 54), (90, 84, 70)),
        heaped=True,
    ),
)


def surfaces_from_spec(text: str) -> Dataset:
    """The dataset called `surfaces:SEED[?train=60]`, all of it training images without a point."""
    source = f"surfaces:{text}"
    head, _, tail = text.partition("?")
    try:
        options = dict(parse_qsl(tail, strict_parsing=bool(tail)))
        seed, number = int(head), int(options.pop("train", 60))
    except ValueError:
        raise InputError(
            "expected SEED or SEED?train=60, in whole numbers", source=source
        ) from None
    if options:
        raise InputError(f"unknown option {min(options)!r}; use train", source=source)
    if seed < 0 or not 1 <= number <= 100_000:
        raise InputError("the seed must be ≥ 0 and train from 1 to 100000", source=source)
    samples = [
        Sample(
            name=f"surface_{index:04d}.png",
            open=partial(render, seed, index),
            read_marks=_nobody,
            split="train",
            tags={"scene": SURFACES[index % len(SURFACES)].name},
        )
        for index in range(number)
    ]
    return Dataset("surfaces", f"surfaces:{seed}?train={number}", tuple(samples))


def _nobody() -> Marks:
    return Marks(as_points(np.zeros((0, 2))), declared=0)


def render(seed: int, index: int, size_hw: tuple[int, int] = SIZE_HW) -> Image.Image:
    """One surface, seen from above or falling away."""
    rng = generator(seed, index)
    kind = SURFACES[index % len(SURFACES)]
    light, tone = (_heap if kind.heaped else _mosaic)(rng, size_hw, kind)
    colours = pick(rng, kind.colours, 2, 30)
    share = (tone > between(rng, 0.2, 0.8)).astype(np.float32)[..., None]
    scene = colours[0] * share + colours[1] * (1 - share)
    scene = scene + ((tone - 0.5) * (2 * kind.uneven))[..., None]
    coarse = 0.8 + 0.4 * noise(rng, size_hw, max(size_hw[0] // 5, 8))
    scene = scene * (light * coarse)[..., None] + 12 * (noise(rng, size_hw, 3) - 0.5)[..., None]
    style = STYLES[int(rng.integers(len(STYLES)))]
    return Image.fromarray(photograph(rng, scene.astype(np.float32), style))


def _mosaic(rng: Generator, size_hw: tuple[int, int], kind: Surface) -> tuple[Floats, Floats]:
    """Grains side by side: the light of every pixel, around 1, and its grain's own chance."""
    pitch = 4 + 40 * between(rng, 0, 1) * between(rng, 0, 1)  # px, a grain's height in the middle
    near, far, tone = _grains(rng, size_hw, pitch, between(rng, *kind.stretch))
    inside = near / np.maximum(far, 1e-6)  # 0 in a grain's middle, 1 halfway to the next
    edge = np.maximum(0, inside - 0.6) * np.float32(2.5 * kind.gap * between(rng, 0.5, 1))
    light = (1 - edge) * (1 + np.float32(kind.dome * between(rng, 0.5, 1)) * (0.5 - inside))
    return light.astype(np.float32), tone


def _heap(rng: Generator, size_hw: tuple[int, int], kind: Surface) -> tuple[Floats, Floats]:
    """The same of grains thrown on one another until they could cover the ground three times.

    The lower ones are darker.
    """
    height, width = size_hw
    pitch = 8 + 24 * between(rng, 0, 1) * between(rng, 0, 1)  # px, a grain's size in the middle
    fall = between(rng, 0, 1.2) if rng.random() < 0.6 else 0.0
    faces = (rng.random(2) * 2 - 1) * (kind.dome * between(rng, 0.5, 1))  # towards the sun
    light = np.full(size_hw, np.float32(1 - kind.gap))
    tone = np.zeros(size_hw, np.float32)
    number = int(3 * height * width / (pitch * pitch)) + 1
    for index in range(number):
        x, y, size, stretch, turn, own = rng.random(6).tolist()
        half = pitch * (0.4 + 0.5 * size * size) * (1 + fall * (y - 0.5))  # px
        long = kind.stretch[0] + (kind.stretch[1] - kind.stretch[0]) * stretch
        wide = min(long, 3.0)  # what is longer is thinner instead
        reach = int(1.5 * half * wide) + 1
        rows, v = _window(y * height, reach, height)
        columns, u = _window(x * width, reach, width)
        cosine, sine = _direction(turn)
        along = (u[None] * cosine + v[:, None] * sine) / (half * wide)
        beside = (v[:, None] * cosine - u[None] * sine) / (half * wide / long)
        depth, lit = _faces(rng, along, beside, faces)
        inside = depth < 0
        lit = np.where(depth < 0.15 * own - 0.3, 1, lit) * (0.6 + 0.4 * (index + 1) / number)
        light[rows, columns] = np.where(inside, lit, light[rows, columns])
        tone[rows, columns] = np.where(inside, own, tone[rows, columns])
    return light, tone


def _window(middle: float, reach: int, end: int) -> tuple[slice, Doubles]:
    """The pixels of a row or column within reach of a place, and how far each is from it."""
    first, last = max(0, int(middle) - reach), min(end, int(middle) + reach + 1)
    return slice(first, last), np.arange(first, last, dtype=np.float64) - middle


def _direction(turn: float) -> tuple[float, float]:
    """Cosine and sine of an angle between −90° and 90°, for a number from 0 to 1, by ÷ alone."""
    slope = 2 * turn - 1
    square = slope * slope
    return (1 - square) / (1 + square), 2 * slope / (1 + square)


def _faces(
    rng: Generator, along: Doubles, beside: Doubles, sun: Doubles
) -> tuple[Doubles, Doubles]:
    """How far inside a grain each place is, below 0, and the light of the face nearest to it.

    A grain is where twelve half-planes overlap.
    """
    depth, lit = np.full(along.shape, -9.0), np.ones(along.shape)
    for a, b, out in (rng.random((6, 3)) * 2 - 1).tolist():
        norm = abs(a) + abs(b) + 1e-6
        across = (a * along + b * beside) / norm
        glow = (a * float(sun[0]) + b * float(sun[1])) / norm
        for sign in (1, -1):  # both ways, so that every grain is closed
            other = sign * across - (0.55 + 0.15 * out * sign)
            lit = np.where(other > depth, 1 + sign * glow, lit)
            depth = np.maximum(depth, other)
    return depth, lit


def _grains(
    rng: Generator, size_hw: tuple[int, int], pitch: float, stretch: float
) -> tuple[Floats, Floats, Floats]:
    """Squared distances to the nearest and second nearest grain's middle, and its own chance.

    Middles lie one in each square of a jittered lattice; squares shrink towards the top by up to
    four, or do not.
    """
    height, width = size_hw
    fall = between(rng, 0, 1.2) if rng.random() < 0.6 else 0.0
    scale = pitch * (1 + fall * (np.arange(height) / height - 0.5))
    down = np.add.accumulate(1 / scale).astype(np.float32)[:, None]
    across = ((np.arange(width) - width / 2) / (pitch * stretch)).astype(np.float32)[None, :]
    across = across * (pitch / scale).astype(np.float32)[:, None] + 1024
    row, column = down.astype(np.int64), across.astype(np.int64)
    jitter = rng.random((256, 256, 3), dtype=np.float32)  # repeats after 256 grains
    near = np.full(size_hw, np.float32(9))
    far, tone = near.copy(), np.zeros(size_hw, np.float32)
    for i in (-1, 0, 1):
        for j in (-1, 0, 1):
            grain = jitter[(row + i) & 255, (column + j) & 255]
            a = down - (row + i) - grain[..., 0]
            b = across - (column + j) - grain[..., 1]
            square = (a * a + b * b).astype(np.float32)
            closer = square < near
            far = np.where(closer, near, np.minimum(far, square))
            tone = np.where(closer, grain[..., 2], tone)
            near = np.where(closer, square, near)
    return near, far, tone
