"""A table as a file: what its runs are made of, what is done, its figures; one run by itself."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from p3net import checkpoint, study, trial
from p3net.configuration import Settings, settings
from p3net.data.catalogue import open_dataset
from p3net.errors import InputError
from p3net.training import Progress

DATA = "synthetic:3?train=8&val=2&test=3&size=96x128"
TINY: dict[str, Any] = {
    "data": DATA,
    "labelled": "3",
    "validation": "0",
    "weights": "none",
    "network": {"backbone": "small", "layers": 1, "hidden": 32, "heads": 2},
    "views": {"crop": 64},
    "streaming": {"labelled": 1, "unlabelled": 1},
    "recipe": {"steps": 4, "workers": 0, "save_every": 2, "average": 0.0},
}
FILE: dict[str, Any] = {
    "title": "A table",
    "where": "tab:none",
    "claim": "Nothing.",
    "base": {"threshold": 0.1, "strong": 0.2},
    "parts": {"labels": {"method": "supervised", "threshold": 0.2}, "more": {"threshold": 0.3}},
    "small": {
        "preset": "quick",
        "seeds": 2,
        "set": {**TINY, "strong": 0.3},
        "parts": {"more": {"hidden": 0.5}},
    },
    "paper": {"preset": "paper", "set": {"data": "sha"}},
    "runs": {
        "a": {"title": "A", "published": {"mae": 50.0, "rmse": 80.0}},
        "b": {
            "title": "B",
            "use": ["labels", "more"],
            "set": {"sigma": 6},
            "small": {"sigma": 5},
            "paper": {"sigma": 4},
            "against": "a",
            "published": {"mae": 60.0},
        },
        "c": {"title": "C", "only": "paper", "split": "val"},
    },
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "table.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
    return path


def tiny(**more: Any) -> Settings:
    return settings({**TINY, **more}, preset="quick")


# --- the file -----------------------------------------------------------------------------------


def test_a_run_is_its_base_scale_parts_and_own_settings_in_that_order(tmp_path):
    found = study.trials(study.read(write(tmp_path)), "small")
    assert [(t.name, t.settings.seed) for t in found] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    a, b = found[0].settings, found[1].settings
    assert (a.threshold, a.strong, a.hidden, a.sigma, a.method) == (0.1, 0.3, 0, 8, "p3net")
    assert (b.threshold, b.hidden, b.sigma, b.method) == (0.3, 0.5, 5, "supervised")
    assert a.per_cell  # of the preset
    at_paper = study.trials(study.read(tmp_path / "table.yaml"), "paper", data={"sha": "sets/A"})
    assert [(t.name, t.split) for t in at_paper] == [("a", "test"), ("b", "test"), ("c", "val")]
    b = at_paper[1].settings
    assert (b.data, b.sigma, b.hidden, b.strong) == ("sha:sets/A", 4, 0, 0.2)


def test_lines_seeds_and_settings_may_be_chosen(tmp_path):
    table = study.read(write(tmp_path))
    found = study.trials(table, "small", names=["b"], seeds=3, assign={"recipe": {"steps": 9}})
    assert [(t.name, t.settings.seed, t.settings.recipe.steps) for t in found] == [
        ("b", seed, 9) for seed in (1, 2, 3)
    ]
    with pytest.raises(InputError, match=r"no run 'c' at small scale; there are a, b"):
        study.trials(table, "small", names=["c"])


def test_the_place_of_a_set_is_given_or_in_the_environment(tmp_path, monkeypatch):
    table = study.read(write(tmp_path))
    monkeypatch.delenv("P3NET_SHA", raising=False)
    with pytest.raises(InputError, match=r"where is sha\? Say --data sha=PATH, or set P3NET_SHA"):
        study.trials(table, "paper")
    monkeypatch.setenv("P3NET_SHA", "elsewhere")
    assert study.trials(table, "paper")[0].settings.data == "sha:elsewhere"
    assert study.trials(table, "paper", data={"sha": "x"})[0].settings.data == "sha:x"


def test_a_file_stands_over_the_one_it_is_like(tmp_path):
    (tmp_path / "common.yaml").write_text(
        yaml.safe_dump({name: FILE[name] for name in ("small", "paper", "parts")})
    )
    own = {name: FILE[name] for name in ("title", "where", "claim", "runs")}
    own |= {"like": "common.yaml", "small": {"seeds": 5}}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(own))
    table = study.read(path)
    assert (table.small.seeds, table.small.preset, table.title) == (5, "quick", "A table")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tilte": "x"}, r"table\.yaml: tilte: Extra inputs"),
        ({"runs": {"a": {"use": ["x"], "title": "A"}}}, "run a uses 'x', which is none of the"),
        ({"runs": {"a": {"against": "x", "title": "A"}}}, "run a is against 'x'"),
        ({"runs": {"a": {}}}, r"runs\.a\.title: Field required"),
        ({"small": {"preset": "quick", "seeds": 0}}, r"small\.seeds"),
        ({"like": "absent.yaml"}, r"absent\.yaml: cannot be read as YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        study.read(write(tmp_path, **changes))


def test_a_wrong_setting_names_file_and_run(tmp_path):
    path = write(tmp_path, base={"treshold": 1})
    with pytest.raises(InputError, match=r"table\.yaml, run a: unknown key 'treshold'"):
        study.trials(study.read(path), "small", source=path)


# --- the hash -----------------------------------------------------------------------------------


def test_a_run_is_known_by_the_hash_of_its_settings():
    one = trial.Trial("a", tiny(), "test")
    text = json.dumps(tiny().model_dump(mode="json"), sort_keys=True)
    assert one.key == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert trial.Trial("another name", tiny(), "test").key == one.key
    others = (tiny(seed=2), tiny(threshold=0.4), tiny(recipe={**TINY["recipe"], "steps": 5}))
    assert len({one.key, *(trial.Trial("a", each, "test").key for each in others)}) == 4


# --- one run ------------------------------------------------------------------------------------


class CutError(Exception):
    pass


def cut_after(steps: int) -> Any:
    def report(now: Progress) -> None:
        if now.step == steps:
            raise CutError

    return report


def test_a_run_cut_off_goes_on_and_ends_as_if_nothing_had_happened(tmp_path):
    one = trial.Trial("a", tiny(), "test")
    assert trial.state(one, tmp_path / "x") == trial.State("missing")
    with pytest.raises(CutError):
        trial.perform(one, tmp_path / "x", cut_after(3))
    assert trial.state(one, tmp_path / "x") == trial.State("begun", 3)
    seen: list[int] = []
    trial.perform(one, tmp_path / "x", lambda now: seen.append(now.step))
    assert seen == [3, 4]  # the checkpoint is of step 2
    assert trial.state(one, tmp_path / "x") == trial.State("done", 4)
    trial.perform(one, tmp_path / "y")
    cut, whole = (json.loads(one.result(tmp_path / n).read_text()) for n in "xy")
    assert cut["per_image"] == whole["per_image"]
    model = checkpoint.load(one.folder(tmp_path / "x"))
    test = open_dataset(DATA).part("test")
    for image, sample in zip(cut["per_image"], test.samples, strict=True):
        assert image["key"] == sample.key
        assert image["truth"] == len(sample.marks().points_xy)
        assert image["scene"] == sample.tags["scene"]
        assert image["counted"] == pytest.approx(model.count(sample.open()).count, rel=1e-5)
    assert cut["images"] == {"labelled": 3, "unlabelled": 5, "validation": 0, "test": 3}
    assert cut["crops"] == 2
    assert "1 thread" in cut["hardware"]
    before = one.result(tmp_path / "x").stat().st_mtime_ns
    trial.perform(one, tmp_path / "x", cut_after(1))  # done: no step is taken
    assert one.result(tmp_path / "x").stat().st_mtime_ns == before


def test_the_images_that_judge_may_not_choose(tmp_path):
    one = trial.Trial("a", tiny(validation="auto"), "val")
    with pytest.raises(InputError, match="the val images would choose the model and judge it"):
        trial.perform(one, tmp_path)
    fine = trial.Trial("a", tiny(validation="2"), "val")
    trial.perform(fine, tmp_path)
    record = json.loads(fine.result(tmp_path).read_text())
    assert [image["key"] for image in record["per_image"]] == [
        "val/val_0000.png",
        "val/val_0001.png",
    ]


@contextmanager
def other_process_in(folder):
    """Another process holds the run in this folder."""
    code = (
        "import sys; from pathlib import Path; from p3net.locking import alone\n"
        "with alone(Path(sys.argv[1]) / '.lock', wait=True): print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield


def test_two_processes_that_want_one_run_take_turns(tmp_path):
    one = trial.Trial("a", tiny(), "test")
    with other_process_in(one.folder(tmp_path)):
        waiting = threading.Thread(
            target=trial.perform, args=(one, tmp_path, cut_after(1)), daemon=True
        )
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        one.result(tmp_path).write_text("{}")  # the other process has finished it
    waiting.join(10)
    assert not waiting.is_alive()
    assert not (one.folder(tmp_path) / "log.jsonl").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"a run cannot be kept here: .*; choose another --out"):
        trial.perform(trial.Trial("a", tiny(), "test"), tmp_path / "file")


def test_scenes_are_rendered_once_and_stay_the_same(tmp_path, monkeypatch):
    plain = open_dataset("synthetic:5?train=2&val=0&test=1&size=64x96")
    first = trial._rendered_once(plain, tmp_path)
    for _ in range(2):
        for stored, sample in zip(first.samples, plain.samples, strict=True):
            assert (stored.key, stored.tags) == (sample.key, sample.tags)
            assert np.array_equal(np.asarray(stored.open()), np.asarray(sample.open()))
            assert np.array_equal(stored.marks().points_xy, sample.marks().points_xy)
    monkeypatch.setattr("p3net.data.synthetic.render", None)
    assert trial._rendered_once(plain, tmp_path).samples[0].open().size == (96, 64)
    other = trial._rendered_once(open_dataset("synthetic:6?train=1&val=0&test=0"), tmp_path)
    with pytest.raises(TypeError):  # another seed is not found among them, so it would be rendered
        other.samples[0].open()


# --- figures --------------------------------------------------------------------------------------


def finished(out: Path, one: trial.Trial, errors: list[float], scenes: str = "sss") -> None:
    """A run that counted 10 + error people where there were 10."""
    images = [
        {"key": str(i), "truth": 10, "counted": 10 + error, "scene": scene}
        for i, (error, scene) in enumerate(zip(errors, scenes, strict=True))
    ]
    one.folder(out).mkdir(parents=True)
    one.result(out).write_text(json.dumps({"per_image": images, "seconds": 60}))


def test_mean_deviation_and_ratio_worked_by_hand(tmp_path):
    """Seeds of line a err by 4 and 8, mean 6, sd √8; b by 3, half of a's: ratio 3 / 6."""
    table = study.read(write(tmp_path))
    found = study.trials(table, "small")
    finished(tmp_path, found[0], [4, -4, 4])
    finished(tmp_path, found[2], [8, 8, -8])
    finished(tmp_path, found[1], [3, 3, 3])
    a, b = study.gather(table, found, tmp_path)
    assert (a.seeds, a.mean("mae"), a.sd("mae")) == (2, 6, pytest.approx(8**0.5))
    assert a.mean("nae") == pytest.approx(0.6)
    assert (a.ratio, a.published) == (None, {"mae": 50, "rmse": 80})
    assert (b.seeds, b.mean("rmse"), b.sd("mae"), b.ratio) == (1, 3, None, 0.5)
    assert b.published_ratio == pytest.approx(60 / 50)
    assert a.sd("mae") == statistics.stdev([4, 8])


