"""The one exception for input that cannot be used.

A message says what was expected, what came and what to do; `source` names the file it
came from. The command line prints it without a traceback.
"""

from __future__ import annotations

from os import PathLike, fspath


class InputError(ValueError):
    """Something a user gave (a file, a key, an array) cannot be used as it is.

    >>> str(InputError("no points; mark at least one head", source="a.csv"))
    'a.csv: no points; mark at least one head'
    """

    def __init__(self, message: str, *, source: str | PathLike[str] | None = None) -> None:
        self.message = message
        self.source = None if source is None else fspath(source)
        super().__init__(message if self.source is None else f"{self.source}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the trip from a loading process to the main one."""
        return (_rebuild, (self.message, self.source))


def _rebuild(message: str, source: str | None) -> InputError:
    return InputError(message, source=source)
