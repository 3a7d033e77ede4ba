"""Requests of the Train tab."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import Field

from p3net.app.web.runs import Runs, RunStatus
from p3net.app.web.session import Session
from p3net.app.web.wire import Body, in_worker

RunNumber = Annotated[int, Path(ge=1, le=10**9)]


class TrainIn(Body):
    """The few settings of a run that the page offers."""

    steps: int = Field(default=1200, ge=1, le=1_000_000)
    seed: int = Field(default=1, ge=0, le=2**31 - 1)
    validation: float = Field(default=0.2, ge=0, le=0.9, description="share of the marked images")


def routes(session: Session) -> APIRouter:
    """Runs: start, watch, stop, resume, use."""
    api = APIRouter(tags=["train"])

    def runs() -> Runs:
        session.need_store()
        assert session.runs is not None  # noqa: S101  a folder has runs
        return session.runs

    @api.get("/runs")
    def all_runs() -> list[RunStatus]:
        """Every run, the newest first."""
        return [runs().status(number) for number in reversed(runs().numbers())]

    @api.post("/runs", status_code=201)
    def start(settings: TrainIn) -> RunStatus:
        """Train on what is marked; the model is used as soon as it is finished."""
        number = runs().start(**settings.model_dump())
        return runs().status(number)

    @api.get("/runs/{run}")
    def run(run: RunNumber) -> RunStatus:
        """How a run stands, with its curves."""
        return runs().status(run)

    @api.post("/runs/{run}/stop")
    def stop(run: RunNumber) -> RunStatus:
        """Stop a run; it can be resumed."""
        runs().stop(run)
        return runs().status(run)

    @api.post("/runs/{run}/resume")
    def resume(run: RunNumber) -> RunStatus:
        """Go on with a run that was stopped."""
        runs().resume(run)
        return runs().status(run)

    @api.post("/runs/{run}/use")
    async def use(run: RunNumber) -> dict[str, Any]:
        """Count with this run's model from now on."""
        runs().path(run)
        model = await in_worker(session, lambda: session.use(run))
        return {"name": model.name, "run": model.run, "mae": model.mae}

    return api
