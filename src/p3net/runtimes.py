"""Networks that other runtimes run: ONNX Runtime and OpenVINO, behind one module.

An exported file takes `images`, B×3×H×W float32 RGB in [0, 1] of any B, H and W, and gives
`density` B×h×w and, where the network predicts distributions, `branches` B×2×h×w and `variance`
B×h×w. What is known of the model travels in the file as JSON: in the metadata of an ONNX file,
in the runtime information of an OpenVINO file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from p3net.errors import InputError
from p3net.network.p3net import Output

KEY = "p3net"
"""Under which a file keeps its JSON."""

OUTPUTS = ("density", "branches", "variance")
"""What a graph gives, in this order; a regressor gives the first."""

DEFAULTS = {".onnx": "onnxruntime", ".xml": "openvino"}
"""The kinds of file, and what runs each where nothing else is asked for."""

Run = Callable[[NDArray[np.float32]], list[NDArray[np.float32]]]
"""Images B×3×H×W → the outputs of the graph."""


class ExportedOutput(Output):
    """An `Output` whose variance B×h×w comes with it; None for a regressor."""

    variance: Tensor | None = None


class Exported(nn.Module):
    """A network in a file, run by another runtime on as many threads as torch uses.

    It counts like any other: images in, `Output` out. It has no parameters and no gradients.

    Attributes:
        record: what the file says of the model.
        runtime: "onnxruntime" or "openvino".
    """

    def __init__(self, path: Path, runtime: str | None = None) -> None:
        super().__init__()
        if path.suffix not in DEFAULTS:
            raise InputError(f"expected a file of {' or '.join(DEFAULTS)}", source=path)
        self.runtime = runtime or DEFAULTS[path.suffix]
        if self.runtime not in RUNTIMES or (path.suffix == ".xml" and self.runtime != "openvino"):
            raise InputError(
                f"{self.runtime} does not run {path.suffix} files; onnxruntime runs .onnx, "
                "openvino runs .onnx and .xml",
                source=path,
            )
        if not path.is_file():
            raise InputError("no such file", source=path)
        self.run, self.record = RUNTIMES[self.runtime](path)

    def forward(self, images: Tensor) -> Output:
        """B×3×H×W, RGB in [0, 1] → density, and the branches' and the variance if there are."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise InputError(f"images must be B×3×H×W, got {tuple(images.shape)}")
        pixels = np.ascontiguousarray(images.detach().cpu().numpy(), np.float32)
        density, *rest = (torch.from_numpy(np.array(each)) for each in self.run(pixels))
        if not rest:
            return ExportedOutput(density)
        branches, variance = rest
        output = ExportedOutput(density, expectations=tuple(branches.unbind(1)))
        output.variance = variance
        return output


def _onnxruntime(path: Path) -> tuple[Run, Mapping[str, Any]]:
    try:
        import onnxruntime  # type: ignore[import-untyped]  # no stubs
    except ImportError:
        raise InputError(
            "running .onnx files needs one more package: pip install 'p3net[onnx]'", source=path
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only; they are raised as well
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 (its exceptions share no base)
        raise InputError(
            f"not an ONNX file, or damaged: {_first_line(error)}", source=path
        ) from None
    record = _parse(session.get_modelmeta().custom_metadata_map.get(KEY), path)

    def run(images: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return list(session.run(None, {"images": images}))

    return run, record


def _openvino(path: Path) -> tuple[Run, Mapping[str, Any]]:
    try:
        import openvino  # type: ignore[import-untyped]  # no stubs
    except ImportError:
        raise InputError(
            "running this with OpenVINO needs one more package: pip install 'p3net[openvino]'",
            source=path,
        ) from None
    core = openvino.Core()
    try:
        model = core.read_model(path)
    except RuntimeError as error:
        raise InputError(
            f"not a file that OpenVINO reads, or damaged: {_first_line(error)}", source=path
        ) from None
    text = _onnx_metadata(path) if path.suffix == ".onnx" else None
    if path.suffix == ".xml" and model.has_rt_info([KEY]):
        text = model.get_rt_info([KEY]).value
    record = _parse(text, path)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",  # else bfloat16 where the processor has it: inexact
        "PERFORMANCE_HINT": "LATENCY",
        # OpenVINO 2026.4 reuses kernels made for a map one position wide where they do not fit
        "CPU_RUNTIME_CACHE_CAPACITY": 0,
    }
    compiled = core.compile_model(model, "CPU", settings)

    def run(images: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        results = compiled(images)
        return [results[number] for number in range(len(compiled.outputs))]

    return run, record


RUNTIMES: dict[str, Callable[[Path], tuple[Run, Mapping[str, Any]]]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def _onnx_metadata(path: Path) -> str | None:
    try:
        import onnx
    except ImportError:
        raise InputError(
            "reading .onnx files needs one more package: pip install 'p3net[onnx]'", source=path
        ) from None
    entries = onnx.load(path, load_external_data=False).metadata_props
    return next((each.value for each in entries if each.key == KEY), None)


def _parse(text: str | None, path: Path) -> Mapping[str, Any]:
    if text is None:
        raise InputError("not a model that `p3net export` wrote", source=path)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise InputError(f"what it says of itself is damaged: {error}", source=path) from None
    if not isinstance(record, dict) or not isinstance(record.get("preparation", {}), dict):
        raise InputError("what it says of itself is damaged: not a table", source=path)
    return record


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
