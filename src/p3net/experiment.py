"""Configuration → run: data split, intervals fitted, network, method and stream built; trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from p3net import checkpoint, training
from p3net.allocator import keep_freed_memory
from p3net.configuration import Settings, Views
from p3net.counting import Counter
from p3net.data import splits
from p3net.data.cache import Cache
from p3net.data.catalogue import is_own, open_dataset
from p3net.data.images import upright_size_hw
from p3net.data.loading import Stream, mixed, paired
from p3net.data.readers import BENCHMARKS
from p3net.data.splits import Split, SplitData
from p3net.data.transforms import apply_to_points, default_backend, whole_view
from p3net.errors import InputError
from p3net.evaluation import ImageResult, Scored, calibrated, count_samples, score
from p3net.intervals import PUBLISHED, Pair, fit
from p3net.locking import alone
from p3net.methods.base import Method
from p3net.methods.mean_teacher import MeanTeacher
from p3net.methods.p3net import P3NetMethod
from p3net.methods.ranking import Ranking
from p3net.methods.supervised import Labelled, Supervised
from p3net.metrics import METRICS
from p3net.network.p3net import P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.network.weights import load_backbone, pretrained_file
from p3net.recipe import Recipe
from p3net.structures import Dataset
from p3net.targets import densities
from p3net.uncertainty import KEY


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    settings: Settings
    split: Split
    data: SplitData
    method: Method
    stream: Stream
    metadata: Mapping[str, Any]


def prepare(chosen: Settings, dataset: Dataset | None = None) -> Prepared:
    """Open the data (unless it is open), split it, fit intervals, build network, method, stream."""
    if dataset is None:
        dataset = open_dataset(chosen.data)
    split = split_of(dataset, chosen)
    data = splits.apply(dataset, split)
    torch.manual_seed(chosen.seed)
    network, choice = _network(chosen, data, dataset.kind)
    common: Labelled = {
        "loss": chosen.loss,
        "sigma": chosen.sigma,
        "per_cell": chosen.per_cell,
        "light": chosen.light,
        "soft": chosen.soft,
        "total": chosen.total,
    }
    views: dict[str, Any] = {"strong": chosen.strong, "hidden": chosen.hidden}
    method: Method
    if chosen.method == "p3net":
        method = P3NetMethod(
            network,
            threshold=chosen.threshold,
            consistency=chosen.consistency,
            teacher=chosen.teacher,
            **views,
            **common,
        )
    elif chosen.method == "mean-teacher":
        method = MeanTeacher(network, decay=chosen.teacher, **views, **common)
    else:
        method = {"supervised": Supervised, "l2r": Ranking}[chosen.method](network, **common)
    metadata = {
        "settings": chosen.model_dump(),
        "kind": dataset.kind,
        "split": {"hash": split.hash, "how": dict(split.how)},
        "chosen_intervals": choice,
        "chosen_on_test": chosen.test_as_validation,
        "preparation": {**asdict(chosen.views.sizing()), "backend": default_backend()},
        "versions": checkpoint.versions(),
    }
    return Prepared(chosen, split, data, method, _stream(chosen, data), metadata)


def split_of(dataset: Dataset, chosen: Settings) -> Split:
    """The split that the settings name: drawn, read from lists, or a folder written before."""
    sin = chosen.test_as_validation
    if chosen.validation == "test" and not sin:
        raise InputError(
            "choosing a model on the test images makes its test figures worthless; validation "
            "comes out of the training images. If you must: test_as_validation=true, and the "
            "run will say so for ever"
        )
    asked = chosen.labelled
    if asked == "auto":
        asked = "100%" if is_own(dataset) else "5%"
    labelled, held = Path(asked), Path(chosen.validation)
    validation: splits.Amount | Path | None = 0  # the sinner's come last
    if not sin:
        validation = held if held.is_file() else _amount("validation", chosen.validation)
    if labelled.is_dir():
        split = splits.read(labelled)
    elif labelled.is_file():
        split = splits.from_lists(
            dataset, labelled=labelled, validation=validation, seed=chosen.seed
        )
    elif labelled.suffix == ".txt":
        raise InputError("no such list of labelled images", source=labelled)
    else:
        share = _amount("labelled", asked)
        split = splits.draw(
            dataset,
            labelled=share or 0,
            validation=validation,
            seed=chosen.seed,
            stratified=chosen.stratified,
            order=chosen.order,
        )
    if sin:
        if not split.test:
            raise InputError("there are no test images to choose on", source=dataset.root)
        split = Split(split.labelled, split.unlabelled, split.test, (), split.how)
    return split


def _amount(key: str, text: str) -> splits.Amount | None:
    """A share or a number; None for validation: auto."""
    if key == "validation" and text == "auto":
        return None
    try:
        return splits.parse_amount(text)
    except InputError as error:
        raise InputError(f"{key}: {error.message}, or the path of a list or a split") from None


def target_cells(dataset: Dataset, sigma: float, views: Views) -> torch.Tensor:
    """The target cells of whole labelled images, all in one row: what intervals are fitted to.

    Images have the size at which they are counted.
    """
    cells = []
    for sample in dataset.samples:
        with sample.open() as image:
            size_hw = upright_size_hw(image)
        view = whole_view(size_hw, views.sizing())
        shown = torch.tensor(apply_to_points(sample.marks().points_xy, view))
        cells.append(densities([shown], view.size_hw, sigma=sigma).flatten())
    return torch.cat(cells)


def _network(
    chosen: Settings, data: SplitData, kind: str
) -> tuple[P3Net | Regressor, dict[str, Any]]:
    start = None
    if chosen.weights not in ("none", "imagenet") and checkpoint.is_model(chosen.weights):
        start = _start(chosen)
    if isinstance(chosen.network, RegressorArchitecture):
        network: P3Net | Regressor = start or Regressor(chosen.network)
        choice: dict[str, Any] = {"how": "none"}
    else:
        own = start.intervals if isinstance(start, P3Net) else None
        pair, choice = _intervals(chosen, data, kind, own)
        tables = json.dumps([each.to_dict() for each in pair])
        choice["hash"] = hashlib.sha256(tables.encode()).hexdigest()[:16]
        network = P3Net(chosen.network, pair)
        if start is not None:
            checkpoint.fill(network, start.state_dict(), "", Path(chosen.weights))
    if start is None and chosen.weights != "none":
        imagenet = chosen.weights == "imagenet"
        name = chosen.network.backbone
        path = pretrained_file(name) if imagenet else Path(chosen.weights)
        load_backbone(network.backbone, path)
    return network, choice


def _start(chosen: Settings) -> P3Net | Regressor:
    """The network of the model that the settings start from, which must be of their shape."""
    network = checkpoint.load(chosen.weights).network
    if not isinstance(network, P3Net | Regressor):
        raise InputError(
            "only weights can be trained on, not an exported file", source=chosen.weights
        )
    own, wanted = network.architecture.model_dump(), chosen.network.model_dump()
    if own != wanted:
        raise InputError(
            "a run that starts from this model needs its network: " + _difference(own, wanted),
            source=chosen.weights,
        )
    return network


def _intervals(
    chosen: Settings, data: SplitData, kind: str, own: Pair | None
) -> tuple[Pair, dict[str, Any]]:
    """The density intervals and where they are from; `own` is what the model to start from has."""
    how = chosen.intervals
    if how == "auto":
        asked = not chosen.published_partition
        if own is not None and not asked:
            return own, {"how": "kept"}
        how = "published" if kind in BENCHMARKS and not asked else "fit"
    if how == "published":
        return PUBLISHED, {"how": how}
    cells = target_cells(data.labelled, chosen.sigma, chosen.views)
    pair = fit(cells, partition=chosen.partition, count=chosen.intervals_count)
    facts = {"partition": chosen.partition, "count": len(pair[0]), "sigma": chosen.sigma}
    return pair, {"how": how, **facts}


def _stream(chosen: Settings, data: SplitData) -> Stream:
    how = chosen.streaming
    unlabelled = data.unlabelled.samples if chosen.method != "supervised" else ()
    if how.kind == "mixed":
        return mixed(data.labelled.samples, unlabelled, batch=how.batch)
    return paired(
        data.labelled.samples,
        unlabelled,
        labelled_per_batch=how.labelled,
        unlabelled_per_batch=how.unlabelled if unlabelled else 0,
    )


def run(
    prepared: Prepared,
    folder: Path,
    *,
    report: Callable[[training.Progress], None] = lambda _progress: None,
    stopped: Callable[[], bool] = lambda: False,
    resume: bool = False,
    world: training.World | None = None,
    cache: Cache | None = None,
) -> Counter:
    """Train in a folder and give the model to count with.

    A folder that holds another run is refused, and so is one in which another process trains; with
    `resume` it must hold this very run, of which a finished one is left as it is. Runs on the same
    images may share a cache. `stopped` is asked after every step.
    """
    world = world or training.World()
    keep_freed_memory()
    record = json.loads(json.dumps(prepared.metadata))
    with alone(folder / ".training", wait=False) if world.rank == 0 else nullcontext():
        if world.rank == 0:
            _claim(folder, record, resume=resume)
            splits.write(prepared.split, folder / "split")
        if resume and (counter := _finished(prepared, folder)) is not None:
            return counter
        return _trained(prepared, folder, record, report, stopped, world, cache, resume=resume)


def _finished(prepared: Prepared, folder: Path) -> Counter | None:
    """The model of a run that has nothing left to do: it may have been calibrated again since."""
    model, last = folder / "model.safetensors", folder / "last.safetensors"
    if not (model.exists() and last.exists()):
        return None
    if checkpoint.read(last)[1]["step"] < prepared.settings.recipe.steps:
        return None
    counter = checkpoint.load(model)
    calibrates = len(prepared.data.validation) and isinstance(counter.network, P3Net)
    return None if calibrates and KEY not in counter.metadata else counter


def _trained(
    prepared: Prepared,
    folder: Path,
    record: Mapping[str, Any],
    report: Callable[[training.Progress], None],
    stopped: Callable[[], bool],
    world: training.World,
    cache: Cache | None,
    *,
    resume: bool,
) -> Counter:
    """The model of a run whose folder is claimed, its intervals calibrated where that is known."""
    chosen = prepared.settings
    held = prepared.data.validation
    latest: list[Scored] = []  # of the last validation, which may be of the final weights

    def validate(network: nn.Module) -> dict[str, float]:
        counter = Counter(network, chosen.views.sizing())
        if not isinstance(network, P3Net):
            return metrics_of(list(count_samples(counter, held)))
        latest[:] = score(counter, held)
        return metrics_of(latest)

    network = training.train(
        prepared.method,
        prepared.stream,
        chosen.views.augmentation(),
        _trainable(chosen),
        folder=folder,
        seed=chosen.seed,
        metadata=record,
        validate=validate if len(held) else None,
        report=report,
        stopped=stopped,
        resume=resume,
        cache=cache or Cache(folder / "cache"),
        world=world,
    )
    counter = Counter(network, chosen.views.sizing(), metadata=record)
    if world.rank == 0 and len(held) and isinstance(network, P3Net):
        scored = latest if chosen.recipe.choose == "last" and latest else score(counter, held)
        chose = (
            chosen.recipe.choose == "best" and chosen.recipe.steps > chosen.recipe.validate_every
        )
        return _calibrate(counter, scored, held.root, folder / "model.safetensors", chose=chose)
    return counter


def _trainable(chosen: Settings) -> Recipe:
    """The recipe, which freezes nothing that has never learned."""
    frozen = 0 if chosen.weights == "none" else chosen.recipe.freeze
    return chosen.recipe.model_copy(update={"freeze": frozen})


def _calibrate(
    counter: Counter, scored: Sequence[Scored], data: str, path: Path, *, chose: bool
) -> Counter:
    """Calibrate a model's intervals and write that into its file too."""
    known = calibrated(counter, scored, data, chose=chose)
    _, record = checkpoint.read(path)
    checkpoint.save(path, counter.network, {**record, KEY: known.metadata[KEY]})
    return known


