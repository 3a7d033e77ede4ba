from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from p3net import checkpoint
from p3net.app.cli import cli
from p3net.app.evaluate import chosen_cases, record, shown
from p3net.data import splits
from p3net.errors import InputError
from p3net.evaluation import Evaluation, ImageResult, group
from p3net.intervals import PUBLISHED
from p3net.metrics import Estimate
from p3net.network.p3net import Architecture, P3Net

SCENES = "synthetic:3?train=4&val=0&test=5&size=64x96"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never trained: its weights, its record and its lists."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    torch.manual_seed(0)
    network = P3Net(Architecture(backbone="small", layers=1, hidden=32), PUBLISHED)
    metadata = {"settings": {"data": SCENES}, "kind": "synthetic", "chosen_on_test": False}
    checkpoint.save(folder / "model.safetensors", network, metadata)
    names = [f"train/train_{i:04d}.png" for i in range(4)]
    split = splits.Split(labelled=(names[0],), unlabelled=tuple(names[1:]))
    splits.write(split, folder / "split")
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["evaluate", *map(str, arguments)])


def error(*arguments: object) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, InputError)
    return str(result.exception)


def test_the_figures_are_those_of_the_lines(run_folder, tmp_path):
    out = tmp_path / "out.csv"
    result = run(run_folder, SCENES, "--csv", out, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    with out.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["image"] for line in lines] == [f"test/test_{i:04d}.png" for i in range(5)]
    assert all(line["scene"] for line in lines)
    errors = [float(line["counted"]) - int(line["truth"]) for line in lines]
    assert errors == pytest.approx([float(line["error"]) for line in lines], abs=1e-3)
    assert report["mae"]["value"] == pytest.approx(sum(map(abs, errors)) / 5, abs=1e-3)
    rms = math.sqrt(sum(e * e for e in errors) / 5)
    assert report["rmse"]["value"] == pytest.approx(rms, abs=1e-3)
    assert report["mae"]["low"] <= report["mae"]["value"] <= report["mae"]["high"]
    assert sum(level["images"] for level in report["by_level"].values()) == 5
    assert report["warnings"] == []
    assert "counting: 5/5" in result.stderr


