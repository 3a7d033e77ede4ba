"""What every command prints with: tables on stdout, progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)
"""Standard output."""

stderr = Console(stderr=True, highlight=False)
"""Where progress and notes go, so that output can be piped."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """A table whose first column names the rows and whose others hold figures."""
    result = Table(*header[:1], title=title or None, title_justify="left")
    for name in header[1:]:
        result.add_column(name, justify="right")
    for row in rows:
        result.add_row(*row)
    return result


@contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done: a bar in a terminal, a line every few seconds elsewhere.

    Gives a function to call with the number done so far.
    """
    if stderr.is_terminal:
        from rich.progress import (  # only where a bar is shown
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        label_column = TextColumn("{task.description}", markup=False)
        columns = (label_column, BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=stderr, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield _plain(total, label)


def _plain(total: int, label: str, every_s: float = 5.0) -> Callable[[int], None]:
    last = time.monotonic()

    def update(done: int) -> None:
        nonlocal last
        if done >= total or time.monotonic() - last >= every_s:
            last = time.monotonic()
            stderr.print(f"{label}: {done}/{total}", markup=False, soft_wrap=True)

    return update
