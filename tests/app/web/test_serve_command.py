"""`p3net serve` as a user runs it: real processes, many at once, real kills."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from typer.testing import CliRunner, Result

from p3net.app import cli
from p3net.app.web.store import Store
from p3net.data.catalogue import open_dataset
from p3net.errors import InputError


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.cli, ["serve", *map(str, words)])


def complaint(result: Result) -> str:
    assert isinstance(result.exception, InputError), result.output
    return str(result.exception)


def test_what_cannot_be_served_is_told(tmp_path, folder, monkeypatch):
    assert "no such folder" in complaint(run("--data", tmp_path / "nowhere", "--port", 0))
    assert "no such" in complaint(run(tmp_path / "nowhere.safetensors", "--port", 0))
    assert "key=value" in complaint(run("--data", folder, "--port", 0, "--set", "steps"))
    unknown = run("--data", folder, "--port", 0, "--set", "recipe.stepz=1")
    assert "did you mean 'recipe.steps'?" in complaint(unknown)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "choose another --port" in complaint(run("--data", folder, "--port", port))
    assert "cannot listen" in complaint(run("--data", folder, "--host", "no.such.host.invalid"))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "p3net[serve]" in complaint(run("--data", folder))


def test_help_does_not_wait_for_heavy_packages():
    code = (
        "import sys, p3net.app.cli; "
        "print([m for m in ('torch', 'fastapi', 'uvicorn', 'starlette') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_elsewhere_than_loopback_a_token_is_asked_for_and_it_stops_with_saved_work(server, folder):
    running = server("--data", folder, "--host", "0.0.0.0")
    base, _, token = running.url.partition("?token=")
    port = base.rstrip("/").rpartition(":")[2]
    here = f"http://127.0.0.1:{port}"
    assert len(token) >= 32
    assert httpx.get(f"{here}/api/images").status_code == 401
    assert httpx.get(f"{here}/?token={token}x").status_code == 401
    with httpx.Client(base_url=here, follow_redirects=True) as client:
        assert "<title>p3net" in client.get(f"/?token={token}").text
        image = client.get("/api/images").json()[0]["id"]
        body, version = {"points": [[3, 4]]}, {"If-Match": "none"}
        client.put(f"/api/images/{image}/marks", json=body, headers=version).raise_for_status()
        assert running.end(signal.SIGTERM) == 0
    assert "all marks are saved" in running.log.read_text()
    assert "Traceback" not in running.log.read_text()
    assert open_dataset(folder).samples[0].marks().points_xy.tolist() == [[3, 4]]


def test_stopping_the_server_stops_training_which_can_be_resumed(server, folder, overrides):
    for number in (1, 2):
        (folder / f"IMG_{number}.txt").write_text("20 30\n60 70\n")
    words = [word for pair in overrides for word in ("--set", pair)]
    running = server("--data", folder, *words)
    with httpx.Client(base_url=running.url, timeout=60) as client:
        client.post("/api/runs", json={"steps": 100000, "validation": 0}).raise_for_status()
        limit = time.monotonic() + 120
        while client.get("/api/runs/1").json()["step"] < 3:
            assert time.monotonic() < limit, client.get("/api/runs/1").text
            time.sleep(0.1)
        assert client.get("/api/status").json()["training"] == 1
    pid = int((folder / ".p3net" / "runs" / "1" / "lock").read_text())
    assert running.end(signal.SIGINT) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    log = (folder / ".p3net" / "runs" / "1" / "output.txt").read_text()
    assert "--resume" in log
    assert "Traceback" not in log


def test_fifty_at_once_are_counted_or_told_to_wait_in_bounded_memory(
    server, model_file, jpeg, tmp_path
):
    running = server(model_file)
    photos = [jpeg(seed, 320, 240) for seed in range(10)]

    def upload(number: int) -> httpx.Response:
        with httpx.Client(base_url=running.url, timeout=300) as client:
            return client.post("/api/count", files={"image": photos[number % 10]})

    assert upload(0).status_code == 200
    before, peak = running.memory_mb(), 0.0
    ended = threading.Event()
    waits: list[float] = []

    def watch() -> None:
        nonlocal peak
        with httpx.Client(base_url=running.url, timeout=300) as client:
            while not ended.wait(0.1):
                started = time.monotonic()
                assert client.get("/api/status").status_code == 200
                waits.append(time.monotonic() - started)
                peak = max(peak, running.memory_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(upload, range(50)))
    took = time.monotonic() - began
    ended.set()
    watcher.join()
    codes = [answer.status_code for answer in answers]
    assert set(codes) <= {200, 503}
    assert codes.count(200) >= 16
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["count"] >= 0
        else:
            assert int(answer.headers["retry-after"]) >= 1
            assert "busy" in answer.json()["detail"]
    assert peak - before < 250, f"{before:.0f} MB before, {peak:.0f} MB at most"
    assert sorted(waits)[len(waits) // 2] < took / 4  # others were answered meanwhile
    assert upload(1).status_code == 200


def test_killed_in_the_middle_of_marking_it_loses_at_most_the_last_change(server, folder):
    running = server("--data", folder)
    with httpx.Client(base_url=running.url) as client:
        image = client.get("/api/images").json()[2]["id"]
        points: list[list[float]] = []
        version, told = "none", 0
        try:
            while True:
                if told == 4:
                    threading.Timer(0.5, running.process.kill).start()
                points.append([len(points) % 128 + 0.5, 7.25])
                answer = client.put(
                    f"/api/images/{image}/marks",
                    json={"points": points},
                    headers={"If-Match": version},
                )
                version, told = answer.json()["version"], len(points)
        except httpx.TransportError:
            pass
    running.process.wait(60)
    assert told > 3
    found = open_dataset(folder).samples[2].marks().points_xy.tolist()
    assert told <= len(found) <= told + 1
    assert found == points[: len(found)]
    store = Store(folder)  # the lock did not outlive the process
    assert store.read(image).points_xy.tolist() == found
    store.close()
