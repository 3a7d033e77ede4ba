"""Annotation files of many images, bytes to entries and back: COCO, Label Studio, CVAT.

As in `annotations`, nothing here touches the disk and whatever the bytes, a parser gives
entries whose points are finite when they are read, or an `InputError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as show
from typing import NoReturn
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from p3net.data.annotations import (
    MAX_COORDINATE,
    Item,
    decimal,
    dict_of,
    json_of,
    list_of,
    number,
    text_of,
)
from p3net.errors import InputError
from p3net.structures import Marks, as_points

_HEAD = ("head", "nose", "left_eye", "right_eye", "left_ear", "right_ear")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file says of one of its images.

    Attributes:
        image: the reference to the image, as the file has it, without URL escapes.
        read: gives the marks; None where the image is listed but not annotated.
        split: the part the file assigns it to, in the file's own word.
        foreign: the reference may start in another machine's folders: its end must do.
    """

    image: str
    read: Callable[[], Marks] | None
    split: str | None = None
    foreign: bool = False


# COCO: an image that is listed without annotations shows nobody; one not listed is unlabelled.


def parse_coco(data: bytes, source: Path) -> list[Entry]:
    """One point a person: the visible keypoints of the head, else all visible, else the box.

    Several keypoints give their mean. Regions marked `iscrowd` are left out. Where one of
    several categories is called head, or else person, only that one counts.
    """
    tree = dict_of(json_of(data, source), "the file", source)
    heads: dict[int | str, list[int]] = {}
    named: dict[str, set[int | str]] = {"head": set(), "person": set()}
    for value in list_of(tree.get("categories", []), "categories", source):
        category = dict_of(value, "a category", source)
        key = _key(category.get("id"), "the id of a category", source)
        names = list_of(category.get("keypoints", []), "keypoints of a category", source)
        heads[key] = [index for index, name in enumerate(names) if name in _HEAD]
        named.get(str(category.get("name")).strip().lower(), set()).add(key)
    images: dict[int | str, tuple[str, list[dict[str, object]]]] = {}
    for value in list_of(tree.get("images"), "images", source):
        image = dict_of(value, "an image", source)
        key = _key(image.get("id"), "the id of an image", source)
        if key in images:
            raise InputError(f"two images have the id {show(key)}", source=source)
        images[key] = (text_of(image.get("file_name"), "file_name", source), [])
    marked: list[tuple[int | str, int | str, dict[str, object]]] = []
    for value in list_of(tree.get("annotations", []), "annotations", source):
        annotation = dict_of(value, "an annotation", source)
        key = _key(annotation.get("image_id"), "image_id", source)
        if key not in images:
            raise InputError(f"an annotation names the unknown image {show(key)}", source=source)
        category_id = _key(annotation.get("category_id", 0), "category_id", source)
        if not annotation.get("iscrowd"):
            marked.append((key, category_id, annotation))
    used = {category_id for _, category_id, _ in marked}
    people = (named["head"] & used) or named["person"] or named["head"]
    for key, category_id, annotation in marked:
        if not people or category_id in people:
            images[key][1].append(annotation)
    return [
        Entry(name, partial(_coco_marks, rows, heads, source) if "annotations" in tree else None)
        for name, rows in images.values()
    ]


def _key(value: object, what: str, source: Path) -> int | str:
    if not isinstance(value, int | str):
        raise InputError(f"{what} must be a number, got {show(value)}", source=source)
    return value


def _coco_marks(
    rows: list[dict[str, object]], heads: Mapping[int | str, list[int]], source: Path
) -> Marks:
    return Marks(as_points([_coco_point(row, heads, source) for row in rows], source=source))


def _coco_point(
    row: dict[str, object], heads: Mapping[int | str, list[int]], source: Path
) -> list[float]:
    flat = list_of(row.get("keypoints") or [], "keypoints", source)
    if len(flat) % 3:
        raise InputError(f"keypoints must be x, y, v in turn, got {show(flat)}", source=source)
    numbers = [number(value, source) for value in flat]
    triples = [numbers[start : start + 3] for start in range(0, len(numbers), 3)]
    head = heads.get(_key(row.get("category_id", 0), "category_id", source), [])
    seen = [t for index, t in enumerate(triples) if t[2] > 0 and index in head]
    seen = seen or [t for t in triples if t[2] > 0]
    if seen:
        return [sum(t[axis] for t in seen) / len(seen) for axis in (0, 1)]
    box = list_of(row.get("bbox"), "without a visible keypoint, bbox", source)
    if len(box) != 4:
        raise InputError(f"bbox must be x, y, width, height, got {show(box)}", source=source)
    x, y, width, height = (number(value, source) for value in box)
    return [x + width / 2, y + height / 2]


