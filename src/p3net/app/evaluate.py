"""`p3net evaluate`: how far a model's counts are from the truth, on whole images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p3net.app.data import Data
from p3net.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

    from p3net.counting import Counter
    from p3net.evaluation import Evaluation, Group, ImageResult
    from p3net.metrics import Estimate
    from p3net.structures import Dataset, Sample


def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run's folder, or a file of weights.")
    ],
    data: Data,
    *,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="SPLIT",
            help="Which images: test (the default; all of a folder without splits), val, train, "
            "or a list.txt of training images.",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="OUT.csv", help="Write a line for every image.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="OUT.png", help="Draw the worst, the median and the best images."),
    ] = None,
    scatter: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Plot people against counted.")
    ] = None,
) -> None:
    """MAE, RMSE and NAE on whole images, with 95 % bootstrap intervals, and by kind of image.

    An image that cannot be read is reported and passed over; the exit code is 1 then.
    """
    from p3net import evaluation
    from p3net.app import figures
    from p3net.app.console import progress, stderr
    from p3net.app.contact_sheet import require_picture_path, save_picture
    from p3net.checkpoint import load
    from p3net.data.catalogue import open_dataset

    for path in (picture, scatter):
        if path is not None:
            require_picture_path(path)
    if scatter is not None:
        figures.require_matplotlib()
    if csv is not None:
        _require_folder(csv)
    counter = load(model)
    images = open_dataset(data)
    split = split or split_meant(images, "test")
    dataset = part(images, split)
    notes = warnings(counter, model, dataset)
    for note in notes:
        stderr.print(f"WARNING: {note}", style="bold red", markup=False, soft_wrap=True)
    labelled = dataset.where(lambda sample: sample.labelled)
    if left_out := len(dataset) - len(labelled):
        stderr.print(f"{left_out:,} images without points are left out", markup=False)
    bad = Unreadable()
    with progress(len(labelled), "counting") as update:
        found = evaluation.evaluate(counter, labelled, lambda done, _total: update(done), bad.add)
    if json:
        context = {"model": str(model), "data": data, "split": split, "warnings": notes}
        _print_json(found, {**context, "unreadable": bad.keys})
    else:
        _print_tables(found, f"{data}, {split} images")
    if csv is not None:
        write_csv(csv, found.results)
    if picture is not None:
        save_picture(cases(counter, labelled, found.results), picture)
    if scatter is not None:
        save_picture(figures.on_white(figures.scatter({"model": found.results})), scatter)
    bad.leave()


class Unreadable:
    """Images that were passed over."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def add(self, sample: Sample, error: InputError) -> None:
        """Say which one, and why."""
        from p3net.app.console import stderr

        self.keys.append(sample.key)
        text = f"error: {sample.key}: {error.message}"
        stderr.print(text, style="red", markup=False, soft_wrap=True)

    def leave(self) -> None:
        """End the command with code 1 if there were any."""
        if self.keys:
            raise typer.Exit(1)


def split_meant(dataset: Dataset, usual: str) -> str:
    """Where no split is given: the usual one, or all of a user's own images that have none."""
    from p3net.data.catalogue import is_own

    whole = is_own(dataset) and {sample.split for sample in dataset.samples} == {"train"}
    return "train" if whole else usual


def part(dataset: Dataset, split: str) -> Dataset:
    """The images of a split or of a list; an error that names the splits there are."""
    from p3net.data import splits

    if split.endswith(".txt"):
        return dataset.pick(sample.key for sample in splits.listed(dataset, Path(split)))
    chosen = dataset.part(split)
    if len(chosen):
        return chosen
    there = [f"{s} ({len(dataset.part(s)):,})" for s in ("train", "val", "test")]
    there = [text for text in there if not text.endswith("(0)")]
    raise InputError(
        f"no {split} images; there are {', '.join(there)}: choose with --split",
        source=dataset.root,
    )


