"""Configuration → run: everything a run depends on, in one validated value.

A preset is a dictionary of the fields it sets; `--set a.b=c` and a YAML file override it. An
unknown key is refused with the nearest right one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_origin

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError, model_validator
from torch import nn

from p3net import checkpoint, training
from p3net.counting import Counter
from p3net.data import splits
from p3net.data.cache import Cache
from p3net.data.catalogue import open_dataset
from p3net.data.images import upright_size_hw
from p3net.data.loading import Stream, mixed, paired
from p3net.data.splits import Split, SplitData
from p3net.data.transforms import Augmentation, default_backend
from p3net.errors import InputError
from p3net.evaluation import count_samples
from p3net.intervals import PUBLISHED, Pair, fit
from p3net.methods.base import Method
from p3net.methods.p3net import P3NetMethod
from p3net.methods.supervised import LABELLED, Supervised
from p3net.metrics import METRICS
from p3net.network.backbone import load_backbone, pretrained_file
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.recipe import Recipe
from p3net.structures import Dataset, inside
from p3net.targets import densities

PAPER_SETS = ("sha", "shb", "qnrf", "jhu", "nwpu")
"""Kinds of data that the published intervals are for."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class Streaming(_Strict):
    """How a step's crops are drawn."""

    kind: Literal["paired", "mixed"] = "paired"
    labelled: int = Field(default=1, ge=1, description="labelled crops in a step (paired)")
    unlabelled: int = Field(default=1, ge=0, description="unlabelled crops in a step (paired)")
    batch: int = Field(default=1, ge=1, description="crops in a step (mixed)")


class Views(_Strict):
    """The augmentation of training crops."""

    scale: tuple[float, float] = (0.7, 1.3)
    flip: float = Field(default=0.5, ge=0, le=1)
    crop: int = Field(default=512, ge=16, description="side of the square crop in pixels")
    grey: float = Field(default=0.0, ge=0, le=1, description="share of crops turned grey")
    max_shorter_side: int = Field(default=2048, ge=16)

    @model_validator(mode="after")
    def _whole_positions(self) -> Views:
        if self.crop % 16:
            low, high = self.crop // 16 * 16, -(-self.crop // 16) * 16
            raise ValueError(f"crop {self.crop} is not a multiple of 16; use {low} or {high}")
        return self

    def augmentation(self) -> Augmentation:
        """As the loader takes it."""
        return Augmentation(self.scale, self.flip, self.crop, self.grey, self.max_shorter_side)


class Settings(_Strict):
    """One run. `data` is the only field without a default."""

    data: str = Field(description="a path, or sha:PATH, folder:PATH, synthetic:SEED, …")
    labelled: str = Field(
        default="5%", description="a share, a number, a list file or a split's folder"
    )
    validation: str = Field(
        default="auto",
        description="the same, out of the training images; 0 for none; auto: the published "
        "validation images, or 10% of the training images where there are none",
    )
    seed: int = Field(default=1, ge=0)
    method: Literal["p3net", "supervised"] = "p3net"
    loss: Literal["pdm", "pdm-rooted", "pdm-l1", "ce", "mse", "bl", "dm"] = "pdm"
    threshold: float = Field(default=0.5, ge=0, lt=1, description="ξ: confidence that ECR asks for")
    strong: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="light and colour of the unlabelled images' second view",
    )
    hidden: float = Field(
        default=0.0, ge=0, lt=1, description="share of that view's squares painted over"
    )
    per_cell: bool = Field(default=False, description="losses are means over cells instead of sums")
    sigma: float = Field(default=8.0, gt=0, description="σ of a head's Gaussian in pixels")
    intervals: Literal["auto", "published", "fit"] = Field(
        default="auto", description="auto: published for the paper's sets, fitted elsewhere"
    )
    partition: Literal["uep", "uniform-length", "uniform-number"] = "uep"
    intervals_count: int = Field(default=25, ge=2, description="C, intervals of a branch")
    weights: str = Field(
        default="imagenet", description="of the backbone: imagenet, none, or a file"
    )
    network: Annotated[Architecture | RegressorArchitecture, Discriminator("kind")] = Architecture()
    views: Views = Views()
    streaming: Streaming = Streaming()
    recipe: Recipe = Recipe()
    test_as_validation: bool = Field(
        default=False, description="choose the model on the test images: a sin, recorded for ever"
    )

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if self.network.kind == "regressor" and self.method != "supervised":
            raise ValueError("a regressor has no branches to compare; use method: supervised")
        if self.network.kind == "regressor" and self.loss not in ("bl", "dm"):
            raise ValueError(f"a regressor has no intervals for loss {self.loss}; use bl or dm")
        for name in self.recipe.terms:
            if name not in ("ecr", *LABELLED):
                known = ", ".join(("ecr", *LABELLED))
                raise ValueError(f"recipe.terms.{name}: no loss is called so; use one of {known}")
        return self


