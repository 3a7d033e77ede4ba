"""Everything a run depends on, in one validated value; presets; a user's words over them.

A preset is a dictionary of the fields it sets; `--set a.b=c` and a YAML file override it. An
unknown key is refused with the nearest right one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError, model_validator

from p3net.data.transforms import Augmentation, Sizing
from p3net.errors import InputError
from p3net.methods.supervised import LABELLED, TOTAL
from p3net.network.p3net import Architecture
from p3net.network.regressor import RegressorArchitecture
from p3net.recipe import Recipe

UNLABELLED = ("ecr", "mt", "l2r")
"""Losses on unlabelled images: of P³Net, Mean Teacher and learning to rank."""


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
    zoom: float = Field(
        default=1.0,
        gt=0,
        le=8,
        description="images are enlarged this many times, up to max_shorter_side, in training "
        "and counting",
    )
    longer_side: int = Field(
        default=0, ge=0, description="and until their longer side has this many px; 0: no such end"
    )

    @model_validator(mode="after")
    def _whole_positions(self) -> Views:
        if self.crop % 16:
            low, high = self.crop // 16 * 16, -(-self.crop // 16) * 16
            raise ValueError(f"crop {self.crop} is not a multiple of 16; use {low} or {high}")
        return self

    def augmentation(self) -> Augmentation:
        """As the loader takes it."""
        return Augmentation(self.scale, self.flip, self.crop, self.grey, self.sizing())

    def sizing(self) -> Sizing:
        """The size of whole images."""
        return Sizing(self.max_shorter_side, self.zoom, self.longer_side)


class Settings(_Strict):
    """One run. `data` is the only field without a default."""

    data: str = Field(description="a path, or sha:PATH, folder:PATH, synthetic:SEED, …")
    labelled: str = Field(
        default="auto",
        description="a share, a number, a list file or a split's folder; auto: all that is marked "
        "of images of your own, 5% of a published or rendered set",
    )
    validation: str = Field(
        default="auto",
        description="the same, out of the training images; 0 for none; auto: the published "
        "validation images, or 10% of the training images where there are none",
    )
    stratified: bool = Field(
        default=False, description="spread the labelled images over the counts, which peeks at them"
    )
    seed: int = Field(default=1, ge=0)
    order: Literal["random", "crowded", "sparse"] = Field(
        default="random", description="label any images, or those with most or fewest people"
    )
    method: Literal["p3net", "supervised", "mean-teacher", "l2r"] = "p3net"
    loss: Literal["pdm", "pdm-rooted", "pdm-l1", "ce", "mse", "bl", "dm"] = "pdm"
    threshold: float = Field(default=0.5, ge=0, lt=1, description="ξ: confidence that ECR asks for")
    light: float = Field(
        default=0.0, ge=0, le=1, description="change of light and colour of the labelled crops"
    )
    soft: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the detail that labelled crops and second views may lose",
    )
    total: bool = Field(
        default=False, description="learn the labelled crops' counts as well as their densities"
    )
    strong: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="light and colour of the unlabelled images' second view",
    )
    hidden: float = Field(
        default=0.0, ge=0, lt=1, description="share of that view's squares painted over"
    )
    consistency: Literal["densities", "relative"] = Field(
        default="densities",
        description="what ECR adds up: squared differences, or these relative to the density",
    )
    teacher: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="decay of the averaged weights that look at the plain view; 0 for none",
    )
    per_cell: bool = Field(default=False, description="losses are means over cells instead of sums")
    sigma: float = Field(default=8.0, gt=0, description="σ of a head's Gaussian in pixels")
    intervals: Literal["auto", "published", "fit"] = Field(
        default="auto",
        description="auto: those of the model started from; published for the paper's sets, "
        "fitted elsewhere",
    )
    partition: Literal["uep", "uniform-length", "uniform-number"] = "uep"
    intervals_count: int = Field(default=25, ge=2, description="C, intervals of a branch")
    weights: str = Field(
        default="imagenet",
        description="to start from: imagenet, none, a file of the backbone's, or a model of p3net, "
        "such as box",
    )
    network: Annotated[Architecture | RegressorArchitecture, Discriminator("kind")] = Architecture()
    views: Views = Views()
    streaming: Streaming = Streaming()
    recipe: Recipe = Recipe()
    test_as_validation: bool = Field(
        default=False, description="choose the model on the test images: a sin, recorded for ever"
    )

    @property
    def published_partition(self) -> bool:
        """Whether the published intervals are of the kind and number that is asked for."""
        return (self.partition, self.intervals_count) == ("uep", 25)

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if self.intervals == "published" and not self.published_partition:
            raise ValueError("the published intervals are 25 by uep; use intervals: fit for others")
        if self.network.backbone.startswith("lite0") and self.weights == "none":
            raise ValueError(
                "Lite0 keeps its batch statistics frozen and cannot start from nothing; "
                "use weights: imagenet or a file"
            )
        if self.network.kind == "regressor" and self.method == "p3net":
            raise ValueError(
                "a regressor has no branches to compare; "
                "use method: supervised, mean-teacher or l2r"
            )
        if self.method == "mean-teacher" and not self.teacher:
            raise ValueError("method mean-teacher needs a teacher; set teacher: 0.99 or so")
        if self.method == "mean-teacher" and not (self.strong or self.hidden or self.soft):
            raise ValueError(
                "method mean-teacher needs two views that differ; set strong: 0.5 or so"
            )
        likeliest = self.network.kind == "p3net" and self.network.decoding == "maximum"
        if likeliest and (self.total or self.loss in ("bl", "dm")):
            raise ValueError(
                "decoding: maximum gives a density that has no gradient; "
                "set total: false and a loss on the distributions, such as pdm"
            )
        if self.network.kind == "regressor" and self.loss not in ("bl", "dm"):
            raise ValueError(f"a regressor has no intervals for loss {self.loss}; use bl or dm")
        for name in self.recipe.terms:
            if name not in (*UNLABELLED, *LABELLED, TOTAL):
                known = ", ".join((*UNLABELLED, *LABELLED, TOTAL))
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
            "terms": {"ecr": {"weight": 0.1, "from_epoch": 5}},
        },
    },
    "quick": {
        "per_cell": True,
        "light": 0.8,
        "soft": 0.6,
        "total": True,
        "strong": 0.8,
        "consistency": "relative",
        "threshold": 0.0,
        "teacher": 0.99,
        "network": {
            "kind": "p3net",
            "backbone": "lite0-deep",
            "layers": 2,
            "hidden": 512,
            "dropout": 0.0,
            "scaled_logits": True,
        },
        "views": {"crop": 256, "zoom": 2.5, "longer_side": 1280, "scale": [0.5, 1.7]},
        "streaming": {"labelled": 8, "unlabelled": 4},
        "intervals": "fit",
        "recipe": {
            "steps": 2400,
            "optimiser": "adamw",
            "learning_rate": 4e-4,
            "backbone_factor": 0.3,
            "weight_decay": 1e-4,
            "schedule": "cosine",
            "warmup": 100,
            "clip": 1.0,
            "channels_last": True,
            "freeze": 3,
            "average": 0.998,
            "terms": {
                "total": {"weight": 20.0},
                "ecr": {"weight": 2.0, "start": 300, "ramp": 300},
            },
            "choose": "last",
        },
    },
}
"""`paper` and `authors` are as published and as in their code (docs/decisions.md).

