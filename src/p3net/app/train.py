"""`p3net train`: from labelled and unlabelled images to a model, resumable at any moment."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p3net.errors import InputError

if TYPE_CHECKING:
    from p3net.configuration import Settings
    from p3net.experiment import Prepared
    from p3net.training import Progress

PRESET = "quick"
"""What the command starts from; the library's own default is the paper's."""

PLAIN_EVERY_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def train(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="A path whose layout is recognised, or sha:PATH, folder:PATH, synthetic:SEED and "
            "the like. Not needed with --resume.",
        ),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The run's folder; runs/NAME from the data if absent."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="quick (default): few labels, two cores. paper and authors: VGG-19 as published "
            "and as in the authors' code."
        ),
    ] = None,
    labelled: Annotated[
        str | None,
        typer.Option(
            help="Images used with their points: 5%, 15, a list.txt, or a split's folder. By "
            "default all that you have marked; of a published set 5%."
        ),
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(
            help="Images to choose the model on: as above; 0 for none. By default the published "
            "ones, or 10% of the training images."
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="What to start from: box (the model in the package; the default but for the "
            "published sets), imagenet, none, or a model: a run's folder or a file.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How long to train; quick: 2400, some 35 minutes of one core, and from a model "
            "1200, a quarter of an hour.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of split, weights, order, crops.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Settings over the preset's, as in run.json."),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="a.b=c", help="One setting over all others; may be repeated."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, bit for bit.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files for TensorBoard as well.")
    ] = False,
) -> None:
    """Learn to count from a few labelled images and many unlabelled ones.

    p3net train sha:part_A --labelled 5%

    p3net train photos/ --labelled marked.txt --out runs/square --steps 3000

    p3net train --out runs/square --resume

    The folder gets model.safetensors to count with, best and last checkpoints,
    log.jsonl with a line a step, the split, and run.json with every setting.

    Many processes: torchrun --nproc-per-node N -m p3net train … shares out the
    same steps. On CPUs one process per core, with one thread each, is fastest;
    a step needs at least as many crops as there are processes.
    """
    import torch
    import torch.distributed as dist

    from p3net import experiment, training

    given = _given(data, labelled, validation, steps, seed, config, assign or [])
    named = given.pop("preset", PRESET)
    preset = preset or named
    folder = out or _default_folder(given, resume=resume)
    if not (resume and (folder / "run.json").is_file()):
        given = _started(given, start, preset)
    elif start is not None:
        raise InputError("a resumed run goes on from its own checkpoint; leave out --from")
    world = training.World.join()
    if world.size > 1 and world.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    shown = world.rank == 0 and not quiet
    try:
        chosen = _settings(given, preset, folder, config, resume=resume)
        prepared = experiment.prepare(chosen)
        if shown:
            _announce(prepared, folder, world.size)
        with (
            _display(chosen.recipe.steps, shown=shown) as show,
            _event_files(folder, wanted=tensorboard and world.rank == 0) as record,
            _at_the_next_step(alone=world.size == 1) as stopped,
        ):

            def report(progress: Progress) -> None:
                show(progress)
                record(progress)

            experiment.run(
                prepared, folder, report=report, stopped=stopped, resume=resume, world=world
            )
        if shown:
            _summarise(prepared, folder)
    except KeyboardInterrupt:
        if world.rank == 0:
            typer.echo(f"\nstopped; continue with: p3net train --out {folder} --resume", err=True)
        raise typer.Exit(130) from None
    except RuntimeError as error:
        if world.size > 1 and _lost_a_process(error):
            raise InputError(
                "another training process has ended, so this one stops too; "
                f"continue with --resume from {folder / 'last.safetensors'}"
            ) from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _lost_a_process(error: RuntimeError) -> bool:
    signs = ("gloo", "Connection closed", "Connection reset", "NCCL", "Broken pipe")
    return any(sign in str(error) for sign in signs)


# --- settings ----------------------------------------------------------------------------------


def _given(
    data: str | None,
    labelled: str | None,
    validation: str | None,
    steps: int | None,
    seed: int | None,
    config: Path | None,
    assign: list[str],
) -> dict[str, Any]:
    """What the user set: the file, then --set, then the options of their own."""
    from p3net.configuration import assignments, merge, read_yaml

    given = merge(read_yaml(config) if config else {}, assignments(assign))
    options = {"data": data, "labelled": labelled, "validation": validation, "seed": seed}
    given |= {name: value for name, value in options.items() if value is not None}
    return given if steps is None else merge(given, {"recipe": {"steps": steps}})


def _started(given: Mapping[str, Any], start: str | None, preset: str) -> dict[str, Any]:
    """The settings with what to start from; a model brings its network, intervals and size."""
    from dataclasses import asdict

    from p3net import checkpoint
    from p3net.configuration import FROM_A_MODEL, merge

    start = start or given.get("weights")
    if start is None:
        own = {"network", "intervals", "loss"} & given.keys()
        start = checkpoint.BOX if preset == PRESET and not own and _new_place(given) else None
    if start is None:
        return dict(given)
    if start in ("imagenet", "none") or not checkpoint.is_model(start):
        return merge(given, {"weights": start})
    _, record = checkpoint.read(checkpoint.weights_file(start))
    brought = {
        "network": record.get("network", {}).get("architecture", {}),
        "intervals": "auto",
        "views": asdict(checkpoint.sizing(record)),
    }
    brought = merge(brought, FROM_A_MODEL.get(preset, {}))
    return merge(brought, merge(given, {"weights": start}))


def _new_place(given: Mapping[str, Any]) -> bool:
    """Whether these are a user's own images.

    On a published set a figure from few labels would be none if all labels had been seen before.
    """
    from p3net.data.catalogue import is_own, open_dataset

    return "data" in given and is_own(open_dataset(str(given["data"])))


_NO_DATA = (
    "DATA is missing: a path, or sha:PATH, folder:PATH, synthetic:SEED; "
    "only --resume of a run that began does without"
)


def _settings(
    given: Mapping[str, Any], preset: str, folder: Path, config: Path | None, *, resume: bool
) -> Settings:
    """The settings; those of a run to be resumed are its own, and what is given must agree."""
    from p3net import configuration, experiment

    if resume and (folder / "run.json").is_file():
        before = experiment.read_record(folder).get("settings", {})
        return configuration.settings(
            configuration.merge(before, given), source=folder / "run.json"
        )
    if "data" not in given:
        raise InputError(_NO_DATA)
    return configuration.settings(given, preset=preset, source=config)


def _default_folder(given: Mapping[str, Any], *, resume: bool) -> Path:
    """runs/DATA-LABELLED, in letters that every file system takes.

    >>> _default_folder({"data": "sha:sets/part_A", "labelled": "5%"}, resume=False).as_posix()
    'runs/part_A-5'
    """
    if "data" not in given:
        raise InputError(
            "--out is missing: the folder of the run to resume" if resume else _NO_DATA
        )
    data = str(given["data"]).partition("?")[0].rstrip("/")
    words = re.findall(r"\w+", re.split(r"[/\\]", data)[-1])
    words = words or re.findall(r"\w+", Path(data).resolve().name)  # of . and ..
    words += re.findall(r"\w+", Path(str(given.get("labelled", ""))).stem)
    return Path("runs") / "-".join(words)


# --- while it runs -----------------------------------------------------------------------------


@contextmanager
def _at_the_next_step(*, alone: bool) -> Iterator[Callable[[], bool]]:
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


def _announce(prepared: Prepared, folder: Path, processes: int) -> None:
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
def _display(steps: int, *, shown: bool) -> Iterator[Callable[[Progress], None]]:
    """A live line in a terminal, plain lines every few seconds and at validations elsewhere."""
    from p3net.app.console import stderr

    line = _Line(steps)
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


class _Line:
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
def _event_files(folder: Path, *, wanted: bool) -> Iterator[Callable[[Progress], None]]:
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


def _summarise(prepared: Prepared, folder: Path) -> None:
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
