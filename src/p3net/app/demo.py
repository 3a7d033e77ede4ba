"""`p3net demo`: the whole method on rendered scenes, in minutes, ending in a page to look at.

Three networks learn from the same scenes: a few labels alone, the same labels and the
unlabelled rest by ECR (P³Net), and all labels. Each is a process of one thread, as many at
once as there are cores. A demo that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from p3net.configuration import Settings
    from p3net.metrics import Estimate

PRESET = "quick"

SETTINGS: dict[str, dict[str, Any]] = {
    "every run": {
        "data": "synthetic:1?train=200&val=0&test=100&size=240x320&most=150",
        "labelled": "5%",
        "stratified": True,
        "validation": "0",
        "soft": 0.0,  # this and what follows as measured in docs/results.md
        "total": False,
        "network": {"backbone": "lite0"},
        "streaming": {"labelled": 4, "unlabelled": 4},
        "views": {"crop": 160, "zoom": 1.0, "scale": [0.7, 1.3]},
        "recipe": {
            "freeze": 0,
            "steps": 400,
            "warmup": 40,
            "average": 0.99,
            "terms": {"ecr": {"weight": 10.0, "start": 60, "ramp": 60}},
            "choose": "last",
            "workers": 0,
        },
    },
    "labels": {"method": "supervised"},
    "p3net": {"method": "p3net"},
    "all": {"method": "supervised", "labelled": "100%"},
}
"""What the three runs set over the preset: the first entry for all, then each its own."""

RUNS = {"labels": "few labels alone", "p3net": "P³Net: the same + ECR", "all": "all labels"}
"""The runs' folders and what they are called."""

_START_ORDER = ("p3net", "labels", "all")  # the longest first, so that the cores end together
_POLL_S = 0.3


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where everything goes.")] = Path(
        "runs/demo"
    ),
    seed: Annotated[
        int, typer.Option(min=0, help="Of the labels drawn, the first weights and the crops.")
    ] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps, instead of the demo's own.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Learn to count from few labels, in minutes: three networks, a table and a page.

    On rendered scenes: labels of a few alone, the same with P³Net's use of the unlabelled rest,
    and labels of all; then counts on unseen scenes. Stopped halfway, it goes on when called again.
    """
    from p3net.app import demo_page, figures
    from p3net.app.console import console

    figures.require_matplotlib()
    chosen = run_settings(seed, steps)
    _check_folder(out, chosen)
    train_all(chosen, out)
    results = gather(out, chosen)
    write_json(out / "results.json", results)
    page = demo_page.write(out, results)
    _print_table(results)
    console.print(f"\n{results['verdict']}", markup=False)
    console.print(f"\nThe page with the pictures: {page}", markup=False, soft_wrap=True)
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def run_settings(seed: int, steps: int | None) -> dict[str, Settings]:
    """The settings of the three runs."""
    from p3net import configuration

    common = configuration.merge(SETTINGS["every run"], {"seed": seed})
    if steps is not None:
        common = configuration.merge(common, {"recipe": {"steps": steps}})
    return {
        name: configuration.settings(configuration.merge(common, SETTINGS[name]), preset=PRESET)
        for name in RUNS
    }


def _check_folder(out: Path, chosen: Mapping[str, Settings]) -> None:
    """Refuse early a folder that holds something else."""
    from p3net.errors import InputError

    for name, settings in chosen.items():
        path = out / name / "run.json"
        if path.exists():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))["settings"]
            except (ValueError, KeyError):
                raise InputError("damaged; delete the demo's folder", source=path) from None
            if before != json.loads(json.dumps(settings.model_dump())):
                raise InputError(
                    "this folder holds a demo with other settings; choose another with --out, "
                    "or delete it",
                    source=out,
                )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", source=out) from None


def write_json(path: Path, content: object) -> None:
    """JSON, moved into place whole."""
    temporary = path.with_suffix(".tmp")
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


# --- one run, in a process of its own ---------------------------------------------------------


def train_one(settings: dict[str, Any], folder: Path, output: Path) -> None:
    """Train, count the test scenes, write `test.json`; what is printed goes to `output`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    import torch

    torch.set_num_threads(1)
    from p3net import configuration, evaluation, experiment
    from p3net.app import demo_page
    from p3net.app.evaluate import record
    from p3net.errors import InputError

    try:
        prepared = experiment.prepare(configuration.Settings(**settings))
        counter = experiment.run(prepared, folder, resume=True)
        found = evaluation.evaluate(counter, prepared.data.test)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    crops = prepared.stream.crops_per_step * prepared.settings.recipe.accumulate
    seconds = sum(crops / line["images_per_second"] for line in demo_page.read_log(folder))
    labelled = prepared.data.labelled
    write_json(
        folder / "test.json",
        {
            "labelled_images": len(labelled),
            "labelled_points": sum(len(s.marks().points_xy) for s in labelled.samples),
            "unlabelled_images": len(prepared.data.unlabelled)
            if settings["method"] == "p3net"
            else 0,
            "minutes": seconds / 60,
            **record(found),
        },
    )


