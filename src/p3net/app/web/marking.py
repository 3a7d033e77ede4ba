"""Requests of the Mark tab."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException
from fastapi.responses import Response
from pydantic import BaseModel, Field

from p3net.app.web import pictures
from p3net.app.web.session import Session
from p3net.app.web.store import State
from p3net.app.web.wire import Body, Id, PointXY, in_worker, legible, picture
from p3net.data.images import open_image
from p3net.structures import as_points

MAX_POINTS = 200_000
"""On one image; the most crowded published one has 20,033."""


class MarksIn(Body):
    """Points in pixels of the upright image; null: nobody has marked it."""

    points: Annotated[list[PointXY], Field(max_length=MAX_POINTS)] | None


class MarksOut(BaseModel):
    """The same, with the version to send as `If-Match` with the next change."""

    points: list[tuple[float, float]] | None
    version: str


class ImageOut(MarksOut):
    """An image of the folder with its marks."""

    id: str
    name: str
    width: int
    height: int


class ImageLine(BaseModel):
    """An image in the list; `marked` is null where nobody has marked it."""

    id: str
    name: str
    marked: int | None
    fault: str = ""


def routes(session: Session) -> APIRouter:
    """Images, marks, drafts, what to mark next."""
    api = APIRouter(tags=["mark"])

    @api.get("/images")
    def images() -> list[ImageLine]:
        """The images of the folder, read anew."""
        store = session.need_store()
        lines = []
        for entry in store.refresh().values():
            found = store.marked(entry)
            fault = found if isinstance(found, str) else ""
            number = None if isinstance(found, str) else found
            lines.append(
                ImageLine(id=entry.id, name=legible(entry.name), marked=number, fault=fault)
            )
        return lines

    @api.get("/images/{image}")
    def image(image: Id) -> ImageOut:
        """One image's size and marks."""
        store = session.need_store()
        entry, state = store.entry(image), store.read(image)
        height, width = pictures.size_hw(entry.path)
        return ImageOut(
            id=image, name=legible(entry.name), width=width, height=height, **record(state)
        )

    @api.put("/images/{image}/marks")
    def mark(
        image: Id, marks: MarksIn, if_match: Annotated[str | None, Header()] = None
    ) -> MarksOut:
        """Replace the marks of a version; 409 with the present ones where they have changed."""
        store = session.need_store()
        store.entry(image)
        if if_match is None:
            raise HTTPException(428, "send If-Match with the version that was changed")
        points = None if marks.points is None else as_points(marks.points)
        return MarksOut(**record(store.write(image, points, if_match.strip().strip('"'))))

    @api.get("/images/{image}/thumbnail", response_class=Response)
    def thumbnail(image: Id) -> Response:
        """A small JPEG."""
        entry = session.need_store().entry(image)
        return picture(pictures.thumbnail(entry.path), "image/jpeg")

    @api.get("/images/{image}/picture", response_class=Response)
    def whole_picture(image: Id) -> Response:
        """The image itself, in a form that browsers show."""
        opened = open_image(path := session.need_store().entry(image).path)
        return picture(*pictures.shown(opened, path.read_bytes()))

    @api.post("/images/{image}/draft")
    async def draft(image: Id) -> dict[str, Any]:
        """The model's own points, to be corrected."""
        entry = session.need_store().entry(image)
        session.need_model()

        def job() -> dict[str, Any]:
            prediction = session.draft(entry)
            interval, found = prediction.interval, prediction.points()
            return {
                "count": prediction.count,
                "interval": None if interval is None else asdict(interval),
                "points": found.xy.round(1).tolist(),
                "scores": found.scores.round(3).tolist(),
            }

        return await in_worker(session, job)

    @api.get("/next")
    def what_next(number: int = 6) -> dict[str, Any]:
        """Which images to mark next, the most useful first, and why."""
        found, seen, total = session.next(max(1, min(number, 50)))
        return {
            "images": [
                {
                    "id": each.entry.id,
                    "name": legible(each.entry.name),
                    "why": each.why,
                    "doubt": each.proposal.doubt,
                    "novelty": each.proposal.novelty,
                }
                for each in found
            ],
            "seen": seen,
            "unmarked": total,
        }

    return api


def record(state: State) -> dict[str, Any]:
    """Marks and their version, ready for JSON."""
    points = None if state.points_xy is None else state.points_xy.tolist()
    return {"points": points, "version": state.version}
