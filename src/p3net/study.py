"""A table of the paper as a file: a base, named overrides, two scales → runs, and their figures."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn

from p3net.configuration import merge, read_yaml, settings
from p3net.data.readers import BENCHMARKS
from p3net.errors import InputError
from p3net.metrics import METRICS
from p3net.network.cost import Cost, cost
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.trial import Trial

Scale = Literal["paper", "small"]
SCALES: tuple[Scale, ...] = ("paper", "small")

Given = dict[str, Any]
"""Settings as a user writes them."""


# --- the file ----------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class AtScale(_Strict):
    """What holds for every run at one scale; `parts` stand over the study's of the same name."""

    preset: str
    seeds: int = Field(default=1, ge=1)
    given: Given = Field(default_factory=dict, alias="set")
    parts: dict[str, Given] = Field(default_factory=dict)


class Entry(_Strict):
    """One line of the table.

    Attributes:
        title: as the table calls it.
        use: parts of the file that it is made of, in order.
        given: its own settings, over the parts, at either scale.
        small: settings over all others at small scale.
        paper: the same at the paper's scale.
        only: the one scale it exists at.
        split: the images its figures are of; test unless the protocol says otherwise.
        tags: of these images, only those with one of the values for each tag.
        published: the paper's figures.
        against: the line whose errors its own are divided by.
    """

    title: str
    use: tuple[str, ...] = ()
    given: Given = Field(default_factory=dict, alias="set")
    small: Given = Field(default_factory=dict)
    paper: Given = Field(default_factory=dict)
    only: Scale | None = None
    split: Literal["test", "val"] = "test"
    tags: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    published: dict[str, float] = Field(default_factory=dict)
    against: str | None = None


class Timing(_Strict):
    """The sizes at which the networks of a table of costs are counted and timed."""

    count_px: int = Field(default=384, ge=16)
    time_px: int = Field(default=1024, ge=16)
    rounds: int = Field(default=3, ge=1)


class Study(_Strict):
    """One table.

    Attributes:
        title: what it shows.
        where: its label in the paper.
        claim: what the paper says of it, in a sentence.
        note: what to know when reading it.
        timing: given for a table of costs, whose networks are built and not trained.
        base: settings of all runs.
        parts: named settings that runs are made of.
        small: for minutes on two cores.
        paper: the paper's.
        runs: the table's lines, by short names.
    """

    title: str
    where: str
    claim: str
    note: str = ""
    timing: Timing | None = None
    base: Given = Field(default_factory=dict)
    parts: dict[str, Given] = Field(default_factory=dict)
    small: AtScale
    paper: AtScale
    runs: dict[str, Entry]

    @model_validator(mode="after")
    def _agree(self) -> Study:
        for name, entry in self.runs.items():
            if entry.against is not None and entry.against not in self.runs:
                raise ValueError(f"run {name} is against {entry.against!r}, which is none of them")
            for part in entry.use:
                if part not in self.parts:
                    raise ValueError(f"run {name} uses {part!r}, which is none of the parts")
        return self

    def at(self, scale: Scale) -> AtScale:
        """What holds at a scale."""
        return self.small if scale == "small" else self.paper


def read(path: Path) -> Study:
    """A study's file, over the one that its `like` names; what is wrong is named by its place."""
    content = read_yaml(path)
    like = content.pop("like", None)
    if like is not None:
        content = merge(read_yaml(path.parent / str(like)), content)
    try:
        return Study(**content)
    except ValidationError as error:
        lines = []
        for each in error.errors():
            place = ".".join(map(str, each["loc"]))
            message = str(each["msg"]).removeprefix("Value error, ")
            lines.append(f"{place}: {message}" if place else message)
        raise InputError("; ".join(lines), source=path) from None


# --- runs --------------------------------------------------------------------------------------


def trials(
    study: Study,
    scale: Scale,
    *,
    names: Sequence[str] = (),
    seeds: int | None = None,
    data: Mapping[str, str] | None = None,
    assign: Mapping[str, Any] | None = None,
    source: Path | None = None,
) -> list[Trial]:
    """The runs of a study at a scale, all lines with seed 1 first.

    Args:
        study: from `read`.
        scale: small or paper.
        names: only these lines.
        seeds: how many a line; the scale's own number where not given.
        data: for each kind that stands alone in `data`, the path of the set: {"sha": "sets/A"}.
        assign: settings over all others.
        source: the study's file, for errors.
    """
    common = study.at(scale)
    entries = {n: e for n, e in study.runs.items() if e.only in (None, scale)}
    for name in names:
        if name not in entries:
            raise InputError(
                f"no run {name!r} at {scale} scale; there are {', '.join(entries)}", source=source
            )
    found = []
    for seed in range(1, (seeds or common.seeds) + 1):
        for name in names or entries:
            entry = entries[name]
            given = merge(study.base, common.given)
            own = entry.small if scale == "small" else entry.paper
            for part in entry.use:
                given = merge(given, study.parts[part])
                given = merge(given, common.parts.get(part, {}))
            for more in (entry.given, own, assign or {}):
                given = merge(given, more)
            given["seed"] = seed
            given["data"] = _located(str(given.get("data", "")), data or {}, source)
            where = f"{source or study.where}, run {name}"
            chosen = settings(given, preset=common.preset, source=where)
            found.append(Trial(name, chosen, entry.split))
    return found


