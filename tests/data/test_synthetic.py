from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import p3net.data.synthetic as module
from p3net.data.scenery import STYLES, View
from p3net.data.sprites import (
    BODIES,
    FIRST_OBJECT,
    HAIR,
    HAT,
    HEAD_M,
    HEADS,
    OBJECTS,
    SKIN,
    Things,
    back_to_front,
    paint,
    resolve,
    sprite,
)
from p3net.data.synthetic import VISIBLE, parse_spec, render, scenes, scenes_from_spec
from p3net.errors import InputError
from p3net.structures import inside

SMALL = (160, 224)


def fingerprint(size_hw: tuple[int, int] = SMALL, indices: range = range(4)) -> str:
    digest = hashlib.sha256()
    for index in indices:
        image, points_xy = render(5, 0, index, size_hw)
        digest.update(np.asarray(image).tobytes() + points_xy.tobytes())
    return digest.hexdigest()


def people(*rows: tuple[float, float, float, int]) -> Things:
    """Things at (x, y, px per metre, variant), every part of thing k coloured 10 k + part."""
    x, y, scale, variant = (np.array(column) for column in zip(*rows, strict=True))
    colours = np.zeros((len(rows), 8, 3), np.float32)
    colours += 10 * np.arange(len(rows))[:, None, None] + np.arange(8)[None, :, None]
    return Things(x.astype(float), y.astype(float), scale.astype(float), variant, colours)


# The dataset.


def test_spec_and_dataset():
    dataset = scenes_from_spec("7?train=3&val=2&test=1&size=96x128")
    assert [sample.key for sample in dataset.samples] == [
        *("train/train_0000.png", "train/train_0001.png", "train/train_0002.png"),
        *("val/val_0000.png", "val/val_0001.png", "test/test_0000.png"),
    ]
    assert dataset.kind == "synthetic"
    assert scenes_from_spec(dataset.root.removeprefix("synthetic:")).root == dataset.root
    image, marks = dataset.samples[0].open(), dataset.samples[0].marks()
    assert (image.size, image.mode) == ((128, 96), "RGB")
    assert marks.declared == len(marks.points_xy)
    assert dataset.samples[0].tags["scene"] in {style.name for style in STYLES}
    assert {split: len(scenes(0).part(split)) for split in ("train", "val", "test")} == {
        "train": 200,
        "val": 50,
        "test": 100,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected SEED"),
        ("seven", "expected SEED"),
        ("7?train", "expected SEED"),
        ("7?train=many", "expected SEED"),
        ("7?size=480by640", "expected SEED"),
        ("-1", "seed must be"),
        ("7?train=-2", "seed must be"),
        ("7?train=100001", "seed must be"),
        ("7?trian=2", "unknown option 'trian'"),
        ("7?size=480", "HEIGHTxWIDTH"),
        ("7?size=480x9000", "HEIGHTxWIDTH"),
        ("7?train=0&val=0&test=0", "no scenes"),
    ],
)
def test_wrong_specs(text, words):
    with pytest.raises(InputError, match=words) as caught:
        parse_spec(text)
    assert caught.value.source == f"synthetic:{text}"


def test_a_longer_dataset_starts_with_the_same_scenes():
    short, long = (scenes(3, parts={"train": n}, size_hw=SMALL) for n in (2, 5))
    for a, b in zip(short.samples, long.samples, strict=False):
        assert a.key == b.key
        assert a.open().tobytes() == b.open().tobytes()


def test_seeds_splits_and_positions_differ():
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    assert len({render(*key, SMALL)[0].tobytes() for key in keys}) == len(keys)


def test_samples_pass_to_other_processes_and_callers_cannot_spoil_a_scene():
    sample = scenes(3, parts={"train": 1}, size_hw=SMALL).samples[0]
    first = sample.open()
    before = first.tobytes()
    first.paste((0, 0, 0), (0, 0, *first.size))
    assert sample.open().tobytes() == before
    assert pickle.loads(pickle.dumps(sample)).open().tobytes() == before
    with pytest.raises(ValueError, match="read-only"):
        sample.marks().points_xy[:] = 0


def test_open_and_marks_render_once(monkeypatch):
    calls = []
    paint_once = module.paint
    monkeypatch.setattr(module, "paint", lambda *given: calls.append(1) or paint_once(*given))
    sample = scenes(11, parts={"train": 1}, size_hw=SMALL).samples[0]
    sample.open(), sample.marks(), sample.open()
    assert len(calls) == 1


# The same bits everywhere.


