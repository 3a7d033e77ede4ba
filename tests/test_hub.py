from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import p3net
from p3net import checkpoint, hub
from p3net.counting import Counter
from p3net.data.transforms import Sizing
from p3net.errors import InputError
from p3net.network.p3net import Architecture, P3Net

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """The endpoints of the hub that fetching and pushing use, over repositories in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_words: object) -> None:
        pass

    def reply(self, body: Any = b"", status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")  # user/name/resolve/revision/file
        repository = self.server.repositories.get("/".join(parts[:2]))
        if repository is None:
            self.reply(status=404, X_Error_Code="RepoNotFound")
        elif parts[3] not in ("main", COMMIT):
            self.reply(status=404, X_Error_Code="RevisionNotFound")
        elif parts[4] not in repository:
            self.reply(status=404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        else:
            self.reply(repository[parts[4]], ETag=f'"{parts[4]}"', X_Repo_Commit=COMMIT)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("authorization") != "Bearer hf_right":
            self.reply({"error": "who are you?"}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repositories.setdefault(name, {})
            self.server.private[name] = asked.get("private", asked.get("visibility") == "private")
            self.reply({"url": f"http://{self.headers['Host']}/{name}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self.reply({"files": [{**each, **mode} for each in files]})
        elif "/commit/" in self.path:
            name = "/".join(self.path.split("/")[3:5])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.repositories[name][line["value"]["path"]] = content
            address = f"http://{self.headers['Host']}/{name}/commit/{COMMIT}"
            self.reply({"commitUrl": address, "commitOid": COMMIT})
        else:
            self.reply({})


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    here = Hub()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{here.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    thread = threading.Thread(target=here.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield here
    here.shutdown()
    here.server_close()
    thread.join()


ABOUT: dict[str, Any] = {
    "settings": {"data": "sha:/home/ann/secret/ShanghaiTech"},
    "split": {"hash": "37194e57", "how": {"data": "/home/ann/x.txt", "labelled": "5%"}},
    "chosen_on_test": False,
    "chosen": "best",
    "history": [
        {"step": 5, "mae": 10.0, "rmse": 20.0, "nae": 0.25},
        {"step": 9, "mae": 11.0, "rmse": 22.0, "nae": 0.5},
    ],
    "calibration": {"scores": [0.1, 0.2] * 5, "images": 10},
    "versions": {"torch": "2.13.0"},
}


@pytest.fixture
def counter() -> Counter:
    torch.manual_seed(0)
    network = P3Net(Architecture(backbone="small", layers=1, hidden=8)).eval()
    return Counter(network, Sizing(77), metadata=ABOUT)


def same(one: Counter, two: Counter) -> bool:
    a, b = one.network.state_dict(), two.network.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_goes_to_the_hub_and_back(server, counter):
    address = p3net.push_to_hub(counter, "ann/square", licence="mit")
    assert address.endswith("/ann/square")
    assert server.private == {"ann/square": True}
    assert set(server.repositories["ann/square"]) == {
        "model.safetensors",
        "config.json",
        "README.md",
    }
    for name in ("ann/square", f"ann/square@{COMMIT}"):
        loaded = p3net.load(name)
        assert same(loaded, counter)
        assert loaded.sizing.max_shorter_side == 77
        assert loaded.metadata["calibration"] == ABOUT["calibration"]


def test_what_was_fetched_once_needs_no_hub(server, counter, monkeypatch):
    p3net.push_to_hub(counter, "ann/square")
    p3net.load("ann/square")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert same(p3net.load("ann/square"), counter)


def test_a_path_wins_over_a_name(server, counter, tmp_path, monkeypatch):
    p3net.push_to_hub(counter, "runs/square")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    other = Counter(P3Net(Architecture(backbone="small", layers=1, hidden=8)).eval())
    checkpoint.save(Path("runs/square/model.safetensors"), other.network, {})
    assert same(p3net.load("runs/square"), other)
    assert not same(other, counter)


def test_errors_teach(server, counter, monkeypatch):
    with pytest.raises(InputError, match="no such file or folder here, and no model of this name"):
        p3net.load("ann/nothing")
    server.repositories["bob/other"] = {"pytorch_model.bin": b""}
    with pytest.raises(InputError, match=r"bob/other has no model\.safetensors"):
        p3net.load("bob/other")
    p3net.push_to_hub(counter, "ann/square")
    with pytest.raises(InputError, match="has no revision v9"):
        p3net.load("ann/square@v9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(InputError, match="could not be reached"):
        p3net.load("ann/elsewhere")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"no such file or folder.*pip install 'p3net\[hub\]'"):
        p3net.load("ann/square")
    with pytest.raises(InputError, match=r"pip install 'p3net\[hub\]'"):
        p3net.push_to_hub(counter, "ann/square")


def test_pushing_needs_a_name_and_a_token(server, counter, monkeypatch):
    for name in ("square", "ann/square@v1", "a/b/c"):
        with pytest.raises(InputError, match="a name on the hub is user/name"):
            p3net.push_to_hub(counter, name)
    with pytest.raises(InputError, match="a name on the hub is"):
        hub.fetch("not a name")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InputError, match="hf auth login"):
        p3net.push_to_hub(counter, "ann/square")


def test_a_folder_as_the_hub_has_it(counter, tmp_path):
    p3net.save_pretrained(counter, tmp_path / "out", licence="mit")
    assert same(p3net.load(tmp_path / "out"), counter)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["library_name"] == "p3net"
    assert config["network"]["architecture"]["backbone"] == "small"
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "mit"
    assert front["library_name"] == "p3net"


def test_the_card_says_what_matters(counter, tmp_path):
    p3net.save_pretrained(counter, tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| MAE | 10.00 |" in card  # of step 5: 2·20 + 10 is less than 2·22 + 11
    assert "step 5" in card
    assert "`37194e57`" in card
    assert "without the test images" in card
    assert "calibrated on 10 images" in card
    assert "25 density intervals" in card
    assert "Licence\n\nNot stated" in card
    assert "/home/ann" not in card
    assert "/home/ann" not in json.dumps(checkpoint.read(tmp_path / "model.safetensors")[1])
    sinner = hub.card({**ABOUT, "chosen_on_test": True, "chosen": "last", "calibration": None})
    assert "TEST images" in sinner
    assert "step 9" in sinner
    assert "not calibrated" in sinner
    few = hub.card({**ABOUT, "calibration": {"scores": [0.1, 0.2], "images": 2}})
    assert "not calibrated" in few
    assert "Not recorded (authors)" in hub.card({"origin": "authors"})