# --- presets -----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"recipe": {"terms": {"ecr": {"weight": 0.01}}}},
    "authors": {
        "streaming": {"kind": "mixed"},
        "views": {"scale": [0.75, 1.25], "grey": 0.12},
        "network": {"kind": "p3net", "tokens": "zeros", "decoders": "copies", "grid": "authors"},
        "recipe": {
            "learning_rate": 5e-6,
            "weight_decay": 1e-4,
            "terms": {"ecr": {"weight": 0.1}},
        },
    },
    "quick": {
        "per_cell": True,
        "network": {
            "kind": "p3net",
            "backbone": "lite0",
            "layers": 2,
            "hidden": 512,
            "dropout": 0.0,
            "scaled_logits": True,
        },
        "views": {"crop": 256},
        "streaming": {"labelled": 4, "unlabelled": 4},
        "intervals": "fit",
        "recipe": {
            "steps": 1200,
            "optimiser": "adamw",
            "learning_rate": 4e-4,
            "backbone_factor": 0.3,
            "weight_decay": 1e-4,
            "schedule": "cosine",
            "warmup": 100,
            "clip": 1.0,
            "average": 0.998,
            "terms": {"ecr": {"weight": 20.0, "start": 100, "ramp": 300}},
            "choose": "last",
        },
    },
}
"""`paper` and `authors` are SPEC's two columns; `quick` is for few labels and two cores.

The authors' crops of ShanghaiTech A (256 px) are a matter of the data: `--set views.crop=256`.
"""