@pytest.mark.parametrize(
    "settings_of_machine",
    [
        {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"},
        {"NPY_DISABLE_CPU_FEATURES": "X86_V4 X86_V3 AVX512_ICL AVX512_SPR AVX512F AVX2 FMA3"},
    ],
    ids=["threads", "older processor"],
)
def test_same_bits_on_another_machine(settings_of_machine):
    here = Path(__file__).parent
    code = f"import sys; sys.path.insert(0, {str(here)!r}); import test_synthetic as t; "
    environment = {**os.environ, **settings_of_machine, "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    output = subprocess.run(
        [sys.executable, "-c", code + "print(t.fingerprint())"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split()[-1] == fingerprint()


@pytest.mark.parametrize("name", ["synthetic", "sprites", "scenery"])
def test_nothing_that_rounds_differently_elsewhere(name):
    """No transcendental function, float sum, matrix product or drawing in the renderer."""
    text = Path(module.__file__).with_name(f"{name}.py").read_text()
    words = ("exp(", "log(", "sin(", "cos(", "power(", "normal(", "uniform(", ".sum(", ".mean(")
    words += (" @ ", "dot(", "einsum", "ImageDraw", "ImageFilter", ".resize(", "cv2", "** 3", "**4")
    assert [word for word in words if word in text] == []


# Points.


@pytest.mark.parametrize("variant", [0, 1, 2, 7, 8, 16, 24])
def test_the_point_is_the_centre_of_the_head(variant):
    """Against the centroid and the extent of the head's own colour in the finished picture."""
    things = people((60, 150, 80.0, variant))
    things.colours[:] = 0
    things.colours[:, [SKIN, HAIR, HAT]] = 200
    codes, _, heads_xy, seen = paint(things, (200, 120), 0)
    picture = resolve(codes, things.colours, np.zeros((200, 120, 3), np.float32))[:, :, 0] > 60
    rows, columns = np.nonzero(picture)
    assert heads_xy[0, 0] == pytest.approx(columns.mean() + 0.5, abs=0.5)
    assert heads_xy[0, 1] == pytest.approx(rows.mean() + 0.5, abs=1)
    assert np.ptp(rows) + 1 == pytest.approx(80 * HEAD_M, abs=2.5)
    assert seen[0] == 1
    heads_high = 4.9 if variant >= 24 else 6.5  # seated or standing
    assert 150 - heads_xy[0, 1] == pytest.approx(heads_high * HEAD_M * 80, rel=0.08)


def test_who_stands_before_hides_who_stands_behind():
    """A head behind a person of the same place is hidden; beside it is not."""
    behind, before, beside = (60, 150, 80.0, 1), (60, 153, 80.0, 1), (110, 150, 80.0, 1)
    things = back_to_front(people(before), people(behind, beside))
    assert things.y.tolist() == [150, 150, 153]
    seen = paint(things, (200, 160), 0).seen
    assert seen[0] < VISIBLE
    assert seen[1] == seen[2] == 1


def test_visible_share_by_counting_pixels():
    """Each head painted alone, then all: what is left of it, counted pixel by pixel."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, FIRST_OBJECT + len(OBJECTS), 25).tolist()
    rows = [(rng.uniform(-5, 105), 60 + 5 * k, 60.0, kind) for k, kind in enumerate(kinds)]
    things = people(*rows)
    together = paint(things, (150, 100), 0)
    for number, row in enumerate(rows):
        alone = paint(people(row), (150, 100), 0).codes
        unit = 28  # 2 × 0.24 m × 60 px/m = 28.8, in the even sizes used from 16 on
        whole = sprite(row[3], unit, 0)
        parts = alone >> 8 & 7
        own = ((parts >= SKIN) & (parts <= HAT)) & (together.codes >> 11 == number)
        own &= together.codes > 0
        expected = own.sum() / whole.area if whole.area else 0
        assert together.seen[number] == pytest.approx(expected)
    assert 0 < np.mean(together.seen[[row[3] < FIRST_OBJECT for row in rows]]) < 1


def test_objects_have_no_heads_and_people_have():
    for light in (-1, 0, 1):
        for variant in range(FIRST_OBJECT + len(OBJECTS)):
            stamp = sprite(variant, 20, light)
            assert (stamp.area > 0) == (variant < FIRST_OBJECT)
            assert stamp.mask.any()
            assert (stamp.codes[stamp.mask] & 255).min() > 0  # no shade ran below zero
    assert len(HEADS) * len(BODIES) == FIRST_OBJECT


def test_resolving_is_the_mean_of_four_codes():
    things = people((9, 18, 30.0, 0), (15, 20, 30.0, 35))
    codes = paint(things, (24, 32), 0).codes
    ground = np.full((24, 32, 3), 77, np.float32)
    expected = np.zeros_like(ground)
    for row in range(48):
        for column in range(64):
            code = int(codes[row, column])
            colour = things.colours[code >> 11, code >> 8 & 7] * (code & 255) / 128
            expected[row // 2, column // 2] += (ground[0, 0] if code == 0 else colour) / 4
    np.testing.assert_allclose(resolve(codes, things.colours, ground), expected, rtol=1e-5)
    empty = np.zeros((48, 64), np.uint32)
    assert (resolve(empty, np.zeros((0, 8, 3), np.float32), ground) == ground).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**40), height=st.integers(64, 200), width=st.integers(64, 200))
def test_any_scene_is_sound(seed, height, width):
    image, points_xy = render(seed, 2, 0, (height, width))
    assert image.size == (width, height)
    assert inside(points_xy, (height, width)).all()
    assert np.asarray(image).dtype == np.uint8
    assert len(np.unique(points_xy, axis=0)) == len(points_xy)


# What the scenes are like.


def test_perspective_agrees_with_a_pinhole():
    """Rows, sizes and depths against a camera worked out by hand."""
    view = View((480, 640), edge=120, near=80, far=20)  # 360 px for 60 px/m
    assert (view.height_m, view.horizon) == (6, 0)
    x, y, scale = view.project(np.array([[2.0, 704 / 80], [-1.0, 704 / 20]]))
    np.testing.assert_allclose([x, y, scale], [[480, 300], [480, 120], [80, 20]])
    nodes = view.lattice()
    near, far = nodes[nodes[:, 1] < 10], nodes[nodes[:, 1] > 33]
    assert np.ptp(far[:, 0]) > 2 * np.ptp(near[:, 0])
    assert nodes[:, 1].max() <= 704 / 20


def test_from_empty_to_dense_and_varied():
    """Counts of 60 small scenes span orders; the styles and the light differ."""
    dataset = scenes(1, parts={"train": 60}, size_hw=SMALL)
    counts = np.array([len(sample.marks().points_xy) for sample in dataset.samples])
    assert 1 <= (counts == 0).sum() <= 15
    assert np.percentile(counts, 90) > 5 * max(np.median(counts), 1)
    assert counts.max() > 100
    light = {}
    for sample in dataset.samples:
        light.setdefault(sample.tags["scene"], []).append(np.asarray(sample.open()).mean())
    assert set(light) == {style.name for style in STYLES}
    assert np.mean(light["night"]) < 0.7 * np.mean(light["sun"])


def test_a_full_size_scene_can_hold_two_thousand():
    found = max(len(render(1, 0, i)[1]) for i in range(40) if _asked(1, 0, i) > 1500)
    assert 1200 < found < 2600


def _asked(*place: int) -> int:
    rng = module.generator(*place)
    module._style(rng)
    return module._draw_count(rng)


def test_counts_asked_for_are_long_tailed():
    asked = np.array([_asked(9, 0, i) for i in range(4000)])
    assert (asked == 0).mean() == pytest.approx(0.08, abs=0.02)
    assert np.median(asked) == pytest.approx(64, abs=16)
    assert asked.max() < 2800
    assert (asked >= 1024).mean() == pytest.approx(0.06, abs=0.015)


def test_most_keeps_what_is_below_it_and_redraws_the_rest():
    whole = [render(1, 0, i, SMALL) for i in range(40)]
    few = [render(1, 0, i, SMALL, 30) for i in range(40)]
    counts = [len(points) for _, points in whole]
    assert max(counts) > 60
    assert max(len(points) for _, points in few) <= 30
    pairs = zip(whole, few, strict=True)
    same = [np.array_equal(np.asarray(a), np.asarray(b)) for (a, _), (b, _) in pairs]
    assert 0 in counts
    assert all(kept for kept, count in zip(same, counts, strict=True) if count == 0)
    assert not all(same)
    assert scenes_from_spec("1?train=2&val=0&test=0&most=30").root.endswith("&most=30")
    empty = [render(1, 0, i, SMALL, 0) for i in range(20)]
    assert all(len(points) == 0 for _, points in empty)
    for wrong in ("-1", "2801", "x"):
        with pytest.raises(InputError):
            parse_spec(f"1?most={wrong}")
