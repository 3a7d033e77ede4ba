"""Marks on disk: what other programs read, versions, kills, full disks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from p3net.app import cli
from p3net.app.web import store as module
from p3net.app.web.store import UNMARKED, ConflictError, Store, UnknownImageError
from p3net.data.catalogue import open_dataset
from p3net.errors import InputError
from p3net.structures import as_points

TWO = as_points([[1.5, 2.25], [100.0, 60.0]])


@pytest.fixture
def store(folder):
    made = Store(folder)
    yield made
    made.close()


def id_of(store: Store, name: str) -> str:
    return next(entry.id for entry in store.entries.values() if entry.name == name)


def test_images_come_in_natural_order_and_unmarked(folder, store):
    (folder / "IMG_10.jpg").write_bytes((folder / "IMG_1.jpg").read_bytes())
    names = [entry.name for entry in store.refresh().values()]
    assert names == [f"IMG_{i}.jpg" for i in (1, 2, 3, 4, 5, 6, 10)]
    assert {store.marked(entry) for entry in store.entries.values()} == {None}


def test_p3net_data_reads_marks_at_once(folder, store):
    store.write(id_of(store, "IMG_2.jpg"), TWO, UNMARKED)
    store.write(id_of(store, "IMG_3.jpg"), as_points([]), UNMARKED)
    samples = {sample.name: sample for sample in open_dataset(folder).samples}
    assert samples["IMG_2.jpg"].marks().points_xy.tolist() == TWO.tolist()
    assert len(samples["IMG_3.jpg"].marks().points_xy) == 0
    assert not samples["IMG_1.jpg"].labelled
    result = CliRunner().invoke(cli.cli, ["data", "check", str(folder)])
    assert result.exit_code == 0, result.output


def test_a_change_needs_the_version_it_was_made_to(store):
    image = id_of(store, "IMG_1.jpg")
    first = store.write(image, TWO, UNMARKED)
    with pytest.raises(ConflictError) as caught:
        store.write(image, as_points([[3, 3]]), UNMARKED)
    assert caught.value.state.version == first.version
    assert caught.value.state.points_xy.tolist() == TWO.tolist()
    assert store.read(image).points_xy.tolist() == TWO.tolist()
    second = store.write(image, None, first.version)
    assert (second.points_xy, second.version) == (None, UNMARKED)
    assert not store.entry(image).marks.exists()


def test_what_another_program_writes_is_a_new_version(store):
    image = id_of(store, "IMG_1.jpg")
    version = store.write(image, TWO, UNMARKED).version
    store.entry(image).marks.write_text("7 8\n")
    assert store.read(image).points_xy.tolist() == [[7, 8]]
    assert store.marked(store.entry(image)) == 1
    with pytest.raises(ConflictError):
        store.write(image, TWO, version)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("IMG_1.csv", b"x,y\n3.0,4.0\n"),
        ("points/IMG_1.json", b"[[3.0, 4.0]]"),
        ("IMG_1.jpg.txt", b"3.0 4.0\n"),
    ],
)
def test_a_file_that_is_there_is_kept_in_its_place_and_form(folder, file, content):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)
    store = Store(folder)
    image = id_of(store, "IMG_1.jpg")
    before = store.read(image)
    assert before.points_xy.tolist() == [[3, 4]]
    store.write(image, TWO, before.version)
    assert open_dataset(folder).samples[0].marks().points_xy.tolist() == TWO.tolist()
    assert (folder / file).read_bytes() != content
    assert not (store.hidden / "originals").exists()
    store.close()


def test_npy_is_written_as_npy(folder):
    np.save(folder / "IMG_1.npy", np.array([[3.0, 4.0]]))
    store = Store(folder)
    image = id_of(store, "IMG_1.jpg")
    store.write(image, TWO, store.read(image).version)
    assert np.load(folder / "IMG_1.npy").tolist() == TWO.tolist()
    store.close()


def test_a_file_that_says_more_is_put_aside_first(folder):
    (folder / "IMG_1.csv").write_text("x,y,label\n3,4,child\n")
    store = Store(folder)
    image = id_of(store, "IMG_1.jpg")
    for points in (TWO, as_points([[1, 1]])):
        store.write(image, points, store.read(image).version)
    kept = store.hidden / "originals" / "IMG_1.csv"
    assert kept.read_text() == "x,y,label\n3,4,child\n"
    assert (folder / "IMG_1.csv").read_text() == "x,y\n1.0,1.0\n"
    store.close()


def test_images_of_one_stem_have_marks_of_their_own(folder):
    (folder / "IMG_1.png").write_bytes((folder / "IMG_1.jpg").read_bytes())
    store = Store(folder)
    store.write(id_of(store, "IMG_1.jpg"), TWO, UNMARKED)
    store.write(id_of(store, "IMG_1.png"), as_points([[1, 1]]), UNMARKED)
    found = {s.name: len(s.marks().points_xy) for s in open_dataset(folder).samples if s.labelled}
    assert found == {"IMG_1.jpg": 2, "IMG_1.png": 1}
    store.close()


def test_images_in_split_folders(folder):
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "IMG_1.jpg").rename(folder / "val" / "images" / "a.jpg")
    store = Store(folder)
    store.write(id_of(store, "val/images/a.jpg"), TWO, UNMARKED)
    assert (folder / "val" / "points" / "a.jpg.txt").is_file()
    assert store.entry(id_of(store, "val/images/a.jpg")).key == "val/a.jpg"
    assert [s.key for s in open_dataset(folder).samples if s.labelled] == ["val/a.jpg"]
    store.close()


def test_a_damaged_file_is_told_and_not_overwritten(folder, store):
    image = id_of(store, "IMG_1.jpg")
    entry = store.entry(image)
    entry.marks.parent.mkdir()
    entry.marks.write_text("one two three\n")
    assert "expected" in store.marked(entry)
    with pytest.raises(InputError):
        store.read(image)
    with pytest.raises(InputError):
        store.write(image, TWO, UNMARKED)
    assert entry.marks.read_text() == "one two three\n"


@pytest.mark.parametrize("id_", ["", "../../etc/passwd", "IMG_1.jpg", "0" * 16])
def test_only_ids_of_the_listing_are_known(store, id_):
    with pytest.raises(UnknownImageError):
        store.read(id_)


def test_one_server_a_folder(folder, store):
    with pytest.raises(InputError, match="another p3net serve"):
        Store(folder)
    store.close()
    Store(folder).close()


def test_other_layouts_and_no_folders_are_refused(tmp_path, folder):
    with pytest.raises(InputError, match="no such folder"):
        Store(tmp_path / "nowhere")
    (folder / "all.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(InputError, match=r"this is coco.*data convert"):
        Store(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError):
        Store(tmp_path / "empty")


def test_a_full_disk_keeps_the_previous_marks(store, monkeypatch):
    image = id_of(store, "IMG_1.jpg")
    version = store.write(image, TWO, UNMARKED).version

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(InputError, match=r"No space left.*previous ones are kept"):
        store.write(image, as_points([[1, 1]]), version)
    monkeypatch.undo()
    assert store.read(image).points_xy.tolist() == TWO.tolist()
    assert [path.name for path in store.entry(image).marks.parent.iterdir()] == ["IMG_1.jpg.txt"]


WRITER = """
import sys
from pathlib import Path
from p3net.app.web.store import Store
from p3net.structures import as_points
store = Store(Path(sys.argv[1]))
image = next(iter(store.entries))
points, version = [], "none"
while True:
    points.append([len(points) + 0.5, 1.0])
    version = store.write(image, as_points(points), version).version
    print(len(points), flush=True)
"""


def test_killed_while_writing_it_loses_at_most_the_last_change(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(40):
            process.stdout.readline()
        time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        told = [40, *map(int, process.communicate()[0].split())]
    store = Store(folder)  # the lock went with the process
    found = store.read(next(iter(store.entries))).points_xy
    assert told[-1] <= len(found) <= told[-1] + 1
    assert found.tolist() == [[i + 0.5, 1.0] for i in range(len(found))]
    store.close()
