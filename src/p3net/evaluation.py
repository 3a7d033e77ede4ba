"""Errors on whole images: one result per image, summaries over all and over groups."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from p3net import uncertainty
from p3net.counting import Counter
from p3net.data.images import upright_size_hw
from p3net.errors import InputError
from p3net.metrics import Estimate, summarise
from p3net.prediction import Interval, Prediction
from p3net.structures import Dataset, Sample, inside

LEVELS: dict[str, tuple[float, float]] = {
    "empty": (0, 1),
    "1–50": (1, 51),
    "51–250": (51, 251),
    "251–1,000": (251, 1001),
    "over 1,000": (1001, float("inf")),
}
"""Density levels by the number of people in an image."""


@dataclass(frozen=True, slots=True)
class ImageResult:
    """One image: what is there and what was counted, and the interval of that, if any."""

    key: str
    truth: int
    counted: float
    tags: Mapping[str, str]
    interval: Interval | None = None

    @property
    def error(self) -> float:
        """Counted less truth."""
        return self.counted - self.truth


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics over some of the images."""

    name: str
    images: int
    metrics: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How intervals fared on images whose true count is known.

    Attributes:
        images: how many.
        level: what was asked for.
        share: of the images whose interval holds the true count.
        width: of the intervals, mean over the images, in heads.
    """

    images: int
    level: float
    share: float
    width: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All results of a dataset and their summaries; coverage where intervals are calibrated."""

    results: tuple[ImageResult, ...]
    overall: Group
    by_level: tuple[Group, ...]
    by_weather: tuple[Group, ...]
    coverage: Coverage | None = None


def true_count(sample: Sample) -> int:
    """The number of marked points inside the image."""
    with sample.open() as image:
        size_hw = upright_size_hw(image)
    return int(inside(sample.marks().points_xy, size_hw).sum())


Progress = Callable[[int, int], None]
"""Told after every image how many of how many are done."""

Failed = Callable[[Sample, InputError], None]
"""Told of an image that cannot be read, which is then passed over; without it that is an error."""


def count_samples(
    counter: Counter,
    dataset: Dataset,
    progress: Progress | None = None,
    failed: Failed | None = None,
) -> Iterator[ImageResult]:
    """Count the labelled images one by one."""
    for sample, truth, prediction in _counted(counter, dataset, progress, failed):
        yield ImageResult(sample.key, truth, prediction.count, sample.tags, prediction.interval)


def _counted(
    counter: Counter, dataset: Dataset, progress: Progress | None, failed: Failed | None
) -> Iterator[tuple[Sample, int, Prediction]]:
    samples = [sample for sample in dataset.samples if sample.labelled]
    if not samples:
        raise InputError("no labelled image to evaluate on", source=dataset.root)
    for number, sample in enumerate(samples, start=1):
        try:
            with sample.open() as image:
                found = sample, true_count(sample), counter.count(image)
        except InputError as error:
            if failed is None:
                raise
            failed(sample, error)
        else:
            yield found
        if progress is not None:
            progress(number, len(samples))


def evaluate(
    counter: Counter,
    dataset: Dataset,
    progress: Progress | None = None,
    failed: Failed | None = None,
) -> Evaluation:
    """MAE, RMSE and NAE on whole images: overall, by density level, by weather where known."""
    results = tuple(count_samples(counter, dataset, progress, failed))
    if not results:
        raise InputError("none of its labelled images can be read", source=dataset.root)
    intervals = [(r.truth, r.interval) for r in results if r.interval and r.interval.calibrated]
    weathers = sorted({r.tags["weather"] for r in results if "weather" in r.tags})
    levels = (
        group(name, [r for r in results if low <= r.truth < high])
        for name, (low, high) in LEVELS.items()
    )
    by_weather = [group(w, [r for r in results if r.tags.get("weather") == w]) for w in weathers]
    adverse = [r for r in results if r.tags.get("weather", "none") != "none"]
    if adverse:
        by_weather.append(group("any adverse", adverse))
    return Evaluation(
        results=results,
        overall=group("all", list(results)),
        by_level=tuple(each for each in levels if each.images),
        by_weather=tuple(each for each in by_weather if each.images),
        coverage=_coverage(intervals) if intervals else None,
    )


def group(name: str, results: list[ImageResult]) -> Group:
    """Summarise some results; no metrics where there are none."""
    if not results:
        return Group(name, 0, {})
    truth = np.array([r.truth for r in results], np.float64)
    counted = np.array([r.counted for r in results], np.float64)
    return Group(name, len(results), summarise(truth, counted))


# --- intervals ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scored:
    """One image: what is there, what was counted, and the spread of that."""

    key: str
    truth: int
    counted: float
    spread: float

    @property
    def score(self) -> float:
        """Truth less counted, in spreads."""
        return (self.truth - self.counted) / self.spread


def score(
    counter: Counter,
    dataset: Dataset,
    progress: Progress | None = None,
    failed: Failed | None = None,
) -> list[Scored]:
    """Count labelled images and say how far off each count is, in units of its own spread."""
    scored = []
    for sample, truth, prediction in _counted(counter, dataset, progress, failed):
        if prediction.variance is None:
            raise InputError(
                "this model predicts no distributions, so there is nothing to calibrate; "
                "a P³Net is needed"
            )
        spread = uncertainty.spread(prediction.variance)
        scored.append(Scored(sample.key, truth, prediction.count, spread))
    return scored


def calibrate(counter: Counter, dataset: Dataset, progress: Progress | None = None) -> Counter:
    """The same model with intervals that hold on images like these, which it has not learned from.

    `checkpoint.save(path, counter.network, counter.metadata)` keeps it.
    """
    return calibrated(counter, score(counter, dataset, progress), dataset.root)


def calibrated(
    counter: Counter, scored: Sequence[Scored], data: str, *, chose: bool = False
) -> Counter:
    """The same model with intervals from these scores.

    Args:
        counter: the model.
        scored: its images, which it has not learned from.
        data: where they come from.
        chose: whether the model was chosen among others for its errors on them.
    """
    names = hashlib.sha256("\n".join(sorted(each.key for each in scored)).encode())
    made = _calibration(scored, f"{data} (images {names.hexdigest()[:12]})", chose=chose)
    return replace(counter, metadata={**counter.metadata, uncertainty.KEY: made.to_dict()})


def _calibration(
    scored: Sequence[Scored], data: str = "", *, chose: bool = False
) -> uncertainty.Calibration:
    scores = tuple(each.score for each in scored)
    return uncertainty.Calibration(scores, data, tuple(each.counted for each in scored), chose)


def held_out(scored: Sequence[Scored], level: float) -> Coverage:
    """Coverage of each image's interval, calibrated on all the others (leave one out)."""
    if len(scored) < 2:
        raise InputError(f"two images at least are needed, got {len(scored)}")
    found = []
    for index, each in enumerate(scored):
        others = [*scored[:index], *scored[index + 1 :]]
        known = _calibration(others)
        found.append((each.truth, uncertainty.interval(each.counted, each.spread, level, known)))
    return _coverage(found)


def _coverage(found: Sequence[tuple[int, Interval]]) -> Coverage:
    """Of true counts and their intervals, all of one level."""
    held = [each.low <= truth <= each.high for truth, each in found]
    widths = [each.high - each.low for _, each in found]
    images = len(found)
    return Coverage(images, found[0][1].level, sum(held) / images, sum(widths) / images)
