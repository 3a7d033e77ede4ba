"""Where counts go: lines, JSON, CSV, overlays and points, each written as it is counted.

A sink is a context that gives a function of one `Row`. Whatever ends the context, an error or
an interrupt, what was counted until then is on disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p3net.app.sources import Source, unique
from p3net.data.images import OVERLAY
from p3net.errors import InputError

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console

    from p3net.data.layout import Layout
    from p3net.prediction import Interval, Prediction, RegionCount


@dataclass(frozen=True, slots=True)
class Row:
    """One count, or one failure.

    Attributes:
        source: what it is of.
        prediction: the count; None for a failure.
        image: the picture, where it is no file.
        time_s: of a video's frame.
        error: why it failed.
    """

    source: Source
    prediction: Prediction | None = None
    image: Image.Image | None = None
    time_s: float | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """For files in output folders: that of the source, with the time of a frame."""
        if self.time_s is None:
            return self.source.name
        return str(Path(self.source.name).with_suffix("")) + f"-{self.time_s:010.3f}s.png"


Sink = Callable[[Row], None]


# --- text -----------------------------------------------------------------------------------


def header(level: float) -> str:
    """The line above `line`s."""
    return f"{'count':>9}  {f'{100 * level:g} % interval':>16}  file"


def line(row: Row) -> str:
    """A count with its interval, and a line more for each region; the name stands last."""
    prediction = row.prediction
    if prediction is None:
        return f"{'failed':>9}  {'':>16}  {row.source.shown}"
    when = "" if row.time_s is None else f" at {clock(row.time_s)}"
    lines = [_figures(prediction) + row.source.shown + when]
    for name, region in prediction.regions.items():
        per_m2 = "" if region.per_m2 is None else f" ({region.per_m2:,.2f} per m²)"
        mark = ", uncalibrated" if region.interval and not region.interval.calibrated else ""
        lines.append(f"{_figures(region)}  {name}{per_m2}{mark}")
    return "\n".join(lines)


def _figures(counted: Prediction | RegionCount) -> str:
    return f"{counted.count:>9,.1f}  {ends(counted.interval):>16}  "


def ends(interval: Interval | None) -> str:
    """An interval in few characters."""
    if interval is None:
        return "–"
    digits = 0 if interval.high >= 100 else 1
    return f"{interval.low:,.{digits}f} – {interval.high:,.{digits}f}"


def clock(time_s: float) -> str:
    """Seconds as minutes and hours.

    >>> clock(7.25), clock(83), clock(3600 + 62.04)
    ('0:07.2', '1:23.0', '1:01:02.0')
    """
    tenths = math.floor(time_s * 10 + 1e-6)
    minutes, tenths = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    start = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{start}:{tenths // 10:02d}.{tenths % 10}"


def record(row: Row) -> dict[str, Any]:
    """A row as JSON."""
    found: dict[str, Any] = {"file": row.source.shown}
    if row.time_s is not None:
        found["time_s"] = round(row.time_s, 3)
    if row.prediction is None:
        return {**found, "error": row.error}
    figures = row.prediction.to_dict()
    figures.pop("source", None)
    return found | figures


def note(text: str) -> None:
    """Something worth knowing, beside the output."""
    _beside().print(f"note: {_printable(text)}", markup=False, soft_wrap=True)


def _failed(row: Row) -> None:
    text = _printable(f"error: {row.source.shown}: {row.error}")
    _beside().print(text, style="red", markup=False, soft_wrap=True)


def _beside() -> Console:
    """Standard error, but on a screen that both share the one that knows of the bar."""
    from p3net.app.console import console, stderr

    return console if console.is_terminal and stderr.is_terminal else stderr


def _printable(text: str) -> str:
    """File names need not be valid text."""
    return text.encode("utf-8", "replace").decode()


def json_line(row: Row) -> None:
    """A sink: one object a line, out at once."""
    import json

    if row.prediction is None:
        _failed(row)
    print(json.dumps(record(row), allow_nan=False), flush=True)


def text_lines(level: float) -> Sink:
    """A table that grows a line at a time; its first line waits for the first count."""
    from p3net.app.console import console

    begun = False

    def add(row: Row) -> None:
        nonlocal begun
        if row.prediction is None:
            _failed(row)
            return
        if not begun:
            begun = True
            interval = row.prediction.interval
            if interval is not None and not interval.calibrated:
                note("intervals are uncalibrated: nothing says yet how often they hold the truth")
            console.print(header(level), style="bold", markup=False, soft_wrap=True)
        console.print(_printable(line(row)), markup=False, soft_wrap=True)

    return add


@contextmanager
def last_line(totals: Totals, *, on_stderr: bool) -> Iterator[None]:
    """Print the totals, whatever ends the context."""
    from p3net.app.console import console, stderr

    begun, word = time.monotonic(), ""
    try:
        yield
    except KeyboardInterrupt:
        word = "stopped: "
        raise
    finally:
        text = word + _printable(totals.text(time.monotonic() - begun))
        (stderr if on_stderr else console).print(text, style="bold", markup=False, soft_wrap=True)


# --- CSV ------------------------------------------------------------------------------------

_COLUMNS = ("file", "time_s", "count", "low", "high", "level", "calibrated", "width", "height")


@contextmanager
def csv_rows(path: Path, regions: Sequence[str]) -> Iterator[Sink]:
    """A line a row, on disk at once; a file with the same columns is continued."""
    import csv

    endings = ("", ": low", ": high", ": per m²")
    columns = [*_COLUMNS, *(f"{name}{end}" for name in regions for end in endings), "error"]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise InputError(f"a region called {twice[0]!r} would hide a column of --csv; rename it")
    try:
        with suppress(FileNotFoundError), path.open(newline="", encoding="utf-8") as file:
            there = next(csv.reader(file), columns) if path.is_file() else columns
            if there != columns:
                raise InputError(
                    f"already there with other columns ({', '.join(there[:3])}, …); give a new "
                    "name",
                    source=path,
                )
        file = path.open("a", newline="", encoding="utf-8", errors="surrogateescape")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text file"
        raise InputError(f"cannot be written: {reason}", source=path) from None
    with file:
        writer = csv.DictWriter(file, columns)
        if not file.tell():
            writer.writeheader()

        def add(row: Row) -> None:
            writer.writerow(_cells(row))
            file.flush()

        yield add


def _cells(row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {"file": row.source.shown, "error": row.error}
    if row.time_s is not None:
        cells["time_s"] = f"{row.time_s:.3f}"
    found = row.prediction
    if found is None:
        return cells
    cells |= {"width": found.size_hw[1], "height": found.size_hw[0]}
    cells |= dict(zip(("count", "low", "high"), _numbers(found), strict=True))
    if found.interval is not None:
        cells |= {"level": found.interval.level, "calibrated": int(found.interval.calibrated)}
    for name, region in found.regions.items():
        each = (*_numbers(region), "" if region.per_m2 is None else f"{region.per_m2:.4f}")
        cells |= dict(
            zip((name, f"{name}: low", f"{name}: high", f"{name}: per m²"), each, strict=True)
        )
    return cells


def _numbers(counted: Prediction | RegionCount) -> tuple[str, str, str]:
    interval = counted.interval
    low, high = ("", "") if interval is None else (f"{interval.low:.3f}", f"{interval.high:.3f}")
    return f"{counted.count:.3f}", low, high


# --- pictures and points --------------------------------------------------------------------


@contextmanager
def overlays(folder: Path, inputs: Iterable[Path]) -> Iterator[Sink]:
    """A picture for every count, called like its image; never an input, nor one for two."""
    untouchable = {path.resolve() for path in inputs}
    taken: set[str] = set()

    def add(row: Row) -> None:
        if row.prediction is None:
            return
        name = str(Path(row.name).with_suffix(OVERLAY))
        path = folder / unique(name, taken)
        while path.resolve() in untouchable:
            path = folder / unique(name, taken)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            row.prediction.overlay(image=row.image).save(path, quality=90)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror or error}", source=path) from None

    yield add


@contextmanager
def points(layout: Layout, destination: Path) -> Iterator[Sink]:
    """A dataset of the images with the model's points, to correct and to train on.

    Frames wait as files beside the destination; the dataset is written when the context ends.
    """
    import shutil
    from tempfile import mkdtemp

    from p3net.data.folders import plain_name
    from p3net.data.formats import convert
    from p3net.data.images import open_image
    from p3net.structures import Dataset, Marks, Sample, as_points

    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise InputError("already exists; give a new or an empty folder", source=destination)
    try:
        waiting = Path(mkdtemp(prefix=f".{destination.name}-", dir=destination.absolute().parent))
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", source=destination) from None
    samples: list[Sample] = []
    taken: set[str] = set()

    def add(row: Row) -> None:
        if row.prediction is None:
            return
        marks = Marks(as_points(row.prediction.points().xy))
        name, path = unique(plain_name(row.name), taken), Path(row.source.place)
        if row.image is not None:
            name = str(Path(name).with_suffix(".png"))
            path = waiting / f"{len(samples)}.png"
            row.image.save(path)
        samples.append(Sample(name, partial(open_image, path), lambda: marks, path=path))

    try:
        yield add
    finally:
        try:
            if samples:
                convert(Dataset("folder", str(destination), tuple(samples)), destination, layout)
        finally:
            shutil.rmtree(waiting, ignore_errors=True)


# --- the whole ------------------------------------------------------------------------------


class Totals:
    """What the last line says. Frames are not added up: they show the same people again."""

    def __init__(self) -> None:
        self.images, self.people, self.failures = 0, 0.0, 0
        self.videos: dict[str, tuple[int, float, float]] = {}  # frames, sum, most

    def add(self, row: Row) -> None:
        """Take a row into account."""
        if row.prediction is None:
            self.failures += 1
            return
        count = row.prediction.count
        if row.time_s is None:
            self.images += 1
            self.people += count
        else:
            frames, total, most = self.videos.get(row.source.shown, (0, 0.0, count))
            self.videos[row.source.shown] = (frames + 1, total + count, max(most, count))

    def text(self, seconds: float) -> str:
        """One sentence."""
        parts = []
        if self.images or not self.videos:
            parts.append(f"{_many(self.images, 'image')}, {self.people:,.1f} counted")
        for shown, (frames, total, most) in self.videos.items():
            figures = f"mean {total / frames:,.1f}, most {most:,.1f}"
            parts.append(f"{shown}: {_many(frames, 'frame')}, {figures}")
        return "; ".join([*parts, f"{self.failures:,} failed", f"{seconds:,.1f} s"])


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
