"""Every file in experiments/: parses at both scales, builds, and takes two steps at small scale."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import p3net
from p3net import study, trial
from p3net.app.experiment_report import cost_markdown, markdown
from p3net.configuration import read_yaml, settings
from p3net.network.p3net import P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture

FOLDER = Path(__file__).parent.parent / "experiments"
FILES = sorted(FOLDER.glob("*.yaml"))
SETS = ("sha", "shb", "qnrf", "jhu", "nwpu")

TINY: dict[str, Any] = {
    "data": "synthetic:1?train=40&val=0&test=8&size=64x64",
    "weights": "none",
    "network": {"backbone": "small", "hidden": 32, "heads": 2},
    "views": {"crop": 64},
    "streaming": {"labelled": 1, "unlabelled": 1},
    "recipe": {"steps": 2, "save_every": 1000},
}


@pytest.mark.parametrize("path", sorted((FOLDER / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_are_settings_of_a_run(path):
    given = read_yaml(path)
    chosen = settings({**given, "data": "photos"}, preset="quick", source=path)
    assert chosen.recipe.steps == given["recipe"]["steps"]
    assert (FOLDER.parent / chosen.validation).is_file()


def test_no_table_is_missing():
    expected = (
        "branches cost decoding distributions ecr full_supervision lambda losses main methods "
        "norm partitions queries threshold weather"
    )
    assert [path.stem for path in FILES] == expected.split()


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """One folder for all files: what one has run serves the others."""
    return tmp_path_factory.mktemp("experiments")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_builds_and_takes_two_steps_at_small_scale(path, out):
    torch.set_num_threads(1)
    table = study.read(path)
    found = study.trials(table, "small", seeds=1, assign=TINY, source=path)
    if table.timing is not None:
        timing = study.Timing(count_px=64, time_px=32, rounds=1)
        lines = study.costs(table, found, timing)
        text = cost_markdown(table, lines, "a machine")
        assert all(line.title in text for line in lines)
        return
    for each in found:
        trial.perform(each, out)
        assert trial.state(each, out) == trial.State("done", 2)
    rows = study.gather(table, found, out)
    assert [row.seeds for row in rows] == [1] * len(rows)
    text = markdown(table, "small", rows)
    assert all(f"| {row.title} | " in text for row in rows)
    assert "Small scale" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_runs_are_valid_at_the_scale_of_the_paper(path):
    table = study.read(path)
    found = study.trials(table, "paper", data=dict.fromkeys(SETS, "sets"), source=path)
    assert found
    networks = {each.settings.network for each in found}
    with torch.device("meta"):  # shapes alone
        for architecture in networks:
            if isinstance(architecture, RegressorArchitecture):
                Regressor(architecture)
            else:
                P3Net(architecture)
    for each in found:
        chosen = each.settings
        kind = chosen.data.partition(":")[0]
        assert (chosen.network.backbone, chosen.recipe.learning_rate) == ("vgg19", 1e-5)
        assert chosen.views.crop == (256 if kind == "sha" else 512)
        assert (each.split == "val") == (kind == "nwpu")


def test_no_file_names_a_place_on_a_machine():
    for path in FOLDER.rglob("*.yaml"):
        for place in ("/home", "/work", "/tmp", "/root", "C:\\", "/data/"):
            assert place not in path.read_text(), path


def test_the_weights_of_ecr_keep_the_proportions_of_the_paper_at_small_scale():
    trials = list(study.trials(study.read(FOLDER / "lambda.yaml"), "small", seeds=1))
    [own] = [each.settings.recipe.terms["ecr"].weight for each in trials if each.name == "0.01"]
    for each in trials:
        weight = each.settings.recipe.terms["ecr"].weight if each.name != "0" else 0.0
        assert weight == pytest.approx(own * float(each.name) / 0.01)


def test_the_same_run_in_two_tables_is_one_run():
    """P³Net with 5 % of the labels stands in nearly every table and is trained once."""
    keys = {
        path.stem: {each.key for each in study.trials(study.read(path), "small")} for path in FILES
    }
    shared = "branches ecr lambda losses main methods norm partitions queries threshold weather"
    common = set.intersection(*(keys[name] for name in shared.split()))
    assert len(common) == 3  # one a seed


LABELS = """
    eq:contdistribution eq:distribution eq:pdm eq:attn eq:classification eq:confidence
    eq:consistency algo:model fig:structure fig:rationale fig:comp_unlabel fig:sdds fig:stds
    fig:stss fig:dtss fig:viz fig:viz2 tab:semi-performance tab:nwpu tab:unlabeled tab:domain
    tab:dm_loss tab:direct tab:partition tab:lambda tab:weather tab:distributions tab:xi
    tab:performance tab:cost tab:alternatives tab:inde
"""
"""Of every equation, algorithm, figure and table in the paper's source."""


def test_the_map_of_the_paper_is_complete_and_leads_somewhere():
    root = FOLDER.parent
    text = (root / "docs" / "paper-map.md").read_text(encoding="utf-8")
    assert [label for label in LABELS.split() if label not in text] == []
    for path in re.findall(r"`(tests/[\w/.]*)`", text):
        assert (root / path).exists(), path
    assert set(re.findall(r"`(\w+\.yaml)`", text)) == {path.name for path in FILES}
    for name in set(
        re.findall(
            r"`((?:losses|methods|network|intervals|targets|training|data|study|"
            r"trial|evaluation|configuration|recipe|app)\.[\w.]+)`",
            text,
        )
    ):
        if name.startswith("recipe.terms") or name.endswith(".yaml"):  # a setting, a file
            continue
        found: Any = p3net
        for part in name.split("."):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)
