"""Streams of training crops: the same for any number of workers, from any step on.

A stream is a value: lanes of samples and how many crops each gives to a step. Which sample
stands at which position of step k, and how it is cropped, are functions of (seed, k,
position) alone. Workers make whole steps; processes (rank of world) share each one.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from p3net.data.cache import Cache
from p3net.data.images import upright_size_hw
from p3net.data.transforms import (
    Augmentation,
    Backend,
    Pixels,
    apply_to_points,
    apply_view,
    default_backend,
    draw_view,
    to_float,
)
from p3net.errors import InputError
from p3net.randomness import generator
from p3net.structures import Batch, Points, Sample


@dataclass(frozen=True, slots=True)
class Lane:
    """Samples drawn epoch by epoch, each once, `per_step` of them in every step."""

    samples: tuple[Sample, ...]
    per_step: int


@dataclass(frozen=True, slots=True)
class Stream:
    """What a step is made of: the crops of every lane, in the lanes' order.

    A crop counts as labelled when its sample is; the samples of a stream that are meant to be
    unlabelled have their points out of reach.
    """

    lanes: tuple[Lane, ...]

    @property
    def crops_per_step(self) -> int:
        """Crops of one step, over all processes."""
        return sum(lane.per_step for lane in self.lanes)

    def epoch(self, step: int) -> int:
        """Passes over the first lane completed before a step."""
        return step * self.lanes[0].per_step // len(self.lanes[0].samples)


@dataclass(frozen=True, slots=True)
class Step:
    """The crops of one step, or one process's share of them."""

    index: int
    labelled: Batch | None
    unlabelled: Batch | None


def paired(
    labelled: Iterable[Sample],
    unlabelled: Iterable[Sample],
    *,
    labelled_per_batch: int,
    unlabelled_per_batch: int,
) -> Stream:
    """Fixed numbers of labelled and unlabelled crops in each step; 0 unlabelled leaves them out."""
    lanes = [Lane(_with_points(labelled), labelled_per_batch)]
    if unlabelled_per_batch != 0:
        lanes.append(Lane(_without_points(unlabelled), unlabelled_per_batch))
    for lane, name in zip(lanes, ("labelled", "unlabelled"), strict=False):
        if lane.per_step < 1:
            raise InputError(f"{name}_per_batch must be at least 1, got {lane.per_step}")
        if not lane.samples:
            raise InputError(
                f"{lane.per_step} {name} crops in a step, but there is no {name} image"
                + ("; set unlabelled_per_batch to 0" if name == "unlabelled" else "")
            )
    return Stream(tuple(lanes))


def mixed(labelled: Iterable[Sample], unlabelled: Iterable[Sample], *, batch: int) -> Stream:
    """One shuffled stream over both, labelled or not as the shuffle falls (Algorithm 1)."""
    samples = _with_points(labelled) + _without_points(unlabelled)
    if batch < 1:
        raise InputError(f"batch must be at least 1, got {batch}")
    if not any(sample.labelled for sample in samples):
        raise InputError("there is no labelled image to learn from")
    return Stream((Lane(samples, batch),))


def step_indices(stream: Stream, seed: int, step: int) -> tuple[tuple[int, ...], ...]:
    """For each lane, which of its samples stand in a step, by position.

    Epoch after epoch is a new permutation; a step may take the end of one and the start of
    the next. Positions are counted through the lanes: 0, 1, … in the first, and so on.
    """
    picked = []
    for number, lane in enumerate(stream.lanes):
        size, first = len(lane.samples), step * lane.per_step
        turns = (divmod(place, size) for place in range(first, first + lane.per_step))
        picked.append(
            tuple(int(_permutation(seed, number, size, epoch)[place]) for epoch, place in turns)
        )
    return tuple(picked)