# --- all of them --------------------------------------------------------------------------------


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def train_all(chosen: Mapping[str, Settings], out: Path) -> None:
    """Train the runs, as many at once as there are cores; the first failure ends all."""
    from p3net.errors import InputError

    context = multiprocessing.get_context("spawn")
    waiting = [name for name in _START_ORDER if not (out / name / "test.json").exists()]
    running: dict[str, BaseProcess] = {}
    totals = {name: chosen[name].recipe.steps for name in RUNS}
    try:
        with _one_thread(), _progress(totals) as show:
            while waiting or running:
                while waiting and len(running) < cores():
                    name = waiting.pop(0)
                    arguments = (chosen[name].model_dump(), out / name, out / f"{name}.txt")
                    running[name] = context.Process(target=train_one, args=arguments)
                    running[name].start()
                time.sleep(_POLL_S)
                for name, process in list(running.items()):
                    if process.exitcode is None:
                        continue
                    del running[name]
                    if process.exitcode != 0:
                        raise InputError(_last_words(name, process.exitcode, out / f"{name}.txt"))
                show({name: _state(out / name, name in running) for name in RUNS})
    finally:
        for process in running.values():
            process.terminate()
            process.join()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Children that start meanwhile use one thread each: two on a shared core are slower."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _last_words(name: str, code: int, output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    said = "\n".join(lines) or "it said nothing; if memory is short, close other programs"
    return f"the run {name!r} {how}. Its last lines ({output}):\n{said}"


_State = tuple[int, str]  # the steps a run has done, and a word about it


def _state(folder: Path, is_running: bool) -> _State:
    last = _last_line(folder / "log.jsonl")
    step = last["step"] if last else 0
    if (folder / "test.json").exists():
        return (step, "done")
    if not is_running:
        return (step, "waiting")
    if last is None:
        return (0, "preparing")
    losses = last["losses"]
    return (step, "  ".join(f"{name} {value:.4g}" for name, value in losses.items()))


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a log that is being written."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().split(b"\n")[:-1]
    line: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return line


@contextmanager
def _progress(totals: Mapping[str, int]) -> Iterator[Callable[[Mapping[str, _State]], None]]:
    """Bars in a terminal, a line every ten seconds elsewhere."""
    from p3net.app.console import stderr

    if stderr.is_terminal:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}", markup=False),
        )
        with Progress(*columns, console=stderr) as bars:
            tasks = {
                name: bars.add_task(RUNS[name], total=total, words="")
                for name, total in totals.items()
            }

            def update(states: Mapping[str, _State]) -> None:
                for name, (step, words) in states.items():
                    bars.update(tasks[name], completed=step, words=words)

            yield update
    else:
        before: tuple[float, tuple[str, ...]] = (0.0, ())

        def line(states: Mapping[str, _State]) -> None:
            nonlocal before
            done = tuple(name for name, (_, words) in states.items() if words == "done")
            if done != before[1] or time.monotonic() - before[0] > 10:
                before = (time.monotonic(), done)
                each = (f"{n} {step}/{totals[n]} {words}" for n, (step, words) in states.items())
                stderr.print(" | ".join(each), markup=False, soft_wrap=True)

        yield line


