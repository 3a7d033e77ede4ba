"""Pictures of densities, and plots of results and records.

Pictures need Pillow and numpy alone; plots need matplotlib, the extra `figures`.

Shapes: H×W pixels, h×w cells.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from p3net.data.images import to_rgb
from p3net.errors import InputError
from p3net.prediction import Prediction, stretch
from p3net.structures import Points, inside
from p3net.targets import CELL, density

if TYPE_CHECKING:
    from p3net.evaluation import ImageResult

Floats = NDArray[np.float32]

HEAT = (
    *((6, 4, 20), (52, 16, 92), (116, 28, 110), (188, 54, 84)),
    *((236, 108, 44), (250, 178, 66), (252, 244, 176)),
)
"""Few to many: every step is lighter, so that it also reads without colour."""

SIGNED = ((22, 78, 160), (120, 172, 216), (246, 246, 246), (236, 146, 104), (168, 24, 40))
"""Too few (blue), right (white), too many (red): equally far from right, equally dark."""

_GAP, _CAPTION, _TILE = 8, 24, 320  # px between tiles; height of a caption; width of a tile


# --- densities ------------------------------------------------------------------------------


def colours(shares: NDArray[Any], anchors: Sequence[tuple[int, int, int]] = HEAT) -> Image.Image:
    """H×W values in [0, 1] as colours between equally spaced anchors."""
    places = np.linspace(0, 1, len(anchors))
    channels = [np.interp(shares, places, [anchor[i] for anchor in anchors]) for i in range(3)]
    return Image.fromarray(np.stack(channels, axis=-1).round().astype(np.uint8))


def heat(
    cells: NDArray[Any],
    size_hw: tuple[int, int],
    *,
    peak: float | None = None,
    cell_xy: tuple[float, float] = (CELL, CELL),
) -> Image.Image:
    """A density, h×w, as a picture of its image's size.

    Args:
        cells: heads per cell.
        size_hw: of the image in pixels; cells that reach beyond it are cut.
        peak: the density that gets the lightest colour; its own largest where not given.
        cell_xy: width and height of a cell in pixels of the image.
    """
    peak = float(cells.max()) if peak is None else peak
    return colours(stretch(cells, size_hw[::-1], cell_xy) / max(peak, 1e-6))


def overlay(
    image: Image.Image,
    cells: NDArray[Any],
    *,
    peak: float | None = None,
    cell_xy: tuple[float, float] = (CELL, CELL),
) -> Image.Image:
    """The image, darkened where nobody was counted, with the density's heat where somebody was."""
    base = to_rgb(image)
    peak = float(cells.max()) if peak is None else peak
    shares = stretch(cells, base.size, cell_xy).clip(0, None) / max(peak, 1e-6)
    opacity = Image.fromarray((255 * 0.8 * np.sqrt(shares.clip(0, 1))).round().astype(np.uint8))
    return Image.composite(colours(0.25 + 0.75 * shares), base, opacity)


class Tiles(NamedTuple):
    """The four pictures of one image, all of one size."""

    image: Image.Image
    truth: Image.Image
    counted: Image.Image
    difference: Image.Image


def tiles(
    image: Image.Image,
    truth_points: Points,
    prediction: Prediction,
    *,
    peak: float | None = None,
    width: int = _TILE,
) -> Tiles:
    """Input, true and counted density in one scale, and counted less true.

    Args:
        image: as it was counted.
        truth_points: N×2 pixels of the upright image; those outside it are left out.
        prediction: of this image.
        peak: the density at the end of both scales; the largest there is where not given.
        width: of each picture in pixels.
    """
    scale = width / prediction.size_hw[1]
    size_hw = (max(1, round(prediction.size_hw[0] * scale)), width)
    cell_xy = (prediction.cell_xy[0] * scale, prediction.cell_xy[1] * scale)
    truth = truth_cells(truth_points, prediction)
    if peak is None:  # faint noise in an empty image is not to look like a crowd
        peak = max(float(truth.max()), float(prediction.density.max()), 0.05)
    apart = stretch(prediction.density - truth, size_hw[::-1], cell_xy) / peak
    return Tiles(
        to_rgb(image).resize(size_hw[::-1], Image.Resampling.LANCZOS),
        heat(truth, size_hw, peak=peak, cell_xy=cell_xy),
        heat(prediction.density, size_hw, peak=peak, cell_xy=cell_xy),
        colours((0.5 + 0.5 * apart).clip(0, 1), SIGNED),
    )