def loader(
    stream: Stream,
    augmentation: Augmentation,
    *,
    seed: int,
    steps: int,
    start: int = 0,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    cache: Cache | None = None,
    backend: Backend | None = None,
) -> Iterator[Step]:
    """The steps `start`, …, `steps` − 1 of a run, in order.

    Args:
        stream: from `paired` or `mixed`.
        augmentation: applied to every crop, labelled or not. It is geometry and grey; views of
            different strength are made from these crops, on tensors, by the methods.
        seed: of order and crops.
        steps: length of the whole run, so that a resumed one differs in `start` alone.
        start: the first step to give.
        workers: processes that make crops; 0 makes them here. The steps are the same.
        rank: which of the `world` training processes this is. Each takes its contiguous share
            of every lane; where `world` does not divide a lane, shares differ by one crop.
        world: number of training processes.
        cache: where prepared images are kept. An image larger than `max_shorter_side` is
            shrunk first and cropped then, so it differs slightly from one without a cache;
            the others do not.
        backend: what scales; `default_backend()` where not given.

    Raises:
        InputError: at once for settings that cannot work; while iterating, for a labelled image
            or an annotation that cannot be read, naming it, wherever it was read. An unlabelled
            image that cannot be read is passed over for the next one, with a warning.
    """
    if not 0 <= rank < world:
        raise InputError(f"rank must be between 0 and world − 1 = {world - 1}, got {rank}")
    if not all(any(_share(lane, each, world) for lane in stream.lanes) for each in range(world)):
        raise InputError(
            f"{stream.crops_per_step} crops a step leave one of {world} processes without any;"
            " enlarge the batch or use fewer processes"
        )
    if workers < 0 or start < 0:
        raise InputError(f"workers and start cannot be negative, got {workers} and {start}")
    maker = _Maker(stream, augmentation, seed, rank, world, cache, backend or default_backend())
    return _steps(maker, range(start, max(start, steps)), workers)


@dataclass(frozen=True, slots=True)
class _Crops:
    """A batch as it travels between processes.

    Pixels are bytes: a quarter of the shared memory floats would take. Points are arrays: for
    tensors so small the handle would cost more than the numbers.
    """

    pixels: Tensor
    points_xy: tuple[Points, ...] | None
    names: tuple[str, ...]
    shorter_sides: tuple[float, ...]
    seeds: tuple[int, ...]

    def batch(self) -> Batch:
        points = self.points_xy
        return Batch(
            images=to_float(self.pixels),
            points_xy=None if points is None else tuple(torch.tensor(each) for each in points),
            names=self.names,
            shorter_sides=self.shorter_sides,
            seeds=self.seeds,
        )


_Crop = tuple[Sample, Pixels, float, Points | None, int]
_Made = tuple[_Crops | None, _Crops | None]


@dataclass(frozen=True)
class _Maker(Dataset[_Made | InputError]):
    """Makes the labelled and the unlabelled crops of a step, by the step's number."""

    stream: Stream
    augmentation: Augmentation
    seed: int
    rank: int
    world: int
    cache: Cache | None
    backend: Backend
    points: dict[tuple[int, int], Points] = field(default_factory=dict, compare=False)
    damaged: set[tuple[int, int]] = field(default_factory=set, compare=False)

    def __getitem__(self, step: int) -> _Made | InputError:
        """An error is a result here: raised in a worker, it would lose its type's parts."""
        try:
            return self.make(step)
        except InputError as error:
            return error

    def make(self, step: int) -> _Made:
        parts: dict[bool, list[_Crop]] = {True: [], False: []}
        first = 0
        for number, indices in enumerate(step_indices(self.stream, self.seed, step)):
            lane = self.stream.lanes[number]
            for place in _share(lane, self.rank, self.world):
                crop = self.readable_crop(number, indices[place], (step, first + place))
                parts[crop[0].labelled].append(crop)
            first += lane.per_step
        return _collect(parts[True]), _collect(parts[False])

    def readable_crop(self, lane: int, index: int, draws: tuple[int, int]) -> _Crop:
        """The crop that `draws` makes of a sample, or of the next one that can be read.

        An unlabelled image is one of many, and a run of a night should not end for it. Labels are
        few, and their images must be right.
        """
        samples = self.stream.lanes[lane].samples
        problem: InputError | None = None
        for turn in range(len(samples)):
            at = (index + turn) % len(samples)
            if (lane, at) in self.damaged or (turn and samples[at].labelled):
                continue
            try:
                return self.crop(lane, at, generator(self.seed, *draws))
            except InputError as error:
                if samples[at].labelled:
                    raise
                problem = problem or error
                self.damaged.add((lane, at))
                warnings.warn(f"passed over, as it cannot be read: {error}", stacklevel=2)
        raise problem or InputError("none of the unlabelled images can be read")

    def crop(self, lane: int, index: int, rng: np.random.Generator) -> _Crop:
        """One crop: its sample, pixels, the scaled image's shorter side, its points, its seed."""
        sample = self.stream.lanes[lane].samples[index]
        shrunk_xy = (1.0, 1.0)
        if self.cache is None:
            with sample.open() as image:
                size_hw = upright_size_hw(image)
                view = draw_view(size_hw, self.augmentation, rng)
                pixels = apply_view(image, view, backend=self.backend)
        else:
            limit = self.augmentation.sizing.max_shorter_side
            whole, shrunk_xy = self.cache.prepared(
                sample, max_shorter_side=limit, backend=self.backend
            )
            size_hw = whole.shape[:2]
            view = draw_view(size_hw, _left(self.augmentation, shrunk_xy[0]), rng)
            pixels = apply_view(whole, view, backend=self.backend)
        points = None
        if sample.labelled:
            if (lane, index) not in self.points:
                self.points[lane, index] = sample.marks().points_xy
            points = apply_to_points(self.points[lane, index] * np.array(shrunk_xy), view)
        seed = int(rng.integers(1 << 62))
        return sample, pixels, min(size_hw) * view.scale_xy[0], points, seed


