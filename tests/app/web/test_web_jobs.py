"""The queue: its bound, its errors, its end, and what happens while nothing waits."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

import pytest

from p3net.app.web.jobs import BusyError, Worker


def no_idle() -> bool:
    return False


def test_jobs_are_done_in_order_and_errors_come_back():
    worker = Worker(no_idle)
    seen = []
    futures = [worker.submit(lambda i=i: seen.append(i)) for i in range(5)]
    failing = worker.submit(lambda: 1 / 0)
    for future in futures:
        future.result(5)
    with pytest.raises(ZeroDivisionError):
        failing.result(5)
    assert seen == [0, 1, 2, 3, 4]
    worker.close()


def test_a_full_queue_refuses_and_waits_for_nobody():
    worker = Worker(no_idle, waiting=2)
    go, begun = threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait(10)

    first = worker.submit(slow)
    assert begun.wait(5)
    second, third = worker.submit(lambda: 2), worker.submit(lambda: 3)
    assert worker.waiting == 2
    with pytest.raises(BusyError):
        worker.submit(lambda: 4)
    go.set()
    assert (first.result(5), second.result(5), third.result(5)) == (None, 2, 3)
    assert worker.submit(lambda: 5).result(5) == 5
    worker.close()


def test_closing_finishes_the_job_at_hand_and_cancels_the_rest():
    worker = Worker(no_idle)
    go, begun = threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait(10)
        return "done"

    first, second = worker.submit(slow), None
    assert begun.wait(5)
    second = worker.submit(lambda: 2)
    threading.Timer(0.05, go.set).start()
    worker.close()
    assert first.result(0) == "done"
    with pytest.raises(CancelledError):
        second.result(0)
    with pytest.raises(BusyError):
        worker.submit(lambda: 3)


def test_idle_work_goes_on_until_done_and_survives_its_errors(caplog):
    calls = []

    def idle() -> bool:
        calls.append(len(calls))
        if len(calls) == 3:
            raise RuntimeError("once")
        return len(calls) < 6

    worker = Worker(idle)
    limit = time.monotonic() + 10
    while len(calls) < 6 and time.monotonic() < limit:
        time.sleep(0.01)
    assert worker.submit(lambda: "still there").result(5) == "still there"
    worker.close()
    assert len(calls) >= 6
    assert "idle work failed" in caplog.text
