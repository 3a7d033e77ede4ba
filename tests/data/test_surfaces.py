from __future__ import annotations

import hashlib

import numpy as np
import pytest

from p3net.data.catalogue import open_dataset
from p3net.data.surfaces import SURFACES, _faces, _grains, _heap, render
from p3net.errors import InputError
from p3net.randomness import generator


def test_nobody_is_on_them_and_every_kind_is_there():
    dataset = open_dataset("surfaces:7?train=9")
    assert len(dataset.samples) == len(dataset.part("train").samples) == 9
    assert {sample.tags["scene"] for sample in dataset.samples} == {one.name for one in SURFACES}
    assert all(len(sample.marks().points_xy) == 0 for sample in dataset.samples)
    assert open_dataset(dataset.root).root == dataset.root


def test_a_surface_is_a_function_of_seed_and_index():
    size_hw = (96, 128)
    pictures = [np.asarray(render(5, index, size_hw)) for index in range(6)]
    digest = hashlib.sha256(b"".join(each.tobytes() for each in pictures)).hexdigest()
    assert (
        digest
        == hashlib.sha256(
            b"".join(np.asarray(render(5, index, size_hw)).tobytes() for index in range(6))
        ).hexdigest()
    )
    assert not np.array_equal(pictures[0], np.asarray(render(6, 0, size_hw)))
    assert all(each.std() > 5 for each in pictures)  # a grain, not a blank page


def test_the_nearest_grains_are_the_nearest():
    """Beside a search over all middles of the lattice, for a surface that does not fall away."""
    rng = generator(11, 4)
    near, far, _ = _grains(rng, (40, 60), 8.0, 1.0)
    again = generator(11, 4)
    falls = again.random() < 0.6  # the same draws in the same order
    fall = float(again.random()) * 1.2 if falls else 0.0
    middles = again.random((256, 256, 3), dtype=np.float32)
    scale = 8.0 * (1 + fall * (np.arange(40) / 40 - 0.5))
    down = np.cumsum(1 / scale)
    for y, x in ((3, 5), (20, 31), (38, 58)):
        place = np.array((down[y], (x - 30) / scale[y] + 1024))
        rows, columns = np.mgrid[-3:60, 1000:1048]
        spots = np.stack([rows, columns], -1) + middles[rows & 255, columns & 255, :2]
        squares = np.sort(((spots - place) ** 2).sum(-1).ravel())
        assert near[y, x] == pytest.approx(squares[0], abs=1e-3)
        assert far[y, x] > squares[1] - 1e-3  # seldom more: only 3×3 squares are looked at


def test_a_place_is_inside_a_grain_where_it_is_on_the_inner_side_of_every_face():
    rows, columns = np.mgrid[-1.2:1.2:25j, -1.2:1.2:31j]
    depth, lit = _faces(generator(3, 1), columns, rows, np.array((0.4, -0.2)))
    sides = generator(3, 1).random((6, 3)) * 2 - 1
    for (y, x), found in np.ndenumerate(depth):
        past = []  # how far beyond each face, and how that is lit
        for a, b, out in sides:
            long = abs(a) + abs(b) + 1e-6
            across = (a * columns[y, x] + b * rows[y, x]) / long
            glow = (a * 0.4 - b * 0.2) / long
            past.append((across - 0.55 - 0.15 * out, 1 + glow))
            past.append((-across - 0.55 + 0.15 * out, 1 - glow))
        assert found == pytest.approx(max(past)[0])
        assert lit[y, x] == pytest.approx(max(past)[1])
    assert 0.1 < (depth < 0).mean() < 0.6


@pytest.mark.parametrize("kind", [each for each in SURFACES if each.heaped], ids=lambda k: k.name)
def test_a_heap_hides_most_of_its_ground(kind):
    light, tone = _heap(generator(2, 9), (120, 160), kind)
    covered = tone > 0
    assert 0.6 < covered.mean() < 1
    assert np.all(light[~covered] == np.float32(1 - kind.gap))
    assert len(np.unique(tone)) > 50  # grains, each with its own


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected SEED"),
        ("x", "expected SEED"),
        ("1?train=0", "from 1 to 100000"),
        ("1?size=3", "unknown option 'size'"),
    ],
)
def test_a_wrong_word_is_named(text, words):
    with pytest.raises(InputError, match=words):
        open_dataset(f"surfaces:{text}")
