"""The benchmarks' layouts, written here as they are published, wrong and missing files included."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from p3net.data import readers
from p3net.data.readers import BENCHMARKS
from p3net.errors import InputError
from p3net.structures import Dataset, Sample

POINTS = [[3.5, 4.25], [10.0, 20.0], [31.75, 7.5]]


def jpeg(path: Path, size_wh: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size_wh, "grey").save(path)


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def shanghaitech_mat(path: Path, points: list[list[float]], number: int) -> None:
    """A 1×1 cell that holds a 1×1 struct, as MATLAB wrote it."""
    struct_array = np.empty((1, 1), dtype=[("location", object), ("number", object)])
    struct_array[0, 0]["location"] = np.array(points, dtype=np.float64).reshape(-1, 2)
    struct_array[0, 0]["number"] = np.array([[number]], dtype=np.uint16)
    cell = np.empty((1, 1), dtype=object)
    cell[0, 0] = struct_array
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, {"image_info": cell}, do_compression=True)


def ann_mat(path: Path, points: list[list[float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, {"annPoints": np.array(points, dtype=np.float64).reshape(-1, 2)})


def shanghaitech(root: Path, part: str = "part_A", truth: str = "ground_truth") -> Path:
    for split, numbers in (("train_data", (1, 2, 10)), ("test_data", (1, 2))):
        for number in numbers:
            jpeg(root / part / split / "images" / f"IMG_{number}.jpg")
            file = root / part / split / truth / f"GT_IMG_{number}.mat"
            shanghaitech_mat(file, POINTS[: number % 3], number % 3)
    return root


def qnrf(root: Path) -> Path:
    for split, number in (("Train", 1), ("Train", 2), ("Test", 1)):
        jpeg(root / split / f"img_{number:04d}.jpg")
        ann_mat(root / split / f"img_{number:04d}_ann.mat", POINTS)
    return root


def jhu(root: Path) -> Path:
    for split, stem in (("train", "0001"), ("train", "0002"), ("val", "0003"), ("test", "0004")):
        jpeg(root / split / "images" / f"{stem}.jpg")
    write(root / "train/gt/0001.txt", "3 4 10 12 1 0\n10 20 5 6 3 1\n")
    write(root / "train/gt/0002.txt", "")
    write(root / "val/gt/0003.txt", "1 2 3 4 2 0\r\n")
    write(root / "test/gt/0004.txt", "-5 2 3 4 2 0\n")
    write(root / "train/image_labels.txt", "0001,2,street,0,0\n0002,0,water park,3,1\n")
    write(root / "val/image_labels.txt", "0003,1,stadium,1,0\n")
    write(root / "test/image_labels.txt", "0004,1,protest,2,0\n")
    return root


def nwpu(root: Path, *, parts: bool = False, truth: str = "json") -> Path:
    for number in range(1, 6):
        folder = f"images_part{number}" if parts else "images"
        jpeg(root / folder / f"{number:04d}.jpg")
        if number == 5:
            continue  # the test labels are withheld
        if truth == "json":
            record = {"img_id": f"{number:04d}.jpg", "human_num": 3, "points": POINTS, "boxes": []}
            write(root / "jsons" / f"{number:04d}.json", json.dumps(record))
        else:
            ann_mat(root / "mats" / f"{number:04d}.mat", POINTS)
    write(root / "train.txt", "0002 1 2\n0001 0 0\n0003 2 4\n")
    write(root / "val.txt", "0004 0 1\r\n")
    write(root / "test.txt", "0005 0 3\n")
    return root


def read(kind: str, path: Path) -> Dataset:
    return BENCHMARKS[kind].read(path)


def sample(dataset: Dataset, key: str) -> Sample:
    return dataset.pick([key]).samples[0]


def recognised(path: Path) -> list[str]:
    return [kind for kind, layout in BENCHMARKS.items() if layout.recognises(path)]


# --- ShanghaiTech -----------------------------------------------------------------------


@pytest.mark.parametrize("truth", ["ground_truth", "ground-truth"])
@pytest.mark.parametrize("suffix", ["", "_final"])
def test_shanghaitech_in_both_spellings(tmp_path, suffix, truth):
    root = shanghaitech(tmp_path, f"part_A{suffix}", truth)
    dataset = read("sha", root)
    assert [s.key for s in dataset.samples] == [
        "train/IMG_1.jpg",
        "train/IMG_2.jpg",
        "train/IMG_10.jpg",
        "test/IMG_1.jpg",
        "test/IMG_2.jpg",
    ]
    marks = sample(dataset, "train/IMG_2.jpg").marks()
    assert marks.points_xy.tolist() == POINTS[:2]
    assert marks.declared == 2
    assert dataset.orphans == ()
    assert dataset.samples[0].open().size == (40, 30)


def test_the_mat_is_nested_as_published(tmp_path):
    shanghaitech_mat(tmp_path / "GT_IMG_1.mat", POINTS, 3)
    mat = scipy.io.loadmat(tmp_path / "GT_IMG_1.mat")
    assert mat["image_info"][0, 0][0, 0]["location"].tolist() == POINTS
    assert mat["image_info"][0, 0][0, 0]["number"] == 3


@pytest.mark.parametrize("below", ["", "part_B", "part_B/train_data", "part_B/../part_B"])
def test_shanghaitech_from_the_root_the_part_or_the_split(tmp_path, below):
    path = shanghaitech(tmp_path / "ShanghaiTech", "part_B") / below
    assert recognised(path) == ["shb"]
    keys = [s.key for s in read("shb", path).samples]
    assert "train/IMG_10.jpg" in keys
    assert ("test/IMG_1.jpg" in keys) == (not below.endswith("train_data"))


def test_shanghaitech_one_folder_deeper_and_both_parts(tmp_path):
    shanghaitech(tmp_path / "ShanghaiTech", "part_A_final")
    shanghaitech(tmp_path / "ShanghaiTech", "part_B_final")
    assert recognised(tmp_path) == ["sha", "shb"]
    assert len(read("sha", tmp_path)) == len(read("shb", tmp_path)) == 5
    part = tmp_path / "ShanghaiTech" / "part_B_final"
    assert recognised(part) == ["shb"]
    with pytest.raises(InputError, match=r"expected ShanghaiTech A: part_A/"):
        read("sha", part)
    with pytest.raises(InputError, match="expected ShanghaiTech A"):
        read("sha", part / "test_data")


def test_a_renamed_part_can_be_forced(tmp_path):
    path = shanghaitech(tmp_path, "SHHA") / "SHHA"
    assert len(read("sha", path)) == 5
    assert recognised(path) == ["sha", "shb"]


def test_reading_in_the_current_folder(tmp_path, monkeypatch):
    shanghaitech(tmp_path)
    monkeypatch.chdir(tmp_path / "part_A" / "test_data")
    assert recognised(Path()) == ["sha"]
    assert {s.split for s in read("sha", Path()).samples} == {"test"}


def test_missing_and_orphaned_annotations(tmp_path):
    root = shanghaitech(tmp_path)
    (root / "part_A/train_data/ground_truth/GT_IMG_2.mat").unlink()
    (root / "part_A/train_data/images/IMG_10.jpg").unlink()
    dataset = read("sha", root)
    assert not sample(dataset, "train/IMG_2.jpg").labelled
    orphan = root / "part_A/train_data/ground_truth/GT_IMG_10.mat"
    assert dataset.orphans == (orphan,)


def test_a_split_without_any_annotation_is_unlabelled(tmp_path):
    root = shanghaitech(tmp_path)
    for file in (root / "part_A/test_data/ground_truth").iterdir():
        file.unlink()
    (root / "part_A/test_data/ground_truth").rmdir()
    dataset = read("sha", root)
    assert [s.labelled for s in dataset.part("test").samples] == [False, False]


def test_samples_travel_to_other_processes(tmp_path):
    for dataset in (
        read("sha", shanghaitech(tmp_path / "a")),
        read("qnrf", qnrf(tmp_path / "q")),
        read("jhu", jhu(tmp_path / "j")),
        read("nwpu", nwpu(tmp_path / "n")),
    ):
        copy = pickle.loads(pickle.dumps(dataset.samples[0]))
        assert np.array_equal(copy.marks().points_xy, dataset.samples[0].marks().points_xy)
        assert copy.open().size == (40, 30)


def expect_marks_error(sample: Sample, file: Path, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        sample.marks()
    assert caught.value.source == str(file)


def test_mats_of_the_wrong_structure(tmp_path):
    root = shanghaitech(tmp_path)
    file = root / "part_A/train_data/ground_truth/GT_IMG_1.mat"
    first = read("sha", root).samples[0]
    cell = np.empty((1, 1), dtype=object)
    cell[0, 0] = np.ones((1, 1))
    for variables in (
        {"annPoints": np.ones((2, 2))},
        {"image_info": np.ones((2, 2))},
        {"image_info": np.zeros((0, 0))},
        {"image_info": "text"},
        {"image_info": cell},
        {"image_info": {"location": np.ones((2, 2))}},
    ):
        scipy.io.savemat(file, variables)
        expect_marks_error(first, file, "expected image_info.*location.*number")
    for location, words in (
        (np.ones((2, 3)), "N×2"),
        (np.array([[1.0, np.nan]]), "finite"),
        (np.array([[1.0, 2e9]]), "absurd"),
        (np.array([["a", "b"]]), "must be numbers"),
        (np.array([[1 + 2j, 0]]), "must be numbers"),
    ):
        inner = np.empty((1, 1), dtype=[("location", object), ("number", object)])
        inner[0, 0]["location"], inner[0, 0]["number"] = location, 1
        cell[0, 0] = inner
        scipy.io.savemat(file, {"image_info": cell})
        expect_marks_error(first, file, words)
    for number in (np.nan, np.inf, 1.5, "two", [[1, 2]], []):
        inner[0, 0]["location"], inner[0, 0]["number"] = np.ones((1, 2)), number
        scipy.io.savemat(file, {"image_info": cell})
        expect_marks_error(first, file, "expected image_info")


def test_files_that_are_no_mats(tmp_path):
    root = shanghaitech(tmp_path)
    file = root / "part_A/train_data/ground_truth/GT_IMG_2.mat"
    second = read("sha", root).samples[1]
    whole = file.read_bytes()
    for content, words in (
        (b"", "not a .mat file"),
        (b"\x89PNG", "not a .mat file"),
        (b"x y\n1 2\n" * 40, "not a .mat file"),
        (whole[: len(whole) // 2], "damaged .mat file"),
        (whole[:200], "damaged .mat file"),
        (b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(900), "MATLAB 7.3"),
    ):
        write(file, content)
        expect_marks_error(second, file, words)
    file.unlink()
    expect_marks_error(second, file, "cannot read the annotation")


def test_an_annotation_too_long_is_not_read(tmp_path, monkeypatch):
    root = shanghaitech(tmp_path)
    file = write(root / "part_A/train_data/ground_truth/GT_IMG_1.mat", bytes(100_001))
    monkeypatch.setattr(readers, "_MAX_ANNOTATION_BYTES", 100_000)
    expect_marks_error(read("sha", root).samples[0], file, "too many for an annotation")


# --- UCF-QNRF ---------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "UCF-QNRF_ECCV18", "UCF-QNRF_ECCV18/Train"])
def test_qnrf(tmp_path, below):
    qnrf(tmp_path / "UCF-QNRF_ECCV18")
    path = tmp_path / below
    assert recognised(path) == ["qnrf"]
    dataset = read("qnrf", path)
    keys = ["train/img_0001.jpg", "train/img_0002.jpg", "test/img_0001.jpg"]
    assert [s.key for s in dataset.samples] == (keys[:2] if below.endswith("Train") else keys)
    assert sample(dataset, keys[1]).marks().points_xy.tolist() == POINTS
    assert sample(dataset, keys[1]).marks().declared is None


def test_qnrf_faults(tmp_path):
    root = qnrf(tmp_path)
    (root / "Train/img_0001_ann.mat").unlink()
    ann_mat(root / "Train/img_0009_ann.mat", POINTS)
    scipy.io.savemat(root / "Train/img_0002_ann.mat", {"points": np.ones((1, 2))})
    dataset = read("qnrf", root)
    assert not dataset.samples[0].labelled
    assert dataset.orphans == (root / "Train/img_0009_ann.mat",)
    expect_marks_error(
        dataset.samples[1], root / "Train/img_0002_ann.mat", r"expected annPoints \(N×2\)"
    )


# --- JHU-Crowd++ ------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "jhu_crowd_v2.0", "jhu_crowd_v2.0/test"])
def test_jhu(tmp_path, below):
    jhu(tmp_path / "jhu_crowd_v2.0")
    path = tmp_path / below
    assert recognised(path) == ["jhu"]
    dataset = read("jhu", path)
    weather = {s.key: s.tags["weather"] for s in dataset.samples}
    if below.endswith("test"):
        assert weather == {"test/0004.jpg": "rain"}
        return
    assert list(weather.values()) == ["none", "snow", "fog", "rain"]
    first, second = dataset.samples[:2]
    assert first.tags == {"scene": "street", "weather": "none", "distractor": "no"}
    assert second.tags == {"scene": "water park", "weather": "snow", "distractor": "yes"}
    assert first.marks().points_xy.tolist() == [[3, 4], [10, 20]]
    assert first.marks().declared == 2
    assert second.marks().points_xy.shape == (0, 2)
    assert sample(dataset, "test/0004.jpg").marks().points_xy.tolist() == [[-5, 2]]


def test_jhu_faults(tmp_path):
    root = jhu(tmp_path)
    write(root / "train/gt/0009.txt", "1 2 3 4 5 6")
    (root / "train/gt/0002.txt").unlink()
    write(root / "val/image_labels.txt", "")
    dataset = read("jhu", root)
    assert dataset.orphans == (root / "train/gt/0009.txt",)
    assert [s.labelled for s in dataset.samples] == [True, False, True, True]
    assert sample(dataset, "val/0003.jpg").tags == {}
    assert sample(dataset, "val/0003.jpg").marks().declared is None
    for content, words in (
        ("1 2 3 4 1 0\nfive 6\n", "line 2: expected x y w h"),
        ("7\n", "line 1"),
        ("nan 2 3 4 1 0\n", "finite"),
        ("1e300 2 3 4 1 0\n", "absurd"),
        (b"\xff\xfe\x00", "expected text"),
    ):
        file = write(root / "train/gt/0001.txt", content)
        expect_marks_error(dataset.samples[0], file, words)


@pytest.mark.parametrize(
    "line", ["0001,2,street,7,0", "0001,two,street,0,0", "0001,2,street", "0001,2,street,0,0,9"]
)
def test_jhu_labels_that_cannot_be_read(tmp_path, line):
    file = write(jhu(tmp_path) / "train/image_labels.txt", f"0002,0,park,3,1\n{line}\n")
    with pytest.raises(InputError, match="line 2: expected id,count,scene") as caught:
        read("jhu", tmp_path)
    assert caught.value.source == str(file)


# --- NWPU-Crowd -------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("truth", ["json", "mat"])
@pytest.mark.parametrize("below", ["", "NWPU-Crowd"])
def test_nwpu(tmp_path, parts, truth, below):
    nwpu(tmp_path / "NWPU-Crowd", parts=parts, truth=truth)
    path = tmp_path / below
    assert recognised(path) == ["nwpu"]
    dataset = read("nwpu", path)
    assert [s.key for s in dataset.samples] == [
        "train/0002.jpg",
        "train/0001.jpg",
        "train/0003.jpg",
        "val/0004.jpg",
        "test/0005.jpg",
    ]
    assert [s.labelled for s in dataset.samples] == [True] * 4 + [False]
    assert dataset.samples[0].tags == {"illumination": "1", "level": "2"}
    marks = dataset.samples[3].marks()
    assert marks.points_xy.tolist() == POINTS
    assert marks.declared == (3 if truth == "json" else None)
    assert dataset.samples[2].open().size == (40, 30)


def test_nwpu_faults(tmp_path):
    root = nwpu(tmp_path)
    write(root / "jsons/0009.json", "{}")
    (root / "images/0001.jpg").unlink()
    dataset = read("nwpu", root)
    assert dataset.orphans == (root / "jsons/0009.json",)
    with pytest.raises(InputError, match="No such file") as caught:
        sample(dataset, "train/0001.jpg").open()
    assert caught.value.source == str(root / "images/0001.jpg")
    for content, words in (
        ("{}", "expected JSON with points"),
        ("[1, 2]", "expected JSON"),
        ("", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ('{"points": [[1, 2]], "human_num": "many"}', "expected JSON"),
        ('{"points": [[1, 2], [3]], "human_num": 2}', "must be numbers"),
        ('{"points": [[1, "2"]], "human_num": 1}', "must be numbers"),
        ('{"points": [[1, NaN]], "human_num": 1}', "finite"),
        ('{"points": [[1, -1e99]], "human_num": 1}', "absurd"),
        ('{"points": [[1, %s]], "human_num": 1}' % ("9" * 400), "must be numbers|finite"),
        ('{"points": "none", "human_num": 1}', "must be numbers"),
        ('{"points": null, "human_num": 1}', "must be numbers"),
    ):
        file = write(root / "jsons/0003.json", content)
        expect_marks_error(sample(dataset, "train/0003.jpg"), file, words)


def test_nwpu_lists_that_cannot_be_read(tmp_path):
    file = write(nwpu(tmp_path) / "val.txt", "0004 0 1\n0005 3\n")
    with pytest.raises(InputError, match="line 2: expected `id illumination level`") as caught:
        read("nwpu", tmp_path)
    assert caught.value.source == str(file)
    write(tmp_path / "val.txt", "0004 0 1\n0004 0 1\n")
    with pytest.raises(InputError, match=r"two images are called val/0004\.jpg"):
        read("nwpu", tmp_path)


# --- None of them -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(BENCHMARKS))
def test_what_is_not_the_set(tmp_path, kind):
    write(tmp_path / "images" / "notes.txt", "x")
    assert recognised(tmp_path) == []
    assert recognised(tmp_path / "none") == []
    with pytest.raises(InputError, match="found nothing of it"):
        read(kind, tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        read(kind, tmp_path / "none")
