from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import p3net
from p3net import export
from p3net.counting import Counter
from p3net.data.transforms import Sizing
from p3net.errors import InputError
from p3net.intervals import Intervals
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.runtimes import Exported

PAIR = (
    Intervals((0.1, 1 / 3, 0.7), (0.0, 0.1 + 0.2, 0.5, 0.1 + 2 / 3)),
    Intervals((0.2, 0.5, 3.0), (0.0, 0.3, 1.1, 4.7)),
)
ABOUT: dict[str, Any] = {"note": "ü", "calibration": {"scores": [-0.5, 0.25], "data": "x"}}
# Batch, height, width; none is checked by export. One network sees them in this order: after an
# image of one position a runtime must not go on with what it made for that.
OTHERS = ((1, 8, 8), (3, 97, 41), (1, 200, 9))


def tiny(seed: int = 1) -> P3Net:
    torch.manual_seed(seed)
    return P3Net(Architecture(backbone="small", layers=1, hidden=8, heads=2), PAIR).eval()


@pytest.fixture(scope="module")
def counter() -> Counter:
    return Counter(tiny(), Sizing(100), metadata=ABOUT)


@pytest.fixture(scope="module")
def file(counter: Counter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "deep" / "m.onnx"
    found = export.export(counter, path)
    assert 0 < found.worst < 1e-4
    assert found.images >= 8
    return path


@pytest.fixture(scope="module")
def regressor() -> Regressor:
    torch.manual_seed(2)
    return Regressor(RegressorArchitecture(backbone="small")).eval()


@pytest.fixture(scope="module")
def openvino_file(regressor: Regressor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openvino") / "m.xml"
    export.export(Counter(regressor), path)
    return path


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def exported(request: pytest.FixtureRequest, file: Path) -> Exported:
    return Exported(file, request.param)


@pytest.mark.parametrize("size", OTHERS)
@torch.inference_mode()
def test_the_file_gives_what_the_network_gives(exported, counter, size):
    images = torch.rand(size[0], 3, *size[1:])
    expected, got = counter.network(images), exported(images)
    near: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(got.density, expected.density, **near)
    for one, two in zip(got.expectations, expected.expectations, strict=True):
        torch.testing.assert_close(one, two, **near)
    # The variance of a mixture, by its definition, cell by cell.
    p, q = (each.double() for each in expected.probabilities)
    omega = p.amax(1) / (p.amax(1) + q.amax(1))
    one, two = (torch.tensor(each.values).double().view(1, -1, 1, 1) for each in PAIR)
    mean = omega * (p * one).sum(1) + (1 - omega) * (q * two).sum(1)
    square = omega * (p * one**2).sum(1) + (1 - omega) * (q * two**2).sum(1)
    torch.testing.assert_close(got.variance.double(), square - mean**2, **near)


@torch.inference_mode()
def test_a_regressor_for_openvino(openvino_file, regressor):
    network = Exported(openvino_file)
    for size in OTHERS:
        images = torch.rand(size[0], 3, *size[1:])
        torch.testing.assert_close(
            network(images).density, regressor(images).density, rtol=1e-3, atol=1e-5
        )
    assert {each.name for each in openvino_file.parent.iterdir()} == {"m.xml", "m.bin"}
    floats = sum(each.numel() for each in regressor.parameters())
    size = openvino_file.with_suffix(".bin").stat().st_size
    assert size > 3 * floats  # four bytes each but for those shared, not two


def test_counting_with_the_file_is_counting_with_the_model(file, counter):
    loaded = p3net.load(file)
    image = np.random.default_rng(0).integers(0, 256, (130, 201, 3), dtype=np.uint8)
    expected, got = counter.count(image), loaded.count(image)  # shrunk to 100 px first
    assert got.count == pytest.approx(expected.count, rel=1e-4)
    assert got.size_hw == expected.size_hw
    assert got.cell_xy == expected.cell_xy
    np.testing.assert_allclose(got.density, expected.density, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got.variance, expected.variance, rtol=1e-3, atol=1e-5)
    assert got.interval.high == pytest.approx(expected.interval.high, rel=1e-3)
    for one, two in zip(got.branches, expected.branches, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)


def test_what_is_known_of_the_model_travels_with_it(file):
    about = p3net.load(file).metadata
    assert about["note"] == "ü"
    assert about["calibration"] == ABOUT["calibration"]
    assert about["preparation"]["max_shorter_side"] == 100
    assert tuple(map(Intervals.from_dict, about["network"]["intervals"])) == PAIR  # every bit
    assert about["exported_with"]["torch"] == torch.__version__


def test_the_graph_is_plain_onnx_of_any_size(file):
    model = onnx.load(file)
    onnx.checker.check_model(model)
    assert {each.domain for each in model.graph.node} == {""}
    (images,) = model.graph.input
    dims = images.type.tensor_type.shape.dim
    assert [bool(each.dim_param) for each in dims] == [True, False, True, True]
    assert [each.name for each in model.graph.output] == ["density", "branches", "variance"]
    kinds = [each.op_type for each in model.graph.node]
    assert kinds.count("Conv") == 9  # as many as the network has, none rewritten


def test_a_file_that_differs_is_not_kept(file, tmp_path, monkeypatch):
    def other(_network: nn.Module, _about: object, path: Path) -> None:
        shutil.copy(file, path)  # the file of another network

    monkeypatch.setattr(export, "_write_onnx", other)
    (tmp_path / "m.onnx").write_text("older")
    with pytest.raises(InputError, match="differs from the network"):
        export.export(Counter(tiny(seed=9)), tmp_path / "m.onnx")
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "older"


def test_parity_sees_nan_and_wrong_shapes(regressor):
    nothing, nan = torch.zeros(1, 2, 2), torch.full((1, 2, 2), torch.nan)
    assert export._apart(nan, nothing + 1) == float("inf")
    assert export._apart(nothing[0], nothing + 1) == float("inf")
    assert export._apart(nothing + 2, nothing + 1) == 1


def test_what_cannot_be_exported(counter, tmp_path):
    with pytest.raises(InputError, match=r"must end in \.onnx or \.xml"):
        export.export(counter, tmp_path / "m.tflite")
    with pytest.raises(InputError, match="a Linear cannot be exported"):
        export.export(Counter(nn.Linear(1, 1)), tmp_path / "m.onnx")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        export.export(counter, tmp_path / "file" / "m.onnx")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("missing", "name"), [("onnxscript", "m.onnx"), ("onnx", "m.onnx"), ("openvino", "m.xml")]
)
def test_missing_packages_are_named(counter, tmp_path, monkeypatch, missing, name):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"pip install 'p3net\[onnx"):
        export.export(counter, tmp_path / name)
    assert not list(tmp_path.iterdir())
