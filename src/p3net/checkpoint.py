"""Models on disk: one safetensors file of tensors with its JSON inside; never a pickle.

A file is written beside its place and moved there whole, so that a crash, a kill or a full
disk leaves the previous one as it was. The authors' `.pth` files are read as well.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from p3net import hub
from p3net.counting import Counter
from p3net.data.transforms import Sizing
from p3net.errors import InputError
from p3net.intervals import PUBLISHED, Intervals
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.network.weights import read_weights
from p3net.runtimes import DEFAULTS, RUNTIMES, Exported

FORMAT = 1
"""Version of the files written here."""

NAMES = ("model.safetensors", "best.safetensors", "last.safetensors")
"""What `load` looks for in a run's folder, in this order."""

BOX = "box"
"""The name of the model that comes with the package."""

_BOX_FILE = Path(__file__).parent / "box" / NAMES[0]

AUTHORS = Architecture(grid="authors", tokens="zeros", decoders="copies")
"""The network of the authors' code; branch 1 uses the published table called branch 1."""


# --- files -------------------------------------------------------------------------------------


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and JSON to one file, atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    record = {"format": FORMAT, **metadata}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        temporary.touch()
        mode = temporary.stat().st_mode  # as others may read files here; save_file's are private
        save_file(ready, temporary, {"p3net": json.dumps(record)})
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"could not be written ({error}); free some space or choose another folder. "
            + ("The previous checkpoint is intact." if path.exists() else "Nothing was there."),
            source=path,
        ) from error
    finally:
        with contextlib.suppress(OSError):  # gone where all went well
            temporary.unlink()


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the JSON of a file that `write` wrote."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        record = json.loads(metadata["p3net"])
        tensors = load_file(path)
    except FileNotFoundError:
        raise InputError("no such checkpoint", source=path) from None
    except KeyError:
        raise InputError("a safetensors file, but not a checkpoint of p3net", source=path) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"damaged checkpoint: {error}", source=path) from None
    if not isinstance(record, dict) or not isinstance(record.get("preparation", {}), dict):
        raise InputError("damaged checkpoint: its description is not a table", source=path)
    if record.get("format") != FORMAT:
        raise InputError(
            f"format {record.get('format')} is not known to this version, which reads {FORMAT}",
            source=path,
        )
    return tensors, record


# --- networks ----------------------------------------------------------------------------------


def describe(network: nn.Module) -> dict[str, Any]:
    """What is needed to build a network again, as JSON: its architecture and its intervals."""
    if isinstance(network, P3Net):
        pair = [each.to_dict() for each in network.intervals]
        return {"architecture": network.architecture.model_dump(), "intervals": pair}
    if isinstance(network, Regressor):
        return {"architecture": network.architecture.model_dump()}
    raise InputError(f"a {type(network).__name__} cannot be saved")


def build(record: Mapping[str, Any], *, source: Path | None = None) -> P3Net | Regressor:
    """The inverse of `describe`, with fresh weights."""
    try:
        architecture = dict(record["architecture"])
        if architecture.get("kind") == "regressor":
            return Regressor(RegressorArchitecture(**architecture))
        one, two = map(Intervals.from_dict, record["intervals"])
        return P3Net(Architecture(**architecture), (one, two))
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise InputError(
            f"the description of the network is damaged: {error}", source=source
        ) from None


def save(
    path: Path, network: nn.Module, metadata: Mapping[str, Any], *, half: bool = False
) -> None:
    """A network that `load` can read, with whatever is worth knowing of it.

    With `half` its numbers are kept in 16 bits: half the size, counts within some 0.1 %.
    """
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    if half:
        tensors = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
    write(path, _unshared(tensors), {**metadata, "network": describe(network)})


def load(path: str | Path = BOX, *, runtime: str | None = None, device: str = "cpu") -> Counter:
    """A model ready to count: a run's folder, a weights file, an exported one, a name on the hub.

    Without any, the model in the box, which counts people in crowds. Weights are `.safetensors` of
    this package or `.pth` of the authors' code. Exported files, `.onnx` and `.xml`, are run by
    `runtime`: onnxruntime or openvino; weights by torch, on any `device` it has. What exists as a
    path wins over `user/name` on the hub.
    """
    if runtime not in (None, "torch", *RUNTIMES):
        known = ", ".join(("torch", *RUNTIMES))
        raise InputError(f"no runtime is called {runtime!r}; use one of {known}")
    if hub.is_elsewhere(str(path)):
        path = hub.fetch(str(path))
    path = _located(path)
    if path.suffix in DEFAULTS:
        exported = Exported(path, runtime)
        return _counter(exported, exported.record)
    if runtime not in (None, "torch"):
        raise InputError(f"{runtime} runs exported files; first: p3net export MODEL OUT.onnx")
    path = weights_file(path)
    if path.suffix == ".safetensors":
        tensors, record = read(path)
        network = build(record.get("network", {}), source=path)
        fill(network, tensors, "average." if any(map(_averaged, tensors)) else "network.", path)
        return _counter(network.to(device), record)
    weights = read_weights(path)
    if not is_authors(weights):
        raise InputError(
            "neither a checkpoint of p3net nor of the authors' code; it begins with "
            + ", ".join(list(weights)[:3]),
            source=path,
        )
    network = from_authors(weights, source=path)
    return Counter(network.to(device), metadata={"origin": "authors"})