`quick` is for few labels and two cores.

The authors' crops of ShanghaiTech A (256 px) are a matter of the data: `--set views.crop=256`.
"""

_QUICK_VGG: dict[str, Any] = {
    "views": {"zoom": 1.0},
    "streaming": {"labelled": 4, "unlabelled": 2},
    "recipe": {"backbone_factor": 0.05},
}

WITH_BACKBONE: dict[tuple[str, str], dict[str, Any]] = {
    ("quick", "vgg19"): _QUICK_VGG,
    ("quick", "vgg19-merged"): _QUICK_VGG,
}
"""What a preset sets otherwise for a backbone that the user names: `quick` was set for Lite0."""


_MEAN_TEACHER: dict[str, Any] = {
    "per_cell": True,
    "strong": 0.5,
    "teacher": 0.999,
    "recipe": {"terms": {"mt": {"weight": 200, "ramp": 4000, "shape": "sigmoid"}}},
}
_RANKING: dict[str, Any] = {
    "per_cell": True,
    "recipe": {"terms": {"l2r": {"weight": 0.01, "start": 2000, "ramp": 2000}}},
}

WITH_METHOD: dict[tuple[str, str], dict[str, Any]] = {
    ("paper", "mean-teacher"): _MEAN_TEACHER,
    ("authors", "mean-teacher"): _MEAN_TEACHER,
    ("quick", "mean-teacher"): {
        "recipe": {"terms": {"mt": {"weight": 200, "ramp": 1200, "shape": "sigmoid"}}}
    },
    ("paper", "l2r"): _RANKING,
    ("authors", "l2r"): _RANKING,
    ("quick", "l2r"): {
        "streaming": {"unlabelled": 2},  # each costs five passes
        "recipe": {"terms": {"l2r": {"weight": 0.01, "start": 300, "ramp": 300}}},
    },
}
"""What a preset sets otherwise for a rival: two views that differ, a weight that rises."""


FROM_A_MODEL: dict[str, dict[str, Any]] = {
    "quick": {"recipe": {"steps": 1200, "learning_rate": 2e-4}}
}
"""What a preset sets otherwise for a run that goes on from a trained model."""


def settings(
    given: Mapping[str, Any], *, preset: str = "paper", source: str | Path | None = None
) -> Settings:
    """Validate what a user gave over a preset; errors name the key and the remedy."""
    if preset not in PRESETS:
        raise InputError(f"unknown preset {preset!r}; use one of {', '.join(PRESETS)}")
    asked = given.get("network")
    backbone = str(asked.get("backbone")) if isinstance(asked, Mapping) else ""
    base = merge(PRESETS[preset], WITH_BACKBONE.get((preset, backbone), {}))
    base = merge(base, WITH_METHOD.get((preset, str(given.get("method"))), {}))
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
        try:
            value: Any = yaml.safe_load(text)
        except yaml.YAMLError:
            raise InputError(f"--set {pair}: the value cannot be read as YAML") from None
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
