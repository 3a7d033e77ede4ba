"""A small folder, a small model, servers in and out of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fastapi.testclient import TestClient

from p3net import checkpoint
from p3net.app.web.guard import Rules
from p3net.app.web.server import create_app
from p3net.app.web.session import Limits, Model, Session
from p3net.app.web.store import Store
from p3net.network.p3net import Architecture, P3Net

TINY = Architecture(backbone="small", layers=1, heads=2, hidden=32, dropout=0.0)

TRAINING = {
    "weights": "none",
    "threshold": "0.0",
    "network.backbone": "small",
    "network.layers": "1",
    "network.hidden": "32",
    "network.heads": "2",
    "views.crop": "64",
    "streaming.labelled": "1",
    "streaming.unlabelled": "1",
    "recipe.workers": "0",
    "recipe.warmup": "1",
    "recipe.save_every": "2",
}
OVERRIDES = tuple(f"{name}={value}" for name, value in TRAINING.items())


def photograph(seed: int, width: int = 128, height: int = 96) -> Image.Image:
    """Something with colours in it."""
    noise = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def photographs(folder: Path) -> Path:
    folder.mkdir()
    for number in range(1, 7):
        photograph(number).save(folder / f"IMG_{number}.jpg", quality=95)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six images, none marked."""
    return photographs(tmp_path / "photos")


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that has learned nothing, and counts something."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    checkpoint.save(path, P3Net(TINY), {})
    return path


@pytest.fixture(scope="session")
def model(model_file: Path) -> Model:
    return Model(checkpoint.load(model_file), "tiny")


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., TestClient]]:
    """Make a client of a server in this process: serve(model=…, data=…, token=…, …)."""
    clients: list[TestClient] = []

    def start(
        *,
        model: Model | None = None,
        data: bool = True,
        token: str | None = None,
        body_bytes: int = 2_000_000,
        limits: Limits | None = None,
    ) -> TestClient:
        store = Store(folder) if data else None
        session = Session(store, model, OVERRIDES, limits or Limits())
        app = create_app(session, Rules(token, body_bytes))
        client = TestClient(app, base_url="http://localhost:8000", raise_server_exceptions=False)
        client.__enter__()
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)


class Server:
    """`p3net serve` in a process of its own."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "p3net", "serve", "--port", "0", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )
        self.url = self._address()

    def _address(self) -> str:
        for _ in range(1200):
            for line in self.log.read_text().splitlines():
                if line.startswith("http://"):
                    return line
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    def memory_mb(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start real servers; those still there at the end are stopped."""
    servers: list[Server] = []

    def start(*words: str | Path) -> Server:
        log = tmp_path / f"server-{len(servers)}.log"
        servers.append(Server([str(word) for word in words], log))
        return servers[-1]

    yield start
    for each in servers:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `folder`, for tests that share a server and take an image each."""
    return photographs(tmp_path_factory.mktemp("shared") / "photos")


@pytest.fixture(scope="module")
def shared_server(shared_folder: Path, model_file: Path) -> Iterator[Server]:
    """A model and a folder."""
    log = shared_folder.parent / "server.log"
    made = Server([str(model_file), "--data", str(shared_folder)], log)
    yield made
    made.end()


@pytest.fixture(scope="session")
def overrides() -> tuple[str, ...]:
    """Settings that make training a matter of seconds."""
    return OVERRIDES


@pytest.fixture(scope="session")
def jpeg() -> Callable[..., bytes]:
    """The bytes of a small photograph: jpeg(seed, width, height)."""
    import io

    def make(seed: int = 1, width: int = 128, height: int = 96) -> bytes:
        file = io.BytesIO()
        photograph(seed, width, height).save(file, "JPEG", quality=90)
        return file.getvalue()

    return make
