"""`p3net experiment` as a user runs it: real processes, real kills; then the figures it draws."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from p3net import checkpoint, study, trial
from p3net.app import cli, experiment, experiment_report, paper_figures
from p3net.errors import InputError

TABLE: dict[str, Any] = {
    "title": "A table",
    "where": "tab:none, a set",
    "claim": "The paper: nothing.",
    "base": {"threshold": 0.0},
    "small": {
        "preset": "quick",
        "seeds": 1,
        "set": {
            "data": "synthetic:3?train=8&val=0&test=3&size=96x128",
            "labelled": "3",
            "validation": "0",
            "weights": "none",
            "network": {"backbone": "small", "layers": 1, "hidden": 32, "heads": 2},
            "views": {"crop": 64},
            "streaming": {"labelled": 1, "unlabelled": 1},
            "recipe": {"steps": 40, "workers": 0, "save_every": 5, "average": 0.0},
        },
    },
    "paper": {"preset": "paper", "set": {"data": "sha"}},
    "runs": {
        "one": {"title": "One", "published": {"mae": 50.0, "rmse": 80.0}},
        "two": {"title": "Two", "set": {"sigma": 6}, "against": "one", "published": {"mae": 60.0}},
        "again": {"title": "One again"},  # the settings of "one": trained once
        "three": {"title": "Three", "set": {"sigma": 5}},
    },
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "table.yaml"
    path.write_text(yaml.safe_dump({**TABLE, **changes}, sort_keys=False))
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.cli, ["experiment", *words])


def start(path: Path, *more: str) -> subprocess.Popen[str]:
    """The command as the leader of its own group of processes."""
    return subprocess.Popen(
        [sys.executable, "-m", "p3net", "experiment", str(path), "--json", *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(condition: Any, process: subprocess.Popen[str], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_killed_in_the_middle_it_goes_on_with_what_is_missing_alone(tmp_path):
    """Killed with all its processes in the second run: the first is not touched again."""
    path, out = write(tmp_path), tmp_path / "out"
    one, two, again, _ = study.trials(study.read(path), "small")
    assert again.key == one.key
    more = ("--out", str(out), "--jobs", "1", "--runs", "one,two,again")
    first = start(path, *more)
    until(lambda: trial.state(two, out).step >= 12, first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    assert one.result(out).exists()
    assert not two.result(out).exists()
    finished = one.result(out).stat().st_mtime_ns

    second = start(path, *more)
    printed, errors = second.communicate(timeout=240)
    assert second.returncode == 0, errors
    assert "1 runs are done already" in errors
    assert "two, seed 1: started from step" in errors
    assert "one, seed 1" not in errors
    result = json.loads(printed)
    assert (result["started"], result["failed"], result["scale"]) == (1, [], "small")
    assert one.result(out).stat().st_mtime_ns == finished
    assert [len(line["mae"]) for line in result["runs"].values()] == [1, 1, 1]
    for each in (one, two):  # a line a step, none twice, and no large leftovers
        log = (each.folder(out) / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log] == list(range(1, 41))
        assert not (each.folder(out) / "last.safetensors").exists()
    for name in ("table.md", "table.csv", "plot.png"):
        assert (out / "table-small" / name).is_file()


def test_stopped_by_hand_it_leaves_no_process_and_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(_seconds: float) -> None:
        assert multiprocessing.active_children()
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment.time, "sleep", interrupted)
    result = run(str(write(tmp_path)), "--out", str(tmp_path / "out"), "--jobs", "1")
    assert result.exit_code == 130
    assert "stopped; the same command goes on: 3 waiting" in result.stderr
    assert not multiprocessing.active_children()


def test_one_failure_does_not_stop_the_others_and_the_exit_code_tells(tmp_path):
    runs = {
        "bad": {"title": "Bad", "set": {"labelled": "500"}},
        "good": {"title": "Good", "set": {"recipe": {"steps": 2}}},
    }
    path = write(tmp_path, runs=runs)
    result = run(str(path), "--out", str(tmp_path / "out"), "--jobs", "2")
    assert result.exit_code == 1
    assert "bad, seed 1: failed" in result.stderr
    assert "500 labelled images asked for" in result.stderr
    assert "good, seed 1: done in" in result.stderr
    assert "1 done, 1 failed" in result.stderr
    row = next(line for line in result.stdout.splitlines() if line.startswith("| Good"))
    assert row.split("|")[5].strip() == "1"
    assert "| Bad | – | – | – | 0 |" in result.stdout
    again = run(str(path), "--out", str(tmp_path / "out"), "--runs", "good")
    assert again.exit_code == 0
    assert "1 runs are done already" in again.stderr
    assert "started" not in again.stderr


def test_a_child_whose_experiment_was_killed_ends_by_itself(tmp_path):
    """`work` is told a parent that is not its own."""
    one = study.trials(study.read(write(tmp_path)), "small", names=["one"])[0]
    code = (
        "import pickle, sys; from pathlib import Path; from p3net.app.experiment import work;"
        "work(pickle.load(sys.stdin.buffer), Path(sys.argv[1]), 1)"
    )
    import pickle

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], input=pickle.dumps(one), check=False
    )
    assert done.returncode == 1
    assert trial.state(one, tmp_path) == trial.State("begun", 1)
    assert "the experiment was killed" in (one.folder(tmp_path) / "output.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "large"], "--scale is paper or small, got 'large'"),
        (["--runs", "x"], "no run 'x' at small scale; there are one, two, again, three"),
        (["--scale", "paper"], "where is sha? Say --data sha=PATH, or set P3NET_SHA"),
        (["--data", "sha"], "expected KIND=PATH after --data, got 'sha'"),
        (["--set", "recipe.stepps=1"], "did you mean 'recipe.steps'?"),
    ],
)
def test_wrong_words_are_named(tmp_path, monkeypatch, words, message):
    monkeypatch.delenv("P3NET_SHA", raising=False)
    result = run(str(write(tmp_path)), *words)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


# --- what it shows --------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path) -> tuple[study.Study, list[trial.Trial], Path]:
    """Line one with seeds that err by 4 and 8, line two by 9; the third is not done."""
    table = study.read(write(tmp_path))
    found = study.trials(table, "small", names=["one", "two", "three"], seeds=2)
    for each, error in zip(found, (4, 9, None, 8, None, None), strict=True):
        if error is None:
            continue
        record = {
            "settings": each.settings.model_dump(mode="json"),
            "images": {"labelled": 3, "unlabelled": 5, "validation": 0, "test": 1},
            "crops": 2,
            "hardware": "an abacus",
            "seconds": 90,
            "per_image": [{"key": "a", "truth": 10, "counted": 10 + error}],
        }
        each.folder(tmp_path).mkdir(parents=True)
        each.result(tmp_path).write_text(json.dumps(record))
    return table, found, tmp_path


def test_the_table_cannot_be_taken_for_the_papers(measured):
    table, found, out = measured
    lines = study.gather(table, found, out)
    text = experiment_report.markdown(table, "small", lines, {"recipe": {"steps": 40}})
    assert "Small scale: these are not the paper's figures" in text
    assert "| One | 6.0 ± 2.8 | 6.0 ± 2.8 | 0.600 ± 0.283 | 2 |  | 50.0 | 80.0 |  |" in text
    assert "| Two | 9.0 | 9.0 | 0.900 | 1 | 1.50 | 60.0 | – | 1.20 |" in text
    assert "| Three | – | – | – | 0 |  | – | – |  |" in text
    for fact in ("synthetic:3", "labelled: 3", "backbone: small", "steps: 40", "an abacus"):
        assert fact in text
    assert "minutes a run: 1.5–1.5" in text
    assert "Changed by hand: recipe.steps=40." in text
    assert "MAE ÷: over that of “One”." in text
    assert "not the paper's figures" not in experiment_report.markdown(table, "paper", lines)
    nothing = study.gather(table, found, out / "elsewhere")
    assert "Nothing has been measured yet." in experiment_report.markdown(table, "small", nothing)


def test_the_csv_holds_the_same_figures_in_full(measured):
    table, found, out = measured
    text = experiment_report.comma_separated("small", study.gather(table, found, out))
    one, two, three = csv.DictReader(io.StringIO(text))
    assert (one["mae_mean"], one["mae_sd"], one["mae_each"]) == (
        "6.0000",
        "2.8284",
        "4.0000 8.0000",
    )
    assert (one["scale"], one["hardware"], one["steps"]) == ("small", "an abacus", "40")
    assert (two["mae_ratio"], two["paper_mae"], two["paper_mae_ratio"]) == (
        "1.5000",
        "60.0000",
        "1.2000",
    )
    assert (three["seeds"], three["mae_mean"]) == ("0", "")


def test_the_plot_is_a_picture(measured):
    table, found, out = measured
    lines = study.gather(table, found, out)
    for scale in study.SCALES:
        with Image.open(io.BytesIO(experiment_report.plot(table, scale, lines))) as picture:
            assert picture.width > 1000


def test_the_live_table_says_how_far_each_line_is(measured):
    table, found, out = measured
    board = experiment.Board(table, "small", found, out)
    board.running[found[4].key] = None  # type: ignore[assignment]
    found[4].folder(out).mkdir(parents=True)
    (found[4].folder(out) / "log.jsonl").write_text("{}\n" * 7)
    board.failed[found[2].key] = "words"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(experiment.live_table(board))
    shown = console.export_text()
    rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│")}
    assert all(word in rows["One"] for word in ("2/2", "6.0 ± 2.8", "50.0"))
    assert all(word in rows["Two"] for word in ("1/2", "seed 2: 7/40", "60.0"))
    assert all(word in rows["Three"] for word in ("0/2", "1 failed"))
    assert "3 done, 1 running, 1 failed, 1 waiting" in shown


def test_costs_are_printed_both_ways_with_ratios(tmp_path):
    runs = {
        "one": {"title": "One", "published": {"parameters_m": 21.5, "seconds_100": 10.0}},
        "two": {"title": "Two", "published": {"multiply_adds_g": 60.8, "seconds_100": 12.0}},
    }
    path = write(tmp_path, runs=runs, timing={"count_px": 64, "time_px": 32, "rounds": 1})
    result = run(str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "table-small" / "table.md").read_text()
    assert "parameters, modules only" in text
    assert "21.5 M / – G" in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith(("| One", "| Two"))]
    assert [row[-2].strip() for row in rows] == ["1.00", "1.20"]
    assert rows[0][-3].strip() == "1.00"


# --- the paper's pictures -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A run of one step, with its split."""
    folder = tmp_path_factory.mktemp("model")
    one = study.trials(
        study.read(write(folder)), "small", names=["one"], assign={"recipe": {"steps": 1}}
    )[0]
    trial.perform(one, folder)
    return one.folder(folder)