def _located(data: str, paths: Mapping[str, str], source: Path | None) -> str:
    """`sha` → `sha:PATH`, from what was given or from the environment; others as they are."""
    if data not in BENCHMARKS:
        return data
    variable = f"P3NET_{data.upper()}"
    path = paths.get(data) or os.environ.get(variable)
    if not path:
        raise InputError(
            f"where is {data}? Say --data {data}=PATH, or set {variable} in the environment",
            source=source,
        )
    return f"{data}:{path}"


# --- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table as far as it has been measured.

    Attributes:
        name: short.
        title: as the table calls it.
        measured: for each metric, a value a seed.
        published: the paper's figures.
        ratio: mean MAE over that of the line it stands against, where both are measured.
        published_ratio: the same of the paper's figures.
        records: what the runs noted: settings, images, hardware, seconds.
    """

    name: str
    title: str
    measured: Mapping[str, tuple[float, ...]]
    published: Mapping[str, float]
    ratio: float | None
    published_ratio: float | None
    records: tuple[Mapping[str, Any], ...]

    @property
    def seeds(self) -> int:
        """How many runs are done."""
        return len(self.records)

    def mean(self, metric: str) -> float | None:
        """Over the seeds that are done."""
        values = self.measured[metric]
        return statistics.fmean(values) if values else None

    def sd(self, metric: str) -> float | None:
        """Sample deviation over the seeds; None of fewer than two."""
        values = self.measured[metric]
        return statistics.stdev(values) if len(values) > 1 else None


def gather(study: Study, wanted: Sequence[Trial], out: Path) -> list[Line]:
    """The table's lines, from the runs that are done; the order is that of the file."""
    records: dict[str, list[Mapping[str, Any]]] = {}
    for trial in wanted:
        there = records.setdefault(trial.name, [])
        path = trial.result(out)
        if path.exists():
            there.append(_read_record(path))
    measured = {
        name: {
            metric: tuple(_metric(metric, each["per_image"], study.runs[name]) for each in some)
            for metric in METRICS
        }
        for name, some in records.items()
    }
    lines = []
    for name, entry in study.runs.items():
        if name not in records:
            continue
        ours = measured[name]["mae"]
        theirs = measured.get(entry.against or "", {}).get("mae", ())
        ratio = None
        if ours and theirs:
            ratio = statistics.fmean(ours) / statistics.fmean(theirs)
        other = study.runs[entry.against].published if entry.against else {}
        published_ratio = None
        if "mae" in entry.published and "mae" in other:
            published_ratio = entry.published["mae"] / other["mae"]
        lines.append(
            Line(
                name,
                entry.title,
                measured[name],
                entry.published,
                ratio,
                published_ratio,
                tuple(records[name]),
            )
        )
    return lines


def _metric(metric: str, images: Sequence[Mapping[str, Any]], entry: Entry) -> float:
    """Over the images with the line's tags."""
    chosen = [
        (each["truth"], each["counted"])
        for each in images
        if all(each.get(tag) in values for tag, values in entry.tags.items())
    ]
    if not chosen:
        raise InputError(f"{entry.title}: no image has the tags {entry.tags}")
    truth, counted = np.array(chosen, np.float64).T
    return METRICS[metric](truth, counted)


def _read_record(path: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"the figures of a run cannot be read ({error}); delete the file to count again",
            source=path,
        ) from None
    found: Mapping[str, Any] = record
    return found


# --- costs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CostLine:
    """One network of a table of costs; `seconds` is the least of the rounds, for one image."""

    name: str
    title: str
    cost: Cost
    seconds: float
    published: Mapping[str, float]


def costs(study: Study, wanted: Sequence[Trial], timing: Timing) -> list[CostLine]:
    """Count every network on paper, and time them in turn, so that all meet the same machine."""
    builds: dict[str, Callable[[], nn.Module]] = {
        trial.name: partial(_network, trial.settings.network) for trial in wanted
    }
    networks = {name: build().eval() for name, build in builds.items()}
    image = torch.full((1, 3, timing.time_px, timing.time_px), 0.5)
    least: dict[str, float] = {}
    with torch.inference_mode():
        for _ in range(timing.rounds):
            for name, network in networks.items():
                began = time.perf_counter()
                network(image)
                least[name] = min(least.get(name, np.inf), time.perf_counter() - began)
    size_hw = (timing.count_px, timing.count_px)
    return [
        CostLine(
            name,
            study.runs[name].title,
            cost(build, size_hw),
            least[name],
            study.runs[name].published,
        )
        for name, build in builds.items()
    ]


def _network(architecture: Architecture | RegressorArchitecture) -> nn.Module:
    if isinstance(architecture, RegressorArchitecture):
        return Regressor(architecture)
    return P3Net(architecture)
