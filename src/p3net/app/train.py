"""`p3net train`: from labelled and unlabelled images to a model, resumable at any moment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p3net.app.train_report import announce, at_the_next_step, display, event_files, summarise
from p3net.errors import InputError

if TYPE_CHECKING:
    from p3net.configuration import Settings
    from p3net.training import Progress

PRESET = "quick"
"""What the command starts from; the library's own default is the paper's."""


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
            announce(prepared, folder, world.size)
        with (
            display(chosen.recipe.steps, shown=shown) as show,
            event_files(folder, wanted=tensorboard and world.rank == 0) as record,
            at_the_next_step(alone=world.size == 1) as stopped,
        ):

            def report(progress: Progress) -> None:
                show(progress)
                record(progress)

            experiment.run(
                prepared, folder, report=report, stopped=stopped, resume=resume, world=world
            )
        if shown:
            summarise(prepared, folder)
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
