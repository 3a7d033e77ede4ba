"""Errors on whole images: one result per image, summaries over all and over groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from p3net.counting import Counter
from p3net.data.images import upright_size_hw
from p3net.errors import InputError
from p3net.metrics import Estimate, summarise
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
    """One image: what is there and what was counted."""

    key: str
    truth: int
    counted: float
    tags: Mapping[str, str]

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
class Evaluation:
    """All results of a dataset and their summaries."""

    results: tuple[ImageResult, ...]
    overall: Group
    by_level: tuple[Group, ...]
    by_weather: tuple[Group, ...]


def true_count(sample: Sample) -> int:
    """The number of marked points inside the image."""
    with sample.open() as image:
        size_hw = upright_size_hw(image)
    return int(inside(sample.marks().points_xy, size_hw).sum())


def count_samples(
    counter: Counter, dataset: Dataset, progress: Callable[[int, int], None] | None = None
) -> Iterator[ImageResult]:
    """Count the labelled images one by one."""
    samples = [sample for sample in dataset.samples if sample.labelled]
    if not samples:
        raise InputError("no labelled image to evaluate on", source=dataset.root)
    for number, sample in enumerate(samples, start=1):
        with sample.open() as image:
            counted = counter.count(image).count
        yield ImageResult(sample.key, true_count(sample), counted, sample.tags)
        if progress is not None:
            progress(number, len(samples))


def evaluate(
    counter: Counter, dataset: Dataset, progress: Callable[[int, int], None] | None = None
) -> Evaluation:
    """MAE, RMSE and NAE on whole images: overall, by density level, by weather where known."""
    results = tuple(count_samples(counter, dataset, progress))
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
    )


def group(name: str, results: list[ImageResult]) -> Group:
    """Summarise some results; no metrics where there are none."""
    if not results:
        return Group(name, 0, {})
    truth = np.array([r.truth for r in results], np.float64)
    counted = np.array([r.counted for r in results], np.float64)
    return Group(name, len(results), summarise(truth, counted))
