from __future__ import annotations

import base64
import io
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from p3net.app import demo
from p3net.app.cli import cli
from p3net.app.demo_page import pick_scenes
from p3net.errors import InputError
from p3net.metrics import Estimate

TINY = {
    "data": "synthetic:2?train=6&val=0&test=5&size=64x96",
    "labelled": "3",
    "validation": "0",
    "weights": "none",
    "network": {"backbone": "small", "layers": 1, "hidden": 32},
    "views": {"crop": 64},
    "streaming": {"labelled": 1, "unlabelled": 1},
    "intervals_count": 5,
    "recipe": {"steps": 99, "workers": 0, "choose": "last"},
}


class Page(HTMLParser):
    """The pictures and the table's rows of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pictures: list[str] = []
        self.links: list[str] = []
        self.rows: dict[str, list[str]] = {}
        self.row = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.pictures += [given[name] for name in ("src", "srcset") if name in given]
        self.links += [given[name] for name in ("href",) if name in given]
        if tag == "tr":
            self.row = given.get("data-run", "")
        if tag == "td" and self.row:
            self.rows.setdefault(self.row, []).append("")

    def handle_endtag(self, tag):
        if tag == "tr":
            self.row = ""

    def handle_data(self, data):
        if self.row and self.rows.get(self.row):
            self.rows[self.row][-1] += data


def run(out: Path, *arguments: object) -> Result:
    return CliRunner().invoke(cli, ["demo", "--out", str(out), *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A whole demo of three steps."""
    out = tmp_path_factory.mktemp("runs") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.SETTINGS, "every run", TINY)
        patch.setitem(demo.SETTINGS, "labels", {"method": "supervised"})
        patch.setitem(demo.SETTINGS, "p3net", {"method": "p3net"})
        patch.setitem(demo.SETTINGS, "all", {"method": "supervised", "labelled": "100%"})
        result = run(out, "--steps", 3)
        assert result.exit_code == 0, (result.output, result.exception)
        yield out, result


def test_the_table_in_the_terminal(finished):
    out, result = finished
    lines = [line for line in result.stdout.splitlines() if "scenes │" in line]
    figures = json.loads((out / "results.json").read_text())["runs"]
    assert len(lines) == len(figures) == 3
    for line, found in zip(lines, figures.values(), strict=True):
        assert found["title"] in line
        assert f"{found['mae']['value']:.2f}" in line
    assert str(out / "index.html") in result.stdout.replace("\n", "")
    assert "done" in result.stderr


def test_the_pages_table_equals_the_results_and_the_results_the_images(finished):
    out, _ = finished
    page = Page((out / "index.html").read_text(encoding="utf-8"))
    results = json.loads((out / "results.json").read_text())
    assert list(page.rows) == list(results["runs"]) == ["labels", "p3net", "all"]
    for name, cells in page.rows.items():
        found = results["runs"][name]
        assert cells[0] == found["title"]
        assert int(cells[1]) == found["labelled_images"] == (6 if name == "all" else 3)
        for cell, metric, digits in zip(cells[2:5], ("mae", "rmse", "nae"), (2, 2, 3), strict=True):
            assert float(cell.split()[0]) == round(found[metric]["value"], digits)
        errors = [abs(each["counted"] - each["truth"]) for each in found["per_image"]]
        assert found["mae"]["value"] == pytest.approx(sum(errors) / 5)
    assert results["runs"]["p3net"]["unlabelled_images"] == 3


def test_every_picture_is_in_the_page_and_nothing_is_asked_for_elsewhere(finished):
    out, _ = finished
    text = (out / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.pictures) >= 4 + 8  # two plots, light and dark, and a scene at least
    for source in page.pictures:
        head, _, content = source.partition(",")
        assert head in ("data:image/png;base64", "data:image/jpeg;base64")
        with Image.open(io.BytesIO(base64.b64decode(content, validate=True))) as image:
            image.load()
            assert min(image.size) > 50
    assert page.links == []
    assert "http" not in text.replace("http-equiv", "")


def test_the_page_says_what_happened(finished):
    out, _ = finished
    text = (out / "index.html").read_text(encoding="utf-8")
    results = json.loads((out / "results.json").read_text())
    assert results["verdict"] in text
    change = f"{results['p3net_less_labels']['mae']:+.2f}".replace("-", "−")
    assert f"changed the error by {change} people per" in text
    truths = [each["truth"] for each in results["runs"]["all"]["per_image"]]
    assert f"holds {sum(truths) / 5:.0f} people on average" in text


def test_both_semi_and_alone_had_the_same_labels(finished):
    out, _ = finished
    lists = {name: (out / name / "split" / "labelled.txt").read_text() for name in demo.RUNS}
    assert lists["labels"] == lists["p3net"] != lists["all"]


