"""What a training run says while it runs and at its end, and how it is asked to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from p3net.errors import InputError

if TYPE_CHECKING:
    from p3net.experiment import Prepared
    from p3net.training import Progress

PLAIN_EVERY_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


# --- while it runs -----------------------------------------------------------------------------


@contextmanager
def at_the_next_step(*, alone: bool) -> Iterator[Callable[[], bool]]:
    """Let a signal to stop wait for the step's end, so that nothing is lost; a second one does not.

    Only of a process that trains alone: several would stop at different steps.
    """
    asked = threading.Event()
    if not alone or threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    before = {each: how for each, how in before.items() if how is not signal.SIG_IGN}

    def ask(_number: int, _frame: object) -> None:
        asked.set()
        for each, handler in before.items():
            signal.signal(each, handler)
        typer.echo("\nstopping after this step; again to stop at once", err=True)

    try:
        for each in before:
            signal.signal(each, ask)
        yield asked.is_set
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def announce(prepared: Prepared, folder: Path, processes: int) -> None:
    """What is about to be learned, from what, and where."""
    from p3net.app.console import stderr

    chosen = prepared.settings
    counts = {role: len(part) for role, part in prepared.data._asdict().items() if role != "test"}
    images = ", ".join(f"{count} {role}" for role, count in counts.items())
    shared = f" by {processes} processes" if processes > 1 else ""
    stderr.print(
        f"{chosen.method} on {chosen.network.backbone} from {chosen.weights}: {images} images; "
        f"{chosen.recipe.steps} steps of {prepared.stream.crops_per_step} crops{shared}; "
        f"in {folder}",
        markup=False,
        soft_wrap=True,
    )
    if chosen.test_as_validation:
        stderr.print(
            "The model is chosen on the test images: its test figures will be worthless, and the "
            "run says so for ever.",
            markup=False,
            soft_wrap=True,
        )


@contextmanager
def display(steps: int, *, shown: bool) -> Iterator[Callable[[Progress], None]]:
    """A live line in a terminal, plain lines every few seconds and at validations elsewhere."""
    from p3net.app.console import stderr

    line = Line(steps)
    if not shown:
        yield lambda _progress: None
    elif stderr.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn  # only for a bar
        from rich.progress import Progress as Bars

        text = TextColumn("{task.description}", markup=False)
        with Bars(BarColumn(20), MofNCompleteColumn(), text, console=stderr) as bars:
            task = bars.add_task("starting", total=steps)
            yield lambda now: bars.update(task, completed=now.step, description=line.text(now))
    else:
        last = time.monotonic()

        def update(now: Progress) -> None:
            nonlocal last
            text = line.text(now)
            due = time.monotonic() - last >= PLAIN_EVERY_S
            if due or now.validation is not None or now.step == steps:
                last = time.monotonic()
                stderr.print(f"step {now.step}/{steps}  {text}", markup=False, soft_wrap=True)

        yield update


class Line:
    """Figures of a run in one line; those that jump from step to step are smoothed."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = steps
        self.clock = clock
        self.started = clock()
        self.first: int | None = None
        self.smooth: dict[str, float] = {}
        self.validation = ""

    def text(self, now: Progress) -> str:
        """The line after a step."""
        if self.first is None:
            self.first = now.step - 1
        jumping = {**now.losses, "images/s": now.images_per_second}
        if "mask_share" in now.records:
            jumping["mask"] = 100 * now.records["mask_share"]
        for name, value in jumping.items():
            self.smooth[name] = value + 0.9 * (self.smooth.get(name, value) - value)
        parts = [f"{name} {self.smooth[name]:.4g}" for name in self.smooth if name in now.losses]
        if "mask" in self.smooth:
            parts.append(f"mask {self.smooth['mask']:.0f}%")
        if now.validation is not None:
            self.validation = f"MAE {now.validation['mae']:.1f} at {now.step}"
        if self.validation:
            parts.append(self.validation)
        pace = (self.clock() - self.started) / (now.step - self.first)
        parts.append(f"{self.smooth['images/s']:.1f} images/s")
        parts.append(f"{_clock(pace * (self.steps - now.step))} left")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(59.6), _clock(3725)
    ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def event_files(folder: Path, *, wanted: bool) -> Iterator[Callable[[Progress], None]]:
    """Write every figure of a step for TensorBoard."""
    if not wanted:
        yield lambda _progress: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "TensorBoard comes with an extra: pip install 'p3net[tensorboard]'; "
            "log.jsonl has the same figures without it"
        ) from None
    writer: Any = None

    def record(now: Progress) -> None:
        nonlocal writer
        if writer is None:  # on resuming, events beyond the checkpoint are dropped
            make: Any = SummaryWriter
            writer = make(str(folder / "tensorboard"), purge_step=now.step)
        figures = {"loss": now.losses, "record": now.records, "validation": now.validation or {}}
        for group, values in figures.items():
            for name, value in values.items():
                writer.add_scalar(f"{group}/{name}", value, now.step)
        writer.add_scalar("learning_rate", now.rate, now.step)

    try:
        yield record
    finally:
        if writer is not None:
            writer.close()


