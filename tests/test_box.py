"""The model in the box: small, clean, and ready without a name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import p3net
from p3net import checkpoint
from p3net.app.cli import cli
from p3net.app.evaluate import shared_roles
from p3net.data import splits
from p3net.data.catalogue import open_dataset
from p3net.structures import Dataset, Sample

BOX = Path(p3net.__file__).parent / "box"


def test_it_fits_and_names_no_place_of_a_machine():
    assert (BOX / "model.safetensors").stat().st_size <= 10_000_000
    _, record = checkpoint.read(BOX / "model.safetensors")
    empty = "synthetic:7?train=30&val=0&test=0&most=0 + surfaces:7?train=72"
    assert record["settings"]["data"] == f"sha:part_A + shb:part_B + {empty}"
    files = [BOX / "config.json", BOX / "split" / "split.json"]
    for text in (json.dumps(record), *(path.read_text(encoding="utf-8") for path in files)):
        assert "/" not in text


def test_it_learned_from_no_development_image():
    split = splits.read(BOX / "split")
    lists = Path(__file__).parent.parent / "experiments" / "lists"
    held = splits.read_list(lists / "box-val.txt")
    assert {f"train/{name}" for name in held} == set(split.validation)
    assert (len(split.labelled), len(split.validation), len(split.test)) == (642, 160, 0)
    assert checkpoint.read(BOX / "model.safetensors")[1]["split"]["hash"] == split.hash


def test_rendered_scenes_are_not_taken_for_those_it_learned_from():
    others = open_dataset("synthetic:3?train=3&val=0&test=0")
    assert shared_roles(p3net.load(), "box", others) == {}


def test_what_it_learned_from_is_known_of_models_that_go_on_from_it(tmp_path):
    split = splits.read(BOX / "split")
    names = [name for name in split.labelled if name.startswith("train/sha/")]
    names = [name.removeprefix("train/sha/") for name in (*names[:2], "train/sha/new")]
    seen = Dataset("sha", "", tuple(Sample(name, _never) for name in names))
    child = replace(p3net.load(), metadata={"kind": "folder", "settings": {"weights": "box"}})
    checkpoint.save(tmp_path / "model.safetensors", child.network, child.metadata)
    assert shared_roles(p3net.load(), "box", seen) == {"labelled": 2}
    assert shared_roles(checkpoint.load(tmp_path), tmp_path, seen) == {"labelled": 2}


def _never() -> Image.Image:
    raise AssertionError("nobody has to look")


def test_a_photo_is_counted_without_naming_a_model(tmp_path):
    sample = open_dataset("synthetic:5?train=1&val=0&test=0&size=192x256&most=60").samples[0]
    with sample.open() as scene:
        scene.save(tmp_path / "photo.png")
    result = CliRunner().invoke(cli, ["count", str(tmp_path / "photo.png"), "--json"])
    assert result.exit_code == 0, result.output
    assert "the one in the box counts people" in result.stderr
    line = json.loads(result.stdout.splitlines()[0])
    assert line["count"] == pytest.approx(p3net.load().count(tmp_path / "photo.png").count)
    assert line["interval"]["calibrated"]


def test_bare_ground_is_nearly_empty():
    draw = np.random.default_rng(0)
    plain = np.full((240, 320, 3), 127, np.uint8)
    grain = draw.integers(90, 160, (240, 320, 3)).astype(np.uint8)
    slope = np.linspace(40, 220, 320, dtype=np.uint8)[None, :, None] + np.zeros(
        (240, 1, 3), np.uint8
    )
    model = p3net.load()
    counts = [model.count(Image.fromarray(each)).count for each in (plain, grain, slope)]
    assert max(counts) < 3, counts


def test_learning_goes_on_from_it_by_default(tmp_path):
    photos = tmp_path / "photos"
    for sample in open_dataset("synthetic:5?train=3&val=0&test=0&size=96x128&most=20").samples:
        photos.mkdir(exist_ok=True)
        with sample.open() as scene:
            scene.save(photos / sample.name)
        lines = "".join(f"{x:.1f} {y:.1f}\n" for x, y in sample.marks().points_xy)
        (photos / sample.name).with_suffix(".txt").write_text(lines)
    words = ["train", str(photos), "--labelled", "2", "--validation", "0", "--steps", "1"]
    words += ["--out", str(tmp_path / "run"), "--set", "recipe.workers=0", "--set", "views.crop=64"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    own = checkpoint.read(BOX / "model.safetensors")[1]
    assert settings["weights"] == "box"
    assert settings["recipe"]["learning_rate"] == 2e-4  # what it knows is not to be unlearned
    assert settings["network"] == own["network"]["architecture"]
    sizes = checkpoint.sizing(own)
    assert {name: settings["views"][name] for name in asdict(sizes)} == asdict(sizes)