DATA = "synthetic:3?train=8&val=0&test=3&size=96x128"


def test_density_maps_of_models_side_by_side(model, tmp_path):
    out = tmp_path / "maps.png"
    words = ["figure", "densities", DATA, str(model), f"again={model / 'model.safetensors'}"]
    result = CliRunner().invoke(cli.cli, [*words, "--out", str(out)])
    assert result.exit_code == 0, result.output
    with Image.open(out) as picture:
        width = 200 * 128 // 96 + 1  # four images of 96×128 px at a height of 200
        assert picture.size == (4 * (width + 6) + 6, 3 * (200 + 18 + 6) + 6)
        assert np.asarray(picture).std() > 10
    one = CliRunner().invoke(
        cli.cli, [*words, "--out", str(out), "--split", "test", "--images", "1"]
    )
    assert one.exit_code == 0
    with Image.open(out) as picture:
        assert picture.width == width + 12


def test_images_are_labelled_and_unlabelled_ones_of_the_models_own_training(model):
    from p3net.data import splits
    from p3net.data.catalogue import open_dataset

    own = splits.read(model / "split")
    chosen = paper_figures.choose(open_dataset(DATA), model, None, 2)
    assert [kind for kind, _ in chosen] == ["labelled"] * 2 + ["unlabelled"] * 2
    assert {s.key for kind, s in chosen if kind == "labelled"} <= set(own.labelled)
    assert {s.key for kind, s in chosen if kind == "unlabelled"} <= set(own.unlabelled)
    with pytest.raises(InputError, match="name a --split"):
        paper_figures.choose(open_dataset(DATA), model.parent, None, 2)


