"""`p3net count`: images, folders, videos and streams → counts with intervals, and pictures."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from PIL import Image

    from p3net.app.rows import Row, Sink
    from p3net.app.sources import Source
    from p3net.app.video import Draw
    from p3net.data.layout import Layout
    from p3net.prediction import Countable, Prediction

Count = Callable[["Countable"], "Prediction"]

_MAY_MOVE = (".gif", ".webp", ".apng", ".avif", ".tif", ".tiff")


def count(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] FILES",
            help="MODEL: a run's folder or a file of weights; without one, the model in the box "
            "counts people. FILES: images, videos, folders with all below them, "
            "'patterns/**/*.jpg', addresses (rtsp://…, http://…), cameras (camera:0), - for an "
            "image from standard input.",
            show_default=False,
        ),
    ],
    *,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, as it is counted.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="OUT.csv", help="Add a line for every count, at once."),
    ] = None,
    overlay: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a picture of every image with its density."),
    ] = None,
    points: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Place a point on everybody and write images and points as a dataset, to correct "
            "and to train on: folder, csv, npy, json, labelme, cclabeler, coco, labelstudio or "
            "cvat. Goes with --points-to.",
        ),
    ] = None,
    points_to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new or empty folder for --points.")
    ] = None,
    regions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Named polygons, each counted by itself as well."),
    ] = None,
    level: Annotated[
        float, typer.Option(help="Share of images whose true count the interval is to hold.")
    ] = 0.9,
    tile: Annotated[
        int | None,
        typer.Option(metavar="PX", help="Side of the pieces a large image is worked on in."),
    ] = None,
    full_size: Annotated[
        bool, typer.Option("--full-size", help="Do not shrink images larger than in training.")
    ] = False,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Of a video, count a frame every 1s, 500ms, 2m.")
    ] = "1s",
    start: Annotated[
        str | None, typer.Option(metavar="TIME", help="Begin there in videos: 90, 1:30.")
    ] = None,
    end: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop there; streams run until stopped.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Draw a video's count over time.")
    ] = None,
    annotated: Annotated[
        Path | None,
        typer.Option(metavar="OUT.mp4", help="Write the video with density and count over it."),
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="How long a stream may be silent.")
    ] = "10s",
    reconnect: Annotated[
        int, typer.Option(min=0, help="How often in a row to look for a lost stream.")
    ] = 10,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What runs the model: torch; of exported files onnxruntime or openvino.",
        ),
    ] = None,
) -> None:
    """Count images, videos and streams; each count comes with an interval.

    p3net count photo.jpg

    p3net count runs/square photos/ --csv counts.csv --overlay pictures/

    What cannot be read is reported and passed over; of an animation the first
    picture is counted. Ctrl-C ends a stream; what was counted is on disk.

    Exit code 0: all was counted; 1: something could not be read; 2: nothing
    could begin, or what was counted could not be written.
    """
    from p3net.app import rows, sources
    from p3net.app import video as videos
    from p3net.checkpoint import load
    from p3net.errors import InputError
    from p3net.regions import read_regions

    model, files = sources.split_words(words)
    if not 0 < level < 1:
        raise InputError(f"--level must lie between 0 and 1, such as 0.9; got {level:g}")
    sampling = {
        "every_s": videos.seconds(every),
        "start_s": None if start is None else videos.seconds(start),
        "end_s": None if end is None else videos.seconds(end),
        "timeout_s": videos.seconds(timeout),
        "retries": reconnect,
        "notify": rows.note,
    }
    planned = sources.plan(files)
    inputs = [source.place for source in planned if isinstance(source.place, Path)]
    _check_outputs(csv, overlay, chart, annotated, planned)
    layout = _layout(points, points_to)
    areas = None if regions is None else read_regions(regions)
    counter = load(model, runtime=runtime)
    if model not in words:
        rows.note("no model named: the one in the box counts people in crowds")

    def count_one(image: Countable) -> Prediction:
        return counter.count(image, level=level, regions=areas, tile=tile, full_size=full_size)

    totals = rows.Totals()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_terminated_as_interrupted())
        enter(rows.last_line(totals, on_stderr=json))
        update = enter(_progress(len(planned), hidden=json))
        sinks: list[Sink] = [totals.add, rows.json_line if json else rows.text_lines(level)]
        if csv is not None:
            sinks.append(enter(rows.csv_rows(csv, [area.name for area in areas or ()])))
        if overlay is not None:
            sinks.append(enter(rows.overlays(overlay, inputs)))
        if layout is not None and points_to is not None:
            sinks.append(enter(rows.points(layout, points_to)))
        if chart is not None:
            sinks.append(enter(videos.chart(chart)))
        draw = None if annotated is None else enter(videos.annotated(annotated, areas))
        for done, source in enumerate(planned):
            for row, share in _counted(source, count_one, sampling, draw):
                for sink in sinks:
                    sink(row)
                update(done + share)
    if totals.failures:
        raise typer.Exit(1)


# --- counting -------------------------------------------------------------------------------


def _counted(
    source: Source, count_one: Count, sampling: Mapping[str, Any], draw: Draw | None
) -> Iterator[tuple[Row, float]]:
    """The rows of one source, each with the share of it that is done; a failure is a row."""
    from p3net.app.rows import Row
    from p3net.errors import InputError

    try:
        if source.error:
            yield Row(source, error=source.error), 1.0
        elif source.kind == "video":
            yield from _frames(source, count_one, sampling, draw)
        else:
            yield _picture(source, count_one), 1.0
    except InputError as error:
        yield Row(source, error=error.message), 1.0
    except (OSError, MemoryError) as error:
        yield Row(source, error=str(error) or type(error).__name__), 1.0


def _picture(source: Source, count_one: Count) -> Row:
    from p3net.app.rows import Row
    from p3net.app.sources import fetch
    from p3net.data.images import MAX_BYTES, open_bytes, open_image

    if source.kind == "image":
        if Path(source.place).suffix.lower() in _MAY_MOVE:
            _note_animation(source, open_image(source.place))
        return Row(source, count_one(source.place))
    if source.kind == "stdin":
        content = sys.stdin.buffer.read(MAX_BYTES)
    else:
        content = fetch(str(source.place))
    image = open_bytes(content)
    _note_animation(source, image)
    return Row(source, count_one(content), image)


def _note_animation(source: Source, image: Image.Image) -> None:
    from p3net.app.rows import note

    if getattr(image, "is_animated", False) and image.format != "MPO":  # one photo, two sizes
        note(f"{source.shown}: holds several pictures; the first is counted")


def _frames(
    source: Source, count_one: Count, sampling: Mapping[str, Any], draw: Draw | None
) -> Iterator[tuple[Row, float]]:
    from p3net.app.rows import Row
    from p3net.data.video import frames
    from p3net.data.video_source import facts

    start_s, end_s = sampling["start_s"] or 0.0, sampling["end_s"]
    if isinstance(source.place, Path):  # a camera might not like to be asked twice
        lasts_s = facts(source.place).duration_s
        end_s = min((t for t in (lasts_s, end_s) if t is not None), default=None)
    prediction = None
    for frame in frames(source.place, between=draw is not None, **sampling):
        if frame.due:
            prediction = count_one(frame.image)
            share = 0.0 if end_s is None else (frame.time_s - start_s) / max(end_s - start_s, 1e-3)
            yield Row(source, prediction, frame.image, frame.time_s), share
        if draw is not None and prediction is not None:
            draw(frame, prediction)


# --- options --------------------------------------------------------------------------------


def _check_outputs(
    csv: Path | None,
    overlay: Path | None,
    chart: Path | None,
    annotated: Path | None,
    planned: Sequence[Source],
) -> None:
    """Say before counting what could not be written after it."""
    from p3net.app import figures
    from p3net.app.contact_sheet import require_picture_path
    from p3net.app.video import require_video_path
    from p3net.errors import InputError

    inputs = {source.place.resolve() for source in planned if isinstance(source.place, Path)}
    for path in (csv, chart, annotated):
        if path is not None and path.resolve() in inputs:
            raise InputError("is one of the inputs; give another name", source=path)
    if csv is not None and not csv.parent.is_dir():
        raise InputError("its folder does not exist; make it first", source=csv)
    if overlay is not None and overlay.exists() and not overlay.is_dir():
        raise InputError("expected a folder for overlays", source=overlay)
    if chart is not None:
        require_picture_path(chart)
        figures.require_matplotlib()
    if annotated is not None:
        require_video_path(annotated)
    number = sum(source.kind == "video" for source in planned)
    for option, path in (("--chart", chart), ("--annotated", annotated)):
        if path is not None and number != 1:
            raise InputError(f"{option} needs exactly one video, got {number}")


def _layout(points: str | None, points_to: Path | None) -> Layout | None:
    from p3net.data.formats import FORMATS
    from p3net.errors import InputError

    if (points is None) != (points_to is None):
        raise InputError("--points FORMAT and --points-to DIR go together")
    if points is not None and points not in FORMATS:
        raise InputError(f"--points {points} is none of {', '.join(FORMATS)}")
    return None if points is None else FORMATS[points]


# --- the terminal ---------------------------------------------------------------------------


@contextmanager
def _progress(total: int, *, hidden: bool) -> Iterator[Callable[[float], None]]:
    """A bar below the lines in a terminal, a line every few seconds on stderr elsewhere."""
    from p3net.app.console import console, stderr

    screen = console if console.is_terminal else stderr
    if hidden and console.is_terminal:  # a bar among lines of JSON spoils them
        yield lambda _done: None
    elif screen.is_terminal:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

        columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        # stdout may be a pipe, and rich would send to the screen what belongs into it
        with Progress(*columns, console=screen, transient=True, redirect_stdout=False) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield _plain_progress(total)


def _plain_progress(total: int, every_s: float = 5.0) -> Callable[[float], None]:
    from p3net.app.console import stderr
    from p3net.app.rows import clock

    begun = last = time.monotonic()

    def update(done: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every_s and 0 < done < total:
            last = now
            left = clock((now - begun) * (total - done) / done)
            stderr.print(f"counting: {100 * done / total:.0f} %, about {left} left", markup=False)

    return update


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let `kill` and service managers end a stream as properly as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
