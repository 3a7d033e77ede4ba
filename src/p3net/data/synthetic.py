"""Rendered crowds, `synthetic:SEED`: what the demo and the tests learn from.

Scene i of a split is a function of (seed, split, i), so a longer dataset starts with the
same scenes, and it is the same bit for bit on any machine (`sprites` and `scenery` say how).

A head counts when at least `VISIBLE` of its area is in the picture and not covered by what
stands before it, and its centre is in the picture; its point is the centre of the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import parse_qsl

import numpy as np
from numpy.random import Generator
from PIL import Image

from p3net.data.scenery import SPACING_M, STYLES, Style, View, background, between, photograph, pick
from p3net.data.sprites import (
    ACCENT,
    CLOTH,
    FIRST_OBJECT,
    HAIR,
    HAT,
    HEADS,
    LEGS,
    OBJECTS,
    SKIN,
    SLEEVE,
    Things,
    back_to_front,
    paint,
    resolve,
)
from p3net.errors import InputError
from p3net.randomness import generator
from p3net.structures import Dataset, Marks, Points, Sample, as_points, inside

PARTS: Mapping[str, int] = {"train": 200, "val": 50, "test": 100}
SIZE_HW = (480, 640)
MOST = 2800
VISIBLE = 0.4
SMALLEST = 14.0  # px per metre: heads of 3.4 px

SKINS = ((236, 196, 168), (214, 166, 132), (182, 128, 94), (141, 92, 62), (96, 62, 44))
HAIRS = ((24, 20, 20), (48, 34, 26), (92, 62, 38), (168, 128, 76), (150, 148, 144), (34, 30, 36))
CLOTHES = (
    *((26, 26, 30), (44, 48, 66), (78, 78, 82), (132, 130, 128), (214, 212, 208), (180, 160, 128)),
    *((168, 44, 46), (98, 104, 64), (118, 152, 184), (98, 70, 52), (206, 172, 68), (52, 84, 150)),
)
LEAVES = ((44, 62, 34), (70, 88, 44), (98, 106, 52), (120, 84, 44), (60, 70, 60))


@dataclass(frozen=True, slots=True)
class Spec:
    """What stands behind `synthetic:`."""

    seed: int
    parts: Mapping[str, int]
    size_hw: tuple[int, int] = SIZE_HW
    most: int = MOST


def parse_spec(text: str) -> Spec:
    """Read `SEED[?train=200&val=50&test=100&size=480x640&most=2800]`.

    The size is height × width; `most` is the largest number of people drawn for a scene, 0 for
    scenes without anybody.

    >>> parse_spec("7?train=20&size=240x320").size_hw
    (240, 320)
    """
    source = f"synthetic:{text}"
    head, _, tail = text.partition("?")
    try:
        options = dict(parse_qsl(tail, keep_blank_values=True, strict_parsing=bool(tail)))
        sizes = [int(side) for side in options.pop("size", "480x640").lower().split("x")]
        most = int(options.pop("most", MOST))
        parts = {**PARTS, **{name: int(number) for name, number in options.items()}}
        seed = int(head)
    except ValueError:
        message = (
            "expected SEED or SEED?train=200&val=50&test=100&size=480x640&most=2800, "
            "in whole numbers"
        )
        raise InputError(message, source=source) from None
    if unknown := sorted(options.keys() - PARTS.keys()):
        raise InputError(
            f"unknown option {unknown[0]!r}; use train, val, test, size, most", source=source
        )
    if len(sizes) != 2 or not all(64 <= side <= 4096 for side in sizes):
        raise InputError("size is HEIGHTxWIDTH, each from 64 to 4096 px", source=source)
    if seed < 0 or not all(0 <= number <= 100_000 for number in parts.values()):
        raise InputError(
            "the seed must be ≥ 0 and each part from 0 to 100000 scenes", source=source
        )
    if not 0 <= most <= MOST:
        raise InputError(f"most is from 0 to {MOST} people, got {most}", source=source)
    if not any(parts.values()):
        raise InputError("no scenes; ask for at least one of train, val, test", source=source)
    return Spec(seed, parts, (sizes[0], sizes[1]), most)


def scenes_from_spec(text: str) -> Dataset:
    """The dataset called `synthetic:TEXT`."""
    spec = parse_spec(text)
    return scenes(spec.seed, parts=spec.parts, size_hw=spec.size_hw, most=spec.most)


def scenes(
    seed: int,
    *,
    parts: Mapping[str, int] = PARTS,
    size_hw: tuple[int, int] = SIZE_HW,
    most: int = MOST,
) -> Dataset:
    """Scenes of kind "synthetic", split by position; nothing is rendered until opened."""
    samples = [
        Sample(
            name=f"{split}_{index:04d}.png",
            open=partial(_open, seed, number, index, size_hw, most),
            read_marks=partial(_read_marks, seed, number, index, size_hw, most),
            split=split,
            tags={"scene": _style(generator(seed, number, index)).name},
        )
        for number, split in enumerate(PARTS)
        for index in range(parts.get(split, 0))
    ]
    options = "&".join(f"{split}={parts.get(split, 0)}" for split in PARTS)
    root = f"synthetic:{seed}?{options}&size={size_hw[0]}x{size_hw[1]}"
    root += f"&most={most}" if most != MOST else ""
    return Dataset("synthetic", root, tuple(samples))


def _open(
    seed: int, split_index: int, index: int, size_hw: tuple[int, int], most: int
) -> Image.Image:
    return render(seed, split_index, index, size_hw, most)[0].copy()


def _read_marks(
    seed: int, split_index: int, index: int, size_hw: tuple[int, int], most: int
) -> Marks:
    points_xy = render(seed, split_index, index, size_hw, most)[1]
    return Marks(points_xy, declared=len(points_xy))


@lru_cache(maxsize=8)
def render(
    seed: int, split_index: int, index: int, size_hw: tuple[int, int] = SIZE_HW, most: int = MOST
) -> tuple[Image.Image, Points]:
    """One scene: an RGB image and the points of its visible heads, N×2.

    The last few results are kept, so that opening an image and then reading its points
    renders once; copy the image before changing it.
    """
    rng = generator(seed, split_index, index)
    style = _style(rng)
    count = _draw_count(rng)
    while count > most:
        count = _draw_count(rng)
    view = _camera(rng, count, size_hw)
    things = back_to_front(_people(rng, view, count, style), _clutter(rng, view, count))
    light = int(rng.integers(-1, 2)) if style.sun else 0
    codes, shadow, heads_xy, seen = paint(things, size_hw, light)
    fog = pick(rng, ((205, 208, 212),), 1, 20)[0]
    ground = background(rng, view, style, fog)
    ground *= 1 - (0.45 + 0.4 * style.sun) / 255 * shadow.astype(np.float32)[:, :, None]
    mist = (style.haze * view.far / np.maximum(things.scale, view.far)).astype(np.float32)
    palette = things.colours + (fog - things.colours) * mist[:, None, None]
    pixels = photograph(rng, resolve(codes, palette, ground), style)
    return Image.fromarray(pixels), as_points(
        heads_xy[(seen >= VISIBLE) & inside(heads_xy, size_hw)]
    )


def _style(rng: Generator) -> Style:
    """The first draw of every scene, so that a sample knows it without rendering."""
    return STYLES[int(rng.integers(len(STYLES)))]


def _draw_count(rng: Generator) -> int:
    """How many people are about: nobody in 8 %, else an octave and a number in it."""
    ceilings = (8, 10, 13, 18, 26, 37, 50, 64, 77, 87, 94, 100)  # percent: 0, 1, 2–3, …, 1024–
    octave = int(np.searchsorted(ceilings, int(rng.integers(100)), side="right")) - 1
    return 0 if octave < 0 else int(rng.integers(2**octave, MOST if octave == 10 else 2 << octave))


def _camera(rng: Generator, count: int, size_hw: tuple[int, int]) -> View:
    """A camera whose ground holds `count` people, as near as the draw and the crowd allow."""
    near = size_hw[0] / 480 / between(rng, 1 / 190, 1 / 45)  # distance, not size, is even
    ratio = between(rng, 1.5, 6)
    edge = size_hw[0] * between(rng, -0.15, 0.45)
    while True:
        far = max(near / ratio, SMALLEST)
        near = min(max(near, 1.3 * far), far + (size_hw[0] - edge) / 3.2)  # 3.2 m up or more
        view = View(size_hw, edge, near, far)
        if near <= 1.31 * SMALLEST or len(view.lattice()) >= 1.4 * count:
            return view
        near *= 0.9


def _people(rng: Generator, view: View, count: int, style: Style) -> Things:
    """Stand `count` people on the lattice, thicker where the scene's pattern says."""
    nodes = view.lattice()
    nodes += (rng.random(nodes.shape) - 0.5) * (0.55 * SPACING_M)
    pattern = ("even", "groups", "streams", "front")[int(rng.integers(4))]
    weight = np.full(len(nodes), 1.0 if pattern == "even" else 0.02)
    if pattern == "front":  # few before it, many behind it
        weight += nodes[:, 1] > between(rng, nodes[0, 1], nodes[-1, 1])
    for x, depth in nodes[rng.integers(len(nodes), size=int(rng.integers(2, 9)))].tolist():
        across, along = nodes[:, 0] - x, nodes[:, 1] - depth
        if pattern == "groups":
            weight += 1 / (1 + (across**2 + along**2) / between(rng, 0.5, 8)) ** 2
        if pattern == "streams":
            weight += 1 / (1 + (across - between(rng, -0.8, 0.8) * along) ** 2) ** 2
    chosen = np.argsort(rng.random(len(nodes)) / weight, kind="stable")[:count]
    x, y, scale = view.project(nodes[chosen])
    count = len(chosen)
    scale *= 0.9 + 0.18 * rng.random(count) - 0.3 * (rng.random(count) < 0.06)  # children
    share = np.add.accumulate(rng.random(len(HEADS)) * rng.random(len(HEADS)))
    heads = np.searchsorted(share, rng.random(count) * share[-1]).clip(max=len(HEADS) - 1)
    bodies = np.searchsorted((0.7, 0.85, 0.9), rng.random(count), side="right")
    kinds = int(rng.integers(2, 10))
    wardrobe = pick(rng, CLOTHES, kinds, 24)
    colours = np.zeros((count, 8, 3), np.float32)
    colours[:, SKIN] = pick(rng, SKINS, count, 12)
    colours[:, HAIR] = pick(rng, HAIRS, count, 12)
    for part in (HAT, CLOTH, LEGS, ACCENT):
        own = pick(rng, ((0, 0, 0),), count, 18)
        colours[:, part] = wardrobe[rng.integers(kinds, size=count)] + own
    colours[:, LEGS] *= 0.7
    bare = rng.random(count) < (0.6 if style.sun else 0.15)
    colours[:, SLEEVE] = np.where(bare[:, None], colours[:, SKIN], colours[:, CLOTH])
    return Things(x, y, scale, heads + len(HEADS) * bodies, colours.clip(4, 250))


