"""Out to other runtimes: ONNX and OpenVINO files that give what the network gives, checked first.

The graph takes images of any number and size and does everything itself, padding and
normalisation included; its convolutions are plain ones. A file appears under its name only after
it was run on images of several sizes and agreed with the network.

Shapes: B images, H×W pixels, h×w cells.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from p3net import checkpoint, hub
from p3net.counting import Counter
from p3net.errors import InputError
from p3net.network.p3net import P3Net
from p3net.network.regressor import Regressor
from p3net.runtimes import DEFAULTS, KEY, OUTPUTS, Exported
from p3net.uncertainty import cell_variance

OPSET = 20
"""Version of ONNX's operators."""

SIZES_HW = ((64, 64), (75, 133), (31, 16), (160, 104))
"""Images that the parity check runs in this order, height and width in pixels.

Odd ones too, and one that is a single position wide before a larger one.
"""

TOLERANCE = 1e-3
"""Largest difference of an exported network: Σ|got − expected| over Σ|expected|."""


@dataclass(frozen=True, slots=True)
class Parity:
    """How far an exported model is from the network it came from, at most.

    Attributes:
        density, branches, variance: Σ|difference| over Σ|expected| of the worst image.
        images: how many were compared.
    """

    density: float
    branches: float
    variance: float
    images: int

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(self.density, self.branches, self.variance)


class Graph(nn.Module):
    """What an exported file computes: images → density, branches and variance, in plain tensors."""

    def __init__(self, network: P3Net | Regressor) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """B×3×H×W → B×h×w and, of a P³Net, B×2×h×w and B×h×w."""
        network = self.network
        if isinstance(network, Regressor):
            return (network(images).density,)
        output = network(images)
        flat = output._replace(probabilities=tuple(p.flatten(2) for p in output.probabilities))
        variance = cell_variance(network, flat).view(output.density.shape)
        return output.density, torch.stack(output.expectations, dim=1), variance


# --- files -------------------------------------------------------------------------------------


def export(counter: Counter, path: str | Path) -> Parity:
    """Write `OUT.onnx`, or `OUT.xml` and `OUT.bin` for OpenVINO, in float32; checked first.

    Returns how far the file is from the network; more than `TOLERANCE` is an error and leaves no
    file. A file of that name is replaced.
    """
    path = Path(path)
    network = _exportable(counter, path)
    with _placed(path) as temporary:
        if path.suffix == ".onnx":
            _write_onnx(network, record(counter), temporary)
        else:
            _save_openvino(_openvino_model(network), record(counter), temporary)
        found = parity(Exported(temporary), network)
        if not found.worst <= TOLERANCE:  # NaN too
            raise InputError(
                f"the exported model differs from the network by {found.worst:.1e} of its output, "
                f"more than {TOLERANCE:.0e}; it was not kept. Try other versions of "
                "torch, onnxscript and the runtime",
                source=path,
            )
    return found


def record(counter: Counter) -> dict[str, Any]:
    """What travels with an exported network: all that is known of it, as JSON."""
    return {
        **counter.metadata,
        "format": checkpoint.FORMAT,
        "network": checkpoint.describe(counter.network),
        "preparation": {**counter.metadata.get("preparation", {}), **asdict(counter.sizing)},
        "exported_with": checkpoint.versions(),
    }


def _exportable(counter: Counter, path: Path) -> P3Net | Regressor:
    if path.suffix not in DEFAULTS:
        raise InputError(f"the file's name must end in {' or '.join(DEFAULTS)}", source=path)
    network = counter.network
    if not isinstance(network, P3Net | Regressor):
        raise InputError(f"a {type(network).__name__} cannot be exported; export the trained model")
    return network


