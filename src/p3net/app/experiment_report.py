"""What an experiment ends with: markdown, CSV and a plot, with the paper's figures beside.

Every one of them says at which scale, on what data and on what machine it was measured.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p3net.study import CostLine, Line, Scale, Study

SMALL = (
    "**Small scale: these are not the paper's figures and cannot be compared with them.** "
    "Rendered scenes, a small backbone and a short training; the paper's column is there for the "
    "order of the lines and the size of their differences alone."
)
FULL = "The paper's scale: its data, network and settings."


def write(
    folder: Path, study: Study, scale: Scale, lines: Sequence[Line], changed: Mapping[str, Any]
) -> list[Path]:
    """`table.md`, `table.csv` and `plot.png` in a folder; gives their paths."""
    from p3net.trial import write_whole

    files = [folder / name for name in ("table.md", "table.csv", "plot.png")]
    write_whole(files[0], markdown(study, scale, lines, changed))
    write_whole(files[1], comma_separated(scale, lines))
    files[2].write_bytes(plot(study, scale, lines))
    return files


# --- text --------------------------------------------------------------------------------------


def markdown(
    study: Study, scale: Scale, lines: Sequence[Line], changed: Mapping[str, Any] | None = None
) -> str:
    """The table, below what it was measured on."""
    rows = [
        (
            each.title,
            *(spread(each, metric) for metric in ("mae", "rmse")),
            *(spread(each, "nae", 3),),
            str(each.seeds),
            _times(each.ratio),
            *(_figure(each.published.get(metric)) for metric in ("mae", "rmse")),
            _times(each.published_ratio),
        )
        for each in lines
    ]
    header = ("", "MAE", "RMSE", "NAE", "seeds", "MAE ÷", "paper MAE", "paper RMSE", "paper MAE ÷")
    against = {n: e.against for n, e in study.runs.items() if e.against}
    parts = [
        f"# {study.title}",
        f"{study.where}. {study.claim}",
        SMALL if scale == "small" else FULL,
        conditions(lines),
    ]
    if changed:
        parts.append(f"Changed by hand: {_plain(changed)}.")
    parts.append(table(header, rows))
    legend = "Mean ± standard deviation over the seeds."
    if against:
        legend += " MAE ÷: over that of " + _against(study, against) + "."
    parts.append(legend)
    if study.note:
        parts.append(study.note)
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions(lines: Sequence[Line]) -> str:
    """Data, network, steps and machine of the runs that are done; a dash where they differ."""
    records = [record for line in lines for record in line.records]
    if not records:
        return "Nothing has been measured yet."
    kept = [record["settings"] for record in records]

    def among(values: Sequence[object]) -> str:
        return " / ".join(dict.fromkeys(map(str, values)))

    minutes = [record["seconds"] / 60 for record in records]
    facts = {
        "Data": "; ".join(dict.fromkeys(f"`{each['data']}`" for each in kept)),
        "images labelled": among([record["images"]["labelled"] for record in records]),
        "unlabelled": among([record["images"]["unlabelled"] for record in records]),
        "counted": among([len(record["per_image"]) for record in records]),
        "backbone": among([each["network"]["backbone"] for each in kept]),
        "steps": among([each["recipe"]["steps"] for each in kept]),
        "crops a step": among([record["crops"] for record in records]),
        "crop in px": among([each["views"]["crop"] for each in kept]),
        "hardware": among([record["hardware"] for record in records]),
        "minutes a run": f"{min(minutes):.1f}–{max(minutes):.1f}",
    }
    return "; ".join(f"{name}: {text}" for name, text in facts.items()) + "."


def comma_separated(scale: Scale, lines: Sequence[Line]) -> str:
    """A line for every line of the table, figures in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = ("mae", "rmse", "nae")
    figures = [f"{name}_{what}" for name in names for what in ("mean", "sd")]
    context = ["data", "steps", "labelled_images", "hardware"]
    ours = ["run", "title", "scale", "seeds", *figures, "mae_each", "mae_ratio"]
    writer.writerow([*ours, "paper_mae", "paper_rmse", "paper_mae_ratio", *context])
    for each in lines:
        values = [f for name in names for f in (each.mean(name), each.sd(name))]
        first = each.records[0] if each.records else None
        facts = ["", "", "", ""]
        if first is not None:
            own = first["settings"]
            facts = [own["data"], own["recipe"]["steps"], first["images"]["labelled"]]
            facts.append(first["hardware"])
        row = [each.name, each.title, scale, each.seeds, *values]
        row += [" ".join(f"{value:.4f}" for value in each.measured["mae"]), each.ratio]
        row += [each.published.get("mae"), each.published.get("rmse"), each.published_ratio, *facts]
        writer.writerow([f"{v:.4f}" if isinstance(v, float) else v for v in row])
    return file.getvalue()


