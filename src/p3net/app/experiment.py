"""`p3net experiment`: one table of the paper, run by run, resumable at any moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from p3net.errors import InputError

if TYPE_CHECKING:
    from p3net.study import Line, Scale, Study
    from p3net.trial import Trial

_POLL_S = 0.3
_PLAIN_EVERY_S = 30.0


def experiment(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A table: experiments/NAME.yaml, or your own.")
    ],
    *,
    scale: Annotated[
        str,
        typer.Option(
            help="small: rendered scenes, minutes on two cores. paper: the paper's data and "
            "settings, for a GPU."
        ),
    ] = "small",
    runs: Annotated[
        str | None, typer.Option(metavar="a,b", help="Only these lines of the table.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each line; the file's number if absent.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Runs and tables; all files may share one.")
    ] = Path("runs/experiments"),
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at once, one thread each; as many as cores if absent."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=PATH",
            help="Where a set of the paper is: sha, shb, qnrf, jhu, nwpu. Or P3NET_SHA and the "
            "like in the environment.",
        ),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=c", help="One setting over all others; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run one table of the paper and print its figures beside the paper's.

    p3net experiment experiments/ecr.yaml

    p3net experiment experiments/main.yaml --scale paper --data sha=sets/part_A --runs sha-5

    Runs what is missing, resumes what was cut off and skips what is done, by the
    hash of each run's settings: call it again after a stop. Lines that two tables
    share are trained once. The exit code is 1 when a run failed; the others go on.
    """
    from p3net.configuration import assignments

    if scale not in ("paper", "small"):
        raise InputError(f"--scale is paper or small, got {scale!r}")
    at: Scale = "paper" if scale == "paper" else "small"
    from p3net import study as studies

    study = studies.read(file)
    changed = assignments(assign or [])
    wanted = studies.trials(
        study,
        at,
        names=tuple(filter(None, (runs or "").split(","))),
        seeds=1 if study.timing else seeds,
        data=_paths(data or []),
        assign=changed,
        source=file,
    )
    folder = out / f"{file.stem}-{at}"
    if study.timing is not None:
        _costs(study, wanted, folder, as_json=as_json)
        return
    from p3net.app import experiment_report, figures
    from p3net.app.console import console

    figures.require_matplotlib()
    board = Board(study, at, wanted, out)
    try:
        with _shown(board) as refresh:
            carry_out(board, jobs or _cores(), refresh)
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; the same command goes on: {board.summary()}", err=True)
        raise typer.Exit(130) from None
    lines = studies.gather(study, wanted, out)
    files = experiment_report.write(folder, study, at, lines, changed)
    if as_json:
        print(json.dumps(_as_json(study, at, lines, board), ensure_ascii=False, indent=2))
    else:
        text = experiment_report.markdown(study, at, lines, changed)
        console.print(text, markup=False, soft_wrap=True)
        for each in files:
            console.print(str(each), markup=False, soft_wrap=True)
    for words in board.failed.values():
        typer.echo(words, err=True)
    if board.failed:
        raise typer.Exit(1)


def _paths(pairs: Sequence[str]) -> dict[str, str]:
    """`["sha=sets/A"]` → {"sha": "sets/A"}."""
    found = {}
    for pair in pairs:
        kind, equals, path = pair.partition("=")
        if not (kind and equals and path):
            raise InputError(f"expected KIND=PATH after --data, got {pair!r}")
        found[kind] = path
    return found


def _cores() -> int:
    import torch

    from p3net.app.demo import cores

    return 1 if torch.cuda.is_available() else cores()


def _costs(study: Study, wanted: Sequence[Trial], folder: Path, *, as_json: bool) -> None:
    import dataclasses

    from p3net import study as studies
    from p3net.app import experiment_report
    from p3net.app.console import console
    from p3net.trial import hardware, write_whole

    assert study.timing is not None  # noqa: S101 (asked by the caller)
    lines = studies.costs(study, wanted, study.timing)
    text = experiment_report.cost_markdown(study, lines, hardware())
    record = [dataclasses.asdict(line) for line in lines]
    write_whole(folder / "table.md", text)
    write_whole(folder / "table.json", json.dumps(record, ensure_ascii=False, indent=2))
    if as_json:
        print(json.dumps(record, ensure_ascii=False, indent=2))
    else:
        console.print(text, markup=False, soft_wrap=True)


# --- all runs ------------------------------------------------------------------------------------


@dataclass
class Board:
    """What stands where: the runs of one call, by their keys."""

    study: Study
    scale: Literal["paper", "small"]
    wanted: Sequence[Trial]
    out: Path
    running: dict[str, BaseProcess] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    started: int = 0
    events: list[str] = field(default_factory=list)
    gathered: tuple[int, list[Line]] = (-1, [])

    def summary(self) -> str:
        """How many runs are done, and what else there is."""
        words = [self.word(trial) for trial in self.unique()]
        counts = {word: words.count(word) for word in ("done", "running", "failed", "waiting")}
        return ", ".join(f"{number} {word}" for word, number in counts.items() if number)

    def lines(self) -> list[Line]:
        """The figures so far; read again when another run is done."""
        from p3net.study import gather

        done = sum(trial.result(self.out).exists() for trial in self.wanted)
        if done != self.gathered[0]:
            self.gathered = (done, gather(self.study, self.wanted, self.out))
        return self.gathered[1]

    def unique(self) -> list[Trial]:
        """The runs, equal ones once."""
        return list({f"{trial.key}/{trial.split}": trial for trial in self.wanted}.values())

    def word(self, trial: Trial) -> str:
        """Done, running, failed or waiting."""
        if trial.result(self.out).exists():
            return "done"
        if trial.key in self.running:
            return "running"
        return "failed" if trial.key in self.failed else "waiting"


