"""Users' formats, read from files as the tools write them, worked by hand."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from p3net.data.folders import Place, split_of
from p3net.data.formats import FORMATS
from p3net.errors import InputError
from p3net.structures import Dataset


def picture(path: Path, size: tuple[int, int] = (40, 20)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "olive").save(path)


def text(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def recognised(path: Path) -> list[str]:
    return [name for name, layout in FORMATS.items() if layout.recognises(path)]


def read(path: Path, name: str) -> dict[str, list[list[float]] | None]:
    """Read a path that only this format recognises; points by key, None for unlabelled."""
    assert recognised(path) == [name]
    return points_of(FORMATS[name].read(path))


def points_of(dataset: Dataset) -> dict[str, list[list[float]] | None]:
    return {
        sample.key: sample.marks().points_xy.tolist() if sample.labelled else None
        for sample in dataset.samples
    }


# --- folders ----------------------------------------------------------------------------

SPELLINGS = {
    "spaces": "1 2\n3.5 4.25\n",
    "tabs and CRLF": "1\t2\r\n3.5\t4.25\r\n",
    "commas": "1,2\n3.5, 4.25\n",
    "semicolons": "1;2\n3.5;4.25",
    "blank lines": "\n 1 2 \n\n3.5 4.25\n\n",
    "a header": "x,y\n1,2\n3.5,4.25\n",
    "a quoted header": '"X";"Y"\n1;2\n3.5;4.25\n',
    "more columns": "id,y,x,label\n0,2,1,head\n1,4.25,3.5,head\n",
    "a mark of the byte order": b"\xef\xbb\xbfx y\n1 2\n3.5 4.25\n",
    "exponents": "1e0 +2\n35e-1 4.25\n",
}


@pytest.mark.parametrize("content", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("suffix", [".txt", ".csv", ".CSV"])
def test_text(content: str | bytes, suffix: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    text(tmp_path / f"a{suffix}", content)
    assert read(tmp_path, "folder") == {"train/a.jpg": [[1, 2], [3.5, 4.25]]}


@pytest.mark.parametrize("content", ["", "\n", "x,y\n"])
def test_empty_text_says_nobody_is_there(content: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    picture(tmp_path / "b.jpg")
    text(tmp_path / "a.csv", content)
    assert read(tmp_path, "folder") == {"train/a.jpg": [], "train/b.jpg": None}


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<i2", "u1", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(dtype: str, order: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    rows = np.array([[1, 2], [3, 4], [5, 6]], dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", rows)
    assert read(tmp_path, "folder") == {"train/a.jpg": [[1, 2], [3, 4], [5, 6]]}


@pytest.mark.parametrize("shape", [(0, 2), (0,), (2, 0)])
def test_an_empty_npy_says_nobody_is_there(shape: tuple[int, ...], tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    np.save(tmp_path / "a.npy", np.zeros(shape))
    assert read(tmp_path, "folder") == {"train/a.jpg": []}


def test_images_and_points_in_two_folders(tmp_path: Path) -> None:
    for name in ("001cell.png", "002cell.png", "gate/7.png"):
        picture(tmp_path / "images" / name)
    text(tmp_path / "points/001cell.json", "[[1, 2.5], [3, 4]]")
    text(tmp_path / "points/gate/7.json", "[]")
    assert read(tmp_path, "folder") == {
        "train/001cell.png": [[1, 2.5], [3, 4]],
        "train/002cell.png": None,
        "train/gate/7.png": [],
    }


def test_own_pictures_and_runs_are_no_data(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.overlay.jpg", "runs/x/cache/b.png", "more/c.png"):
        picture(tmp_path / name)
    text(tmp_path / "a.txt", "1 1\n")
    text(tmp_path / "runs" / "x" / "run.json", "{}")
    assert set(read(tmp_path, "folder")) == {"train/a.jpg", "train/more/c.png"}


def test_splits_by_folder_in_either_order(tmp_path: Path) -> None:
    for path in ("Train/images/a.png", "val/b.png", "test/images/c/d.png"):
        picture(tmp_path / "one" / path)
    text(tmp_path / "one/Train/points/a.txt", "1 2")
    text(tmp_path / "one/val/b.txt", "3 4")
    text(tmp_path / "one/test/points/c/d.txt", "5 6")
    expected = {"train/a.png": [[1, 2]], "val/b.png": [[3, 4]], "test/c/d.png": [[5, 6]]}
    assert read(tmp_path / "one", "folder") == expected
    for path in ("images/train/a.png", "images/validation/b.png", "images/test/c/d.png"):
        picture(tmp_path / "two" / path)
    text(tmp_path / "two/points/train/a.txt", "1 2")
    text(tmp_path / "two/points/validation/b.txt", "3 4")
    text(tmp_path / "two/points/test/c/d.txt", "5 6")
    assert read(tmp_path / "two", "folder") == expected


def test_images_come_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        picture(tmp_path / f"IMG_{number}.jpg")
    names = [sample.name for sample in FORMATS["folder"].read(tmp_path).samples]
    assert names == ["IMG_2.jpg", "IMG_9.jpg", "IMG_10.jpg"]


def test_annotations_without_image_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    stray = text(tmp_path / "b.txt", "1 2")
    text(tmp_path / "README.txt", "how these were taken")
    text(tmp_path / ".hidden.txt", "")
    assert FORMATS["folder"].read(tmp_path).orphans == (stray,)


def test_two_annotations_of_one_image_are_refused_but_can_be_chosen(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    text(tmp_path / "a.txt", "1 2")
    text(tmp_path / "a.csv", "3,4")
    with pytest.raises(InputError, match="two annotations") as caught:
        FORMATS["folder"].read(tmp_path)
    assert caught.value.source == str(tmp_path / "a.jpg")
    assert points_of(FORMATS["txt"].read(tmp_path)) == {"train/a.jpg": [[1, 2]]}
    assert points_of(FORMATS["csv"].read(tmp_path)) == {"train/a.jpg": [[3, 4]]}


def test_an_annotation_of_two_images_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    picture(tmp_path / "a.png")
    text(tmp_path / "a.txt", "1 2")
    with pytest.raises(InputError, match=r"call it a\.png\.txt"):
        FORMATS["folder"].read(tmp_path)
    (tmp_path / "a.txt").rename(tmp_path / "a.png.txt")
    assert read(tmp_path, "folder") == {"train/a.jpg": None, "train/a.png": [[1, 2]]}


def test_a_plain_folder_of_photos_is_an_unlabelled_dataset(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    text(tmp_path / "settings.json", '{"camera": 7}')
    assert read(tmp_path, "folder") == {"train/a.jpg": None}


def test_an_annotation_is_read_when_asked_for(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    bad = text(tmp_path / "a.txt", "1 2 3")
    (sample,) = FORMATS["folder"].read(tmp_path).samples
    with pytest.raises(InputError, match="expected 2 values a line, got 3") as caught:
        sample.marks()
    assert caught.value.source == str(bad)


# --- one JSON file an image --------------------------------------------------------------


def labelme(image: str, shapes: list[dict[str, object]]) -> str:
    tree = {"version": "5.4.1", "flags": {}, "shapes": shapes, "imagePath": image}
    return json.dumps(tree | {"imageData": None, "imageHeight": 20, "imageWidth": 40})


HEAD = {"label": "head", "points": [[1.5, 2.5]], "group_id": None, "shape_type": "point"}
BOX = {"label": "head", "points": [[10, 4], [20, 8]], "shape_type": "rectangle"}
AREA = {"label": "roi", "points": [[0, 0], [9, 0], [9, 9]], "shape_type": "polygon"}


def test_labelme(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        picture(tmp_path / name)
    text(tmp_path / "a.json", labelme("a.jpg", [HEAD, BOX, AREA]))
    text(tmp_path / "b.json", labelme("b.jpg", []))
    assert read(tmp_path, "labelme") == {
        "train/a.jpg": [[1.5, 2.5], [15, 6]],
        "train/b.jpg": [],
        "train/c.jpg": None,
    }
    assert read(tmp_path / "a.json", "labelme") == {"train/a.jpg": [[1.5, 2.5], [15, 6]]}


@pytest.mark.parametrize("reference", ["../photos/a.jpg", "..\\photos\\a.jpg"])
def test_labelme_files_apart_from_their_images(reference: str, tmp_path: Path) -> None:
    picture(tmp_path / "photos/a.jpg")
    text(tmp_path / "labels/first.json", labelme(reference, [HEAD]))
    stray = text(tmp_path / "labels/second.json", labelme("gone.jpg", [HEAD]))
    assert read(tmp_path, "labelme") == {"train/photos/a.jpg": [[1.5, 2.5]]}
    assert FORMATS["labelme"].read(tmp_path).orphans == (stray,)
    text(stray, labelme(reference, []))
    with pytest.raises(InputError, match="annotates the same image"):
        FORMATS["labelme"].read(tmp_path)


def test_cclabeler(tmp_path: Path) -> None:
    for name in ("1.jpg", "2.jpg", "3.jpg"):
        picture(tmp_path / "images" / name)
    points = [{"x": 1.5, "y": 2}, {"x": 3, "y": 4}]
    tree = {"img_id": "1", "human_num": 3, "boxes": [], "points": points}
    text(tmp_path / "jsons/1.json", json.dumps(tree))
    text(tmp_path / "jsons/2.json", json.dumps(tree | {"points": [], "human_num": 0}))
    text(tmp_path / "marks/1.json", "[1, 0, 1]")
    assert read(tmp_path, "cclabeler") == {
        "train/1.jpg": [[1.5, 2], [3, 4]],
        "train/2.jpg": [],
        "train/3.jpg": None,
    }
    dataset = FORMATS["cclabeler"].read(tmp_path)
    assert dataset.samples[0].marks().declared == 3
    assert dataset.orphans == ()
    assert read(tmp_path / "jsons/1.json", "cclabeler") == {"train/1.jpg": [[1.5, 2], [3, 4]]}


# --- one file for many images ------------------------------------------------------------

PERSON = {
    "id": 1,
    "name": "person",
    "keypoints": ["nose", "left_eye", "right_eye", "left_hip"],
}


def coco(annotations: list[dict[str, object]] | None, *names: str, **more: object) -> str:
    images = [{"id": 7 + n, "file_name": name, "width": 40} for n, name in enumerate(names)]
    tree: dict[str, object] = {"info": {}, "images": images, "categories": [PERSON]}
    if annotations is not None:
        tree["annotations"] = [{"image_id": 7, "category_id": 1} | row for row in annotations]
    return json.dumps(tree | more)


def test_coco_takes_one_point_a_person(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        picture(tmp_path / name)
    rows: list[dict[str, object]] = [
        {"keypoints": [10, 4, 2, 20, 8, 1, 0, 0, 0, 99, 99, 2]},  # nose and one eye
        {"keypoints": [0, 0, 0, 0, 0, 0, 0, 0, 0, 30, 15, 1]},  # only a hip
        {"keypoints": [0] * 12, "num_keypoints": 0, "bbox": [10, 2, 4, 6]},
        {"bbox": [0, 0, 3, 5]},
        {"bbox": [0, 0, 40, 20], "iscrowd": 1},
        {"bbox": [0, 0, 9, 9], "category_id": 2},
    ]
    text(tmp_path / "labels.json", coco(rows, "a.jpg", "b.jpg"))
    expected = [[15, 6], [30, 15], [12, 5], [1.5, 2.5]]
    found = {"train/a.jpg": expected, "train/b.jpg": [], "train/c.jpg": None}
    assert read(tmp_path, "coco") == found
    # The file alone: only what it lists.
    assert read(tmp_path / "labels.json", "coco") == {"train/a.jpg": expected, "train/b.jpg": []}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("head", "person"), [[1.5, 2.5]]),  # one person marked twice
        (("car", "person"), [[4.5, 4.5]]),
        (("car", "Person "), [[4.5, 4.5]]),
        (("cell", "nucleus"), [[1.5, 2.5], [4.5, 4.5]]),
    ],
)
def test_coco_with_several_categories(tmp_path: Path, names, expected) -> None:
    picture(tmp_path / "a.jpg")
    rows: list[dict[str, object]] = [
        {"bbox": [0, 0, 3, 5], "category_id": 1},
        {"bbox": [0, 0, 9, 9], "category_id": 2},
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    text(tmp_path / "labels.json", coco(rows, "a.jpg", categories=categories))
    assert read(tmp_path, "coco") == {"train/a.jpg": expected}


def test_coco_in_its_own_layout(tmp_path: Path) -> None:
    row: dict[str, object] = {"bbox": [0, 0, 2, 2]}
    picture(tmp_path / "train2017/0001.jpg")
    picture(tmp_path / "val2017/0001.jpg")
    for split in ("train", "val"):
        name = f"{split}2017/0001.jpg"
        file = tmp_path / f"annotations/person_keypoints_{split}2017.json"
        text(file, coco([row], name))
    assert read(tmp_path, "coco") == {
        "train/train2017/0001.jpg": [[1, 1]],
        "val/val2017/0001.jpg": [[1, 1]],
    }
    file = tmp_path / "annotations/person_keypoints_val2017.json"
    assert read(file, "coco") == {"val/val2017/0001.jpg": [[1, 1]]}


def test_coco_with_a_file_in_each_split(tmp_path: Path) -> None:
    for folder in ("train", "valid"):
        picture(tmp_path / folder / "a.jpg")
        text(tmp_path / folder / "_annotations.coco.json", coco([{"bbox": [0, 0, 2, 2]}], "a.jpg"))
    assert read(tmp_path, "coco") == {"train/a.jpg": [[1, 1]], "val/a.jpg": [[1, 1]]}


def test_coco_without_annotations_is_unlabelled(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    text(tmp_path / "image_info.json", coco(None, "a.jpg"))
    assert read(tmp_path, "coco") == {"train/a.jpg": None}


def test_listed_images_that_are_missing_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    text(tmp_path / "labels.json", coco([], "a.jpg", "gone/b.jpg"))
    assert FORMATS["coco"].read(tmp_path).orphans == (tmp_path / "gone/b.jpg",)


def test_a_name_that_may_mean_two_images_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "x/a.jpg")
    picture(tmp_path / "y/a.jpg")
    text(tmp_path / "labels.json", coco([], "a.jpg"))
    with pytest.raises(InputError, match=r"may mean 'x/a\.jpg' or 'y/a\.jpg'"):
        FORMATS["coco"].read(tmp_path)


COCO_FAULTS = {
    "two images have the id 7": coco([], "a.jpg", images=[{"id": 7, "file_name": "a.jpg"}] * 2),
    "unknown image 9": coco([{"image_id": 9}], "a.jpg"),
    "x, y, v in turn": coco([{"keypoints": [1, 2]}], "a.jpg"),
    "without a visible keypoint, bbox": coco([{}], "a.jpg"),
    "x, y, width, height": coco([{"bbox": [1, 2]}], "a.jpg"),
    "is listed twice": coco([], "a.jpg", "./a.jpg"),
}


@pytest.mark.parametrize("message", COCO_FAULTS)
def test_coco_faults(message: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    file = text(tmp_path / "labels.json", COCO_FAULTS[message])
    with pytest.raises(InputError, match=message) as caught:
        points_of(FORMATS["coco"].read(tmp_path))
    assert caught.value.source == str(file)


def region(x: float, y: float, kind: str = "keypointlabels", **more: object) -> dict[str, object]:
    value = {"x": x, "y": y, "width": 10, "height": 20, kind: ["head"]}
    place = {"original_width": 400, "original_height": 200, "image_rotation": 0}
    return {"type": kind, "value": value} | place | more


def task(image: str, *results: list[dict[str, object]], **more: object) -> dict[str, object]:
    versions = [{"id": n, "result": result} for n, result in enumerate(results)]
    return {"id": 1, "annotations": versions, "data": {"image": image}} | more


def test_labelstudio(tmp_path: Path) -> None:
    for name in ("a b.jpg", "c.jpg", "d.jpg", "deep/e.jpg", "f.jpg", "g.jpg", "h.jpg"):
        picture(tmp_path / name)
    skipped = {"result": [region(1, 1)], "was_cancelled": True}
    truth = {"result": [region(50, 50)], "ground_truth": True}
    tasks = [
        task(
            "/data/upload/3/1a2b3c4d-a_b.jpg", [region(25, 50), region(10, 10, "rectanglelabels")]
        ),
        task("https://example.com/photos/c.jpg?token=1", []),
        task("/data/local-files/?d=photos/d.jpg", [region(1, 1)], [region(100, 100)]),
        task("s3://bucket/deep/e.jpg"),
        task("f.jpg", annotations=[skipped]),
        task("g.jpg", annotations=[truth, {"result": []}]),
    ]
    text(tmp_path / "project-3-at-2024.json", json.dumps(tasks))
    assert read(tmp_path, "labelstudio") == {
        "train/a b.jpg": [[100, 100], [60, 40]],
        "train/c.jpg": [],
        "train/d.jpg": [[400, 200]],
        "train/deep/e.jpg": None,
        "train/f.jpg": None,
        "train/g.jpg": [[200, 100]],
        "train/h.jpg": None,
    }


def test_labelstudio_regions_that_appear_again_count_once(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    results = [region(25, 50, id="r1"), region(25, 50, id="r1"), region(25, 50, id="r2")]
    text(tmp_path / "export.json", json.dumps([task("a.jpg", results)]))
    assert read(tmp_path, "labelstudio") == {"train/a.jpg": [[100, 100], [100, 100]]}


def test_labelstudio_without_a_size_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    text(tmp_path / "a.json", json.dumps([task("a.jpg", [region(1, 1, original_width=None)])]))
    with pytest.raises(InputError, match="original_width"):
        points_of(FORMATS["labelstudio"].read(tmp_path))


def test_cvat(tmp_path: Path) -> None:
    for name in ("1.png", "2.png", "3.png", "4.png", "5.png"):
        picture(tmp_path / "images" / name)
    text(
        tmp_path / "annotations.xml",
        """<?xml version="1.0" encoding="utf-8"?>