# --- at the end --------------------------------------------------------------------------------


def summarise(prepared: Prepared, folder: Path) -> None:
    """Where everything is, how good it is, and what to type next."""
    from p3net import checkpoint
    from p3net.app.console import console

    _, record = checkpoint.read(folder / "model.safetensors")
    split = prepared.split
    kind = "best on validation" if record["chosen"] == "best" and record["history"] else "last"
    averaged = ", averaged" if prepared.settings.recipe.average else ""
    rows = {
        "model": f"{folder / 'model.safetensors'}  "
        f"({kind} weights{averaged}, step {record['step']})",
        "best": f"{folder / 'best.safetensors'}",
        "last": f"{folder / 'last.safetensors'}  (all state, for --resume)",
        "log": f"{folder / 'log.jsonl'}",
        "split": f"{folder / 'split'}  ({len(split.labelled)} labelled, "
        f"{len(split.unlabelled)} unlabelled, {len(split.validation)} validation; {split.hash})",
        "settings": f"{folder / 'run.json'}",
    }
    if not record["history"]:
        del rows["best"]
    at = [each for each in record["history"] if each["step"] == record["step"]]
    for each in at[-1:]:
        figures = (f"{name.upper()} {each[name]:.2f}" for name in each if name != "step")
        rows["validation"] = "  ".join(figures)
    rows["intervals"] = _intervals(record, folder)
    for name, text in rows.items():
        console.print(f"{name:11s}{text}", markup=False, soft_wrap=True)
    if prepared.settings.test_as_validation:
        console.print("Chosen on the test images: do not report its test figures.", soft_wrap=True)
    console.print(f"\nNext: {_next(prepared, folder)}", markup=False, soft_wrap=True)


def _intervals(record: Mapping[str, Any], folder: Path) -> str:
    """Whether the model's intervals are calibrated, and how they become it."""
    from p3net.app.calibrate import LEVEL, fewest
    from p3net.uncertainty import Calibration

    known = Calibration.of(record)
    images = 0 if known is None else len(known.scores)
    if known is not None and known.multiplier(LEVEL, 0)[1]:
        return f"calibrated on {images} validation images"
    why = f"it takes {fewest(LEVEL)} images that it has not learned from, there were {images}"
    if known is not None and known.chose:
        why = "the validation images chose the model"
    model = folder / "model.safetensors"
    return f"uncalibrated: {why}; mark others, then: p3net calibrate {folder} OTHERS --out {model}"


def _next(prepared: Prepared, folder: Path) -> str:
    """What to type now: judge it where there are test images, or count."""
    import shlex

    if prepared.split.test:
        return f"p3net evaluate {folder} {shlex.quote(prepared.settings.data)} --split test"
    return f"p3net count {folder} IMAGES"
