"""Work beside the requests: one thread for the model behind a bounded queue.

A full queue refuses at once instead of growing, and while nothing waits the thread does small
pieces of idle work.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

WAITING = 16
"""Jobs that may wait; one more is refused as busy."""

PAUSE_S = 0.25
"""Between two looks for idle work."""

logger = logging.getLogger(__name__)


class BusyError(Exception):
    """The queue is full; try again in a few seconds."""


class Worker:
    """One thread that does jobs in the order they come.

    Args:
        idle: called while nothing waits; says whether there is more of its kind to do at once.
        waiting: length of the queue.
    """

    def __init__(self, idle: Callable[[], bool], *, waiting: int = WAITING) -> None:
        self._idle = idle
        self._jobs: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue(waiting)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self._jobs.qsize()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Put a job at the end of the queue."""
        future: Future[T] = Future()
        try:
            if self._closing.is_set():
                raise BusyError
            self._jobs.put_nowait((future, job))
        except queue.Full:
            raise BusyError from None
        return future

    def close(self) -> None:
        """Finish the job at hand; those that wait are cancelled."""
        self._closing.set()
        self._thread.join()
        while not self._jobs.empty():
            self._jobs.get_nowait()[0].cancel()

    def _work(self) -> None:
        more = False
        while not self._closing.is_set():
            try:
                future, job = self._jobs.get(timeout=0.001 if more else PAUSE_S)
            except queue.Empty:
                try:
                    more = self._idle()
                except Exception:
                    logger.exception("idle work failed")
                    more = False
                continue
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001  it belongs to whoever asked
                    future.set_exception(error)