def test_what_is_not_done_has_no_figures(tmp_path):
    table = study.read(write(tmp_path))
    a, b = study.gather(table, study.trials(table, "small"), tmp_path)
    assert (a.seeds, a.mean("mae"), b.ratio) == (0, None, None)


def test_only_images_with_the_tags_are_judged(tmp_path):
    runs = {
        "all": {"title": "all"},
        "haze": {"title": "haze", "tags": {"scene": ["h", "n"]}},
        "none": {"title": "none", "tags": {"scene": ["x"]}},
    }
    table = study.read(write(tmp_path, runs=runs))
    found = study.trials(table, "small", seeds=1, names=["all", "haze"])
    assert found[0].key == found[1].key  # one run serves both lines
    finished(tmp_path, found[0], [1, 5, 9], "shn")
    every, haze = study.gather(table, found, tmp_path)
    assert (every.mean("mae"), haze.mean("mae")) == (5, 7)
    with pytest.raises(InputError, match="none: no image has the tags"):
        study.gather(table, study.trials(table, "small", seeds=1), tmp_path)


def test_damaged_figures_are_named(tmp_path):
    table = study.read(write(tmp_path))
    found = study.trials(table, "small")
    found[0].folder(tmp_path).mkdir(parents=True)
    found[0].result(tmp_path).write_text("{")
    with pytest.raises(InputError, match=r"test\.json: the figures of a run cannot be read"):
        study.gather(table, found, tmp_path)


def test_costs_count_and_time_every_network(tmp_path):
    runs = {"a": {"title": "A"}, "b": {"title": "B", "set": {"network": {"layers": 2}}}}
    table = study.read(write(tmp_path, runs=runs, timing={"count_px": 64, "time_px": 32}))
    assert table.timing is not None
    found = study.trials(table, "small", seeds=1)
    one, two = study.costs(table, found, table.timing)
    assert min(one.seconds, two.seconds) > 0
    d, hidden = 128, 32  # a layer: two attentions, three norms, two linear maps; in two branches
    layer = 2 * (4 * d * d + 4 * d) + 3 * 2 * d + 2 * d * hidden + d + hidden
    assert two.cost.parameters - one.cost.parameters == 2 * layer