def photos(folder: Path) -> Path:
    """Two marked pictures, and one that ends in the middle."""
    folder.mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    for name in "abc":
        Image.fromarray(pixels).save(folder / f"{name}.png")
        (folder / f"{name}.csv").write_text("x,y\n30,30\n")
    whole = (folder / "b.png").read_bytes()
    (folder / "b.png").write_bytes(whole[: len(whole) // 2])
    return folder


def test_an_image_that_cannot_be_read_is_reported_and_the_rest_judged(run_folder, tmp_path):
    data = photos(tmp_path / "photos")
    result = run(run_folder, data, "--split", "train", "--json")
    assert result.exit_code == 1
    assert "error: train/b.png: truncated or damaged image" in result.stderr
    report = json.loads(result.stdout)
    assert (report["images"], report["unreadable"]) == (2, ["train/b.png"])
    for name in "ac":
        (data / f"{name}.png").write_bytes((data / "b.png").read_bytes())
    assert "none of its labelled images can be read" in error(run_folder, data, "--split", "train")


@pytest.mark.parametrize("option", ["--csv", "--picture", "--scatter"])
def test_figures_are_printed_before_a_file_that_cannot_be_written(run_folder, tmp_path, option):
    pytest.importorskip("matplotlib")
    place = tmp_path / ("out.csv" if option == "--csv" else "out.png")
    place.mkdir()  # a folder of that name
    result = run(run_folder, SCENES, option, place)
    assert "MAE" in result.stdout
    assert isinstance(result.exception, InputError)
    assert "could not be written" in str(result.exception)


def test_the_tables(run_folder):
    result = run(run_folder / "model.safetensors", SCENES)
    assert result.exit_code == 0, result.output
    assert result.stdout.count('"MSE"') == 1
    assert "MAE" in result.stdout
    assert "weather" not in result.stdout
    assert "counting" not in result.stdout
    assert "WARNING" not in result.stderr


def test_pictures(run_folder, tmp_path):
    cases, plot = tmp_path / "cases.png", tmp_path / "plot.jpg"
    result = run(run_folder, SCENES, "--picture", cases, "--scatter", plot)
    assert result.exit_code == 0, result.output
    with Image.open(cases) as image:
        assert image.width > 4 * 320
        assert image.height > 4 * 200  # at least four of the five images
    with Image.open(plot) as image:
        assert image.format == "JPEG"


def test_images_of_the_run_itself_are_warned_of(run_folder):
    result = run(run_folder, SCENES, "--split", "train", "--json")
    assert "1 labelled and 3 unlabelled" in " ".join(result.stderr.split())
    assert len(json.loads(result.stdout)["warnings"]) == 1
    other = SCENES.replace("synthetic:3", "synthetic:4")  # other scenes under the same names
    assert "WARNING" not in run(run_folder, other, "--split", "train").stderr


def test_images_of_a_list(run_folder, tmp_path):
    (tmp_path / "list.txt").write_text("train_0002.png\ntrain_0001.png\n")
    result = run(run_folder, SCENES, "--split", tmp_path / "list.txt", "--json")
    names = [each["key"] for each in json.loads(result.stdout)["per_image"]]
    assert names == ["train/train_0002.png", "train/train_0001.png"]
    assert "2 unlabelled" in " ".join(result.stderr.split())


def test_a_model_chosen_on_the_test_images_says_so(run_folder, tmp_path):
    counter = checkpoint.load(run_folder)
    path = tmp_path / "sinner.safetensors"
    checkpoint.save(path, counter.network, {"chosen_on_test": True})
    assert "chosen on test images" in " ".join(run(path, SCENES).stderr.split())


def test_a_split_that_is_not_there(run_folder, tmp_path):
    text = error(run_folder, SCENES, "--split", "val")
    assert "no val images" in text
    assert "train (4), test (5)" in text
    assert "val (" not in text


def test_unlabelled_images_are_left_out(run_folder, tmp_path):
    pixels = np.zeros((64, 64, 3), np.uint8)
    for name in "ab":
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    (tmp_path / "a.txt").write_text("10 20\n")
    result = run(run_folder, tmp_path, "--split", "train", "--json")
    assert "1 images without points are left out" in result.stderr
    assert json.loads(result.stdout)["images"] == 1


@pytest.mark.parametrize("option", ["--csv", "--picture", "--scatter"])
def test_a_folder_that_does_not_exist_is_told_before_counting(run_folder, tmp_path, option):
    assert "does not exist" in error(run_folder, SCENES, option, tmp_path / "no" / "out.png")


def test_no_model(tmp_path):
    assert "no model in this folder" in error(tmp_path, SCENES)


def test_weather_and_missing_figures_in_json():
    results = (
        ImageResult("a", 0, 1.0, {"weather": "fog"}),
        ImageResult("b", 4, 2.0, {"weather": "none"}),
    )
    fog = group("fog", [results[0]])
    found = Evaluation(results, group("all", list(results)), (), (fog,))
    text = json.dumps(record(found), allow_nan=False)
    assert json.loads(text)["by_weather"]["fog"]["nae"]["value"] is None
    assert json.loads(text)["by_weather"]["fog"]["mae"]["value"] == 1.0
    assert shown(fog.metrics["nae"]) == "–"
    assert shown(Estimate(1234.5, 0.21, 2000)) == "1,234.5 (0.2–2,000)"


def test_intervals_are_judged_where_they_are_calibrated(run_folder, tmp_path):
    plain = json.loads(run(run_folder, SCENES, "--json").stdout)
    assert plain["coverage"] is None
    assert not plain["per_image"][0]["interval"]["calibrated"]
    counter = checkpoint.load(run_folder)
    path = tmp_path / "known.safetensors"
    own = [(r["truth"] - r["counted"]) for r in plain["per_image"]]
    units = [r["interval"]["high"] - r["counted"] for r in plain["per_image"]]
    times = NormalDist().inv_cdf(0.95)  # of the uncalibrated intervals at 90 %
    scores = sorted(abs(e) * times / u for e, u in zip(own, units, strict=True))
    middle = scores[2] * 1.0001  # as wide as to hold three of the five scenes
    checkpoint.save(
        path,
        counter.network,
        {**counter.metadata, "calibration": {"scores": [middle] * 10}},
    )
    found = json.loads(run(path, SCENES, "--json", "--csv", tmp_path / "out.csv").stdout)
    assert found["coverage"]["level"] == 0.9
    assert found["coverage"]["share"] == pytest.approx(3 / 5)
    with (tmp_path / "out.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    widths = [float(each["high"]) - float(each["low"]) for each in lines]
    assert found["coverage"]["width"] == pytest.approx(sum(widths) / 5, abs=1e-3)
    assert "hold the true count of 60% of 5" in " ".join(run(path, SCENES).stdout.split())


def test_the_cases_are_the_extremes_and_the_middle():
    off = {"a": 0.5, "b": -9, "c": 3, "d": 0, "e": -4, "f": 1, "g": 2}
    results = [ImageResult(key, 20, 20 + e, {}) for key, e in off.items()]
    results.append(ImageResult("empty", 0, 0.0, {}))
    words = [(word, result.key) for word, result in chosen_cases(results)]
    assert words[:2] == [("worst", "b"), ("worst", "e")]
    assert words[2:4] == [("median", "g"), ("median", "f")]
    assert words[4:] == [("best", "d"), ("best", "a")]
    assert [r.key for _, r in chosen_cases(results[:1])] == ["a"]