def carry_out(board: Board, jobs: int, refresh: Callable[[], None]) -> None:
    """Run what is not done, `jobs` at once; a failure is noted and the others go on."""
    from p3net.trial import state

    context = multiprocessing.get_context("spawn")
    waiting = [trial for trial in board.unique() if not trial.result(board.out).exists()]
    done = len(board.unique()) - len(waiting)
    if done:
        board.events.append(f"{done} runs are done already")
    trials: dict[str, Trial] = {}
    try:
        with _one_thread():
            while waiting or board.running:
                while waiting and len(board.running) < jobs:
                    trial = waiting.pop(0)
                    before = state(trial, board.out)
                    at = f" from step {before.step} or a little before" if before.step else ""
                    board.events.append(f"{_label(trial)}: started{at}")
                    trials[trial.key] = trial
                    started = context.Process(target=work, args=(trial, board.out, os.getpid()))
                    board.running[trial.key] = started
                    board.started += 1
                    started.start()
                refresh()
                time.sleep(_POLL_S)
                for key, process in list(board.running.items()):
                    if process.exitcode is not None:
                        del board.running[key]
                        _note(board, trials[key], process.exitcode)
            refresh()
    finally:
        for process in board.running.values():
            process.terminate()
            process.join()
        board.running.clear()


def work(trial: Trial, out: Path, parent: int) -> None:
    """One run in a process of its own; what is printed goes to `output.txt` in its folder."""
    folder = trial.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    import torch

    from p3net.trial import perform

    torch.set_num_threads(1)

    def live_with_parent(_progress: object) -> None:
        if os.getppid() != parent:  # it was killed; whoever resumes wants the folder
            raise SystemExit("the experiment was killed")

    try:
        perform(trial, out, live_with_parent)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None


def _note(board: Board, trial: Trial, code: int) -> None:
    """Write down how a run ended."""
    if code == 0 and trial.result(board.out).exists():
        record = json.loads(trial.result(board.out).read_text(encoding="utf-8"))
        board.events.append(f"{_label(trial)}: done in {record['seconds'] / 60:.1f} minutes")
        return
    output = trial.folder(board.out) / "output.txt"
    said = ""
    if output.exists():
        said = "\n".join(output.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    board.failed[trial.key] = f"{_label(trial)} {how} ({output}):\n{said or 'it said nothing'}"
    board.events.append(f"{_label(trial)}: failed")


def _label(trial: Trial) -> str:
    return f"{trial.name}, seed {trial.settings.seed}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs that start meanwhile use one thread each, before they import anything."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


# --- while it runs -----------------------------------------------------------------------------


@contextmanager
def _shown(board: Board) -> Iterator[Callable[[], None]]:
    """A live table in a terminal; elsewhere a line for every event, and now and then the state."""
    from p3net.app.console import stderr

    if stderr.is_terminal:
        from rich.live import Live

        with Live(console=stderr, refresh_per_second=2) as live:
            yield lambda: live.update(live_table(board))
    else:
        said, last = 0, time.monotonic()

        def line() -> None:
            nonlocal said, last
            for words in board.events[said:]:
                stderr.print(words, markup=False, soft_wrap=True)
            if len(board.events) > said or time.monotonic() - last > _PLAIN_EVERY_S:
                stderr.print(board.summary(), markup=False, soft_wrap=True)
                last = time.monotonic()
            said = len(board.events)

        yield line


def live_table(board: Board) -> Any:
    """How far each line of the experiment is, and its figures so far."""
    from p3net.app.console import table
    from p3net.app.experiment_report import spread
    from p3net.trial import state

    rows = []
    for line in board.lines():
        own = [trial for trial in board.wanted if trial.name == line.name]
        words = [board.word(trial) for trial in own]
        steps = [
            f"seed {trial.settings.seed}: {state(trial, board.out).step}"
            f"/{trial.settings.recipe.steps}"
            for trial, word in zip(own, words, strict=True)
            if word == "running"
        ]
        if "failed" in words:
            steps.append(f"{words.count('failed')} failed")
        published = line.published.get("mae")
        rows.append(
            (
                line.title,
                f"{line.seeds}/{len(own)}",
                ", ".join(steps) or ("" if line.seeds == len(own) else "waiting"),
                spread(line, "mae"),
                "–" if published is None else f"{published:.1f}",
            )
        )
    header = ("", "done", "now", f"MAE ({board.scale} scale)", "paper")
    return table(header, rows, title=f"{board.study.title}: {board.summary()}")


def _as_json(study: Study, scale: str, lines: Sequence[Line], board: Board) -> Mapping[str, Any]:
    return {
        "title": study.title,
        "where": study.where,
        "scale": scale,
        "started": board.started,
        "failed": list(board.failed.values()),
        "runs": {
            line.name: {
                "title": line.title,
                "seeds": line.seeds,
                **{metric: list(values) for metric, values in line.measured.items()},
                "paper": dict(line.published),
                "mae_ratio": line.ratio,
                "paper_mae_ratio": line.published_ratio,
                "keys": [t.key for t in board.wanted if t.name == line.name],
                "seconds": [record["seconds"] for record in line.records],
                "hardware": [record["hardware"] for record in line.records],
            }
            for line in lines
        },
    }
