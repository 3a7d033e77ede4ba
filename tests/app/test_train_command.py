"""`p3net train` as a user runs it: real processes, real kills, a real full disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from p3net import checkpoint
from p3net.app import cli, train
from p3net.app.train_report import Line
from p3net.errors import InputError
from p3net.training import Progress

DATA = "synthetic:3?train=8&val=2&test=2&size=96x128"
TINY = {
    "weights": "none",
    "threshold": "0.0",
    "network.backbone": "small",
    "network.layers": "1",
    "network.hidden": "32",
    "network.heads": "2",
    "views.crop": "64",
    "views.zoom": "1.5",
    "streaming.labelled": "2",
    "streaming.unlabelled": "2",
    "recipe.workers": "0",
    "recipe.steps": "8",
    "recipe.validate_every": "3",
    "recipe.save_every": "2",
    "recipe.warmup": "2",
}


def arguments(out: Path, *more: str, **changes: str) -> list[str]:
    settings = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    pairs = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return ["train", DATA, "--labelled", "3", "--out", str(out), *pairs, *more]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.cli, list(words))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def start(words: list[str], *, code: str = "", **env: str) -> subprocess.Popen[str]:
    """The command in a process of its own, after some code that meddles with it."""
    program = f"{code}\nimport sys\nfrom p3net.app.cli import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, errors


def steps(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def assert_equal_runs(one: Path, two: Path) -> None:
    for name in ("last", "best", "model"):
        a, b = (checkpoint.read(each / f"{name}.safetensors") for each in (one, two))
        assert a[0].keys() == b[0].keys()
        assert all(torch.equal(a[0][key], b[0][key]) for key in a[0]), name
        assert (a[1]["step"], a[1]["history"]) == (b[1]["step"], b[1]["history"])
    first, second = steps(one), steps(two)
    assert [each["step"] for each in second] == list(range(1, len(first) + 1))
    for a, b in zip(first, second, strict=True):
        assert (a["losses"], a["records"], a["validation"]) == (
            b["losses"],
            b["records"],
            b["validation"],
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run of eight steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, errors = finish(start(arguments(folder)))
    assert code == 0, errors
    return folder


# --- what it says -----------------------------------------------------------------------------


def test_the_summary_says_where_everything_is_and_what_to_type_next(tmp_path):
    out = tmp_path / "run"
    result = run(*arguments(out, "--steps", "3"))
    assert result.exit_code == 0, result.output
    for name in ("model", "best", "last"):
        assert f"{out / name}.safetensors" in result.stdout
        assert (out / f"{name}.safetensors").is_file()
    for name in ("log.jsonl", "split", "run.json"):
        assert str(out / name) in result.stdout
    assert "3 labelled, 5 unlabelled, 2 validation" in result.stdout
    assert re.search(r"validation MAE \d+\.\d\d  RMSE \d+\.\d\d", result.stdout)
    assert f"Next: p3net evaluate {out} '{DATA}' --split test" in result.stdout
    assert re.search(
        r"step 3/3  pdm \S+  total \S+  ecr \S+  mask \d+%  MAE \S+ at 3  \S+ images/s  0:00 left",
        result.stderr,
    )
    assert len(steps(out)) == 3


def test_quiet_prints_nothing(tmp_path):
    result = run(*arguments(tmp_path / "run", "--steps", "1", "--quiet"))
    assert (result.exit_code, result.output) == (0, "")


def test_the_line_of_figures_worked_by_hand():
    """Smoothed by 0.9; two steps in 4 s leave six steps 12 s."""
    now = iter((0.0, 1.0, 4.0))
    line = Line(8, clock=lambda: next(now))
    line.text(Progress(1, {"pdm": 2.0}, {"mask_share": 0.5}, {"mae": 3.0}, 0.1, 10.0))
    text = line.text(Progress(2, {"pdm": 3.0}, {"mask_share": 0.6}, None, 0.1, 20.0))
    assert text == "pdm 2.1  mask 51%  MAE 3.0 at 1  11.0 images/s  0:12 left"


def test_tensorboard_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = run(*arguments(tmp_path / "run", "--tensorboard"))
    assert isinstance(result.exception, InputError)
    assert "p3net[tensorboard]" in str(result.exception)


def test_tensorboard_gets_every_figure(tmp_path, monkeypatch):
    written: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "run" / "tensorboard")
            assert purge_step == 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def close(self) -> None:
            written.append(("closed", 0))

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    result = run(*arguments(tmp_path / "run", "--steps", "2", "--tensorboard"))
    assert result.exit_code == 0
    expected = {("loss/pdm", 1), ("loss/ecr", 2), ("record/mask_share", 2), ("validation/mae", 2)}
    assert expected < set(written)
    assert written[-1] == ("closed", 0)


# --- what it refuses --------------------------------------------------------------------------


def test_a_folder_with_a_run_is_not_overwritten(whole):
    result = run(*arguments(whole))
    assert "holds a run already; continue it with --resume" in str(result.exception)


def test_resume_takes_the_settings_from_the_run_and_refuses_others(whole):
    again = run("train", "--out", str(whole), "--resume")
    assert again.exit_code == 0, again.output
    changed = run("train", "--out", str(whole), "--resume", "--steps", "9")
    assert "recipe.steps was 8 and is 9" in str(changed.exception)


def test_a_run_may_start_from_another(whole, tmp_path):
    words = ["--set", "recipe.steps=1", "--set", "recipe.workers=0", "--set", "views.crop=64"]
    words += ["--labelled", "3", "--out", str(tmp_path / "run")]
    result = run("train", DATA, *words, "--from", str(whole))
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["network"]["backbone"] == "small"
    assert record["chosen_intervals"]["how"] == "kept"
    assert "leave out --from" in str(
        run("train", "--out", str(whole), "--resume", "--from", "box").exception
    )


def test_resume_where_nothing_began_starts_what_the_same_words_start(tmp_path):
    for k in range(3):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{k}.png")
        (tmp_path / f"{k}.csv").write_text("x,y\n30,30\n")
    found = []
    for more in ([], ["--resume"]):
        out = tmp_path / f"run{len(more)}"
        words = ["--steps", "1", "--set", "recipe.workers=0", "--set", "views.crop=64", *more]
        result = run("train", f"folder:{tmp_path}", "--out", str(out), *words)
        assert result.exit_code == 0, result.output
        found.append(json.loads((out / "run.json").read_text())["settings"])
        assert f"Next: p3net count {out} IMAGES" in result.stdout  # there are no test images
    assert found[0] == found[1]
    assert found[0]["weights"] == "box"
    assert found[0]["labelled"] == "auto"


def test_a_preset_of_the_command_stands_over_that_of_a_file(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("preset: quick\n")
    words = ["--config", str(file), "--preset", "paper", "--steps", "1"]
    result = run(*arguments(tmp_path / "run", *words))
    assert result.exit_code == 0, result.output
    chosen = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert chosen["per_cell"] is False


def test_data_or_out_missing():
    assert "DATA is missing" in str(run("train").exception)
    assert "--out is missing" in str(run("train", "--resume").exception)
    result = run("train", "--out", "nowhere", "--resume")
    assert "DATA is missing" in str(result.exception)


def test_configuration_from_a_file_under_the_options(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("preset: paper\nrecipe: {steps: 9, save_every: 7}\nseed: 4\n")
    out = tmp_path / "run"
    result = run(*arguments(out, "--config", str(file), "--steps", "1"))
    assert result.exit_code == 0, result.output
    chosen = json.loads((out / "run.json").read_text())["settings"]
    assert (chosen["recipe"]["steps"], chosen["seed"], chosen["per_cell"]) == (1, 4, False)
    file.write_text("recipe: {stepz: 9}\n")
    result = run(*arguments(tmp_path / "other", "--config", str(file)))
    assert "a.yaml: unknown key 'recipe.stepz'; did you mean 'recipe.steps'?" in str(
        result.exception
    )


# --- kills ------------------------------------------------------------------------------------

SLOW_SAVE = """
import time
from p3net import checkpoint
save_file = checkpoint.save_file
def slow(tensors, path, metadata):
    save_file(tensors, path, metadata)
    print("writing", path, file=__import__("sys").stderr, flush=True)
    with open(path, "r+b") as file:  # half of the file is there
        file.truncate(file.seek(0, 2) // 2)
    time.sleep(60)
    save_file(tensors, path, metadata)
checkpoint.save_file = slow
"""


def wait_until(ready: object, process: subprocess.Popen[str], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not ready() and process.poll() is None:  # type: ignore[operator]
        assert time.monotonic() < limit, "too slow"
        time.sleep(0.01)


def kill_after(folder: Path, words: list[str], lines: int, delay: float = 0.0) -> None:
    """SIGKILL once the log has some lines more than it will keep."""
    log = folder / "log.jsonl"

    def written() -> bool:
        return log.exists() and log.read_bytes().count(b"\n") >= lines

    process = start(words, code=PACED)
    try:
        wait_until(written, process)
        time.sleep(delay)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL


PACED = """
import time
from p3net import training
append = training._append
def paced(log, progress):  # so that a kill finds the step it is meant for
    append(log, progress)
    time.sleep(0.1)
training._append = paced
"""


def kill_while_saving(folder: Path, words: list[str]) -> None:
    process = start(words, code=SLOW_SAVE)
    try:
        wait_until(lambda: list(folder.glob(".*.safetensors.*.tmp")), process)
        time.sleep(0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert list(folder.glob(".*.safetensors.*.tmp"))


def test_killed_at_three_moments_it_ends_with_the_same_bits(tmp_path, whole):
    out = tmp_path / "run"
    words = arguments(out)
    kill_after(out, words, lines=3)
    resume = ["train", "--out", str(out), "--resume"]
    kill_while_saving(out, resume)
    assert checkpoint.read(out / "last.safetensors")[1]["step"] == 2
    kill_after(out, resume, lines=5, delay=0.05)
    code, errors = finish(start(resume))
    assert code == 0, errors
    assert_equal_runs(whole, out)
    assert not list(out.glob(".*.tmp"))


@pytest.mark.slow
def test_killed_at_five_random_moments(tmp_path, whole):
    import random

    out, draw = tmp_path / "run", random.Random(1)
    words, seen = arguments(out), 0
    for _ in range(5):
        process = start(words, code=PACED)
        time.sleep(draw.uniform(1.0, 5.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        seen += process.returncode == -signal.SIGKILL
        if (out / "run.json").exists():
            words = ["train", "--out", str(out), "--resume"]
    assert seen > 0
    code, errors = finish(start(words))
    assert code == 0, errors
    assert_equal_runs(whole, out)


def test_a_second_process_in_the_folder_is_refused_and_harms_nothing(tmp_path, whole):
    out = tmp_path / "run"
    first = start(arguments(out), code=PACED)
    wait_until(lambda: (out / "log.jsonl").exists() and len(steps(out)) >= 1, first)
    first.send_signal(signal.SIGSTOP)  # so that it is there for certain
    try:
        code, errors = finish(start(["train", "--out", str(out), "--resume"]))
    finally:
        first.send_signal(signal.SIGCONT)
        ended = finish(first)[0]
    assert code == 2
    assert "another process is training in this folder" in errors
    assert ended == 0
    assert_equal_runs(whole, out)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_stop_loses_no_step_and_says_how_to_go_on(tmp_path, whole, how):
    out = tmp_path / "run"
    process = start(arguments(out), code=PACED)
    wait_until(lambda: (out / "log.jsonl").exists() and len(steps(out)) == 3, process)
    process.send_signal(how)
    code, errors = finish(process)
    assert code == 130
    assert "stopping after this step" in errors
    assert checkpoint.read(out / "last.safetensors")[1]["step"] == len(steps(out)) < 8
    assert f"continue with: p3net train --out {out} --resume" in errors
    assert "Traceback" not in errors
    assert finish(start(["train", "--out", str(out), "--resume"]))[0] == 0
    assert_equal_runs(whole, out)


def test_a_finished_run_is_left_as_it_is(tmp_path, whole):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    path = out / "model.safetensors"
    counter = checkpoint.load(path)
    own = {**counter.metadata, "calibration": {"scores": [0.5] * 20}}
    checkpoint.save(path, counter.network, own)
    before = path.read_bytes()
    assert finish(start(["train", "--out", str(out), "--resume"]))[0] == 0
    assert path.read_bytes() == before


# --- a full disk ------------------------------------------------------------------------------

FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from p3net import checkpoint
write = checkpoint.write
calls = 0
def limited(path, tensors, metadata):
    global calls
    calls += path.name == "last.safetensors"
    if calls == 2:  # no file may grow beyond 1 MB from now on
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    write(path, tensors, metadata)
checkpoint.write = limited
"""


def assert_intact(out: Path, code: int, errors: str, step: int) -> None:
    assert code == 2
    assert f"{out / 'last.safetensors'}: could not be written" in errors
    assert "The previous checkpoint is intact" in errors
    assert "Traceback" not in errors
    assert checkpoint.read(out / "last.safetensors")[1]["step"] == step
    assert checkpoint.load(out / "last.safetensors").network is not None
    assert not list(out.glob(".*.tmp"))


def test_a_file_that_may_not_grow_leaves_the_previous_checkpoint(tmp_path, whole):
    pytest.importorskip("resource")
    out = tmp_path / "run"
    code, errors = finish(start(arguments(out, recipe__validate_every="100"), code=FULL))
    assert_intact(out, code, errors, step=2)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 20 MB, where mounting is permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"mounting is not permitted: {mount.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_leaves_the_previous_checkpoint(small_disk):
    """The first checkpoint of 12 MB fits, the second one beside it does not."""
    out = small_disk / "run"
    code, errors = finish(start(arguments(out, recipe__validate_every="100")))
    assert_intact(out, code, errors, step=2)


# --- many processes ---------------------------------------------------------------------------


def torchrun(words: list[str], processes: int = 2) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "p3net", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paired", "mixed"])
def test_two_processes_have_the_losses_of_one(tmp_path, kind):
    changes = {"streaming__kind": kind, "streaming__batch": "4", "recipe__steps": "20"}
    folders = [tmp_path / "one", tmp_path / "two"]
    words = [arguments(folder, **changes) for folder in folders]
    assert finish(start(words[0]))[0] == 0
    process = torchrun(words[1])
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.count("Next: p3net evaluate") == 1
    one, two = map(steps, folders)
    assert len(one) == len(two) == 20
    for a, b in zip(one, two, strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-5, abs=1e-6)
        if kind == "paired":
            assert a["records"]["mask_share"] == pytest.approx(b["records"]["mask_share"])
        # One by one they may differ: Adam makes steps of rounding errors where the gradient is 0.
    a, b = (checkpoint.read(folder / "model.safetensors")[0] for folder in folders)
    apart = sum(float((a[name] - b[name]).square().sum()) for name in a)
    assert apart**0.5 < 1e-4 * sum(float(each.square().sum()) for each in a.values()) ** 0.5


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_a_message(tmp_path):
    out = tmp_path / "run"
    process = torchrun(arguments(out, recipe__steps="100000"))
    try:
        wait_until(lambda: (out / "log.jsonl").exists() and len(steps(out)) >= 2, process)
        children = subprocess.run(
            ["ps", "--ppid", str(process.pid), "-o", "pid="],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "exitcode" in errors  # torchrun's report; ours may be cut short by its SIGTERM


def test_a_lost_process_is_told_from_other_errors():
    assert train._lost_a_process(RuntimeError("[gloo/pair.cc] Connection closed by peer"))
    assert not train._lost_a_process(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
