from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from p3net import checkpoint, export, hub
from p3net.app.cli import cli
from p3net.data import splits
from p3net.data.splits import Split
from p3net.errors import InputError
from p3net.export import Parity
from p3net.network.p3net import Architecture, P3Net


@pytest.fixture
def model(tmp_path: Path) -> str:
    torch.manual_seed(0)
    network = P3Net(Architecture(backbone="small", layers=1, hidden=8))
    checkpoint.save(
        tmp_path / "run" / "model.safetensors",
        network,
        {"preparation": {"max_shorter_side": 32}},
    )
    return str(tmp_path / "run")


def run(*words: object) -> Any:
    return CliRunner().invoke(cli, ["export", *map(str, words)])


@pytest.mark.parametrize("name", ["out.onnx", "out.xml"])
def test_a_file_is_made_and_the_difference_told(model, tmp_path, monkeypatch, name):
    asked = []

    def made(counter, path):  # the real one takes long; tests/test_export.py runs it
        asked.append((counter.sizing.max_shorter_side, path))
        return Parity(density=1e-6, branches=3e-6, variance=2e-6, images=10)

    monkeypatch.setattr(export, "export", made)
    result = run(model, tmp_path / name)
    assert result.exit_code == 0, result.output
    assert asked == [(32, tmp_path / name)]
    assert "10 images of several sizes differ by 3e-06 at most" in result.stdout.replace("\n", "")


def test_a_folder_for_the_hub(model, tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        hub, "upload", lambda folder, name: pushed.append((folder, name)) or f"hub/{name}"
    )
    result = run(model, tmp_path / "out", "--licence", "mit", "--push", "ann/square")
    assert result.exit_code == 0, result.output
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "README.md"}
    assert 'license: "mit"' in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert pushed == [(tmp_path / "out", "ann/square")]
    assert "hub/ann/square" in result.stdout


def test_lists_of_images_without_the_maker_s_places(model, tmp_path):
    split = Split(("train/a",), validation=("train/b",), how={"data": f"sha:{tmp_path}/part_A"})
    splits.write(split, Path(model) / "split")
    result = run(model, tmp_path / "out", "--lists")
    assert result.exit_code == 0, result.output
    found = splits.read(tmp_path / "out" / "split")
    assert found == split
    assert found.how == {"data": "sha:part_A"}


def test_a_folder_with_another_model_s_lists_is_left_as_it_was(model, tmp_path):
    splits.write(Split(("train/other",)), tmp_path / "out" / "split")
    splits.write(Split(("train/a",)), Path(model) / "split")
    result = run(model, tmp_path / "out", "--lists")
    assert isinstance(result.exception, InputError)
    assert "holds another split" in str(result.exception)
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["split"]


def test_lists_that_are_not_there_leave_nothing(model, tmp_path):
    result = run(model, tmp_path / "out", "--lists")
    assert isinstance(result.exception, InputError)
    assert "cannot read the split" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("out.tflite",), "expected OUT.onnx, OUT.xml or a folder"),
        (("out.onnx", "--licence", "mit"), "go with a folder"),
        (("out.xml", "--push", "a/b"), "go with a folder"),
        (("out.xml", "--lists"), "go with a folder"),
    ],
)
def test_words_that_do_not_fit(model, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = run(model, *words)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_model_that_is_not_there(tmp_path):
    result = run(tmp_path / "nowhere.onnx", tmp_path / "out.onnx")
    assert isinstance(result.exception, InputError)
    assert "no such file" in str(result.exception)