def _counter(network: nn.Module, record: Mapping[str, Any]) -> Counter:
    """A network that prepares images as its record says."""
    return Counter(network.eval(), sizing(record), metadata=record)


def sizing(record: Mapping[str, Any]) -> Sizing:
    """The size at which a model counts, as its record says."""
    known = record.get("preparation", {})
    return Sizing(**{each.name: known[each.name] for each in fields(Sizing) if each.name in known})


def weights_file(path: str | Path) -> Path:
    """The file of a model: itself, or the one in a run's folder."""
    path = _located(path)
    if not path.is_dir():
        return path
    found = next((path / name for name in NAMES if (path / name).is_file()), None)
    if found is None:
        raise InputError(f"no model in this folder; looked for {', '.join(NAMES)}", source=path)
    return found


def _located(path: str | Path) -> Path:
    """Where a model is: "box" is the one in the package, unless something here is called so."""
    return _BOX_FILE if str(path) == BOX and not Path(path).exists() else Path(path)


def is_model(path: str | Path) -> bool:
    """Whether this is a model of p3net, as against weights of a backbone alone."""
    try:
        with safe_open(weights_file(path), framework="pt") as file:
            return "p3net" in (file.metadata() or {})
    except (InputError, SafetensorError, OSError):
        return False


def fill(network: nn.Module, tensors: Mapping[str, Tensor], prefix: str, source: Path) -> None:
    """Load the tensors under a prefix into a network; all must be there and fit."""
    own = network.state_dict()
    state = {name: tensors.get(prefix + name) for name in own}
    state = {**state, **_same_storage(own, state)}
    wrong = [n for n, tensor in state.items() if tensor is None or tensor.shape != own[n].shape]
    if wrong:
        raise InputError(
            f"{len(wrong)} of {len(own)} tensors are missing or of another shape, "
            f"first {wrong[0]}: these are weights of another network",
            source=source,
        )
    network.load_state_dict(state)


def _averaged(name: str) -> bool:
    return name.startswith("average.")


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One name for tensors that two names share (branches with common tokens or decoders)."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def _same_storage(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """For the missing second name of a shared tensor, what its first name holds."""
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(tensor.data_ptr(), name)
    return {
        name: state[first[tensor.data_ptr()]]
        for name, tensor in own.items()
        if state[name] is None and tensor.numel()
    }


# --- the authors' checkpoints ------------------------------------------------------------------


def is_authors(weights: Mapping[str, Tensor]) -> bool:
    """Whether a state dict looks like the authors'."""
    return "count_query1" in weights and "count_query2" in weights


def from_authors(weights: Mapping[str, Tensor], *, source: Path | None = None) -> P3Net:
    """The network of a state dict of the authors' code, ready to count.

    Their names: `features.N.*`, `decoder{1,2}.layers.{i}.*`, `count_query{1,2}` (C×1×d).
    """
    tensors = {}
    for name, tensor in weights.items():
        own = _own_name(name)
        tensors[own] = tensor.squeeze(1) if own.startswith("tokens.") else tensor
    layers = {name.split(".")[3] for name in tensors if name.startswith("decoders.0.layers.")}
    network = P3Net(AUTHORS.model_copy(update={"layers": max(len(layers), 1)}), PUBLISHED)
    constants = {name: t for name, t in network.state_dict().items() if name not in tensors}
    tensors |= {n: t for n, t in constants.items() if n.endswith((".mean", ".deviation"))}
    unknown = sorted(tensors.keys() - network.state_dict().keys())
    if unknown:
        raise InputError(
            f"not the network of the authors' code: {len(unknown)} tensors too many, "
            f"first {unknown[0]}",
            source=source,
        )
    fill(network, tensors, "", source or Path("state dict"))
    return network.eval()


def _own_name(name: str) -> str:
    for branch, index in (("1", "0"), ("2", "1")):
        name = name.replace(f"decoder{branch}.", f"decoders.{index}.")
        name = name.replace(f"count_query{branch}", f"tokens.{index}")
    return f"backbone.{name}" if name.startswith("features.") else name


def versions() -> dict[str, str]:
    """What made a file: versions of the package and of what its numbers depend on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("p3net", "numpy", "pillow", "scipy", "torch")}
