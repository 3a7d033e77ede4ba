from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from p3net.app import console
from p3net.app.contact_sheet import contact_sheet
from p3net.app.data import app
from p3net.data.catalogue import open_dataset
from p3net.errors import InputError


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three images of 300×280: three points, none, not annotated."""
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (280, 300, 3), dtype=np.uint8)
    for name in ("a", "b", "c"):
        Image.fromarray(pixels).save(folder / f"{name}.jpg")
    (folder / "a.txt").write_text("10 20\n30 40\n50 60\n")
    (folder / "b.txt").write_text("")
    return folder


def test_a_clean_folder(photos):
    result = run("check", photos)
    assert result.exit_code == 0
    text = flat(result.stdout)
    assert "read as folder" in text
    assert "images 3 (train 3)" in text
    assert "labelled 2" in text
    assert "points 3 points an image" in text
    assert "0 to 3, median 1.5, mean 1.5" in text
    assert "300 × 280 px" in text
    assert "no faults" in text
    assert "checking: 3/3" in result.stderr
    assert "checking" not in result.stdout


def test_the_histogram_in_text(photos):
    lines = run("check", photos).stdout.splitlines()
    bars = {line.split()[0]: line.split()[1:] for line in lines if "–" in line}
    assert bars == {
        "0–0": ["█" * 40, "1"],
        "1–1": ["0"],
        "2–2": ["0"],
        "3–3": ["█" * 40, "1"],
    }


def test_faults_with_their_files_and_exit_code_1(photos):
    whole = (photos / "c.jpg").read_bytes()
    (photos / "c.jpg").write_bytes(whole[: len(whole) // 3])
    (photos / "a.txt").write_text("10 20\n10 20\n999 1\n")
    (photos / "z.txt").write_text("1 2\n")
    result = run("check", photos)
    assert result.exit_code == 1
    text = result.stdout
    assert "error: the image cannot be read (1)" in text
    assert f"  {photos / 'c.jpg'}: truncated" in text
    assert f"  {photos / 'a.jpg'}: 1 of 3 points are repeated" in text
    assert f"  {photos / 'a.jpg'}: 1 of 3 points, the first at (999, 1)" in text
    assert f"  {photos / 'z.txt'}: no image belongs to it" in text
    assert "3 faults, 1 warnings" in text
    assert text.index("cannot be read") < text.index("outside") < text.index("more than once")


def test_warnings_leave_the_exit_code_at_0(photos):
    result = run("check", photos, "--crop", 290)
    assert result.exit_code == 0
    assert "warning: the image is smaller than the crop" in result.stdout
    assert "300 × 280 px, the crop is 290" in result.stdout
    assert "0 faults, 3 warnings" in result.stdout
    assert "no faults" in run("check", photos, "--crop", 0).stdout


def test_json_on_stdout_alone(photos):
    (photos / "b.txt").write_text("5 -1\n")
    result = run("check", photos, "--json", "--crop", 290)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["images"] == 3
    assert report["points"] == 4
    assert report["counts"] == {"least": 1, "median": 2.0, "mean": 2.0, "most": 3}
    assert report["histogram"] == {"edges": [0, 1, 2, 3, 4], "images": [0, 1, 0, 1]}
    assert report["smallest_hw"] == [280, 300]
    assert report["clean"] is False
    assert [f["severity"] for f in report["faults"]] == ["error", "warning", "warning", "warning"]
    assert report["faults"][0]["file"] == str(photos / "b.jpg")


def test_what_cannot_be_read_is_an_input_error(tmp_path):
    """The command line turns it into one message and exit code 2."""
    for spec in (tmp_path / "none", f"sha:{tmp_path}", "ucf:x"):
        result = run("check", spec)
        assert isinstance(result.exception, InputError)


def test_brackets_in_names_are_printed_as_they_are(photos):
    odd = photos.rename(photos.parent / "[red] day [1]")
    (odd / "c.jpg").write_bytes(b"")
    result = run("check", odd)
    assert result.exit_code == 1
    assert f"{odd / 'c.jpg'}: the image file is empty" in result.stdout
    assert result.stdout.splitlines()[0].endswith(str(odd))


def test_names_that_are_no_text(photos):
    odd = photos / "b\udcff.jpg"
    try:
        odd.write_bytes(b"")
    except (OSError, UnicodeError):
        pytest.skip("this file system takes no such names")
    result = run("check", photos)
    assert result.exit_code == 1
    assert "b?.jpg: the image file is empty" in result.stdout
    report = json.loads(run("check", photos, "--json").stdout)
    assert report["faults"][0]["file"] == str(odd)


def test_the_picture_shows_the_points(photos, tmp_path):
    Image.new("RGB", (640, 480), "white").save(photos / "a.jpg")
    (photos / "a.txt").write_text("160 120\n600 400\n5000 5000\n")
    result = run("check", photos, "--picture", tmp_path / "sheet.png")
    assert result.exit_code == 1  # a point is outside
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)
    assert sheet.shape == (8 + 240 + 18 + 8, 8 + 3 * (320 + 8), 3)
    first = sheet[8:248, 8:328]
    red = (first[..., 0] > 200) & (first[..., 1] < 100)
    rows, columns = np.nonzero(red)
    left = columns < 200
    # Half the scale: the dots' centres are at (80, 60) and (300, 200).
    assert abs(columns[left].mean() + 0.5 - 80) <= 0.5
    assert abs(rows[left].mean() + 0.5 - 60) <= 0.5
    assert abs(columns[~left].mean() + 0.5 - 300) <= 0.5
    assert abs(rows[~left].mean() + 0.5 - 200) <= 0.5


def test_the_sheet_survives_damaged_members_and_long_sets(photos):
    (photos / "b.jpg").write_bytes(b"no image")
    (photos / "a.txt").write_text("one two")
    sheet = contact_sheet(open_dataset(photos))
    assert sheet.size == (8 + 3 * 328, 8 + 266)
    for i in range(30):
        (photos / f"d{i}.jpg").write_bytes((photos / "c.jpg").read_bytes())
    assert contact_sheet(open_dataset(photos)).size == (8 + 4 * 328, 8 + 6 * 266)


@pytest.mark.parametrize("name", ["sheet.txt", "sheet", "none/sheet.png"])
def test_a_picture_that_cannot_be_written_is_said_first(photos, tmp_path, name):
    result = run("check", photos, "--picture", tmp_path / name)
    assert isinstance(result.exception, InputError)
    assert result.exception.source == str(tmp_path / name)
    assert "checking" not in result.stderr


def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(monkeypatch):
    def shown(*, terminal: bool, seconds: float) -> str:
        out, now = io.StringIO(), iter(seconds * i for i in range(99))
        fake = Console(file=out, force_terminal=terminal, width=70)
        monkeypatch.setattr(console, "stderr", fake)
        if not terminal:
            monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
        with console.progress(4, "counting [x]") as update:
            for done in range(1, 5):
                update(done)
        return out.getvalue()

    assert shown(terminal=False, seconds=0.1) == "counting [x]: 4/4\n"
    assert shown(terminal=False, seconds=9).splitlines() == [
        f"counting [x]: {done}/4" for done in range(1, 5)
    ]
    monkeypatch.undo()
    bar = shown(terminal=True, seconds=0)
    assert "4/4" in bar
    assert "counting [x]" in bar
    assert "━" in bar


def test_help_says_what_data_may_be():
    result = run("check", "--help")
    assert result.exit_code == 0
    assert "sha:PATH" in flat(result.stdout)