def test_attention_of_every_token_over_the_image(model, tmp_path):
    image, out = tmp_path / "image.png", tmp_path / "attention.png"
    pixels = np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(image)
    words = ["figure", "attention", str(model), str(image), "--out", str(out), "--width", "60"]
    result = CliRunner().invoke(cli.cli, words)
    assert result.exit_code == 0, result.output
    counter = checkpoint.load(model)
    first, second, cell_xy = paper_figures.attention_of(counter, Image.fromarray(pixels))
    tokens = len(first)
    assert first.shape == second.shape == (tokens, 10, 15)  # 60×90 px by 2.5, 16 px a position
    assert cell_xy == pytest.approx((16 / 2.5, 16 / 2.5))
    for maps in (first, second):
        assert maps.sum(axis=(1, 2)) == pytest.approx(np.ones(tokens), abs=1e-4)
    rows = -(-(1 + 2 * tokens) // 6)
    with Image.open(out) as picture:
        assert picture.size == (6 * (60 + 6) + 6, rows * (40 + 18 + 6) + 6)


def test_attention_needs_tokens_and_a_layer_that_is_there(model):
    from p3net.counting import Counter
    from p3net.network.regressor import Regressor, RegressorArchitecture

    image = Image.new("RGB", (64, 64))
    with pytest.raises(InputError, match=r"there is no layer 2; this model has 1, from 1"):
        paper_figures.attention_of(checkpoint.load(model), image, layer=2)
    regressor = Counter(Regressor(RegressorArchitecture(backbone="small")).eval())
    with pytest.raises(InputError, match="a regressor has no density tokens"):
        paper_figures.attention_of(regressor, image)