def _left(augmentation: Augmentation, shrunk: float) -> Augmentation:
    """What is left to do to an image that has been shrunk to the limit: its zoom holds for both."""
    sizing = augmentation.sizing
    if shrunk == 1:
        return augmentation
    return replace(augmentation, sizing=replace(sizing, zoom=sizing.zoom / shrunk))


def _collect(crops: list[_Crop]) -> _Crops | None:
    """One batch of crops that are all labelled or all not; None where there are none."""
    if not crops:
        return None
    samples, pixels, shorter_sides, points, seeds = zip(*crops, strict=True)
    return _Crops(
        pixels=torch.from_numpy(np.stack(pixels)),
        points_xy=points if samples[0].labelled else None,
        names=tuple(sample.key for sample in samples),
        shorter_sides=shorter_sides,
        seeds=seeds,
    )


_WORKER_DIED = "DataLoader worker"  # how torch's own message begins, unlike a passed-on one


def _steps(maker: _Maker, numbers: range, workers: int) -> Iterator[Step]:
    with warnings.catch_warnings():
        # More workers than cores, and forking beside threads, are the caller's choice.
        warnings.simplefilter("ignore")
        made = iter(
            DataLoader(
                maker,
                batch_size=None,
                sampler=numbers,
                num_workers=workers,
                collate_fn=_as_it_is,
                worker_init_fn=_start_worker if workers else None,
                multiprocessing_context=_start_method() if workers else None,
                prefetch_factor=2 if workers else None,
                generator=torch.Generator(),  # else it would draw from the global one
            )
        )
    try:
        for number in numbers:
            try:
                result = next(made)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if isinstance(error, RuntimeError) and not str(error).startswith(_WORKER_DIED):
                    raise
                raise InputError(
                    "a loading process was killed; if memory is short, use fewer workers"
                ) from error
            if isinstance(result, InputError):
                raise result
            labelled, unlabelled = result
            yield Step(
                index=number,
                labelled=labelled and labelled.batch(),
                unlabelled=unlabelled and unlabelled.batch(),
            )
    finally:
        del made  # ends the workers now, even where a traceback keeps this frame


def _as_it_is(made: Any) -> Any:
    return made


def _start_method() -> str:
    """Fork where it is sound: the first step came six times sooner than with spawn."""
    can_fork = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    return "fork" if can_fork else "spawn"


def _start_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process to answer
    if default_backend() == "cv2":
        import cv2  # optional

        cv2.setNumThreads(0)  # one core a worker; its pool of threads does not survive a fork


def _share(lane: Lane, rank: int, world: int) -> range:
    return range(rank * lane.per_step // world, (rank + 1) * lane.per_step // world)


@lru_cache(maxsize=8)
def _permutation(seed: int, lane: int, size: int, epoch: int) -> NDArray[np.int64]:
    # The last counter is never 0, which keeps these draws apart from the crops' (seed, step,
    # position): missing counters count as 0.
    return generator(seed, epoch, 0, lane + 1).permutation(size)


def _with_points(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    samples = tuple(samples)
    for sample in samples:
        if not sample.labelled:
            raise InputError(
                "stands among the labelled images but has no points", source=sample.key
            )
    return samples


def _without_points(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    return tuple(sample.without_labels() for sample in samples)