def _require_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError("its folder does not exist; make it first", source=path)


# --- what makes figures worthless -------------------------------------------------------------


def warnings(counter: Counter, model: str | Path, dataset: Dataset) -> list[str]:
    """Reasons not to trust figures of this model on these images."""
    found = []
    if counter.metadata.get("chosen_on_test"):
        found.append(
            "this model was chosen on test images; its figures on them are not those of "
            "unseen images"
        )
    roles = shared_roles(counter, model, dataset)
    if roles:
        which = " and ".join(f"{number:,} {role}" for role, number in roles.items())
        found.append(
            f"of these {len(dataset):,} images, the run itself used {which}; "
            "these figures say little about unseen images"
        )
    return found


def shared_roles(counter: Counter, model: str | Path, dataset: Dataset) -> dict[str, int]:
    """How many of the images the model's own run used, by role, or those that it went on from.

    A run's folder keeps its lists. Images are the same where the kind of data and the key are;
    names of rendered scenes say nothing without their seed and size.
    """
    from p3net.data.splits import ROLES

    used: dict[str, set[str]] = {}
    for record, folder in _ancestors(counter.metadata, model):
        for key, role in _roles(record, folder, dataset).items():
            used.setdefault(key, set()).add(role)
    worst = [next(role for role in ROLES if role in roles) for roles in used.values()]
    return {role: worst.count(role) for role in ROLES if role in worst}


def _ancestors(
    record: Mapping[str, Any], model: str | Path
) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """The records of a model and of those it went on from, with their folders, the last first."""
    from p3net import checkpoint

    seen: set[Path] = set()
    while (path := checkpoint.weights_file(model)) not in seen:
        seen.add(path)
        yield record, path.parent
        model = str(record.get("settings", {}).get("weights", "none"))
        if not checkpoint.is_model(model):
            return
        _, record = checkpoint.read(checkpoint.weights_file(model))


def _roles(record: Mapping[str, Any], folder: Path, dataset: Dataset) -> dict[str, str]:
    """What a run used each of the images for, by their keys."""
    from p3net.data import splits
    from p3net.data.catalogue import SURFACES, SYNTHETIC, origin
    from p3net.data.synthetic import parse_spec

    kind = record.get("kind")
    if kind is None or not (folder / "split").is_dir():
        return {}
    rendered = dataset.kind == SYNTHETIC == kind
    if rendered:
        specs = (record["settings"]["data"], dataset.root)
        one, two = (parse_spec(spec.partition(":")[2]) for spec in specs)
        if (one.seed, one.size_hw) != (two.seed, two.size_hw):
            return {}
    split = splits.read(folder / "split")
    used = {origin(kind, key): role for role in splits.ROLES[:-1] for key in split.keys(role)}
    origins = {sample.key: origin(dataset.kind, sample.key) for sample in dataset.samples}
    return {
        key: used[each]
        for key, each in origins.items()
        if each in used and (rendered or each[0] not in (SYNTHETIC, SURFACES))
    }


# --- what is written --------------------------------------------------------------------------


