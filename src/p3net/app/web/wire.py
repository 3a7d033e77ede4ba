"""What the routes share: kinds of values, waiting for the worker, pictures and maps as answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

import numpy as np
from fastapi import Path
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from p3net.app.web.session import Session

T = TypeVar("T")

Coordinate = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
PointXY = tuple[Coordinate, Coordinate]
Id = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="16 hex digits")]


class Body(BaseModel):
    """What a request brings; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


async def in_worker(session: Session, job: Callable[[], T]) -> T:
    """Do a job in the worker's thread, without holding another meanwhile."""
    return await asyncio.wrap_future(session.worker.submit(job))


def picture(content: bytes, kind: str) -> Response:
    """An image that the browser may keep for a minute."""
    return Response(content, media_type=kind, headers={"Cache-Control": "private, max-age=60"})


def grid(cells: NDArray[np.float32], cell_xy: tuple[float, float]) -> Response:
    """h×w numbers as little-endian float32, row by row; rows, columns and cells in the headers."""
    rows, columns = cells.shape
    headers = {"X-Grid": f"{rows} {columns}", "X-Cell": f"{cell_xy[0]!r} {cell_xy[1]!r}"}
    content = np.ascontiguousarray(cells, "<f4").tobytes()
    return Response(content, media_type="application/octet-stream", headers=headers)


def legible(name: str) -> str:
    """A file's name as text, whatever bytes it has."""
    return name.encode("utf-8", "replace").decode()
