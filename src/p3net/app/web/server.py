"""The application: a REST interface under `/api`, described by OpenAPI, and the static page.

Requests that compute wait for the worker without holding a thread; when its queue is full the
answer is 503 with `Retry-After`. Files are read and pictures decoded in threads of their own, so
one slow request does not stop the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from p3net import __version__
from p3net.app.web import counting, marking, training
from p3net.app.web.guard import Guard, Rules
from p3net.app.web.jobs import BusyError
from p3net.app.web.runs import UnknownRunError
from p3net.app.web.session import NoFolderError, NoModelError, Session, UnknownCountError
from p3net.app.web.store import ConflictError, UnknownImageError
from p3net.app.web.wire import legible
from p3net.errors import InputError

STATIC = Path(__file__).parent / "static"


class Problem(BaseModel):
    """Why a request was not done."""

    detail: str


_PROBLEMS: dict[int, str] = {
    401: "The token is missing (only where the server is not bound to loopback)",
    403: "The request comes from another site",
    404: "No such image, run or count",
    409: "In conflict with the state: other marks meanwhile, no model yet, no folder",
    413: "The body is too large",
    422: "Something in the request cannot be used; `detail` says what",
    428: "The version is missing: send `If-Match`",
    503: "Busy: the queue is full; try again after `Retry-After` seconds",
}

_ANSWERS: dict[type[Exception], tuple[int, str]] = {
    FileNotFoundError: (404, "the image's file is gone"),
    UnknownImageError: (404, "no such image in the folder"),
    UnknownRunError: (404, "no such run"),
    UnknownCountError: (404, "this count is no longer kept; count the image again"),
    NoModelError: (409, "no model yet: train one, or start the server with a MODEL"),
    NoFolderError: (409, "no folder: start the server with --data FOLDER"),
    BusyError: (503, "busy: too many requests wait; try again shortly"),
}

RETRY_AFTER_S = 2


def create_app(session: Session, rules: Rules | None = None) -> FastAPI:
    """The application around a session, which it closes when it ends."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(session.close)

    app = FastAPI(
        title="p3net serve",
        version=__version__,
        openapi_url="/api/openapi.json",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.session = session
    app.add_middleware(Guard, rules=rules or Rules())
    _explain_errors(app)
    problems: dict[int | str, dict[str, Any]] = {
        status: {"description": words, "model": Problem} for status, words in _PROBLEMS.items()
    }
    for part in (_status, marking.routes, counting.routes, training.routes):
        app.include_router(part(session), prefix="/api", responses=problems)
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    return app


def _status(session: Session) -> APIRouter:
    api = APIRouter(tags=["status"])

    @api.get("/status")
    def status() -> dict[str, Any]:
        """What is there: model, folder, limits, how many requests wait."""
        model, store, runs = session.model, session.store, session.runs
        return {
            "version": __version__,
            "model": model
            and {"name": model.name, "run": model.run, "mae": model.mae, "tokens": model.tokens},
            "folder": store and legible(store.folder.name),
            "training": runs.active() if runs else None,
            "waiting": session.worker.waiting,
            "limits": dataclasses.asdict(session.limits),
        }

    return api


def _explain_errors(app: FastAPI) -> None:
    """One form for everything that goes wrong: `{"detail": "…"}`."""

    def answer(status: int, words: str) -> Callable[..., Response]:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
        return lambda _request, _error: JSONResponse({"detail": words}, status, headers=headers)

    def unusable(_request: Request, error: Any) -> Response:
        return JSONResponse({"detail": error.message}, 422)

    def invalid(_request: Request, error: Any) -> Response:
        # Without what was sent: it may hold numbers that JSON cannot.
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"detail": f"{place}: {first['msg']}"}, 422)

    def conflict(_request: Request, error: Any) -> Response:
        return JSONResponse({"detail": str(error), **marking.record(error.state)}, 409)

    app.add_exception_handler(InputError, unusable)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ConflictError, conflict)
    for kind, (status, words) in _ANSWERS.items():
        app.add_exception_handler(kind, answer(status, words))
