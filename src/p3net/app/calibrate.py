"""`p3net calibrate`: intervals that hold, learned from images whose true count is known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p3net.app.data import Data

if TYPE_CHECKING:
    from p3net.evaluation import Coverage


LEVEL = 0.9
"""Of intervals, where none is asked for."""


def calibrate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run's folder, or a file of weights.")
    ],
    data: Data,
    *,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="SPLIT",
            help="Which images: val (the default; all of a folder without splits), train or test.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="OUT.safetensors", help="Where to write the calibrated model."),
    ] = None,
    level: Annotated[
        float, typer.Option(help="Level of the intervals whose coverage is printed.")
    ] = LEVEL,
    allow_trained: Annotated[
        bool,
        typer.Option(
            "--allow-trained", help="Take images the model learned from too: intervals too narrow."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Scale a model's intervals by its errors on images it has not learned from.

    Use images like those to be counted, twenty or more; nine suffice for a level of 0.9. The
    printed coverage is that of each image's interval, calibrated on all the others. With --out
    the scores are kept in the model, so that `p3net count --level` may ask for any level later.
    """
    from p3net import evaluation
    from p3net.app.console import progress
    from p3net.app.evaluate import Unreadable, part, shared_roles, split_meant
    from p3net.checkpoint import load, save
    from p3net.data.catalogue import open_dataset
    from p3net.errors import InputError

    if not 0 < level < 1:
        raise InputError(f"--level must lie between 0 and 1, such as 0.9; got {level:g}")
    if out is not None and out.suffix != ".safetensors":
        raise InputError("a model is written as .safetensors; name it so", source=out)
    counter = load(model)
    dataset = open_dataset(data)
    split = split or split_meant(dataset, "val")
    images = part(dataset, split).where(lambda sample: sample.labelled)
    roles = shared_roles(counter, model, images) if not allow_trained else {}
    roles.pop("validation", None)
    if roles:
        which = " and ".join(f"{number:,} {role}" for role, number in roles.items())
        raise InputError(
            f"the model learned from {which} of these {len(images):,} images, on which its errors "
            "are smaller than on others; choose others, or insist with --allow-trained",
            source=data,
        )
    bad = Unreadable()
    with progress(len(images), "counting") as update:
        scored = evaluation.score(counter, images, lambda done, _total: update(done), bad.add)
    found = evaluation.held_out(scored, level)
    known = evaluation.calibrated(counter, scored, f"{data}, {split}")
    enough = len(scored) >= fewest(level)
    if out is not None:
        save(out, known.network, known.metadata)
    if json:
        _print_json(found, enough=enough, out=out)
    else:
        _print_words(found, enough=enough, out=out)
    bad.leave()


def fewest(level: float) -> int:
    """How many images an interval of this level takes at least.

    >>> fewest(0.9), fewest(0.95)
    (9, 19)
    """
    import math

    return math.ceil(round(level / (1 - level), 9))


def _print_json(found: Coverage, *, enough: bool, out: Path | None) -> None:
    import json
    from dataclasses import asdict

    record = {**asdict(found), "calibrated": enough, "out": None if out is None else str(out)}
    typer.echo(json.dumps(record))


def _print_words(found: Coverage, *, enough: bool, out: Path | None) -> None:
    from p3net.app.console import console

    console.print(
        f"{found.level:.0%} intervals hold the true count of {found.share:.0%} of "
        f"{found.images:,} images, each calibrated on the others; mean width {found.width:,.1f}",
        soft_wrap=True,
    )
    if not enough:
        console.print(
            f"Too few images for {found.level:.0%}: counts at that level will be called "
            f"uncalibrated. It takes {fewest(found.level):,} at least.",
            soft_wrap=True,
        )
    last = "Nothing was written; --out FILE keeps it." if out is None else f"Written to {out}"
    console.print(last, markup=False, soft_wrap=True)
