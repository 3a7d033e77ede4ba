from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

import p3net
from p3net.errors import InputError
from p3net.runtimes import Exported

ABOUT = {"preparation": {"max_shorter_side": 64}, "note": "ü <&>"}
FILES = (("m.onnx", "onnxruntime"), ("m.onnx", "openvino"), ("m.xml", "openvino"))


def handmade(path: Path, *, branches: bool = True, about: str | None = json.dumps(ABOUT)) -> None:
    """A graph made by hand: density = red, branches = green and blue, variance = 2·red."""
    nodes, outputs = [], ["density"]
    parts = helper.make_node("Split", ["images"], ["r", "g", "b"], axis=1, num_outputs=3)
    nodes += [parts, helper.make_node("Squeeze", ["r", "one"], ["density"])]
    if branches:
        outputs += ["branches", "variance"]
        nodes += [helper.make_node("Concat", ["g", "b"], ["branches"], axis=1)]
        nodes += [helper.make_node("Add", ["density", "density"], ["variance"])]
    ranks: dict[str, list[Any]] = {"branches": ["n", 2, "h", "w"]}
    graph = helper.make_graph(
        nodes,
        "handmade",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ranks.get(name, ["n", "h", "w"]))
            for name in outputs
        ],
        [helper.make_tensor("one", TensorProto.INT64, [1], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    if about is not None:
        helper.set_model_props(model, {"p3net": about})
    if path.suffix == ".onnx":
        onnx.save(model, path)
        return
    converted = openvino.Core().read_model(model.SerializeToString())
    if about is not None:
        converted.set_rt_info(about, ["p3net"])
    openvino.save_model(converted, path, compress_to_fp16=False)


@pytest.mark.parametrize(("name", "runtime"), FILES)
@pytest.mark.parametrize("size", [(1, 5, 9), (2, 8, 3)])
def test_every_runtime_runs_a_graph_made_by_hand(tmp_path, name, runtime, size):
    handmade(tmp_path / name)
    network = Exported(tmp_path / name, runtime)
    images = torch.rand(size[0], 3, *size[1:])
    output = network(images)
    assert torch.equal(output.density, images[:, 0])
    assert torch.equal(torch.stack(output.expectations, 1), images[:, 1:])
    assert torch.equal(output.variance, 2 * images[:, 0])
    assert network.record == ABOUT
    assert not list(network.parameters())


def test_a_regressor_has_a_density_only(tmp_path):
    handmade(tmp_path / "m.onnx", branches=False)
    output = Exported(tmp_path / "m.onnx")(torch.ones(1, 3, 2, 2))
    assert output.density.shape == (1, 2, 2)
    assert output.expectations == ()
    assert output.variance is None


@pytest.mark.parametrize(("name", "runtime"), FILES)
def test_load_counts_with_it(tmp_path, name, runtime):
    handmade(tmp_path / name)
    counter = p3net.load(tmp_path / name, runtime=runtime)
    image = np.zeros((16, 24, 3), np.uint8)
    image[3, 5, 0] = 255
    found = counter.count(image)
    assert found.count == pytest.approx(1)
    assert found.variance is not None
    assert float(found.variance.sum()) == pytest.approx(2)
    assert found.interval is not None
    assert counter.sizing.max_shorter_side == 64
    assert counter.metadata["note"] == "ü <&>"


def test_it_uses_as_many_threads_as_torch(tmp_path, monkeypatch):
    import onnxruntime

    handmade(tmp_path / "m.onnx")
    real, seen = onnxruntime.InferenceSession, []

    def spy(path, options, **words):
        seen.append(options.intra_op_num_threads)
        return real(path, options, **words)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    Exported(tmp_path / "m.onnx")
    assert seen == [3]


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 4, 8, 8)])
def test_wrong_images(tmp_path, shape):
    handmade(tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"B×3×H×W"):
        Exported(tmp_path / "m.onnx")(torch.zeros(shape))


@pytest.mark.parametrize(("name", "runtime"), FILES)
def test_files_of_others_are_refused(tmp_path, name, runtime):
    handmade(tmp_path / name, about=None)
    with pytest.raises(InputError, match="not a model that `p3net export` wrote"):
        Exported(tmp_path / name, runtime)


@pytest.mark.parametrize("about", ["{", "[]", '{"preparation": 3}'])
def test_damaged_descriptions(tmp_path, about):
    handmade(tmp_path / "m.onnx", about=about)
    with pytest.raises(InputError, match="damaged"):
        Exported(tmp_path / "m.onnx")


@pytest.mark.parametrize(("name", "runtime"), FILES)
def test_damaged_files(tmp_path, name, runtime):
    (tmp_path / name).write_bytes(b"not a model at all")
    with pytest.raises(InputError, match="or damaged"):
        Exported(tmp_path / name, runtime)


def test_what_does_not_run_what(tmp_path):
    with pytest.raises(InputError, match=r"expected a file of \.onnx or \.xml"):
        Exported(tmp_path / "m.pth")
    with pytest.raises(InputError, match=r"onnxruntime does not run \.xml"):
        Exported(tmp_path / "m.xml", "onnxruntime")
    with pytest.raises(InputError, match="tensorrt does not run"):
        Exported(tmp_path / "m.onnx", "tensorrt")
    with pytest.raises(InputError, match="no such file"):
        Exported(tmp_path / "m.onnx")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match="openvino runs exported files"):
        p3net.load(tmp_path, runtime="openvino")


@pytest.mark.parametrize(
    ("missing", "runtime", "extra"),
    [
        ("onnxruntime", "onnxruntime", "onnx"),
        ("openvino", "openvino", "openvino"),
        ("onnx", "openvino", "onnx"),
    ],
)
def test_missing_packages_are_named(tmp_path, monkeypatch, missing, runtime, extra):
    handmade(tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"pip install 'p3net\[{extra}\]'"):
        Exported(tmp_path / "m.onnx", runtime)


def test_outputs_outlive_the_next_run(tmp_path):
    handmade(tmp_path / "m.xml")
    network = Exported(tmp_path / "m.xml")
    first: Tensor = network(torch.ones(1, 3, 4, 4)).density
    network(torch.zeros(1, 3, 4, 4))
    assert float(first.sum()) == 16