@contextmanager
def _placed(path: Path) -> Iterator[Path]:
    """A temporary name beside the path; what is written there moves to it if all goes well."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    suffixes = (".bin", ".xml") if path.suffix == ".xml" else (path.suffix,)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for suffix in suffixes:
            temporary.with_suffix(suffix).replace(path.with_suffix(suffix))
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", source=path) from None
    finally:
        for suffix in suffixes:
            with contextlib.suppress(OSError):
                temporary.with_suffix(suffix).unlink(missing_ok=True)


def parity(exported: Callable[[Tensor], Any], network: P3Net | Regressor) -> Parity:
    """Compare an exported network with its origin: `SIZES_HW`, batches of 1 and 2, flat images."""
    draw = torch.Generator().manual_seed(0)
    graph = Graph(network).eval()
    worst = dict.fromkeys(OUTPUTS, 0.0)
    count = 0
    for number, (height, width) in enumerate(SIZES_HW):
        images = torch.rand(1 + number % 2, 3, height, width, generator=draw)
        flat = torch.full_like(images[:1], number / (len(SIZES_HW) - 1))
        for batch in (images, flat):
            with torch.inference_mode():
                expected = graph(batch)
                got = exported(batch)
            parts: tuple[Tensor, ...] = (got.density,)
            if len(expected) > 1:
                parts = (got.density, torch.stack(got.expectations, dim=1), got.variance)
            for name, one, two in zip(OUTPUTS, parts, expected, strict=False):
                worst[name] = max(worst[name], _apart(one, two))
            count += len(batch)
    return Parity(**worst, images=count)


def _apart(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    apart = float((got - expected).double().abs().sum() / expected.double().abs().sum())
    return apart if apart == apart else float("inf")  # noqa: PLR0124 (NaN)


# --- ONNX --------------------------------------------------------------------------------------


def _write_onnx(network: P3Net | Regressor, about: Mapping[str, Any], path: Path) -> None:
    program = _onnx_program(network)
    program.model.metadata_props[KEY] = json.dumps(about)
    program.save(path, external_data=False)


def _onnx_program(network: P3Net | Regressor) -> Any:
    """The graph for any batch, height and width."""
    try:
        import onnx  # noqa: F401 (what torch's exporter needs)
        from onnxscript import opset20 as op
    except ImportError:
        raise InputError("exporting needs more packages: pip install 'p3net[onnx]'") from None

    def floordiv(self: Any, other: Any) -> Any:
        """Python's //, for negative numbers too: ⌈h/8⌉ is written −(−h // 8)."""
        return op.Div(op.Sub(self, op.Mod(self, other)), other)

    def matmul(self: Any, other: Any) -> Any:
        """A vector on the right becomes a column.

        ONNX Runtime 1.31 fuses Transpose and MatMul by a vector into a wrong product.
        """
        if len(other.shape) > 1:
            return op.MatMul(self, other)
        axis: Any = op.Constant(value_ints=[-1])
        return op.Squeeze(op.MatMul(self, op.Unsqueeze(other, axis)), axis)

    names = OUTPUTS if isinstance(network, P3Net) else OUTPUTS[:1]
    any_size = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    training = network.training
    try:
        with warnings.catch_warnings(), _quiet("torch.onnx"), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch about torch
            captured = torch.export.export(
                Graph(network).eval(),
                (torch.zeros(2, 3, 75, 133),),
                dynamic_shapes=(any_size,),
                strict=False,
            )
            return torch.onnx.export(
                captured,
                dynamo=True,
                input_names=["images"],
                output_names=list(names),
                opset_version=OPSET,
                verbose=False,
                custom_translation_table={
                    operator.floordiv: floordiv,
                    torch.ops.aten.matmul.default: matmul,
                },
            )
    finally:
        network.train(training)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Exporters log what packages they do without and what they leave as it is."""
    import logging

    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# --- OpenVINO ----------------------------------------------------------------------------------


def _openvino_model(network: P3Net | Regressor) -> Any:
    try:
        import openvino  # type: ignore[import-untyped]  # no stubs
    except ImportError:
        raise InputError(
            "OpenVINO files need more packages: pip install 'p3net[onnx,openvino]'"
        ) from None
    serialised = _onnx_program(network).model_proto.SerializeToString()
    return openvino.Core().read_model(serialised)


def _save_openvino(model: Any, about: Mapping[str, Any], path: Path) -> None:
    import openvino

    model.set_rt_info(json.dumps(about), [KEY])
    openvino.save_model(model, path, compress_to_fp16=False)


# --- the hub -----------------------------------------------------------------------------------


def save_pretrained(
    counter: Counter, folder: str | Path, *, licence: str | None = None, half: bool = False
) -> None:
    """A folder as the Hugging Face hub has it: weights, `config.json` and a model card.

    Places on this machine are left out of what is written. With `half` weights have 16 bits.
    """
    folder = Path(folder)
    about = {**hub.public(counter.metadata), "preparation": record(counter)["preparation"]}
    checkpoint.save(folder / hub.WEIGHTS, counter.network, about, half=half)
    hub.describe(folder, checkpoint.read(folder / hub.WEIGHTS)[1], licence=licence)


def push_to_hub(
    counter: Counter, name: str, *, licence: str | None = None, private: bool = True
) -> str:
    """`save_pretrained` to `user/name` on the hub; gives the address."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(counter, folder, licence=licence)
        return hub.upload(Path(folder), name, private=private)
