"""The command line: `p3net`. Each command is a thin layer over one function of the core."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from p3net.allocator import keep_freed_memory
from p3net.app import (
    calibrate,
    count,
    data,
    demo,
    evaluate,
    experiment,
    export,
    paper_figures,
    serve,
    train,
)
from p3net.errors import InputError

cli = typer.Typer(
    name="p3net",
    help="Count crowds, and anything else marked by points, from a handful of annotated images.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
cli.add_typer(data.app, name="data")
cli.add_typer(paper_figures.app, name="figure")
cli.command()(demo.demo)
cli.command()(train.train)
cli.command()(evaluate.evaluate)
cli.command()(calibrate.calibrate)
cli.command()(count.count)
cli.command()(export.export)
cli.command()(serve.serve)
cli.command()(experiment.experiment)


@cli.command()
def cost(
    size: Annotated[int, typer.Option(help="Side of the square image in pixels.")] = 384,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Parameters and multiply-adds of the paper's three models (tab:cost), both ways.

    "modules only" repeats the paper's counter, which does not look inside attention.
    """
    import dataclasses
    import json

    from p3net.app.console import console, table
    from p3net.network import cost as costs

    figures = {name: costs.cost(build, (size, size)) for name, build in costs.PAPER_MODELS.items()}
    if as_json:
        print(json.dumps({name: dataclasses.asdict(each) for name, each in figures.items()}))
        return
    rows = [
        (
            name,
            f"{each.parameters / 1e6:.2f} M",
            f"{each.multiply_adds / 1e9:.2f} G",
            f"{each.module_parameters / 1e6:.2f} M",
            f"{each.module_multiply_adds / 1e9:.2f} G",
        )
        for name, each in figures.items()
    ]
    console.print(
        table(
            (
                "model",
                "parameters",
                "multiply-adds",
                "parameters (modules only)",
                "multiply-adds (modules only)",
            ),
            rows,
            title=f"One image of {size}×{size}",
        )
    )


def main() -> None:
    """Entry point: errors a user can mend are printed as one message, without a traceback."""
    keep_freed_memory()  # image after image wants the same again
    try:
        cli()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `p3net … | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}could not be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it may be what is full
        sys.exit(2)