def truth_cells(points_xy: Points, prediction: Prediction) -> Floats:
    """The true density on the grid of a prediction, h×w."""
    scale_xy = CELL / np.array(prediction.cell_xy)
    rows, columns = prediction.density.shape
    size_hw = (rows * CELL, columns * CELL)
    shown = points_xy[inside(points_xy, prediction.size_hw)] * scale_xy
    shown = shown[inside(shown, size_hw)]  # a grid may leave out part of a cell at the edges
    cells: Floats = density(torch.from_numpy(shown), size_hw).numpy()
    return cells


def panel(
    image: Image.Image,
    truth_points: Points,
    prediction: Prediction,
    *,
    title: str = "input",
) -> Image.Image:
    """The four pictures of `tiles` side by side, with counts below."""
    pictures = tiles(image, truth_points, prediction)
    truth = int(inside(truth_points, prediction.size_hw).sum())
    captions = (
        title,
        f"truth: {truth:,}",
        f"counted: {prediction.count:,.1f}",
        f"difference: {prediction.count - truth:+,.1f}",
    )
    step = _TILE + _GAP
    sheet = Image.new("RGB", (4 * step + _GAP, pictures[0].height + _CAPTION + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)
    for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        sheet.paste(picture, (_GAP + i * step, _GAP))
        text = caption
        while draw.textlength(text, font) > _TILE:  # the end of a long name says most
            text = f"...{text[4:]}"
        draw.text((_GAP + i * step, _GAP + picture.height + 4), text, fill="black", font=font)
    return sheet


def stack(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures below each other, on white."""
    size = (max(p.width for p in pictures), sum(p.height for p in pictures) + _GAP)
    sheet = Image.new("RGB", size, "white")
    top = 0
    for picture in pictures:
        sheet.paste(picture, (0, top))
        top += picture.height
    return sheet


# --- plots ----------------------------------------------------------------------------------

_LINES = ("#7a8794", "#d1495b", "#2e86ab", "#8f6bb3", "#3d9970")
_MARKERS = ("o", "o", "+", "x", "s")
DPI = 160
"""Of plots."""
_INK = {False: "#333333", True: "#cccccc"}


def require_matplotlib() -> None:
    """Say early that plots cannot be made."""
    try:
        import matplotlib  # noqa: F401, ICN001 (only whether it is there)
    except ImportError:
        raise InputError(
            "plots need matplotlib, which comes with an extra: pip install 'p3net[figures]'"
        ) from None


def scatter(results: Mapping[str, Sequence[ImageResult]], *, dark: bool = False) -> bytes:
    """True counts against what each model counted, with the diagonal; a transparent PNG."""
    most = max((max(r.truth, r.counted) for each in results.values() for r in each), default=1.0)

    def draw(axes: Any) -> None:
        axes = axes[0]
        limit = 1.4 * max(most, 10)
        axes.plot([0, limit], [0, limit], color=_INK[dark], linewidth=0.8, linestyle=(0, (4, 3)))
        for i, (name, each) in enumerate(results.items()):
            truth, counted = [r.truth for r in each], [max(r.counted, 0) for r in each]
            axes.plot(
                truth,
                counted,
                _MARKERS[i],
                color=_LINES[i],
                label=name,
                markersize=6 - 2 * (i == 1),  # a ring round a dot, so that none hides another
                markerfacecolor="none" if i == 0 and len(results) > 1 else _LINES[i],
            )
        ticks = [t for t in (0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000) if t <= limit]
        for set_scale, set_ticks in (
            (axes.set_xscale, axes.set_xticks),
            (axes.set_yscale, axes.set_yticks),
        ):
            set_scale("symlog", linthresh=10)
            set_ticks(ticks, [f"{t:,}" for t in ticks], minor=False)
            set_ticks([], minor=True)
        axes.set(xlabel="people", ylabel="counted", xlim=(-1, limit), ylim=(-1, limit))
        axes.set_aspect("equal")
        if len(results) > 1:
            axes.legend(frameon=False, labelcolor=_INK[dark], fontsize=9)

    return _plot(draw, 1, (5.2, 5.0), dark=dark)


def curves(logs: Mapping[str, Sequence[Mapping[str, Any]]], *, dark: bool = False) -> bytes:
    """Loss, validation MAE and disagreement over the steps, where recorded; a transparent PNG.

    Args:
        logs: the lines of each run's `log.jsonl`, by the run's name.
        dark: for a dark page.
    """
    wanted: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "loss on labelled crops": _labelled_loss,
        "validation MAE": lambda line: (line.get("validation") or {}).get("mae"),
        "branches apart on unlabelled crops": lambda line: line["records"].get("disagreement"),
    }
    series: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for title, value in wanted.items():
        for name, log in logs.items():
            found = [(int(line["step"]), value(line)) for line in log]
            points = [(step, v) for step, v in found if v is not None]
            if points:
                series.setdefault(title, {})[name] = points

    def draw(axes: Any) -> None:
        for one, (title, runs) in zip(axes, series.items(), strict=True):
            for (name, _), colour in zip(logs.items(), _LINES, strict=False):
                if name in runs:
                    steps, values = zip(*runs[name], strict=True)
                    smooth = values if title == "validation MAE" else running_mean(values)
                    one.plot(steps, smooth, color=colour, linewidth=1.5, label=name)
            one.set_title(title, fontsize=10, color=_INK[dark], loc="left")
            one.set_xlabel("step")
            if title.startswith("loss"):
                one.set_yscale("log")
            else:
                one.set_ylim(bottom=0)
        if series:
            axes[0].legend(frameon=False, labelcolor=_INK[dark], fontsize=9)

    return _plot(draw, max(len(series), 1), (4.1 * max(len(series), 1), 3.2), dark=dark)


def over_time(series: Sequence[tuple[float, Prediction]], *, dark: bool = False) -> bytes:
    """Counts of a video with the band of their intervals, and of its regions; a transparent PNG.

    Args:
        series: seconds and what was counted then, in order.
        dark: for a dark page.
    """
    times = np.array([time_s for time_s, _ in series])
    last = float(times[-1])
    unit, factor = ("h", 3600) if last > 7200 else ("min", 60) if last > 180 else ("s", 1)
    regions = list(series[0][1].regions)[: len(_LINES) - 2]

    def draw(axes: Any) -> None:
        axes = axes[0]
        many = len(times) > 60
        known = [p.interval for _, p in series if p.interval is not None]
        if len(known) == len(series):
            low, high = zip(*((i.low, i.high) for i in known), strict=True)
            words = f"{100 * known[0].level:g} % interval" + (
                "" if known[0].calibrated else ", uncalibrated"
            )
            axes.fill_between(
                times / factor, low, high, color=_LINES[2], alpha=0.2, linewidth=0, label=words
            )
        style = {"linewidth": 1.6, "marker": None if many else "o", "markersize": 3}
        counts = [p.count for _, p in series]
        axes.plot(times / factor, counts, color=_LINES[2], label="count", **style)
        for name, colour in zip(regions, (*_LINES[:2], *_LINES[3:]), strict=False):
            part = [p.regions[name].count for _, p in series]
            axes.plot(times / factor, part, color=colour, label=name, **{**style, "linewidth": 1.2})
        axes.set(xlabel=f"time ({unit})", ylabel="count")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        axes.legend(
            frameon=False,
            labelcolor=_INK[dark],
            fontsize=9,
            ncols=5,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            borderaxespad=0.2,
        )

    return _plot(draw, 1, (8.0, 3.4), dark=dark)


def on_white(png: bytes) -> Image.Image:
    """A transparent plot as a picture that reads on its own."""
    with Image.open(io.BytesIO(png)) as plot:
        ink = plot.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", ink.size, "white"), ink).convert("RGB")


def _labelled_loss(line: Mapping[str, Any]) -> float | None:
    return next((float(v) for name, v in line["losses"].items() if name != "ecr"), None)


def running_mean(values: Sequence[float]) -> NDArray[np.float64]:
    """The mean over the last 4 % of the steps, so that a curve shows its course.

    >>> running_mean([1.0] * 50 + [3.0] * 50)[[0, 49, 50, 51, 99]].tolist()
    [1.0, 1.0, 1.5, 2.0, 3.0]
    """
    window = max(1, len(values) // 25)
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means: NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _plot(
    draw: Callable[[Any], None], columns: int, size_in: tuple[float, float], *, dark: bool
) -> bytes:
    """One row of axes as a transparent PNG, without any window."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    ink = _INK[dark]
    for one in axes:
        one.set_facecolor("none")
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(ink)
        one.tick_params(colors=ink, labelsize=9, which="both")
        one.xaxis.label.set_color(ink)
        one.yaxis.label.set_color(ink)
    draw(axes)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, transparent=True)
    return file.getvalue()