def metrics_of(results: Sequence[ImageResult | Scored]) -> dict[str, float]:
    """MAE, RMSE and NAE of counted images."""
    import numpy as np

    truth = np.array([each.truth for each in results], np.float64)
    counted = np.array([each.counted for each in results], np.float64)
    return {name: metric(truth, counted) for name, metric in METRICS.items()}


_SAME = {
    "settings": "the settings",
    "split": "the images, or which of them are labelled,",
    "chosen_intervals": "the density intervals (have points been changed since?)",
    "preparation": "the ways to scale images",
}
"""Parts of a run's record that a resumed run must agree with, in words."""


def _claim(folder: Path, record: Mapping[str, Any], *, resume: bool) -> None:
    """Write `run.json`, or check that the run there is the one to be resumed."""
    path = folder / "run.json"
    if path.exists():
        if not resume:
            raise InputError(
                "this folder holds a run already; continue it with --resume or choose another",
                source=folder,
            )
        before = read_record(folder)
        for part, what in _SAME.items():
            if before.get(part) != record[part]:
                raise InputError(
                    f"cannot resume: {what} differ from those the run began with: "
                    + _difference(before.get(part), record[part]),
                    source=path,
                )
        return
    try:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"a run cannot be kept here ({error.strerror}); choose another folder", source=folder
        ) from None


def read_record(folder: Path) -> dict[str, Any]:
    """What `run.json` in a run's folder says: settings, split, intervals, versions."""
    path = folder / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"the record of a run cannot be read: {error}", source=path) from None
    if not isinstance(record, dict):
        raise InputError("a record of a run was expected", source=path)
    return record


def _difference(before: object, now: object, path: str = "") -> str:
    """Where two JSON values first differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    return f"{path} was {before!r} and is {now!r}"
