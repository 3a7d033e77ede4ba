from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from p3net.data import catalogue
from p3net.data.catalogue import kinds, open_dataset
from p3net.errors import InputError


def jpeg(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30)).save(path)


def shanghaitech(root: Path, part: str) -> Path:
    jpeg(root / part / "train_data" / "images" / "IMG_1.jpg")
    (root / part / "train_data" / "ground_truth").mkdir()
    return root


def folder(root: Path) -> Path:
    jpeg(root / "a.jpg")
    (root / "a.txt").write_text("1 2\n3 4\n")
    jpeg(root / "b.jpg")
    return root


def test_a_kind_before_the_colon_forces_the_reading(tmp_path):
    root = shanghaitech(tmp_path, "part_A")
    forced = open_dataset(f"sha:{root}")
    assert (forced.kind, forced.root, len(forced)) == ("sha", f"sha:{root}", 1)
    plain = open_dataset(f"folder:{root}/part_A/train_data/images")
    assert (plain.kind, [s.name for s in plain.samples]) == ("folder", ["IMG_1.jpg"])


def test_a_path_is_recognised_by_its_contents(tmp_path):
    part = open_dataset(str(shanghaitech(tmp_path / "a", "part_A")))
    assert part.kind == "sha"
    own = open_dataset(folder(tmp_path / "own"))
    assert own.kind == "folder"
    assert own.root == str(tmp_path / "own")
    assert [s.labelled for s in own.samples] == [True, False]
    assert own.samples[0].marks().points_xy.tolist() == [[1, 2], [3, 4]]


def test_both_parts_of_shanghaitech_need_a_choice(tmp_path):
    shanghaitech(tmp_path, "part_A")
    shanghaitech(tmp_path, "part_B")
    with pytest.raises(InputError) as caught:
        open_dataset(tmp_path)
    assert f"write sha:{tmp_path} or shb:{tmp_path}" in str(caught.value)
    assert open_dataset(f"shb:{tmp_path}").kind == "shb"


def test_several_sets_in_one(tmp_path):
    shanghaitech(tmp_path, "part_A")
    shanghaitech(tmp_path, "part_B")
    own = folder(tmp_path / "own")
    spec = f"sha:{tmp_path} + shb:{tmp_path} + {own} + folder:{own}"
    joined = open_dataset(spec)
    assert (joined.kind, joined.root) == ("joined", spec)
    names = [sample.name for sample in joined.samples]
    assert names[:3] == ["sha/IMG_1.jpg", "shb/IMG_1.jpg", "folder/a.jpg"]
    assert names[-1] == "folder-2/b.jpg"
    assert joined.samples[2].marks().points_xy.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(InputError, match="no such file"):
        open_dataset(f"sha:{tmp_path} + {tmp_path / 'none'}")


def test_synthetic_scenes():
    dataset = open_dataset("synthetic:7?train=3&val=1&test=0&size=64x96")
    assert dataset.kind == "synthetic"
    assert len(dataset) == 4
    assert dataset.samples[0].open().size == (96, 64)
    with pytest.raises(InputError, match="SEED"):
        open_dataset("synthetic:seven")


@pytest.mark.parametrize("name", ["C:\\photos", "C:photos", "12:30 market", "a:b:c", "http:x"])
def test_a_path_with_a_colon_that_exists_is_a_path(tmp_path, monkeypatch, name):
    folder(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert open_dataset(name).kind == "folder"
    assert len(open_dataset(f"folder:{name}")) == 2


def test_a_folder_called_like_a_kind_is_written_with_a_dot(tmp_path, monkeypatch):
    folder(tmp_path / "sha:x")
    monkeypatch.chdir(tmp_path)
    assert open_dataset("./sha:x").kind == "folder"
    with pytest.raises(InputError, match="no such file or folder"):
        open_dataset("sha:x")


def test_the_home_folder_after_a_colon(tmp_path, monkeypatch):
    folder(tmp_path / "photos")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert len(open_dataset("folder:~/photos")) == 2


@pytest.mark.parametrize("spec", ["C:\\none", "./none:here", "/none/a:b"])
def test_a_missing_path_with_a_colon_is_called_missing(spec):
    with pytest.raises(InputError, match="no such file or folder"):
        open_dataset(spec)


@pytest.mark.parametrize("spec", ["ucf:somewhere", "SHA:somewhere", ""])
def test_an_unknown_kind_lists_the_known_ones(spec):
    with pytest.raises(InputError, match="no such kind") as caught:
        open_dataset(spec)
    for kind in ("sha", "shb", "qnrf", "jhu", "nwpu", "folder", "coco", "synthetic"):
        assert f"\n  {kind} " in str(caught.value)


def test_nothing_known_lists_what_was_tried(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match="none of the known layouts") as caught:
        open_dataset(tmp_path)
    for kind, summary in kinds().items():
        assert kind in str(caught.value)
        assert summary in str(caught.value)
    with pytest.raises(InputError, match="no such file or folder"):
        open_dataset(tmp_path / "none")
    with pytest.raises(InputError, match="expected a path after sha:"):
        open_dataset("sha:")


def test_a_set_without_images_is_refused(tmp_path):
    (tmp_path / "part_A" / "train_data" / "images").mkdir(parents=True)
    with pytest.raises(InputError, match="no images there; expected ShanghaiTech A"):
        open_dataset(f"sha:{tmp_path}")


def test_what_may_not_be_read_is_said(tmp_path, monkeypatch):
    root = shanghaitech(tmp_path, "part_A")

    def deny(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", deny)
    for spec in (str(root), f"sha:{root}"):
        with pytest.raises(InputError, match="Permission denied"):
            open_dataset(spec)


def test_every_kind_can_be_asked_for(tmp_path):
    """A kind in the list is a kind that `KIND:PATH` understands."""
    rendered = {catalogue.SYNTHETIC, catalogue.SURFACES}
    for kind in kinds():
        words = "expected SEED" if kind in rendered else "no such file or folder"
        with pytest.raises(InputError, match=words):
            open_dataset(f"{kind}:{tmp_path / 'none'}")
