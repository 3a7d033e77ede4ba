from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from p3net.data.cache import Cache
from p3net.data.images import open_image
from p3net.data.loading import Step, Stream, loader, mixed, paired, step_indices
from p3net.data.transforms import Augmentation, Sizing, apply_to_points, apply_view, draw_view
from p3net.errors import InputError
from p3net.randomness import generator
from p3net.structures import Batch, Marks, Sample, as_points

SMALL = Augmentation(crop=32, grey=0.3)


def _marks(points: tuple[tuple[float, float], ...]) -> Marks:
    return Marks(as_points(points))


def _forbidden() -> Marks:
    raise AssertionError("the points of an unlabelled image were read")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sample], list[Sample]]:
    """Seven labelled images and eleven others whose points exist but may not be read."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    made = []
    for number in range(18):
        height, width = (int(side) for side in rng.integers(30, 90, 2))
        path = folder / f"{number}.jpg"
        coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8))
        coarse.resize((width, height)).save(path)
        points = tuple(map(tuple, (rng.random((9, 2)) * (width, height)).tolist()))
        read = partial(_marks, points) if number < 7 else _forbidden
        made.append(Sample(path.name, partial(open_image, path), read, path=path))
    return made[:7], made[7:]


@pytest.fixture
def stream(samples: tuple[list[Sample], list[Sample]]) -> Stream:
    return paired(*samples, labelled_per_batch=2, unlabelled_per_batch=3)


def same(one: Batch | None, other: Batch | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        torch.equal(one.images, other.images)
        and one.names == other.names
        and one.shorter_sides == other.shorter_sides
        and one.labelled == other.labelled
        and all(map(torch.equal, one.points_xy or (), other.points_xy or ()))
    )


def same_steps(one: list[Step], other: list[Step]) -> bool:
    return [step.index for step in one] == [step.index for step in other] and all(
        same(a.labelled, b.labelled) and same(a.unlabelled, b.unlabelled)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("kind", ["paired", "mixed"])
def test_any_number_of_workers_gives_the_same_bits(samples, stream, kind, workers) -> None:
    stream = stream if kind == "paired" else mixed(*samples, batch=3)
    alone = list(loader(stream, SMALL, seed=5, steps=9))
    assert [step.index for step in alone] == list(range(9))
    assert same_steps(alone, list(loader(stream, SMALL, seed=5, steps=9, workers=workers)))
    assert not same_steps(alone, list(loader(stream, SMALL, seed=6, steps=9)))


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_later_gives_the_rest(stream, workers) -> None:
    alone = list(loader(stream, SMALL, seed=5, steps=12))
    for start in (1, 7, 11):
        rest = list(loader(stream, SMALL, seed=5, steps=12, start=start, workers=workers))
        assert same_steps(alone[start:], rest)
    assert list(loader(stream, SMALL, seed=5, steps=12, start=12, workers=workers)) == []
    assert list(loader(stream, SMALL, seed=5, steps=12, start=20, workers=workers)) == []


def test_each_crop_is_its_seed_step_and_position_alone(samples, stream) -> None:
    """Every crop worked out again by itself, from the numbers only."""
    for step in loader(stream, SMALL, seed=9, start=3, steps=6):
        lanes = step_indices(stream, 9, step.index)
        for part, batch, first in ((0, step.labelled, 0), (1, step.unlabelled, 2)):
            for place, index in enumerate(lanes[part]):
                sample = samples[part][index]
                image = sample.open()
                size_hw = image.height, image.width
                view = draw_view(size_hw, SMALL, generator(9, step.index, first + place))
                pixels = apply_view(image, view).astype(np.float32).transpose(2, 0, 1)
                np.testing.assert_array_equal(batch.images[place], pixels / np.float32(255))
                assert batch.names[place] == sample.key
                assert batch.shorter_sides[place] == min(size_hw) * view.scale_xy[0]
                if part == 0:
                    points = apply_to_points(sample.marks().points_xy, view)
                    np.testing.assert_array_equal(batch.points_xy[place], points)


def test_an_epoch_holds_every_sample_once(samples) -> None:
    stream = paired(*samples, labelled_per_batch=2, unlabelled_per_batch=3)
    labelled = [i for step in range(35) for i in step_indices(stream, 1, step)[0]]
    unlabelled = [i for step in range(33) for i in step_indices(stream, 1, step)[1]]
    for drawn, size in ((labelled, 7), (unlabelled, 11)):
        epochs = [tuple(drawn[k : k + size]) for k in range(0, len(drawn) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(epochs)) == len(epochs)  # a new order each time
    assert [stream.epoch(step) for step in (0, 3, 4, 7)] == [0, 0, 1, 2]
    assert stream.crops_per_step == 5


def test_paired_keeps_its_numbers_and_mixed_falls_as_it_may(samples, stream) -> None:
    for step in loader(stream, SMALL, seed=0, steps=5):
        assert step.labelled is not None
        assert step.unlabelled is not None
        assert (len(step.labelled), len(step.unlabelled)) == (2, 3)
        assert step.unlabelled.points_xy is None
    one_by_one = mixed(*samples, batch=1)
    seen = Counter()
    for step in loader(one_by_one, SMALL, seed=0, steps=18):
        assert (step.labelled is None) != (step.unlabelled is None)
        batch = step.labelled or step.unlabelled
        seen[batch.names[0]] += 1
        assert batch.labelled == (step.labelled is not None)
    assert seen == Counter(sample.key for part in samples for sample in part)


def test_labels_alone(samples) -> None:
    labelled, _ = samples
    for stream in (
        paired(labelled, [], labelled_per_batch=3, unlabelled_per_batch=0),
        mixed(labelled, [], batch=3),
    ):
        for step in loader(stream, SMALL, seed=0, steps=3):
            assert len(step.labelled) == 3
            assert step.unlabelled is None


def test_points_of_unlabelled_samples_are_out_of_reach(samples, stream) -> None:
    for each in (stream, mixed(*samples, batch=2)):
        inside = [s for lane in each.lanes for s in lane.samples if s.read_marks is _forbidden]
        assert len(inside) == 11
        assert all(sample.withheld for sample in inside)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_batch_of_one(samples, stream, world) -> None:
    """Joined in order of rank, the shares are the whole, lane by lane, remainders included."""
    whole = list(loader(stream, SMALL, seed=4, steps=4))
    shares = [
        list(loader(stream, SMALL, seed=4, steps=4, rank=r, world=world)) for r in range(world)
    ]
    for number, step in enumerate(whole):
        for part in ("labelled", "unlabelled"):
            pieces = [getattr(share[number], part) for share in shares]
            lengths = [0 if piece is None else len(piece) for piece in pieces]
            assert max(lengths) - min(lengths) <= 1
            expected = getattr(step, part)
            pieces = [piece for piece in pieces if piece is not None]
            assert torch.equal(torch.cat([piece.images for piece in pieces]), expected.images)
            assert sum((piece.names for piece in pieces), ()) == expected.names


def test_the_cache_changes_no_crop(stream, tmp_path: Path) -> None:
    alone = list(loader(stream, SMALL, seed=5, steps=9))
    cache = Cache(tmp_path)
    for workers in (2, 0, 0):  # empty at first, full at last
        assert same_steps(
            alone, list(loader(stream, SMALL, seed=5, steps=9, cache=cache, workers=workers))
        )
    assert cache.used_bytes() > 0


def test_points_follow_an_image_that_the_cache_shrank(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture = np.zeros((300, 400, 3), np.uint8)
    picture[196:204, 96:104] = 255
    Image.fromarray(picture).save(path)
    sample = Sample("a.png", partial(open_image, path), partial(_marks, ((100, 200),)), path=path)
    stream = paired([sample], [], labelled_per_batch=1, unlabelled_per_batch=0)
    augmentation = Augmentation(scale_range=(0.9, 1.1), crop=100, sizing=Sizing(110))
    for cache in (None, Cache(tmp_path / "c")):
        found = 0
        for step in loader(stream, augmentation, seed=0, steps=12, cache=cache):
            assert 0.9 * 110 <= step.labelled.shorter_sides[0] <= 1.1 * 110 + 1
            (points,), image = step.labelled.points_xy, step.labelled.images[0, 0].numpy()
            if len(points) and (points > 4).all() and (points < 96).all():
                y, x = np.mgrid[:100, :100] + 0.5
                centre = np.array([(image * x).sum(), (image * y).sum()]) / image.sum()
                assert np.abs(centre - points[0].numpy()).max() < 0.25
                found += 1
        assert found > 3


def test_an_image_that_the_cache_shrank_is_not_shrunk_again(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (400, 300)).save(path)
    sample = Sample("a.png", partial(open_image, path), partial(_marks, ()), path=path)
    stream = paired([sample], [], labelled_per_batch=1, unlabelled_per_batch=0)
    for zoom, limit, shorter in ((0.5, 200, 150), (0.5, 120, 120), (2.0, 200, 200)):
        augmentation = Augmentation(scale_range=(1, 1), crop=96, sizing=Sizing(limit, zoom))
        for cache in (None, Cache(tmp_path / "c")):
            (step,) = loader(stream, augmentation, seed=0, steps=1, cache=cache)
            assert step.labelled.shorter_sides[0] == pytest.approx(shorter, rel=0.01)


def broken(path: Path) -> Sample:
    """A picture that ends in the middle."""
    Image.effect_noise((64, 64), 90).save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    return Sample(path.name, partial(open_image, path), partial(_marks, ((9, 9),)), path=path)


@pytest.mark.parametrize("cached", [False, True])
def test_an_unlabelled_image_that_cannot_be_read_is_passed_over(samples, tmp_path, cached) -> None:
    labelled, unlabelled = samples
    bad = broken(tmp_path / "broken.jpg")
    cache = Cache(tmp_path / "c") if cached else None
    for make in (partial(paired, labelled_per_batch=1, unlabelled_per_batch=2), mixed):
        stream = make(labelled, [bad, *unlabelled], **({"batch": 3} if make is mixed else {}))
        flow = loader(stream, SMALL, seed=0, steps=12, cache=cache)
        with pytest.warns(UserWarning, match=r"passed over.*broken\.jpg") as caught:
            steps = list(flow)
        assert len(caught) == 1  # said once
        names = [
            n for step in steps for part in (step.labelled, step.unlabelled) for n in part_of(part)
        ]
        assert len(names) == 36
        assert bad.key not in names
    alone = paired(labelled, [bad], labelled_per_batch=1, unlabelled_per_batch=1)
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(InputError, match="truncated or damaged"),
    ):
        list(loader(alone, SMALL, seed=0, steps=1))


def part_of(batch: Batch | None) -> tuple[str, ...]:
    return () if batch is None else batch.names


@pytest.mark.parametrize("workers", [0, 2])
def test_a_labelled_image_that_cannot_be_read_is_named(samples, tmp_path: Path, workers) -> None:
    path = tmp_path / "broken.jpg"
    stream = paired([broken(path)], samples[1], labelled_per_batch=1, unlabelled_per_batch=1)
    with pytest.raises(InputError) as caught:
        list(loader(stream, SMALL, seed=0, steps=3, workers=workers))
    assert caught.value.source == str(path)
    assert "truncated or damaged" in caught.value.message
    assert "Traceback" not in str(caught.value)
    assert not multiprocessing.active_children()  # though `caught` keeps the frames alive


def test_settings_that_cannot_work_are_refused_at_once(samples, stream) -> None:
    labelled, unlabelled = samples
    one = partial(paired, labelled_per_batch=1, unlabelled_per_batch=1)
    with pytest.raises(InputError, match=r"train/7\.jpg: stands among the labelled"):
        one([unlabelled[0].without_labels()], unlabelled)
    with pytest.raises(InputError, match="no labelled image"):
        one([], unlabelled)
    with pytest.raises(InputError, match="no unlabelled image; set unlabelled_per_batch to 0"):
        one(labelled, [])
    with pytest.raises(InputError, match="labelled_per_batch must be at least 1, got 0"):
        paired(labelled, unlabelled, labelled_per_batch=0, unlabelled_per_batch=1)
    with pytest.raises(InputError, match="unlabelled_per_batch must be at least 1, got -1"):
        paired(labelled, unlabelled, labelled_per_batch=1, unlabelled_per_batch=-1)
    with pytest.raises(InputError, match="batch must be at least 1"):
        mixed(labelled, unlabelled, batch=0)
    with pytest.raises(InputError, match="no labelled image"):
        mixed([], unlabelled, batch=1)
    with pytest.raises(InputError, match="rank must be between 0 and world − 1 = 1, got 2"):
        loader(stream, SMALL, seed=0, steps=1, rank=2, world=2)
    with pytest.raises(InputError, match="5 crops a step leave one of 9 processes without any"):
        loader(stream, SMALL, seed=0, steps=1, world=9)
    with pytest.raises(InputError, match="cannot be negative"):
        loader(stream, SMALL, seed=0, steps=1, workers=-1)


def test_the_global_generators_are_left_alone(stream) -> None:
    torch.manual_seed(0)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for workers in (0, 1):
        list(loader(stream, SMALL, seed=0, steps=2, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002


def test_orders_and_crops_draw_from_separate_places() -> None:
    """Counters that are missing count as 0, so the places must differ in another one."""
    assert generator(1, 2).random() == generator(1, 2, 0, 0).random()
    orders = {generator(1, epoch, 0, lane).random() for epoch in range(9) for lane in (1, 2)}
    crops = {generator(1, step, position).random() for step in range(9) for position in range(9)}
    assert not orders & crops


def test_workers_start_beside_threads_and_end_with_the_loop(stream) -> None:
    large = np.zeros((3000, 3000, 3), np.uint8)
    cv2.resize(large, (1500, 1500), interpolation=cv2.INTER_AREA)  # starts OpenCV's threads
    steps = loader(stream, SMALL, seed=0, steps=1000, workers=2)
    assert [step.index for step in islice(steps, 3)] == [0, 1, 2]
    assert len(multiprocessing.active_children()) == 2
    steps.close()
    assert not multiprocessing.active_children()


def _die() -> Image.Image:
    time.sleep(0.3)  # the main process is waiting by then
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_killed_worker_ends_the_loop(samples) -> None:
    fatal = Sample("fatal.png", _die)
    stream = paired(samples[0], [fatal], labelled_per_batch=1, unlabelled_per_batch=1)
    with pytest.raises(InputError, match="a loading process was killed"):
        list(loader(stream, SMALL, seed=0, steps=3, workers=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_other_errors_keep_their_type(samples, workers) -> None:
    bad = Sample("bad.png", partial(np.random.default_rng, "no seed"))
    stream = paired(samples[0], [bad], labelled_per_batch=1, unlabelled_per_batch=1)
    with pytest.raises(TypeError, match="SeedSequence"):
        list(loader(stream, SMALL, seed=0, steps=3, workers=workers))
