"""`p3net data`: read any layout, find its faults, convert it, draw labelled lists."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from p3net.data.checking import Report
    from p3net.data.splits import Split

app = typer.Typer(no_args_is_help=True, help="Read any layout, find its faults, convert and split.")

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A path whose layout is recognised, or sha:PATH, shb:, qnrf:, jhu:, nwpu:, folder:, "
        "coco: and the like, or synthetic:SEED.",
    ),
]


@app.callback()
def main() -> None:
    """Keep `check` a command of its own, however many there are."""


# --- check ------------------------------------------------------------------------------


@app.command()
def check(
    data: Data,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Draw a contact sheet with the points.")
    ] = None,
    crop: Annotated[
        int, typer.Option(min=0, help="Warn of images smaller than this many px; 0 for none.")
    ] = 256,
) -> None:
    """Count images and points and name every fault with its file.

    Exit code 0: clean (there may be warnings); 1: faults; 2: the data cannot be read.
    """
    from p3net.app.console import progress
    from p3net.app.contact_sheet import contact_sheet, require_picture_path, save_picture
    from p3net.data.catalogue import open_dataset
    from p3net.data.checking import check as check_dataset

    if picture is not None:
        require_picture_path(picture)
    dataset = open_dataset(data)
    with progress(len(dataset), "checking") as update:
        report = check_dataset(
            dataset, crop=crop or None, progress=lambda done, _total: update(done)
        )
    if json:
        typer.echo(_as_json(report))
    else:
        _print_report(report)
    if picture is not None:
        save_picture(contact_sheet(dataset), picture)
    raise typer.Exit(0 if report.clean else 1)


def _as_json(report: Report) -> str:
    import json
    from dataclasses import asdict

    faults = [{**asdict(fault), "severity": fault.severity} for fault in report.faults]
    record = {**asdict(report), "clean": report.clean, "faults": faults}
    return json.dumps(record, indent=2)


def _print_report(report: Report) -> None:
    from rich.text import Text

    from p3net.app.console import console
    from p3net.data.checking import FAULTS

    rows = _rows(report)
    margin = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        row = Text.assemble((name.ljust(margin), "bold"), _printable(text))
        console.print(row, soft_wrap=True)
    if report.histogram.images:
        console.print("\nimages by number of points", style="bold")
        console.print(_bars(report), markup=False)
    for kind, words in FAULTS.items():
        faults = [fault for fault in report.faults if fault.kind == kind]
        if faults:
            style = "yellow" if faults[0].severity == "warning" else "red"
            title = f"\n{faults[0].severity}: {words} ({len(faults)})"
            console.print(title, style=style, markup=False, soft_wrap=True)
        for fault in faults:
            line = _printable(f"  {fault.file}: {fault.message}")
            console.print(line, markup=False, soft_wrap=True)
    errors = sum(fault.severity == "error" for fault in report.faults)
    warnings = len(report.faults) - errors
    console.print(f"\n{errors} faults, {warnings} warnings" if report.faults else "\nno faults")


def _printable(text: str) -> str:
    """File names need not be valid text."""
    return text.encode("utf-8", "replace").decode()


def _rows(report: Report) -> list[tuple[str, str]]:
    splits = ", ".join(f"{split} {number:,}" for split, number in report.splits.items())
    rows = [
        ("data", report.root),
        ("read as", report.kind),
        ("images", f"{report.images:,} ({splits})"),
        ("labelled", f"{report.labelled:,}"),
        ("points", f"{report.points:,}"),
    ]
    if report.counts is not None:
        counts = report.counts
        text = f"{counts.least:,} to {counts.most:,}, median {counts.median:,g}, "
        rows.append(("points an image", f"{text}mean {counts.mean:,.1f}"))
    if report.smallest_hw is not None and report.largest_hw is not None:
        (low_h, low_w), (high_h, high_w) = report.smallest_hw, report.largest_hw
        same = report.smallest_hw == report.largest_hw
        sizes = f"{low_w} × {low_h}" + ("" if same else f" to {high_w} × {high_h}")
        rows.append(("width × height", f"{sizes} px"))
    grey = f"{report.grey:,}"
    if report.colourless:
        grey += f", and {report.colourless:,} stored as colour without any"
    return [*rows, ("grey", grey)]


def _bars(report: Report, width: int = 40) -> str:
    """The histogram, a line for each bin, in eighths of a character."""
    edges, images = report.histogram.edges, report.histogram.images
    labels = [f"{low:,}–{high - 1:,}" for low, high in pairwise(edges)]
    margin = max(map(len, labels))
    lines = []
    for label, number in zip(labels, images, strict=True):
        eighths = round(8 * width * number / max(images))
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        lines.append(f"  {label:>{margin}}  {bar or ('▏' if number else '')} {number:,}")
    return "\n".join(lines)


# --- convert ----------------------------------------------------------------------------


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="As DATA of `check`: a path, sha:PATH, ….")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new or empty folder.")],
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="folder (x y in .txt), csv, npy, json, labelme, cclabeler, coco, labelstudio "
            "or cvat.",
        ),
    ],
) -> None:
    """Write the images and points in another format; nothing is lost, nothing overwritten."""
    from p3net.app.console import console, progress
    from p3net.data.catalogue import open_dataset
    from p3net.data.formats import FORMATS
    from p3net.data.formats import convert as convert_dataset

    if to not in FORMATS:
        raise typer.BadParameter(f"{to!r} is none of {', '.join(FORMATS)}", param_hint="--to")
    dataset = open_dataset(source)
    with progress(len(dataset), "converting") as update:
        convert_dataset(
            dataset, destination, FORMATS[to], progress=lambda done, _total: update(done)
        )
    written = FORMATS[to].read(destination)
    points = [len(sample.marks().points_xy) for sample in written.samples if sample.labelled]
    console.print(
        f"{_many(len(written), 'image')} ({len(points):,} labelled, {_many(sum(points), 'point')}) "
        f"as {to} in {destination}",
        markup=False,
        soft_wrap=True,
    )


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


# --- split ------------------------------------------------------------------------------


@app.command()
def split(
    data: Data,
    *,
    labelled: Annotated[
        str | None,
        typer.Option(help="Share (5%, 0.05) or number (15) of training images with labels."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw; one seed gives nested lists.")] = 1,
    validation: Annotated[
        str | None,
        typer.Option(
            help="Share or number of training images to choose a model on. "
            "Default: the published part, or 10% where there is none."
        ),
    ] = None,
    order: Annotated[
        str, typer.Option(help="Label first: random, crowded (most people) or sparse (fewest).")
    ] = "random",
    stratified: Annotated[
        bool, typer.Option("--stratified", help="Spread the labels evenly over the counts.")
    ] = False,
    labelled_list: Annotated[
        Path | None,
        typer.Option("--list", metavar="FILE", help="Take the labelled images from a list."),
    ] = None,
    validation_list: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the validation images from a list.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the four lists and split.json.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the split as JSON.")] = False,
) -> None:
    """Say which images are labelled, unlabelled, for validation and for the test.

    Test images are never drawn from. Every split has a hash that runs record.
    """
    from p3net.data import splits
    from p3net.data.catalogue import open_dataset
    from p3net.errors import InputError

    held = None if validation is None else splits.parse_amount(validation)
    if (labelled is None) == (labelled_list is None):
        raise InputError("say which images are labelled: --labelled 5% or --list FILE, one of them")
    if labelled_list is None and validation_list is not None:
        raise InputError("--validation-list goes with --list; give both or neither")
    if labelled_list is not None and (order != "random" or stratified):
        raise InputError(
            "--list says which images are labelled; leave out --order and --stratified"
        )
    if validation_list is not None and held is not None:
        raise InputError("--validation-list says which images; leave out --validation")
    dataset = open_dataset(data)
    if labelled is not None:
        drawn = splits.draw(
            dataset,
            labelled=splits.parse_amount(labelled),
            seed=seed,
            validation=held,
            order=splits.parse_order(order),
            stratified=stratified,
        )
    elif labelled_list is not None:
        held_out = held if validation_list is None else validation_list
        drawn = splits.from_lists(dataset, labelled=labelled_list, validation=held_out, seed=seed)
    points = sum(len(s.marks().points_xy) for s in splits.apply(dataset, drawn).labelled.samples)
    if out is not None:
        splits.write(drawn, out)
    if json:
        typer.echo(_split_as_json(drawn, points))
    else:
        _print_split(drawn, points, out)


def _split_as_json(drawn: Split, points: int) -> str:
    import json

    from p3net.data.splits import ROLES

    roles = {role: list(drawn.keys(role)) for role in ROLES}
    record = {"hash": drawn.hash, "points": points, "how": dict(drawn.how), **roles}
    return json.dumps(record, indent=2, ensure_ascii=False)


def _print_split(drawn: Split, points: int, out: Path | None) -> None:
    from rich.table import Table

    from p3net.app.console import console
    from p3net.data.splits import ROLES

    table = Table("role", box=None, pad_edge=False)
    for name in ("images", "points"):
        table.add_column(name, justify="right")
    for role in ROLES:
        table.add_row(
            role, f"{len(drawn.keys(role)):,}", f"{points:,}" if role == "labelled" else ""
        )
    console.print(table)
    console.print(f"\nhash {drawn.hash}", markup=False)
    if out is None:
        console.print("nothing written; --out FOLDER keeps the lists", markup=False)
    else:
        console.print(f"written to {out}", markup=False, soft_wrap=True)