def test_called_again_it_trains_nothing_and_gives_the_same(finished):
    out, _ = finished
    before = (out / "results.json").read_bytes()
    logs = [(out / name / "log.jsonl").stat().st_mtime_ns for name in demo.RUNS]
    assert run(out, "--steps", 3).exit_code == 0
    assert (out / "results.json").read_bytes() == before
    assert [(out / name / "log.jsonl").stat().st_mtime_ns for name in demo.RUNS] == logs


def test_another_demo_in_the_folder_is_refused(finished):
    out, _ = finished
    result = run(out, "--steps", 3, "--seed", 2)
    assert isinstance(result.exception, InputError)
    assert "other settings" in str(result.exception)


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "run.json").write_text("{")
    assert "damaged" in str(run(tmp_path).exception)
    (tmp_path / "file").write_text("")
    assert "cannot be made" in str(run(tmp_path / "file").exception)


def test_a_failed_run_gives_its_last_lines_and_ends_the_others(monkeypatch, tmp_path):
    monkeypatch.setitem(demo.SETTINGS, "every run", TINY)
    monkeypatch.setitem(demo.SETTINGS, "p3net", {"labelled": "70"})
    monkeypatch.setattr(demo, "cores", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    result = run(tmp_path, "--steps", 3)
    assert isinstance(result.exception, InputError)
    assert "the run 'p3net' ended with code 1" in str(result.exception)
    assert "70" in str(result.exception)
    assert not (tmp_path / "results.json").exists()
    assert os.environ["OMP_NUM_THREADS"] == "7"  # as it was


def test_a_killed_run_is_named_with_its_signal(tmp_path):
    (tmp_path / "all.txt").write_text("one\ntwo\n")
    text = demo._last_words("all", -9, tmp_path / "all.txt")
    assert "'all' was killed by signal 9" in text
    assert text.endswith("one\ntwo")
    (tmp_path / "all.txt").write_text("")
    assert "memory" in demo._last_words("all", -9, tmp_path / "all.txt")


def images(*errors: float) -> list[dict[str, float]]:
    return [{"error": error} for error in errors]


def test_the_comparison_is_by_pairs():
    apart = demo.compare(images(-10, 20, 30), images(9, -19, 29))
    assert (apart.value, apart.low, apart.high) == pytest.approx((-1, -1, -1))
    apart = demo.compare(images(1, 1, 1, 1), images(0, 2, 0, 2))
    assert apart.value == 0
    assert apart.low < 0 < apart.high


@pytest.mark.parametrize(
    ("mae", "apart", "words"),
    [
        ((10, 8, 5), (-2, -3, -1), ("helped", "by 20%", "40% of the way")),
        ((10, 4, 5), (-6, -7, -5), ("helped", "as far as labelling everything did")),
        ((10, 12, 5), (2, 1, 3), ("did harm", "by 20%", "--seed 2")),
        ((10, 9, 5), (-1, -3, 1), ("does not show", "within chance", "-3.00 to +1.00")),
        ((10, 9.95, 5), (-0.05, -0.07, -0.03), ("does not show", "is small")),
        ((0, 0, 0), (0, 0, 0), ("does not show",)),
    ],
)
def test_the_verdict_tells_what_came_out(mae, apart, words):
    text = demo.verdict(dict(zip(demo.RUNS, mae, strict=True)), Estimate(*apart))
    assert all(each in text for each in words), text
    assert ("helped:" in text) == (words[0] == "helped")


def test_scenes_are_picked_by_their_counts():
    truths = {f"s{i}": i for i in range(1, 11)} | {"nobody": 0}
    assert pick_scenes(truths) == {
        "sparse": "s3",
        "medium": "s6",
        "dense": "s10",
        "empty": "nobody",
    }
    assert pick_scenes({"one": 4}) == {"sparse": "one"}
    assert pick_scenes({"none": 0}) == {"empty": "none"}


def test_the_settings_as_shipped_are_valid_and_differ_only_as_said():
    chosen = demo.run_settings(seed=5, steps=7)
    dumps = {name: each.model_dump() for name, each in chosen.items()}
    assert [each["method"] for each in dumps.values()] == ["supervised", "p3net", "supervised"]
    for each in dumps.values():
        assert each["seed"] == 5
        assert each["recipe"]["steps"] == 7
    labels, ours = dumps["labels"], dumps["p3net"]
    assert labels["labelled"] == ours["labelled"] != dumps["all"]["labelled"]
    assert {key for key in labels if labels[key] != ours[key]} <= {"method", "recipe", "streaming"}