def emit_coco(items: Sequence[Item]) -> bytes:
    """One category head with one keypoint; unlabelled images are not listed."""
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    for item in (item for item in items if item.marks is not None):
        height, width = item.size_hw
        key = len(images) + 1
        images.append({"id": key, "file_name": item.image, "height": height, "width": width})
        annotations.extend(
            {
                "id": number,
                "image_id": key,
                "category_id": 1,
                "keypoints": [x, y, 2],
                "num_keypoints": 1,
                "bbox": [x, y, 0, 0],
                "area": 0,
                "iscrowd": 0,
            }
            for number, (x, y) in enumerate(item.rows, start=len(annotations) + 1)
        )
    head = {"id": 1, "name": "head", "keypoints": ["head"], "skeleton": []}
    tree = {"images": images, "annotations": annotations, "categories": [head]}
    return json.dumps(tree).encode()


# Label Studio: a task without annotations is unlabelled; one with an empty result shows nobody.


def parse_labelstudio(data: bytes, source: Path) -> list[Entry]:
    """Keypoints, and rectangles by their centre, of each task's ground truth or last annotation."""
    entries = []
    for value in list_of(json_of(data, source), "the file", source):
        task = dict_of(value, "a task", source)
        fields = dict_of(task.get("data"), "the data of a task", source)
        image = text_of(fields.get("image", next(iter(fields.values()), None)), "image", source)
        versions = [
            dict_of(version, "an annotation", source)
            for key in ("annotations", "completions")
            for version in list_of(task.get(key, []), key, source)
        ]
        versions = [version for version in versions if not version.get("was_cancelled")]
        versions.sort(key=lambda version: bool(version.get("ground_truth")))
        read = partial(_labelstudio_marks, versions[-1], source) if versions else None
        entries.append(Entry(_labelstudio_path(image, source), read, foreign=True))
    return entries


def _labelstudio_path(image: str, source: Path) -> str:
    """The path in `/data/upload/…`, `/data/local-files/?d=…` or a URL."""
    try:
        parts = urlsplit(image)
        path = parse_qs(parts.query).get("d", [parts.path])[0]
    except ValueError as error:
        raise InputError(
            f"not a place of an image: {show(image)}: {error}", source=source
        ) from None
    return text_of(path if "?d=" in image else unquote(path), "image", source)


def _labelstudio_marks(version: Mapping[str, object], source: Path) -> Marks:
    rows: list[list[float]] = []
    seen: set[str] = set()
    for value in list_of(version.get("result"), "result", source):
        region = dict_of(value, "a region", source)
        kind, name = region.get("type"), region.get("id")
        if isinstance(name, str):
            if name in seen:
                continue  # a region appears again for each of its other properties
            seen.add(name)
        if kind in ("keypoint", "keypointlabels", "rectangle", "rectanglelabels"):
            place = dict_of(region.get("value"), "the value of a region", source)
            row = []
            for axis, side in (("x", "width"), ("y", "height")):
                percentage = number(place.get(axis), source)
                if kind in ("rectangle", "rectanglelabels"):
                    percentage += number(place.get(side), source) / 2
                length = region.get(f"original_{side}")
                if not isinstance(length, int) or not 0 < length <= MAX_COORDINATE:
                    raise InputError(
                        f"original_{side} must be a length in px, got {show(length)}; "
                        "export with Label Studio 1.0 or later",
                        source=source,
                    )
                row.append(number(percentage * length / 100, source))
            rows.append(row)
    return Marks(as_points(rows, source=source))


