"""Training runs of a folder: `p3net train` in processes of its own, watched through its files.

Runs lie in `.p3net/runs/N`. A run's process holds a lock there that ends with it, whatever
becomes of the server, so a run is known to go on or to have ended, by any server, at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p3net.app.web.store import claim
from p3net.data import splits
from p3net.data.catalogue import open_dataset
from p3net.errors import InputError

CURVE = 300
"""Points of a curve that a status holds, at most."""

SAVE_EVERY = 50
"""Steps that a stop or a kill can cost."""


class UnknownRunError(LookupError):
    """No run has this number."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a run stands, as its files say.

    Attributes:
        number: of the run, from 1.
        state: running, finished, stopped (it can be resumed) or failed.
        step: of `steps`, done.
        steps: of the whole run.
        loss: [step, sum of the weightless losses] at most `CURVE` times, averaged between.
        validation: [step, MAE] of each validation.
        images: numbers of labelled, unlabelled and validation images.
        message: what went wrong, where something did.
    """

    number: int
    state: str
    step: int = 0
    steps: int = 0
    loss: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    images: dict[str, int] = field(default_factory=dict)
    message: str = ""


class Runs:
    """The runs of one folder, one at a time.

    Args:
        folder: of the images.
        home: where the runs lie.
        overrides: settings for every run, `a.b=c`, over those of the page.
    """

    def __init__(self, folder: Path, home: Path, overrides: Sequence[str] = ()) -> None:
        self.folder = folder
        self.home = home
        self.overrides = tuple(overrides)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()
        self._locking = threading.Lock()  # a look at a run's lock must not be taken for its owner

    def numbers(self) -> list[int]:
        """All runs, the oldest first."""
        found = self.home.iterdir() if self.home.is_dir() else ()
        return sorted(int(path.name) for path in found if path.name.isdecimal())

    def path(self, number: int) -> Path:
        """The folder of a run."""
        if number not in self.numbers():
            raise UnknownRunError(number)
        return self.home / str(number)

    def active(self) -> int | None:
        """The run that goes on, if one does."""
        return next((n for n in reversed(self.numbers()) if self._running(n)), None)

    def newest_finished(self) -> int | None:
        """The last run that has a model."""
        done = (n for n in reversed(self.numbers()) if self._model(n) and not self._running(n))
        return next(done, None)

    def start(self, *, steps: int, seed: int, validation: float) -> int:
        """Train on everything that is marked now, but for the share kept for validation.

        The split is fixed here, so that marks added later do not keep the run from resuming.
        """
        with self._starting:
            self._refuse_second()
            dataset = open_dataset(f"folder:{self.folder}")
            split = splits.draw(dataset, labelled=1.0, validation=validation, seed=seed)
            number = max(self.numbers(), default=0) + 1
            run = self.home / str(number)
            splits.write(split, run / "split")
            words = [f"folder:{self.folder}", "--labelled", str(run / "split")]
            words += ["--steps", str(steps), "--seed", str(seed)]
            own = (
                f"recipe.save_every={min(SAVE_EVERY, steps)}",
                f"recipe.validate_every={max(1, steps // 10)}",
            )
            for pair in (*own, *self.overrides):
                words += ["--set", pair]
            self._spawn(number, words)
            return number

    def resume(self, number: int) -> None:
        """Continue a run that was stopped, bit for bit."""
        with self._starting:
            run = self.path(number)
            self._refuse_second()
            if self._model(number):
                raise InputError(f"run {number} is finished; start another")
            if not (run / "run.json").is_file():
                raise InputError(f"run {number} never began, so there is nothing to resume")
            self._spawn(number, ["--resume"])

    def stop(self, number: int, *, patience_s: float = 20.0) -> None:
        """Interrupt a run and wait until it has ended; it can be resumed."""
        run = self.path(number)
        if not self._running(number):
            raise InputError(f"run {number} is not running")
        text = (run / "lock").read_text()
        process = int(text) if text.isdecimal() else 0
        for how in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                if process:
                    os.kill(process, how)
            if self._wait(number, patience_s):
                return

    def close(self) -> None:
        """Stop what this server started."""
        for number in list(self._children):
            if self._running(number):
                self.stop(number)

    def status(self, number: int) -> RunStatus:
        """Read how a run stands."""
        run = self.path(number)
        lines = _log(run / "log.jsonl")
        running = self._running(number)
        message = ""
        if running:
            state = "running"
        elif self._model(number):
            state = "finished"
        else:
            message = _complaint(run / "output.txt")
            state = "failed" if message else "stopped"
        return RunStatus(
            number,
            state,
            step=int(lines[-1]["step"]) if lines else 0,
            steps=_steps(run),
            loss=_thinned([(line["step"], sum(line["losses"].values())) for line in lines]),
            validation=[
                (line["step"], line["validation"]["mae"]) for line in lines if line["validation"]
            ],
            images=_images(run / "split"),
            message=message,
        )

    def _refuse_second(self) -> None:
        if (number := self.active()) is not None:
            raise InputError(f"run {number} is going on; stop it or wait for its end")

    def _model(self, number: int) -> bool:
        return (self.home / str(number) / "model.safetensors").is_file()

    def _running(self, number: int) -> bool:
        child = self._children.get(number)
        if child is not None and child.poll() is not None:
            self._children.pop(number, None)
        with self._locking:
            lock = claim(self.home / str(number) / "lock")
            if lock is not None:
                os.close(lock)
        return lock is None

    def _wait(self, number: int, patience_s: float) -> bool:
        """Whether the run ends in time."""
        pause = threading.Event()
        for _ in range(round(patience_s / 0.05)):
            if not self._running(number):
                return True
            pause.wait(0.05)
        return False

    def _spawn(self, number: int, words: Sequence[str]) -> None:
        run = self.home / str(number)
        with self._locking:
            lock = claim(run / "lock")
            if lock is None:
                raise InputError(f"run {number} is going on")
            try:
                with (run / "output.txt").open("wb") as output:
                    child = subprocess.Popen(  # noqa: S603  words of our own, no shell
                        [sys.executable, "-m", "p3net", "train", *words, "--out", str(run)],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=(lock,),
                        start_new_session=True,
                    )
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(child.pid).encode(), 0)
            except OSError as error:
                raise InputError(f"training cannot be started: {error}", source=run) from None
            finally:
                os.close(lock)
        self._children[number] = child


def _log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log that is being written."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _steps(run: Path) -> int:
    try:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        return int(record["settings"]["recipe"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _images(split: Path) -> dict[str, int]:
    try:
        counts = json.loads((split / "split.json").read_text(encoding="utf-8"))["counts"]
    except (OSError, ValueError, KeyError):
        return {}
    return {role: int(counts[role]) for role in ("labelled", "unlabelled", "validation")}


def _complaint(path: Path) -> str:
    """The error at the end of a process's output; nothing where it was stopped."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return "the run's files are gone"
    at = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if at:
        return " ".join(lines[at[-1] :]).removeprefix("error: ")
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else ""


def _thinned(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `CURVE` points: means of equally long pieces, at each piece's last step."""
    length = -(-len(curve) // CURVE) or 1
    pieces = [curve[i : i + length] for i in range(0, len(curve), length)]
    return [(piece[-1][0], sum(y for _, y in piece) / len(piece)) for piece in pieces]
