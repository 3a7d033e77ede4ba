"""Every block of the README runs, in one folder and in its order, as a reader would go through."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from p3net.app.cli import cli
from p3net.data.catalogue import open_dataset

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
COMMANDS = [
    shlex.split(line, comments=True)
    for kind, text in BLOCKS
    if kind == "sh"
    for line in text.splitlines()
]

ELSEWHERE = {
    ("make",): "what runs this test",
    ("p3net", "serve"): "stays until it is stopped: tests/app/web",
    ("torchrun",): "tests/app/test_train_command.py",
    (
        "p3net",
        "experiment",
        "experiments/main.yaml",
    ): "needs ShanghaiTech: test_experiments_build.py",
}
"""Beginnings of commands that are not run here, and why."""

SHORTER = {
    "train": "--steps 1 --set recipe.workers=0 --set views.crop=64",
    "experiment": "--seeds 1 --runs labels-5 --set recipe.steps=1 --set views.crop=64 "
    "--set data=synthetic:1?train=20&val=0&test=2&size=96x128",
}
"""What is added so that a command takes seconds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what the README speaks of: photos, some of them marked, and a film."""
    av = pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "experiments", folder / "experiments")
    scenes = open_dataset("synthetic:5?train=16&val=0&test=0&size=96x128").samples
    for number, sample in enumerate(scenes):
        below = folder / ("photos" if number < 12 else "more" if number < 14 else "new")
        below.mkdir(exist_ok=True)
        with sample.open() as image:
            image.save(below / f"{number}.jpg")
        if number < 10 or below.name == "more":
            rows = "".join(f"{x},{y}\n" for x, y in sample.marks().points_xy)
            (below / f"{number}.csv").write_text(f"x,y\n{rows}")
    for name in ("photo.jpg", "square.jpg"):
        shutil.copy(folder / "photos" / "0.jpg", folder / name)
    with (
        av.open(str(folder / "crossing.mp4"), "w") as film,
        Image.open(folder / "photo.jpg") as shown,
    ):
        stream = film.add_stream("mpeg4", rate=1)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for _ in range(5):
            frame = av.VideoFrame.from_ndarray(np.asarray(shown.convert("RGB")), format="rgb24")
            film.mux(stream.encode(frame))
        film.mux(stream.encode(None))
    return folder


def test_the_blocks(place, monkeypatch):
    monkeypatch.chdir(place)
    for needed in ("matplotlib", "onnx", "onnxruntime", "scipy"):
        pytest.importorskip(needed)
    ran = 0
    for words in COMMANDS:
        if not words or any(tuple(words[: len(start)]) == start for start in ELSEWHERE):
            continue
        assert words[0] == "p3net", words
        result = CliRunner().invoke(cli, [*words[1:], *SHORTER.get(words[1], "").split()])
        assert result.exit_code == 0, f"{shlex.join(words)}: {result.output} {result.exception}"
        ran += 1
    assert ran >= 10
    for name in ("counts.csv", "day.png", "day.mp4", "square.onnx"):
        assert (place / name).stat().st_size > 0


def test_the_python(place, monkeypatch):
    monkeypatch.chdir(place)
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    found: dict[str, object] = {}
    exec(code, found)
    assert (place / "square.overlay.png").is_file()


def test_every_module_has_its_line():
    """The tree in the README names each module once."""
    (tree,) = [
        text for text in (ROOT / "README.md").read_text().split("```") if "src/p3net/\n" in text
    ]
    package = ROOT / "src" / "p3net"
    entries = re.split(r"\n {2}(?=\w)", tree)
    for path in package.rglob("*.py"):
        first, *inside = path.relative_to(package).parts
        if path.name.startswith("__") or first == "app":
            continue
        start = f"{first}/" if inside else first
        (entry,) = [each for each in entries if re.match(rf"(\w+\.py, )*{start}", each)]
        assert not inside or re.search(rf"\b{path.stem}\b", entry), path.name