# --- what came of it ------------------------------------------------------------------------------


def gather(out: Path, chosen: Mapping[str, Settings]) -> dict[str, Any]:
    """The three evaluations and how they compare, as JSON."""
    tests = {
        name: json.loads((out / name / "test.json").read_text(encoding="utf-8")) for name in RUNS
    }
    apart = compare(tests["labels"]["per_image"], tests["p3net"]["per_image"])
    mae = {name: test["mae"]["value"] for name, test in tests.items()}
    any_run = chosen["p3net"]
    return {
        "data": any_run.data,
        "seed": any_run.seed,
        "steps": any_run.recipe.steps,
        "runs": {name: {"title": RUNS[name], **test} for name, test in tests.items()},
        "p3net_less_labels": {"mae": apart.value, "low": apart.low, "high": apart.high},
        "outcome": outcome(mae["labels"], apart),
        "verdict": verdict(mae, apart),
    }


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Estimate:
    """The change in MAE between two models on the same images, with its bootstrap interval.

    The images are drawn in pairs, which takes out that some scenes are harder than others.
    """
    import numpy as np

    from p3net.metrics import Estimate
    from p3net.randomness import generator

    change = np.array(
        [abs(b["error"]) - abs(a["error"]) for a, b in zip(before, after, strict=True)]
    )
    picks = generator(0).integers(0, len(change), (2000, len(change)))
    low, high = np.percentile(change[picks].mean(axis=1), (2.5, 97.5))
    return Estimate(float(change.mean()), float(low), float(high))


def outcome(mae: float, apart: Estimate) -> str:
    """Whether a change of this MAE is a help, a harm, or too small or uncertain to call either."""
    if apart.low <= 0 <= apart.high:
        return "uncertain"
    if abs(apart.value) < 0.01 * mae:
        return "small"
    return "helped" if apart.value < 0 else "harmed"


def verdict(mae: Mapping[str, float], apart: Estimate) -> str:
    """What the three figures say, in words, whichever way it went."""
    labels, ours, every = mae["labels"], mae["p3net"], mae["all"]
    figures = f"MAE {labels:.2f} without, {ours:.2f} with, {every:.2f} with all labels"
    came = outcome(labels, apart)
    if came in ("uncertain", "small"):
        return (
            f"This run does not show that ECR helps ({figures}): the change in MAE, "
            f"{apart.value:+.2f}, is {'small' if came == 'small' else 'within chance'} "
            f"(95 % interval {apart.low:+.2f} to {apart.high:+.2f})."
        )
    share = abs(apart.value) / labels
    if came == "harmed":
        return (
            f"The unlabelled scenes did harm this time: ECR raised the error by {share:.0%} "
            f"({figures}). Other labels may give another answer: p3net demo --seed 2."
        )
    words = f"The unlabelled scenes helped: ECR lowered the error by {share:.0%} ({figures})"
    other = "Other labels may show less: p3net demo --seed 2."
    if ours <= every:
        return f"{words}, as far as labelling everything did. {other}"
    part = (labels - ours) / (labels - every)
    return f"{words}, {part:.0%} of the way to labelling everything. {other}"


def _print_table(results: Mapping[str, Any]) -> None:
    from p3net.app.console import console, table
    from p3net.app.demo_page import METRICS

    rows = [
        (
            run["title"],
            f"{run['labelled_images']:,} scenes",
            *(_figure(run[metric]["value"], digits) for metric, digits in METRICS.items()),
            f"{run['minutes']:.1f}",
        )
        for run in results["runs"].values()
    ]
    images = results["runs"]["p3net"]["images"]
    console.print(
        table(
            ("method", "labels", "MAE", "RMSE", "NAE", "minutes"),
            rows,
            title=f"{images:,} unseen scenes",
        )
    )


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
