"""The Hugging Face hub: models by name, `user/name` or `user/name@revision`, and their cards."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p3net.errors import InputError
from p3net.metrics import METRICS
from p3net.uncertainty import Calibration

WEIGHTS = "model.safetensors"
"""The file of a repository that holds the model; `config.json` and `README.md` stand beside it."""

MODEL_SUFFIXES = (".safetensors", ".pth", ".pt", ".onnx", ".xml")
"""How the names of files that hold a model end."""

_NAME = re.compile(r"(?P<id>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")


def is_name(text: str) -> bool:
    """Whether this could be a model's name on the hub: `user/name`, no known file's ending.

    >>> is_name("ann/square"), is_name("ann/square@v2"), is_name("runs/a/b"), is_name("a/b.onnx")
    (True, True, False, False)
    """
    return _NAME.fullmatch(text) is not None and not text.endswith(MODEL_SUFFIXES)


def is_elsewhere(text: str) -> bool:
    """Whether this is a model's name on the hub rather than a path here.

    What lies in a folder that is here, or in `runs`, where runs are kept, is meant as a path even
    if it is missing: nobody's typing error is sent to the hub.
    """
    path = Path(text)
    here = path.exists() or path.parent.is_dir() or path.parts[:1] == ("runs",)
    return not here and is_name(text)


def fetch(name: str) -> Path:
    """The weights of a model on the hub, from this machine's cache if they are there."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise InputError("a name on the hub is user/name or user/name@revision", source=name)
    api = _api(f"no such file or folder. To fetch a model called {name} from the hub")
    from huggingface_hub import errors

    try:
        return Path(api.hf_hub_download(found["id"], WEIGHTS, revision=found["revision"]))
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):  # no connection, nothing kept
            raise InputError(
                f"no such file or folder here, and the hub could not be reached: {_line(error)}",
                source=name,
            ) from None
        raise InputError(
            f"the hub's {found['id']} has no {WEIGHTS}: not a model of p3net", source=name
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            f"the hub's {found['id']} has no revision {found['revision']}", source=name
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            "no such file or folder here, and no model of this name on the hub; a private one "
            "needs `hf auth login`",
            source=name,
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise InputError(f"not fetched from the hub: {_line(error)}", source=name) from None


def upload(folder: Path, name: str, *, private: bool = True) -> str:
    """Make or update a repository from a folder and give its address."""
    if not is_name(name) or "@" in name:
        raise InputError("a name on the hub is user/name", source=name)
    api = _api("to push a model to the hub")
    from huggingface_hub import errors

    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="p3net")
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise InputError(
            f"not pushed to the hub: {_line(error)}; log in with `hf auth login`, with a token "
            "that may write",
            source=name,
        ) from None
    return str(address)


def _api(why: str) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise InputError(f"{why}: pip install 'p3net[hub]'") from None
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- what stands beside the weights ------------------------------------------------------------


def public(record: Mapping[str, Any]) -> dict[str, Any]:
    """A model's description without the places of its maker's machine, only their names."""
    settings = dict(record.get("settings", {}))
    for key in ("data", "labelled", "validation", "weights"):
        if isinstance(value := settings.get(key), str):
            settings[key] = _places(value)
    split = dict(record.get("split", {}))
    if "how" in split:
        split["how"] = public_facts(split["how"])
    calibration = record.get("calibration")
    if isinstance(calibration, Mapping) and isinstance(data := calibration.get("data"), str):
        calibration = {**calibration, "data": _places(data)}
    known = {"settings": settings, "split": split, "calibration": calibration}
    return {**record, **{key: value for key, value in known.items() if key in record}}


def public_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """How a split was drawn, without the places.

    >>> public_facts({"data": "sha:/home/ann/part_A", "seed": 1})
    {'data': 'sha:part_A', 'seed': 1}
    """
    return {k: _places(v) if isinstance(v, str) else v for k, v in facts.items()}