def spread(line: Line, metric: str, digits: int = 1) -> str:
    """Mean ± sd; the mean alone of one seed, a dash of none."""
    mean, sd = line.mean(metric), line.sd(metric)
    if mean is None:
        return "–"
    return f"{mean:.{digits}f}" + (f" ± {sd:.{digits}f}" if sd is not None else "")


def _figure(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _against(study: Study, against: Mapping[str, str]) -> str:
    titles = dict.fromkeys(study.runs[name].title for name in against.values())
    return " or ".join(f"“{title}”" for title in titles) if len(titles) < 4 else "its own reference"


def _plain(changed: Mapping[str, Any], prefix: str = "") -> str:
    """Nested settings as a.b=c.

    >>> _plain({"recipe": {"steps": 2}, "labelled": "5%"})
    'recipe.steps=2, labelled=5%'
    """
    parts = []
    for key, value in changed.items():
        inner = isinstance(value, dict)
        parts.append(_plain(value, f"{prefix}{key}.") if inner else f"{prefix}{key}={value}")
    return ", ".join(parts)


# --- costs -------------------------------------------------------------------------------------


def cost_markdown(study: Study, lines: Sequence[CostLine], machine: str) -> str:
    """Parameters and multiply-adds both ways, and times as a ratio to the first line."""
    timing = study.timing
    px = f"{timing.count_px}²" if timing else ""
    header = (
        "",
        "parameters, all",
        f"multiply-adds at {px}, all",
        "parameters, modules only",
        "multiply-adds, modules only",
        "paper",
        f"seconds at {timing.time_px}²" if timing else "",
        "time ÷",
        "paper time ÷",
    )
    first, paper_first = lines[0].seconds, lines[0].published.get("seconds_100")
    rows = []
    for each in lines:
        figures = each.published
        theirs = figures.get("seconds_100")
        rows.append(
            (
                each.title,
                f"{each.cost.parameters / 1e6:.2f} M",
                f"{each.cost.multiply_adds / 1e9:.2f} G",
                f"{each.cost.module_parameters / 1e6:.2f} M",
                f"{each.cost.module_multiply_adds / 1e9:.2f} G",
                " / ".join(
                    (
                        f"{_figure(figures.get('parameters_m'))} M",
                        f"{_figure(figures.get('multiply_adds_g'))} G",
                    )
                ),
                f"{each.seconds:.2f}",
                f"{each.seconds / first:.2f}",
                f"{theirs / paper_first:.2f}" if theirs and paper_first else "–",
            )
        )
    text = [f"# {study.title}", f"{study.where}. {study.claim}", f"Timed on {machine}: the least"]
    text[-1] += f" of {timing.rounds if timing else 0} rounds, in turn, one image at a time."
    return "\n\n".join([*text, table(header, rows), study.note]).rstrip() + "\n"


# --- plot --------------------------------------------------------------------------------------


def plot(study: Study, scale: Scale, lines: Sequence[Line]) -> bytes:
    """MAE of every line, each seed a dot: measured on the left, the paper's on the right; PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.34 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(lines))
    for place, line in zip(places, lines, strict=True):
        values = line.measured["mae"]
        left.plot(values, [place] * len(values), "o", color="#7a8794", markersize=4)
        if (mean := line.mean("mae")) is not None:
            left.errorbar(mean, place, xerr=line.sd("mae") or 0, fmt="D", color="#d1495b")
        if "mae" in line.published:
            right.plot(line.published["mae"], place, "D", color="#2e86ab")
    left.set_yticks(list(places), [line.title for line in lines], fontsize=9)
    left.invert_yaxis()
    small = scale == "small"
    left.set_title(
        "measured at SMALL scale: MAE, mean ± sd, seeds" if small else "measured: MAE, mean ± sd",
        fontsize=9,
        loc="left",
    )
    words = textwrap.fill(f"in the paper: MAE ({study.where})", 60)
    right.set_title(words, fontsize=9, loc="left")
    if not small:  # one measure, one scale
        right.sharex(left)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", linewidth=0.4)
        axes.set_xlim(left=0)  # a small difference is to look small
    figure.suptitle(study.title, fontsize=11, x=0.01, ha="left")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=140)
    return file.getvalue()