def _clutter(rng: Generator, view: View, count: int) -> Things:
    """Objects: scattered, in rows and in heaps; many are round and of the size of a head."""
    nodes = view.lattice()
    places, variants, colours = [np.zeros((0, 2))], [np.zeros(0, np.int64)], []
    for _ in range(int(rng.integers(0, 7 if count else 12))):
        kind = int(rng.integers(len(OBJECTS)))
        number = 1 + int(between(rng, 0, 1) * between(rng, 0, 1) * OBJECTS[kind].most)
        start = nodes[int(rng.integers(len(nodes)))]
        layout = ("scattered", "row", "heap")[int(rng.integers(3))]
        if layout == "scattered":
            spots = nodes[rng.integers(len(nodes), size=number)]
        elif layout == "row":
            step = np.array([between(rng, -1.5, 1.5), between(rng, -1.5, 1.5)])
            spots = start + np.arange(number)[:, None] * step
        else:
            spots = start + (rng.random((number, 2)) - 0.5) * (0.3 + 0.12 * number)
        spots = spots[(spots[:, 1] > nodes[0, 1]) & (spots[:, 1] < nodes[-1, 1])]
        places.append(spots)
        variants.append(np.full(len(spots), FIRST_OBJECT + kind))
        hues = LEAVES if OBJECTS[kind].leafy else (*SKINS, *HAIRS, *CLOTHES)
        alike = rng.random() < 0.6  # the objects of a place look alike or each has its colours
        rows = pick(rng, hues, 8 * len(spots), 18).reshape(-1, 8, 3)
        colours.append(np.repeat(rows[:1], len(spots), axis=0) if alike else rows)
    ground = np.concatenate(places)
    x, y, scale = view.project(ground)
    scale *= 0.8 + 0.5 * rng.random(len(ground))
    paints = np.concatenate([np.zeros((0, 8, 3), np.float32), *colours]).clip(4, 250)
    return Things(x, y, scale, np.concatenate(variants), paints)
