"""Training behind the page: real processes, started, stopped, resumed, orphaned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from p3net.app.web import runs as module
from p3net.app.web.runs import Runs, UnknownRunError
from p3net.errors import InputError


def wait_for(condition, seconds: float = 120):
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "too slow"
        time.sleep(0.05)
    return found


@pytest.fixture
def marked(folder):
    """Three of the six images have points."""
    for number, rows in ((1, "20 30\n60 70\n"), (2, "40 50\n"), (3, "10 10\n90 20\n100 80\n")):
        (folder / f"IMG_{number}.txt").write_text(rows)
    return folder


def test_start_stop_resume_finish(marked, overrides):
    runs = Runs(marked, marked / ".p3net" / "runs", overrides)
    number = runs.start(steps=100_000, seed=1, validation=0.34)
    with pytest.raises(InputError, match="run 1 is going on"):
        runs.start(steps=1, seed=1, validation=0)
    with pytest.raises(InputError, match="run 1 is going on"):
        runs.resume(number)
    wait_for(lambda: runs.status(1).step >= 3)
    assert (runs.status(1).state, runs.status(1).steps, runs.active()) == ("running", 100_000, 1)
    other = Runs(marked, runs.home)  # a server started after a crash knows it too, and can stop it
    assert other.active() == 1
    other.stop(1)
    status = runs.status(1)
    assert (status.state, status.message, runs.newest_finished()) == ("stopped", "", None)
    assert status.images == {"labelled": 2, "unlabelled": 3, "validation": 1}
    done = status.step
    # marks added meanwhile do not stand in the way
    (marked / "IMG_4.txt").write_text("5 5\n")
    runs.resume(1)
    wait_for(lambda: runs.status(1).step > done or runs.status(1).state != "running")
    assert runs.status(1).state == "running", runs.status(1).message
    runs.close()
    assert runs.active() is None


def test_a_finished_run_has_a_model_and_curves(marked, overrides):
    runs = Runs(marked, marked / ".p3net" / "runs", overrides)
    assert runs.start(steps=4, seed=2, validation=0.34) == 1
    wait_for(lambda: runs.status(1).state != "running")
    status = runs.status(1)
    assert (status.state, status.step) == ("finished", 4), status.message
    assert [step for step, _ in status.loss] == [1, 2, 3, 4]
    assert [step for step, _ in status.validation] == [1, 2, 3, 4]
    lines = (runs.path(1) / "log.jsonl").read_text().splitlines()
    assert status.validation[-1][1] == json.loads(lines[-1])["validation"]["mae"]
    assert runs.newest_finished() == 1
    with pytest.raises(InputError, match="finished; start another"):
        runs.resume(1)
    with pytest.raises(InputError, match="not running"):
        runs.stop(1)


def test_what_went_wrong_is_told(marked):
    runs = Runs(marked, marked / ".p3net" / "runs", ("network.backbone=smal",))
    number = runs.start(steps=2, seed=1, validation=0)
    wait_for(lambda: runs.status(number).state != "running")
    status = runs.status(number)
    assert (status.state, "network.backbone" in status.message) == ("failed", True)
    with pytest.raises(InputError, match="never began"):
        runs.resume(number)


def test_nothing_marked_cannot_be_trained_on(folder):
    runs = Runs(folder, folder / ".p3net" / "runs")
    with pytest.raises(InputError, match="no annotated training image"):
        runs.start(steps=2, seed=1, validation=0.2)
    assert runs.numbers() == []
    with pytest.raises(UnknownRunError):
        runs.status(1)


def test_everything_for_validation_leaves_nothing_to_learn(folder):
    (folder / "IMG_1.txt").write_text("1 1\n")
    runs = Runs(folder, folder / ".p3net" / "runs")
    with pytest.raises(InputError, match="leaves none to label"):
        runs.start(steps=2, seed=1, validation=0.9)


def test_a_process_that_ignores_the_interrupt_is_killed(folder, tmp_path):
    run = tmp_path / "runs" / "1"
    run.mkdir(parents=True)
    lock = module.claim(run / "lock")
    code = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "print('deaf', flush=True); time.sleep(99)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=(lock,), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout as words:
        assert words.readline() == b"deaf\n"
    os.pwrite(lock, str(process.pid).encode(), 0)
    os.close(lock)
    Runs(folder, tmp_path / "runs").stop(1, patience_s=0.3)
    assert process.wait(10) == -signal.SIGKILL


def test_long_curves_are_thinned_to_means():
    curve = [(step, float(step)) for step in range(1, 701)]
    thin = module._thinned(curve)
    assert len(thin) == 234
    assert thin[0] == (3, 2.0)
    assert thin[-1] == (700, 700.0)
    assert module._thinned([]) == []


def test_half_a_line_of_a_log_is_left_for_later(tmp_path):
    (tmp_path / "log").write_text('{"step": 1}\n{"step": 2')
    assert module._log(tmp_path / "log") == [{"step": 1}]
