from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from p3net import checkpoint
from p3net.app.calibrate import fewest
from p3net.app.cli import cli
from p3net.data import splits
from p3net.data.splits import Split
from p3net.errors import InputError
from p3net.network.p3net import Architecture, P3Net

DATA = "synthetic:3?train=6&val=10&test=0&size=64x96"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run that learned from the training images."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    network = P3Net(Architecture(backbone="small", layers=1, hidden=8))
    about = {"settings": {"data": DATA}, "kind": "synthetic"}
    checkpoint.save(folder / "model.safetensors", network, about)
    keys = tuple(f"train/{each.name}" for each in _train())
    splits.write(Split(keys[:2], keys[2:], (), ()), folder / "split")
    return folder


def _train():
    from p3net.data.catalogue import open_dataset

    return open_dataset(DATA).part("train").samples


def run(*words: str):
    return CliRunner().invoke(cli, ["calibrate", *map(str, words)], catch_exceptions=False)


def test_it_prints_the_coverage_and_keeps_the_model(model, tmp_path):
    out = tmp_path / "new.safetensors"
    result = run(model, DATA, "--out", out)
    assert result.exit_code == 0
    assert "of 10 images, each calibrated on the others" in result.output
    assert f"Written to {out}" in result.output.replace("\n", "")
    known = checkpoint.load(out)
    assert known.metadata["calibration"]["images"] == 10
    assert known.metadata["settings"] == {"data": DATA}
    found = known.count(torch.rand(3, 64, 96))
    assert found.interval is not None
    assert found.interval.calibrated
    assert "calibration" not in checkpoint.load(model).metadata


def test_json_and_too_few_images(model):
    result = run(model, DATA, "--json", "--level", "0.95")
    record = json.loads(result.stdout.strip().splitlines()[-1])
    assert record["images"] == 10
    assert record["level"] == 0.95
    assert record["calibrated"] is False  # 19 would be needed
    assert 0 <= record["share"] <= 1
    assert record["width"] > 0
    assert record["out"] is None
    words = run(model, DATA, "--level", "0.95").output
    assert "Too few images for 95%" in words
    assert "19 at least" in words
    assert "Nothing was written" in words


def test_images_the_model_learned_from_are_refused(model):
    with pytest.raises(
        InputError, match=r"2 labelled and 4 unlabelled of these 6.*--allow-trained"
    ):
        run(model, DATA, "--split", "train")
    assert run(model, DATA, "--split", "train", "--allow-trained").exit_code == 0


def test_what_cannot_be_asked_for(model, tmp_path):
    with pytest.raises(InputError, match="--level must lie between 0 and 1"):
        run(model, DATA, "--level", "90")
    with pytest.raises(InputError, match=r"written as \.safetensors"):
        run(model, DATA, "--out", tmp_path / "model.pth")
    with pytest.raises(InputError, match="no test images"):
        run(model, DATA, "--split", "test")


@pytest.mark.parametrize(("level", "images"), [(0.9, 9), (0.8, 4), (0.99, 99), (0.5, 1)])
def test_the_fewest_images(level, images):
    """n + 1 images leave 1/(n + 1) beyond the largest score: that must be within 1 − level."""
    assert fewest(level) == images
    assert 1 / (images + 1) <= 1 - level + 1e-9
    assert images == 1 or 1 / images > 1 - level