def _places(text: str) -> str:
    """`sha:/home/ann/part_A + folder:photos/yard` → `sha:part_A + folder:yard`.

    >>> _places("sha:/home/ann/part_A + ../photos/yard"), _places("5%"), _places("synthetic:1?a=2")
    ('sha:part_A + yard', '5%', 'synthetic:1?a=2')
    """

    def name(part: str) -> str:
        kind, colon, rest = part.rpartition(":")
        return kind + colon + rest.rstrip("/").rpartition("/")[2]

    return " + ".join(name(part.strip()) for part in text.split(" + "))


def describe(folder: Path, record: Mapping[str, Any], *, licence: str | None = None) -> None:
    """Write `config.json` and the model card `README.md`."""
    config = {"library_name": "p3net", **record}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(card(record, licence=licence), encoding="utf-8")


def card(record: Mapping[str, Any], *, licence: str | None = None) -> str:
    """The model card: what it is, what it learned from, how well it counts, what it is for."""
    record = public(record)
    head = ["library_name: p3net", "pipeline_tag: other", "tags: [crowd-counting, p3net]"]
    if licence:
        head.insert(0, f"license: {json.dumps(licence)}")
    parts = (
        _front(head),
        _ABOUT,
        "## Data\n\n" + _data(record),
        "## Metrics\n\n" + _metrics(record),
        "## Network\n\n" + _network(record),
        "## Licence\n\n"
        + (licence or "Not stated. The data it learned from may restrict what it is used for."),
        _USE,
    )
    return "\n\n".join(parts) + "\n"


_ABOUT = """# A model that counts

Made with p3net: a distribution over densities for every 8×8 px of an image; the count is the sum
of their expectations.

```python
import p3net

model = p3net.load("user/name")  # pip install 'p3net[hub]'
print(model.count("photo.jpg").count)
```"""

_USE = """## Intended use

Counting what it was shown, in images like those it learned from. Other scenes, cameras, scales
and objects need images of their own: mark some, measure with `p3net evaluate`, train again. It
tells how many and where, never who; do not decide about safety by it alone."""


def _front(lines: list[str]) -> str:
    return "\n".join(("---", *lines, "---"))


def _data(record: Mapping[str, Any]) -> str:
    settings, split = record.get("settings", {}), record.get("split", {})
    if not settings:
        return f"Not recorded ({record.get('origin', 'no settings in the file')})."
    lines = [f"- learned from: {settings.get('data', '?')}"]
    if split.get("hash"):
        lines.append(f"- split (hash of labelled, unlabelled, validation, test): `{split['hash']}`")
        lines += [f"- {key}: {value}" for key, value in split.get("how", {}).items()]
    seen = "on the TEST images: figures on them are not those of unseen images"
    lines.append(f"- chosen {seen if record.get('chosen_on_test') else 'without the test images'}")
    return "\n".join(lines)


def _metrics(record: Mapping[str, Any]) -> str:
    steps = [each for each in record.get("history", ()) if {"mae", "rmse"} <= each.keys()]
    lines = ["Not recorded."]
    if steps:
        best = min(steps, key=lambda each: 2 * each["rmse"] + each["mae"])
        own = best if record.get("chosen") == "best" else steps[-1]
        rows = [f"| {name.upper()} | {own[name]:.2f} |" for name in METRICS if name in own]
        lines = [f"| on validation images, step {own['step']} | |", "|---|---|", *rows]
    known = Calibration.of(record)
    sure = known is not None and known.multiplier(0.9, 0)[1]
    words = f"calibrated on {len(known.scores)} images" if known and sure else "not calibrated"
    lines += ["", f"Intervals: {words}."]
    return "\n".join(lines)


def _network(record: Mapping[str, Any]) -> str:
    network = record.get("network", {})
    lines = [f"- {key}: {value}" for key, value in network.get("architecture", {}).items()]
    for number, each in enumerate(network.get("intervals", ()), start=1):
        borders = each["borders"]
        lines.append(
            f"- branch {number}: {len(each['values'])} density intervals, borders from "
            f"{borders[0]:g} to {borders[-1]:g} heads per cell"
        )
    versions = ", ".join(f"{name} {number}" for name, number in record.get("versions", {}).items())
    return "\n".join([*lines, f"- made with: {versions or 'not recorded'}"])