def emit_labelstudio(items: Sequence[Item]) -> bytes:
    """Tasks as Label Studio exports them; the images as its local storage names them."""
    tasks = []
    for count, item in enumerate(items, start=1):
        height, width = item.size_hw
        points = np.array(item.rows, dtype=np.float64).reshape(-1, 2)
        region = {
            "type": "keypointlabels",
            "from_name": "head",
            "to_name": "image",
            "original_width": width,
            "original_height": height,
            "image_rotation": 0,
        }
        places = zip(percent(points[:, 0], width), percent(points[:, 1], height), strict=True)
        result = [
            region
            | {"id": f"p{index}"}
            | {"value": {"x": x, "y": y, "width": 0.5, "keypointlabels": ["head"]}}
            for index, (x, y) in enumerate(places)
        ]
        versions = [] if item.marks is None else [{"id": count, "result": result}]
        data = {"image": f"/data/local-files/?d={quote(item.image)}"}
        tasks.append({"id": count, "data": data, "annotations": versions})
    return json.dumps(tasks).encode()


def percent(pixels: NDArray[np.float64], length: int) -> list[float]:
    """The percentages that `percentage × length / 100` turns back into the same pixels.

    Rounding may leave no such number at first; what was once read from percentages has one.
    """
    best = pixels / length * 100
    up = down = best
    for _ in range(8):
        up, down = np.nextafter(up, np.inf), np.nextafter(down, -np.inf)
        for near in (up, down):
            better = (best * length / 100 != pixels) & (near * length / 100 == pixels)
            best = np.where(better, near, best)
    return [float(value) for value in best]


# CVAT for images: an image without shapes is unlabelled; the tag `empty` says that nobody is there.


def parse_cvat(data: bytes, source: Path) -> list[Entry]:
    """`<points>` of an `<image>`, and `<box>` by its centre; `subset` is the split."""
    images: list[tuple[Mapping[str, str], list[tuple[str, Mapping[str, str]]]]] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "track":
            raise InputError("CVAT for video; export as CVAT for images 1.1", source=source)
        if tag == "image":
            images.append((attributes, []))
        elif images and (
            tag in ("points", "box") or (tag == "tag" and attributes.get("label") == "empty")
        ):
            images[-1][1].append((tag, attributes))

    def refuse(*_: object) -> NoReturn:
        raise InputError("a DOCTYPE is not allowed in an annotation file", source=source)

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.StartDoctypeDeclHandler = refuse  # no entities, so none that grow or read files
    try:
        parser.Parse(data, True)  # noqa: FBT003  expat takes no keyword
    except (expat.ExpatError, ValueError, LookupError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"not readable as XML: {error}", source=source) from None
    return [
        Entry(
            text_of(attributes.get("name"), "the name of an image", source),
            partial(_cvat_marks, shapes, source) if shapes else None,
            attributes.get("subset"),
        )
        for attributes, shapes in images
    ]


def _cvat_marks(shapes: Sequence[tuple[str, Mapping[str, str]]], source: Path) -> Marks:
    rows: list[list[float]] = []
    for tag, attributes in shapes:
        if tag == "points":
            for pair in filter(None, attributes.get("points", "").split(";")):
                values = [decimal(value.strip(), source) for value in pair.split(",")]
                rows.append(values)
        elif tag == "box":
            ends = [
                decimal(attributes.get(name, ""), source) for name in ("xtl", "ytl", "xbr", "ybr")
            ]
            rows.append([(ends[0] + ends[2]) / 2, (ends[1] + ends[3]) / 2])
    if any(len(row) != 2 for row in rows):
        raise InputError('points must be "x,y;x,y;…"', source=source)
    return Marks(as_points(rows, source=source))


def emit_cvat(items: Sequence[Item]) -> bytes:
    """The XML that CVAT exports, without the description of the task."""
    lines = ['<?xml version="1.0" encoding="utf-8"?>', "<annotations>", "<version>1.1</version>"]
    for count, item in enumerate(items):
        height, width = item.size_hw
        name = quoteattr(item.image)
        lines.append(f'<image id="{count}" name={name} width="{width}" height="{height}">')
        if item.rows:
            places = ";".join(f"{x!r},{y!r}" for x, y in item.rows)
            lines.append(f'<points label="head" occluded="0" points="{places}" z_order="0"/>')
        elif item.marks is not None:
            lines.append('<tag label="empty"/>')
        lines.append("</image>")
    return "\n".join([*lines, "</annotations>", ""]).encode()
