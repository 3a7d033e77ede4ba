"""Requests of the Count tab."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Form, UploadFile
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field

from p3net.app.web import pictures
from p3net.app.web.session import Counted, Session
from p3net.app.web.wire import Body, Id, PointXY, grid, in_worker, picture
from p3net.data.images import open_bytes
from p3net.errors import InputError
from p3net.network.p3net import P3Net
from p3net.regions import Region, Regions
from p3net.structures import as_points
from p3net.targets import CELL


class RegionIn(Body):
    """A named polygon in pixels of the upright image."""

    name: str = Field(min_length=1, max_length=100)
    polygon: Annotated[list[PointXY], Field(min_length=3, max_length=1000)]


class RegionsIn(Body):
    """All regions of an image."""

    regions: Annotated[list[RegionIn], Field(max_length=100)]


def routes(session: Session) -> APIRouter:
    """Counts, their maps, regions and pictures."""
    api = APIRouter(tags=["count"])

    @api.post("/count")
    async def count(
        image: UploadFile, regions: Annotated[str | None, Form()] = None
    ) -> dict[str, Any]:
        """Count one image; `regions` is JSON, as for `/count/{id}/regions`."""
        session.need_model()
        asked = None if not regions else _regions(_parse_regions(regions))
        counted = await in_worker(session, lambda: session.count(image.file.read(), asked))
        return _counted(counted)

    @api.post("/count/{count}/regions")
    async def count_regions(count: Id, regions: RegionsIn) -> dict[str, Any]:
        """Count inside polygons of an image that was counted before."""
        before = session.counted(count)
        asked = _regions(regions)

        def job() -> dict[str, Any]:
            again = before.model.counter.count(before.content, regions=asked)
            return dict(again.to_dict()["regions"])

        return await in_worker(session, job)

    @api.get("/count/{count}/maps/{which}", response_class=Response)
    def one_map(count: Id, which: Literal["density", "spread", "branch-1", "branch-2"]) -> Response:
        """A map as little-endian float32, row by row; its shape and cells are in the headers."""
        prediction = session.counted(count).prediction
        maps: dict[str, NDArray[np.float32] | None] = {"density": prediction.density}
        maps |= {f"branch-{i}": each for i, each in enumerate(prediction.branches, 1)}
        if prediction.variance is not None:
            maps["spread"] = np.sqrt(prediction.variance)
        cells = maps.get(which)
        if cells is None:
            raise InputError(f"this model is a regressor: it has no {which}")
        return grid(cells, prediction.cell_xy)

    @api.get("/count/{count}/attention", response_class=Response)
    async def attention(count: Id, branch: int = 1, token: int = 1) -> Response:
        """Where a token of a branch looks, both numbered from 1; a map as above."""
        counted = session.counted(count)
        cells = await in_worker(session, lambda: session.attention(counted, branch - 1, token - 1))
        network = counted.model.counter.network
        assert isinstance(network, P3Net)  # noqa: S101  a regressor has been refused
        factor = network.backbone.stride / CELL
        x, y = counted.prediction.cell_xy
        return grid(cells, (x * factor, y * factor))

    @api.get("/count/{count}/points")
    async def points(count: Id) -> dict[str, Any]:
        """Where the people were found."""
        counted = session.counted(count)
        found = await in_worker(session, counted.prediction.points)
        return {"points": found.xy.round(1).tolist(), "scores": found.scores.round(3).tolist()}

    @api.get("/count/{count}/picture", response_class=Response)
    def countedpicture(count: Id) -> Response:
        """The image that was counted, in a form that browsers show."""
        content = session.counted(count).content
        return picture(*pictures.shown(open_bytes(content), content))

    @api.get("/count/{count}/overlay", response_class=Response)
    async def overlay(count: Id, opacity: float = 0.6, points: bool = False) -> Response:
        """The image under its density, as a JPEG."""
        counted = session.counted(count)

        def job() -> bytes:
            made = counted.prediction.overlay(opacity=opacity, points=points, image=counted.content)
            return pictures.jpeg(made)

        return picture(await in_worker(session, job), "image/jpeg")

    return api


def _counted(counted: Counted) -> dict[str, Any]:
    prediction = counted.prediction
    return {
        **prediction.to_dict(),
        "id": counted.id,
        "model": counted.model.name,
        "tokens": counted.model.tokens,
        "branches": len(prediction.branches),
    }


def _parse_regions(text: str) -> RegionsIn:
    try:
        return RegionsIn.model_validate_json(text)
    except ValueError as error:
        raise InputError(f"regions cannot be read: {str(error).splitlines()[-1].strip()}") from None


def _regions(asked: RegionsIn) -> Regions:
    return Regions(tuple(Region(each.name, as_points(each.polygon)) for each in asked.regions))