def settings(
    given: Mapping[str, Any], *, preset: str = "paper", source: str | Path | None = None
) -> Settings:
    """Validate what a user gave over a preset; errors name the key and the remedy."""
    if preset not in PRESETS:
        raise InputError(f"unknown preset {preset!r}; use one of {', '.join(PRESETS)}")
    base = dict(PRESETS[preset])
    asked = given.get("network")
    if isinstance(asked, Mapping) and asked.get("kind") == "regressor":  # what it shares with P³Net
        shared = base.get("network", {}).keys() & RegressorArchitecture.model_fields.keys()
        base["network"] = {key: base["network"][key] for key in shared - {"kind"}}
    merged = merge(base, given)
    network = merged.get("network")
    if isinstance(network, dict):
        network.setdefault("kind", "p3net")
    try:
        return Settings(**merged)
    except ValidationError as error:
        lines = [_explain(cast("Mapping[str, Any]", each)) for each in error.errors()]
        raise InputError("; ".join(dict.fromkeys(lines)), source=source) from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries, the second's entries over the first's."""
    result = {key: merge(v, {}) if isinstance(v, Mapping) else v for key, v in base.items()}
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = merge(cast("Mapping[str, Any]", old), value) if both else value
    return result


def assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """`["a.b=1", "c=x"]` → {"a": {"b": 1}, "c": "x"}, values read as YAML.

    >>> assignments(["recipe.steps=10", "labelled=5%"])
    {'recipe': {'steps': 10}, 'labelled': '5%'}
    """
    result: dict[str, Any] = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if not equals or not path:
            raise InputError(f"expected key=value after --set, got {pair!r}")
        value: Any = yaml.safe_load(text)
        for key in reversed(path.split(".")):
            value = {key: value}
        result = merge(result, value)
    return result


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of settings."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot be read as YAML: {error}", source=path) from None
    if not isinstance(content, dict):
        raise InputError("a mapping of settings was expected", source=path)
    return content


def _explain(error: Mapping[str, Any]) -> str:
    """One of pydantic's complaints in the project's words."""
    path = [str(part) for part in error["loc"] if part not in ("p3net", "regressor")]
    key = ".".join(path) or "settings"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _keys(Settings), n=1, cutoff=0.5)
        return f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if error["type"] == "missing":
        return f"{key} is missing; it has no default"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message if key == "settings" else f"{key}: {message}, got {error['input']!r}"


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        named = ".ecr" if get_origin(info.annotation) is dict else ""
        for kind in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _keys(kind, f"{prefix}{name}{named}.")
    return keys


# --- from settings to a run --------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    settings: Settings
    split: Split
    data: SplitData
    method: Method
    stream: Stream
    metadata: Mapping[str, Any]


def prepare(chosen: Settings) -> Prepared:
    """Open the data, split it, fit intervals, build network, method and stream."""
    dataset = open_dataset(chosen.data)
    split = split_of(dataset, chosen)
    data = splits.apply(dataset, split)
    torch.manual_seed(chosen.seed)
    network, choice = _network(chosen, data, dataset.kind)
    method: Method
    if chosen.method == "p3net":
        method = P3NetMethod(
            network,
            loss=chosen.loss,
            threshold=chosen.threshold,
            sigma=chosen.sigma,
            per_cell=chosen.per_cell,
            strong=chosen.strong,
            hidden=chosen.hidden,
        )
    else:
        method = Supervised(network, loss=chosen.loss, sigma=chosen.sigma, per_cell=chosen.per_cell)
    metadata = {
        "settings": chosen.model_dump(),
        "split": {"hash": split.hash, "how": dict(split.how)},
        "chosen_intervals": choice,
        "chosen_on_test": chosen.test_as_validation,
        "preparation": {
            "max_shorter_side": chosen.views.max_shorter_side,
            "backend": default_backend(),
        },
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
    labelled, held = Path(chosen.labelled), Path(chosen.validation)
    amount = 0 if sin else _amount("validation", chosen.validation) if not held.is_file() else None
    if labelled.is_dir():
        split = splits.read(labelled)
    elif labelled.is_file():
        validation = held if held.is_file() and not sin else amount
        split = splits.from_lists(
            dataset, labelled=labelled, validation=validation, seed=chosen.seed
        )
    elif labelled.suffix == ".txt":
        raise InputError("no such list of labelled images", source=labelled)
    elif held.is_file():
        raise InputError(
            "a list of validation images goes with a list of labelled ones; "
            f"labelled is {chosen.labelled}",
            source=held,
        )
    else:
        share = _amount("labelled", chosen.labelled)
        split = splits.draw(dataset, labelled=share or 0, validation=amount, seed=chosen.seed)
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


def target_cells(dataset: Dataset, sigma: float) -> torch.Tensor:
    """The target cells of whole labelled images, all in one row: what intervals are fitted to."""
    cells = []
    for sample in dataset.samples:
        with sample.open() as image:
            size_hw = upright_size_hw(image)
        points = sample.marks().points_xy
        shown = torch.from_numpy(points[inside(points, size_hw)])
        cells.append(densities([shown], size_hw, sigma=sigma).flatten())
    return torch.cat(cells)


def _network(
    chosen: Settings, data: SplitData, kind: str
) -> tuple[P3Net | Regressor, dict[str, Any]]:
    if isinstance(chosen.network, RegressorArchitecture):
        network: P3Net | Regressor = Regressor(chosen.network)
        choice: dict[str, Any] = {"how": "none"}
    else:
        pair: Pair = PUBLISHED
        how = chosen.intervals
        if how == "auto":
            how = "published" if kind in PAPER_SETS else "fit"
        choice = {"how": how}
        if how == "fit":
            cells = target_cells(data.labelled, chosen.sigma)
            pair = fit(cells, partition=chosen.partition, count=chosen.intervals_count)
            choice |= {"partition": chosen.partition, "count": len(pair[0]), "sigma": chosen.sigma}
        network = P3Net(chosen.network, pair)
    if chosen.weights != "none":
        imagenet = chosen.weights == "imagenet"
        name = chosen.network.backbone
        path = pretrained_file(name) if imagenet else Path(chosen.weights)
        load_backbone(network.backbone, path)
    return network, choice


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
    resume: bool = False,
    world: training.World | None = None,
) -> Counter:
    """Train in a folder and give the model to count with.

    A folder that holds another run is refused; with `resume` it must hold this very one.
    """
    world = world or training.World()
    record = json.loads(json.dumps(prepared.metadata))
    if world.rank == 0:
        _claim(folder, record, resume=resume)
        splits.write(prepared.split, folder / "split")
    chosen = prepared.settings
    side = chosen.views.max_shorter_side

    def validate(network: nn.Module) -> dict[str, float]:
        counter = Counter(network, max_shorter_side=side)
        return metrics_on(counter, prepared.data.validation)

    network = training.train(
        prepared.method,
        prepared.stream,
        chosen.views.augmentation(),
        chosen.recipe,
        folder=folder,
        seed=chosen.seed,
        metadata=record,
        validate=validate if len(prepared.data.validation) else None,
        report=report,
        resume=resume,
        cache=Cache(folder / "cache"),
        world=world,
    )
    return Counter(network, max_shorter_side=side, metadata=record)


def metrics_on(counter: Counter, dataset: Dataset) -> dict[str, float]:
    """MAE, RMSE and NAE on a dataset's labelled images."""
    import numpy as np

    results = list(count_samples(counter, dataset))
    truth = np.array([each.truth for each in results], np.float64)
    counted = np.array([each.counted for each in results], np.float64)
    return {name: metric(truth, counted) for name, metric in METRICS.items()}


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
        for part in ("settings", "split", "chosen_intervals"):
            if before.get(part) != record[part]:
                raise InputError(
                    f"cannot resume: the {part} differ from those the run began with: "
                    + _difference(before.get(part), record[part]),
                    source=path,
                )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