def record(found: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON; figures that do not exist are null."""
    groups = {"by_level": found.by_level, "by_weather": found.by_weather}
    images = [
        {
            "key": r.key,
            "truth": r.truth,
            "counted": r.counted,
            "error": r.error,
            "interval": None if r.interval is None else asdict(r.interval),
            **r.tags,
        }
        for r in found.results
    ]
    return {
        **_group(found.overall),
        **{name: {each.name: _group(each) for each in group} for name, group in groups.items()},
        "coverage": None if found.coverage is None else asdict(found.coverage),
        "per_image": images,
    }


def _group(group: Group) -> dict[str, Any]:
    import math

    metrics = {name: asdict(estimate) for name, estimate in group.metrics.items()}
    finite = {
        name: {part: None if math.isnan(value) else value for part, value in parts.items()}
        for name, parts in metrics.items()
    }
    return {"images": group.images, **finite}


def write_csv(path: Path, results: Sequence[ImageResult]) -> None:
    """A line for every image: key, truth, counted, error, interval, what the set says of it."""
    import csv

    tags = sorted({tag for result in results for tag in result.tags})
    try:
        with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "truth", "counted", "error", "low", "high", *tags])
            for r in results:
                figures = [f"{r.counted:.4f}", f"{r.error:.4f}", "", ""]
                if r.interval is not None:
                    figures[2:] = f"{r.interval.low:.4f}", f"{r.interval.high:.4f}"
                writer.writerow([r.key, r.truth, *figures, *(r.tags.get(tag, "") for tag in tags)])
    except OSError as error:
        raise InputError(f"could not be written: {error.strerror}", source=path) from None


def cases(counter: Counter, dataset: Dataset, results: Sequence[ImageResult]) -> Image.Image:
    """Panels of the worst two, the median two and the best two images, fewer of few.

    The best are looked for among images with people, where there are any.
    """
    from p3net.app import figures

    samples = {sample.key: sample for sample in dataset.samples}
    panels = []
    for word, result in chosen_cases(results):
        sample = samples[result.key]
        with sample.open() as image:
            prediction = counter.count(image)
        with sample.open() as image:
            points = sample.marks().points_xy
            panels.append(figures.panel(image, points, prediction, title=f"{word}: {result.key}"))
    return figures.stack(panels)


def chosen_cases(results: Sequence[ImageResult]) -> list[tuple[str, ImageResult]]:
    """The worst, median and best by absolute error, no image twice."""
    ranked = sorted(results, key=lambda r: (-abs(r.error), r.key))
    with_people = [r for r in ranked if r.truth] or ranked
    middle = (len(ranked) - 1) // 2
    wanted = [("worst", r) for r in ranked[:2]]
    wanted += [("median", r) for r in ranked[middle : middle + 2]]
    wanted += [("best", r) for r in reversed(with_people[-2:])]
    first: dict[str, tuple[str, ImageResult]] = {}
    for word, result in wanted:
        first.setdefault(result.key, (word, result))
    return list(first.values())


def _print_json(found: Evaluation, context: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps({**context, **record(found)}, indent=2))


def _print_tables(found: Evaluation, title: str) -> None:
    from rich import box

    from p3net.app.console import console, table

    made = table(("", "images", "MAE", "RMSE", "NAE"), [_row(found.overall)], title=title)
    made.box, made.pad_edge = box.SIMPLE_HEAD, False  # narrow enough for 80 columns
    for words, groups in (("people", found.by_level), ("weather", found.by_weather)):
        if len(groups) > 1:
            made.add_section()
            made.add_row(words, style="dim")
            for group in groups:
                made.add_row(*_row(group))
    console.print(made)
    console.print(
        'RMSE is the "MSE" of the papers. In brackets: 95 % intervals, images drawn again.',
        style="dim",
        soft_wrap=True,
    )
    if (of := found.coverage) is not None:
        console.print(
            f"{of.level:.0%} intervals hold the true count of {of.share:.0%} of {of.images:,} "
            f"images; mean width {of.width:,.1f}",
            soft_wrap=True,
        )


def _row(group: Group) -> tuple[str, ...]:
    figures = (shown(group.metrics[name]) for name in ("mae", "rmse"))
    return (group.name, f"{group.images:,}", *figures, shown(group.metrics["nae"], 3))


def shown(estimate: Estimate, digits: int = 2) -> str:
    """A figure and its interval, each with as many digits as it bears; a dash where none is."""
    import math

    if math.isnan(estimate.value):  # no image with people
        return "–"
    low, high = (_rounded(end, digits - 1) for end in (estimate.low, estimate.high))
    return f"{_rounded(estimate.value, digits)} ({low}–{high})"


def _rounded(value: float, digits: int) -> str:
    return f"{value:,.{digits - (value >= 100)}f}"
