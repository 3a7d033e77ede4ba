"""One run of a study: trained where it is missing, resumed where it was cut off, counted, recorded.

A run is known by the hash of its settings and kept under it, so that what one table has trained
serves every other. Nothing else says what is done: a run is when its figures are on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from p3net import experiment, training
from p3net.configuration import Settings
from p3net.data.cache import Cache
from p3net.data.catalogue import SYNTHETIC, open_dataset
from p3net.errors import InputError
from p3net.evaluation import count_samples
from p3net.locking import alone
from p3net.structures import Dataset, Marks, Sample, as_points


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a study: a line of the table with one seed.

    Attributes:
        name: of the line.
        settings: everything the run depends on.
        split: the images to count in the end.
    """

    name: str
    settings: Settings
    split: str

    @property
    def key(self) -> str:
        """16 hex digits of the SHA-256 over the settings: equal runs are one run."""
        text = json.dumps(self.settings.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def folder(self, out: Path) -> Path:
        """Where it is kept."""
        return out / "runs" / self.key

    def result(self, out: Path) -> Path:
        """The file with its figures: there when it is done."""
        return self.folder(out) / f"{self.split}.json"


@dataclass(frozen=True, slots=True)
class State:
    """How far a run is: "missing", "begun" or "done", and after how many steps."""

    word: Literal["missing", "begun", "done"]
    step: int = 0


def state(trial: Trial, out: Path) -> State:
    """Read from the run's folder."""
    if trial.result(out).exists():
        return State("done", trial.settings.recipe.steps)
    log = trial.folder(out) / "log.jsonl"
    if not log.exists():
        return State("missing")
    return State("begun", log.read_bytes().count(b"\n"))


def perform(
    trial: Trial, out: Path, report: Callable[[training.Progress], None] = lambda _progress: None
) -> None:
    """Train from where the run stands, count its images, write its figures.

    Processes that want the same run at once do it one after the other, and the later ones find it
    done. Images are rendered, and prepared copies made, once for all runs in `out`.
    """
    folder = trial.folder(out)
    with alone(folder / ".lock", wait=True):
        if trial.result(out).exists():
            return
        dataset = open_dataset(trial.settings.data)
        if dataset.kind == SYNTHETIC:
            dataset = _rendered_once(dataset, out / "scenes")
        prepared = experiment.prepare(trial.settings, dataset)
        shown = dataset.part(trial.split)
        if {sample.key for sample in shown.samples} & set(prepared.split.validation):
            raise InputError(
                f"the {trial.split} images would choose the model and judge it; "
                "take validation out of the training images: validation: 10%"
            )
        began = time.monotonic()
        world = training.World(device=_device())
        counter = experiment.run(
            prepared, folder, report=report, resume=True, cache=Cache(out / "cache"), world=world
        )
        results = [
            {"key": r.key, "truth": r.truth, "counted": r.counted, **r.tags}
            for r in count_samples(counter, shown)
        ]
        record = {
            "settings": trial.settings.model_dump(mode="json"),
            "split": prepared.metadata["split"],
            "images": {role: len(part) for role, part in prepared.data._asdict().items()},
            "crops": prepared.stream.crops_per_step * trial.settings.recipe.accumulate,
            "hardware": hardware(),
            "versions": prepared.metadata["versions"],
            "seconds": time.monotonic() - began,
            "per_image": results,
        }
        write_whole(trial.result(out), json.dumps(record, indent=1, ensure_ascii=False))
        (folder / "last.safetensors").unlink(missing_ok=True)  # large, and of no more use


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and move it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"could not be written: {error.strerror}", source=path) from None


def hardware() -> str:
    """The processor or the GPU that this process works on, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        lines = facts.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} thread" + "s" * (torch.get_num_threads() > 1)


# --- scenes rendered once ----------------------------------------------------------------------


def _rendered_once(dataset: Dataset, folder: Path) -> Dataset:
    """The same scenes, each rendered by the first process that opens it and read by the others."""
    place = folder / hashlib.sha256(dataset.root.encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    samples = (
        replace(
            sample, open=partial(_open, sample, place), read_marks=partial(_marks, sample, place)
        )
        for sample in dataset.samples
    )
    return replace(dataset, samples=tuple(samples))


def _scene(sample: Sample, folder: Path) -> Mapping[str, Any]:
    path = folder / f"{Path(sample.name).stem}.npz"
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.npz")
        with sample.open() as image:
            np.savez(temporary, pixels=np.asarray(image), points_xy=sample.marks().points_xy)
        temporary.replace(path)
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def _open(sample: Sample, folder: Path) -> Image.Image:
    return Image.fromarray(_scene(sample, folder)["pixels"])


def _marks(sample: Sample, folder: Path) -> Marks:
    points_xy = as_points(_scene(sample, folder)["points_xy"])
    return Marks(points_xy, declared=len(points_xy))
