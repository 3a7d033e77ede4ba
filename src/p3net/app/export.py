"""`p3net export`: a model for ONNX Runtime or OpenVINO, or a folder for the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run's folder, a file of weights, a hub id.")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="OUT.onnx for ONNX Runtime, OUT.xml for OpenVINO, a folder for the hub.",
        ),
    ],
    *,
    licence: Annotated[
        str | None, typer.Option(metavar="NAME", help="For the model card of a folder.")
    ] = None,
    half: Annotated[
        bool, typer.Option("--half", help="Of a folder's weights keep 16 bits: half the size.")
    ] = False,
    lists: Annotated[
        bool,
        typer.Option(
            "--lists", help="With a folder, name the images it learned from and was judged on."
        ),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="USER/NAME", help="Push the folder to the Hugging Face hub as well."),
    ] = None,
) -> None:
    """Write a model for other runtimes; it is compared with the original before it says done.

    p3net export runs/square square.onnx          then: p3net count square.onnx photos/

    The file takes images of any number and size, RGB in [0, 1], and gives the density and its
    variance.
    """
    from dataclasses import replace

    from p3net import export as exporting
    from p3net import hub
    from p3net.app.console import console, stderr
    from p3net.checkpoint import load, weights_file
    from p3net.data import splits
    from p3net.errors import InputError
    from p3net.runtimes import DEFAULTS

    to_folder = out.suffix not in DEFAULTS
    if to_folder and out.suffix:
        raise InputError("expected OUT.onnx, OUT.xml or a folder", source=out)
    if not to_folder and (licence or push or half or lists):
        raise InputError("--licence, --half, --lists and --push go with a folder", source=out)
    counter = load(model)
    split = splits.read(weights_file(model).parent / "split") if lists else None
    if to_folder:
        if split is not None:  # first: it refuses a folder that holds another model's lists
            splits.write(replace(split, how=hub.public_facts(split.how)), out / "split")
        exporting.save_pretrained(counter, out, licence=licence, half=half)
        also = ", the lists of its images" if lists else ""
        console.print(f"{out}: weights{also}, config.json and a model card", markup=False)
        if push is not None:
            address = hub.upload(out, push)
            console.print(f"pushed to {address}, private", markup=False)
        return
    stderr.print("exporting; this takes a minute", style="dim")
    found = exporting.export(counter, out)
    measured = f"{found.images} images of several sizes differ by {found.worst:.0e} at most"
    console.print(f"{out}: {measured}", markup=False, soft_wrap=True)