<!-- exported -->
<annotations>
  <version>1.1</version>
  <meta><task><name>square</name><labels><label><name>head</name></label></labels></task></meta>
  <image id="0" name="1.png" width="40" height="20">
    <points label="head" occluded="0" points="1.50,2.50;3.00,4.25" z_order="0"></points>
    <points label="head" points="7,8"/>
    <box label="head" xtl="10" ytl="4" xbr="20" ybr="8"/>
    <polygon label="roi" points="0,0;9,0;9,9"/>
  </image>
  <image id="1" name="2.png" width="40" height="20"></image>
  <image id="2" name="3.png" subset="Validation"><tag label="empty"/></image>
  <image id="3" name="4.png"><tag label="blurred"/></image>
</annotations>""",
    )
    expected = {
        "train/1.png": [[1.5, 2.5], [3, 4.25], [7, 8], [15, 6]],
        "train/2.png": None,
        "train/4.png": None,
        "train/5.png": None,
        "val/3.png": [],
    }
    assert read(tmp_path, "cvat") == expected
    del expected["train/5.png"]
    assert read(tmp_path / "annotations.xml", "cvat") == expected


# --- all -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_without_images_is_refused(name: str, tmp_path: Path) -> None:
    text(tmp_path / "a.json", coco([], "a.jpg"))
    with pytest.raises(InputError, match="no images"):
        FORMATS[name].read(tmp_path)


@pytest.mark.parametrize("name", ["coco", "labelstudio", "cvat"])
def test_a_forced_reading_says_what_is_not_there(name: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    with pytest.raises(InputError, match=r"no \.(json|xml) file here"):
        FORMATS[name].read(tmp_path)
    other = text(tmp_path / "a.json", "17") if name != "cvat" else text(tmp_path / "a.xml", "<x>")
    with pytest.raises(InputError) as caught:
        FORMATS[name].read(tmp_path)
    assert caught.value.source == str(other)


def test_nothing_is_recognised_where_there_is_nothing(tmp_path: Path) -> None:
    assert recognised(tmp_path) == []
    assert recognised(tmp_path / "nowhere") == []
    assert recognised(text(tmp_path / "a.md", "# notes")) == []


def test_datasets_travel_to_loading_processes(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg")
    text(tmp_path / "labels.json", coco([{"bbox": [0, 0, 2, 2]}], "a.jpg"))
    there = pickle.loads(pickle.dumps(FORMATS["coco"].read(tmp_path)))
    assert points_of(there) == {"train/a.jpg": [[1, 1]]}
    assert there.samples[0].open().size == (40, 20)


@pytest.mark.parametrize(
    ("path", "split", "name", "points"),
    [
        ("a.jpg", None, "a.jpg", "points/a.jpg"),
        ("images/a.jpg", None, "a.jpg", "points/a.jpg"),
        ("val/a.jpg", "val", "a.jpg", "val/points/a.jpg"),
        ("Test/images/x/a.jpg", "test", "x/a.jpg", "Test/points/x/a.jpg"),
        ("images/train/a.jpg", "train", "a.jpg", "points/train/a.jpg"),
        ("train/images/val/a.jpg", "train", "val/a.jpg", "train/points/val/a.jpg"),
        ("trainers/a.jpg", None, "trainers/a.jpg", "points/trainers/a.jpg"),
    ],
)
def test_places(path: str, split: str | None, name: str, points: str) -> None:
    place = Place.of(path)
    assert (place.split, place.name, place.beside_images("points")) == (split, name, points)


def test_splits_in_file_names() -> None:
    words = ["instances_val2017", "test", "Train", "latest", "retrain", "values", "my-training-set"]
    assert [split_of(word) for word in words] == ["val", "test", "train", None, None, None, "train"]
