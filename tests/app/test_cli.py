from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from p3net.app.cli import cli, main
from p3net.errors import InputError


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["p3net", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_cost_table():
    result = CliRunner().invoke(cli, ["cost"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if "│" in line}
    assert [f for f in rows["BL"].split() if "." in f] == ["21.50", "60.73", "21.50", "60.73"]
    expected = ["34.11", "69.34", "29.91", "65.57"]
    assert [f for f in rows["VGG19+Trans"].split() if "." in f] == expected
    assert [f for f in rows["P³Net"].split() if "." in f] == ["53.68", "60.66", "36.85", "57.75"]
    assert "384×384" in result.stdout


def test_the_cost_table_as_json():
    result = CliRunner().invoke(cli, ["cost", "--size", "64", "--json"])
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert set(figures) == {"BL", "VGG19+Trans", "P³Net"}
    assert figures["BL"]["parameters"] == 21_499_457
    # 60,728,573,952 at 384², and a network of convolutions grows with the area
    assert figures["BL"]["multiply_adds"] * 36 == 60_728_573_952
    keys = {"parameters", "multiply_adds", "module_parameters", "module_multiply_adds"}
    assert set(figures["P³Net"]) == keys


def test_a_wrong_size_is_one_line_and_code_2(monkeypatch, capsys):
    assert run_main(monkeypatch, "cost", "--size", "5") == 2
    captured = capsys.readouterr()
    assert captured.err == ("error: an image of 5×5 px is smaller than one cell of 8×8 px\n")
    assert captured.out == ""
    assert isinstance(CliRunner().invoke(cli, ["cost", "--size", "-1"]).exception, InputError)


def test_words_that_are_no_command(monkeypatch, capsys):
    assert run_main(monkeypatch, "cost", "--size", "wide") == 2
    assert run_main(monkeypatch, "fly") == 2
    assert "No such command 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(monkeypatch, capsys, flag):
    assert run_main(monkeypatch, flag) == 0
    text = capsys.readouterr().out
    assert "cost" in text
    assert "data" in text


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("p3net.app.cli.cli", interrupt)
    assert run_main(monkeypatch, "cost") == 130
    assert capsys.readouterr().err == "stopped\n"


def test_help_imports_nothing_heavy():
    """Only typer and what it needs: help and completion answer at once."""
    script = (
        "import sys\n"
        "sys.argv = ['p3net', '--help']\n"
        "from p3net.app.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'cv2', 'PIL', 'pydantic', 'matplotlib', 'yaml'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    begin = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    seconds = time.perf_counter() - begin
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
    assert result.stderr.strip() == "[]"
    assert seconds < 5  # well under half a second on an idle machine; torch alone takes two


def test_python_m_p3net():
    result = subprocess.run(
        [sys.executable, "-m", "p3net", "--help"], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "cost" in result.stdout
