"""Mangled and hostile files through every reader: a dataset, or an error that names the file.

The files are made here, the same ones each time. No other exception may come out, no file
may take longer than a few seconds, and memory may not grow with what a file claims to hold.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import signal
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from p3net.data.formats import FORMATS, convert
from p3net.data.images import open_image, to_rgb
from p3net.data.layout import Layout
from p3net.data.readers import BENCHMARKS
from p3net.errors import InputError
from p3net.structures import Dataset, Marks, Sample, as_points

LAYOUTS = {**FORMATS, **BENCHMARKS}
SECONDS = 5
MEGABYTES = 150
X = 12.25
"""A coordinate of every valid dataset, in px and, as images have 100 px, in percent."""

ABSURD = (
    *("NaN", "Infinity", "-Infinity", "1e308", "-1e400", "1e7", "true", "null", '"12"', "[1]"),
    *("{}", "9" * 5000, "9" * 400, "0x10", "1_0", "--1", "٣"),
)


def png(width: int = 100, height: int = 100) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(stream, "PNG")
    return stream.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100_000))
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def mat(**variables: Any) -> bytes:
    from scipy.io import savemat

    stream = io.BytesIO()
    savemat(stream, variables)
    return stream.getvalue()


def image_info(points: Any, number: Any) -> bytes:
    """ShanghaiTech's nested structs."""
    inner = np.empty((1, 1), dtype=[("location", object), ("number", object)])
    inner["location"][0, 0], inner["number"][0, 0] = points, number
    outer = np.empty((1, 1), dtype=object)
    outer[0, 0] = inner
    return mat(image_info=outer)


POINTS = np.array([[X, 7.5], [30.0, 40.0]])


def valid_files(name: str, folder: Path) -> dict[str, bytes]:
    """A small valid dataset of the layout, and which of its files is the annotation, first."""
    picture = png()
    ann, nwpu = mat(annPoints=POINTS), {"img_id": "0001.jpg", "human_num": 2, "boxes": []}
    known = {
        "sha": {
            "part_A/train_data/ground_truth/GT_IMG_1.mat": image_info(POINTS, 2),
            "part_A/train_data/images/IMG_1.png": picture,
        },
        "shb": {
            "part_B/test_data/ground-truth/GT_IMG_1.mat": image_info(POINTS, 2),
            "part_B/test_data/images/IMG_1.png": picture,
        },
        "qnrf": {"Train/img_0001_ann.mat": ann, "Train/img_0001.png": picture},
        "jhu": {
            "train/gt/0001.txt": b"12.25 7 3 4 1 0\n30 40 3 4 1 0\n",
            "train/image_labels.txt": b"0001,2,street,0,0\n",
            "train/images/0001.png": picture,
        },
        "nwpu": {
            "jsons/0001.json": json.dumps(nwpu | {"points": POINTS.tolist()}).encode(),
            "train.txt": b"0001 0 1\n",
            "images/0001.png": picture,
        },
    }
    if name in known:
        return known[name]
    image = folder / "a.png"
    image.write_bytes(picture)
    marks = Marks(as_points(POINTS))
    sample = Sample("a.png", lambda: open_image(image), lambda: marks, path=image)
    convert(Dataset("test", "", (sample,)), folder / "new", FORMATS[name])
    files = [path for path in (folder / "new").rglob("*") if path.is_file()]
    files.sort(key=lambda path: path.suffix == ".png")
    return {path.relative_to(folder / "new").as_posix(): path.read_bytes() for path in files}


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(_: int, __: FrameType | None) -> None:
        pytest.fail(f"took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit() -> Iterator[None]:
    with suppress(OSError):  # where the system allows, forget the peaks of earlier tests
        Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f"memory grew by {grown:.0f} MB"


def test_the_memory_limit_sees_what_is_taken() -> None:
    with pytest.raises(AssertionError, match="memory grew"), memory_limit():  # noqa: PT012
        taken = np.ones(2 * MEGABYTES * 1024**2, np.uint8)
        assert taken[-1] == 1


class Ground:
    """A dataset on disk of which one file at a time is replaced."""

    def __init__(self, name: str, folder: Path) -> None:
        self.layout: Layout = LAYOUTS[name]
        self.files = valid_files(name, folder)
        self.root = folder / "ground"
        self.annotation = next(iter(self.files))
        for path, content in self.files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_bytes(content)

    def outcome(self) -> InputError | Dataset:
        """Read everything there is; the error or the dataset."""
        with time_limit():
            try:
                self.layout.recognises(self.root)
                dataset = self.layout.read(self.root)
                for sample in dataset.samples:
                    assert sample.path is not None
                    assert self.root in sample.path.parents
                    to_rgb(sample.open())
                    if sample.labelled:
                        points = sample.marks().points_xy
                        assert points.ndim == 2
                        assert points.shape[1] == 2
                        assert np.isfinite(points).all()
            except InputError as error:
                return error
        return dataset

    def with_file(self, path: str, content: bytes) -> InputError | Dataset:
        """The outcome with one file replaced; an error must name that file."""
        (self.root / path).write_bytes(content)
        try:
            result = self.outcome()
        finally:
            (self.root / path).write_bytes(self.files[path])
        if isinstance(result, InputError):
            assert result.source == str(self.root / path), result
            assert len(str(result)) < 1000, result
        return result


def truncated(content: bytes) -> list[bytes]:
    return [content[: len(content) * part // 12] for part in range(12)]


def flipped(content: bytes, seed: int, times: int = 16) -> list[bytes]:
    draw = np.random.default_rng(seed)
    results = []
    for _ in range(times):
        mangled = np.frombuffer(content, np.uint8).copy()
        places = draw.integers(0, len(mangled), size=draw.integers(1, 6))
        mangled[places] ^= draw.integers(1, 256, size=len(places), dtype=np.uint8)
        results.append(mangled.tobytes())
    return results


def wrong_types(seed: int) -> list[bytes]:
    draw = np.random.default_rng(seed)
    return [
        png(2, 2),
        pickle.dumps({"points": [[1, 2]]}),
        b"<html><body>404 Not Found</body></html>",
        "x y\n1 2\n".encode("utf-16"),
        bytes(4096),
        draw.bytes(4096),
        b"PK\x03\x04" + draw.bytes(500),
        *(b"null", b"true", b'"text"', b"17", b"[]", b"{}", b"[[]]", b"[{}]", b"[[1,2],[3]]"),
        b"[" * 100_000,
        b'{"points":' * 50_000,
        b"[" + b"9" * 6000 + b"]",
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    result = Ground(name, tmp_path).outcome()
    assert isinstance(result, Dataset)
    assert [len(sample.marks().points_xy) for sample in result.samples] == [2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_mangled_annotations(name: str, tmp_path: Path) -> None:
    ground = Ground(name, tmp_path)
    content = ground.files[ground.annotation]
    mangled = truncated(content) + flipped(content, seed=1) + wrong_types(seed=2)
    assert len(mangled) * len(LAYOUTS) > 300
    with memory_limit():
        errors = [
            isinstance(ground.with_file(ground.annotation, file), InputError) for file in mangled
        ]
    assert sum(errors) >= 10


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"npy"}))
def test_absurd_coordinates_are_refused(name: str, tmp_path: Path) -> None:
    ground = Ground(name, tmp_path)
    content = ground.files[ground.annotation].decode()
    assert str(X) in content
    with memory_limit():
        for value in ABSURD:
            mangled = content.replace(str(X), value).encode()
            assert isinstance(ground.with_file(ground.annotation, mangled), InputError), value


def nodes(tree: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield where
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from nodes(tree[key], (*where, key))


def replaced(tree: Any, where: tuple[Any, ...], value: Any) -> Any:
    if not where:
        return value
    copy = tree.copy()
    copy[where[0]] = replaced(tree[where[0]], where[1:], value)
    return copy


@pytest.mark.parametrize("name", ["json", "labelme", "cclabeler", "coco", "labelstudio", "nwpu"])
def test_any_value_in_any_place_of_a_json_file(name: str, tmp_path: Path) -> None:
    ground = Ground(name, tmp_path)
    tree = json.loads(ground.files[ground.annotation])
    values: list[Any] = [None, True, -1, 1e308, "x", "../x.png", [], {}, [[1]], {"id": {}}]
    with memory_limit():
        for where in nodes(tree):
            for value in values:
                mangled = json.dumps(replaced(tree, where, value)).encode()
                ground.with_file(ground.annotation, mangled)


BILLION = b"".join(
    [
        b'<?xml version="1.0"?><!DOCTYPE annotations [<!ENTITY a0 "ha">',
        *(b'<!ENTITY a%d "%s">' % (n, b"&a%d;" % (n - 1) * 10) for n in range(1, 12)),
        b']><annotations><image id="0" name="&a11;" width="1" height="1"/></annotations>',
    ]
)
EXTERNAL = (
    b'<?xml version="1.0"?><!DOCTYPE annotations [<!ENTITY file SYSTEM "file:///etc/passwd">]>'
    b'<annotations><image id="0" name="a.png"><tag label="empty">&file;</tag></image></annotations>'
)
QUADRATIC = (
    b'<!DOCTYPE annotations [<!ENTITY a "'
    + b"x" * 100_000
    + b'">]><annotations><image name="'
    + b"&a;" * 100_000
    + b'"/></annotations>'
)


@pytest.mark.parametrize(
    "content",
    [
        BILLION,
        EXTERNAL,
        QUADRATIC,
        BILLION.decode().encode("utf-16"),
        b'<!DOCTYPE annotations SYSTEM "http://localhost/x.dtd"><annotations/>',
        b'<!DOCTYPE a [<!ENTITY % p SYSTEM "file:///etc/passwd">%p;]><annotations/>',
        b'<?xml version="1.0" encoding="rot13"?><annotations/>',
        b'<?xml version="1.0" encoding="shift-jis"?><annotations><image name="a.png"/>',
        b"<annotations>" + b"<image>" * 50_000,
        b'<annotations><image name="a.png"/><image name="a.png"/></annotations>',
        b'<annotations><image name="a.png"><points points="1,2,3"/></image></annotations>',
        b'<annotations><image name="a.png"><box xtl="1"/></image></annotations>',
        b'<annotations><track id="0"/></annotations>',
        b"<annotations><image/></annotations>",
        b"<annotations>&undefined;</annotations>",
    ],
    ids=range(15),
)
def test_hostile_xml_is_refused(content: bytes, tmp_path: Path) -> None:
    ground = Ground("cvat", tmp_path)
    with memory_limit():
        assert isinstance(ground.with_file(ground.annotation, content), InputError)


def npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode("latin1") + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + data


@pytest.mark.parametrize(
    "content",
    [
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 2)}", bytes(64)),
        npy("{'descr': '<f8', 'fortran_order': True, 'shape': (10**12, 2)}", bytes(64)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 2)}", bytes(64)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (4, 3)}", bytes(96)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (4,)}", bytes(32)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1, 2)}", pickle.dumps([1, 2])),
        npy("{'descr': '<U9', 'fortran_order': False, 'shape': (1, 2)}", bytes(72)),
        npy("{'descr': '<c8', 'fortran_order': False, 'shape': (1, 2)}", bytes(16)),
        npy("{'descr': '|b1', 'fortran_order': False, 'shape': (1, 2)}", bytes(2)),
        npy("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1, 2)}", bytes(16)),
        npy("__import__('os').getcwd()", bytes(16)),
        npy("(" * 9000, bytes(16)),
        npy("{'descr': '<f8'}", bytes(16)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2)}", bytes(16), (9, 0)),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
        npy(
            "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2)}",
            np.full(2, np.nan).tobytes(),
        ),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2)}", np.full(2, 1e9).tobytes()),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2)}", bytes(15)),
    ],
    ids=range(18),
)
def test_hostile_npy_is_refused(content: bytes, tmp_path: Path) -> None:
    ground = Ground("npy", tmp_path)
    with memory_limit():
        assert isinstance(ground.with_file(ground.annotation, content), InputError)


@pytest.mark.parametrize("name", ["sha", "qnrf"])
def test_hostile_mat(name: str, tmp_path: Path) -> None:
    ground = Ground(name, tmp_path)
    cells = np.empty((2, 2), dtype=object)
    cells[:] = "x"
    odd = [[[np.nan, 1.0]], [[np.inf, 1.0]], [[1.0, 2.0, 3.0]], [1.0], "text", cells, [[1j, 2j]]]
    files = [mat(other=POINTS), b"MATLAB 5.0 MAT-file".ljust(128, b" ")]
    files += [mat(annPoints=points) for points in odd]
    files += [image_info(points, 2) for points in odd]
    files += [mat(image_info=points) for points in odd]
    files += [image_info(POINTS, number) for number in (np.nan, "two", cells, [[1, 2, 3]])]
    # A compressed element that unpacks to 200 MB.
    pack = zlib.compressobj()
    bomb = b"".join(pack.compress(bytes(1_000_000)) for _ in range(200)) + pack.flush()
    files.append(ground.files[ground.annotation][:128] + struct.pack("<II", 15, len(bomb)) + bomb)
    with memory_limit():
        errors = [
            isinstance(ground.with_file(ground.annotation, file), InputError) for file in files
        ]
    assert sum(errors) > len(files) // 2


BAD_TEXT = (
    *(
        b"1 2 3\n",
        b"1\n",
        b"1 2\n3\n",
        b"1,,2\n",
        b"a,b\n1,2\n",
        b"x,x,y\n1,2,3\n",
        b"x,y\n1,2,3\n",
    ),
    *(b"1,5;2,5\n", b"\xff\xfe1 2\n", b"x y\nnan nan\n", b"0 0.5 0.5 0.1 0.1\n", b"1 2\x00\n"),
    *(
        b"1" * 200_000 + b"x 2\n",
        b"a man in a red coat\n",
        b"x,y\n1,\n",
        b"1 2\n" * 1000 + b"1 two\n",
    ),
)


@pytest.mark.parametrize("name", ["txt", "csv"])
@pytest.mark.parametrize("content", BAD_TEXT, ids=range(len(BAD_TEXT)))
def test_bad_text_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    ground = Ground(name, tmp_path)
    assert isinstance(ground.with_file(ground.annotation, content), InputError)


def bad_images() -> list[bytes]:
    jpeg = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(jpeg, "JPEG")
    bmp = (
        b"BM" + struct.pack("<IHHI", 60, 0, 0, 54) + struct.pack("<IiiHH", 40, 10**5, 10**5, 1, 24)
    )
    return [
        claiming(60_000, 60_000),
        claiming(2**31 - 1, 1),
        claiming(0, 5),
        claiming(20_001, 20_000),
        bmp + bytes(40),
        b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + bytes(20),
        b"P6 60000 60000 255\n" + bytes(30),
        b"",
        b"not an image",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        *truncated(png())[:8],
        *truncated(jpeg.getvalue())[:8],
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_bad_images_are_refused(name: str, tmp_path: Path) -> None:
    ground = Ground(name, tmp_path)
    picture = next(path for path in ground.files if path.endswith(".png"))
    with memory_limit():
        for content in bad_images():
            assert isinstance(ground.with_file(picture, content), InputError)
        for content in flipped(png(), seed=3):
            ground.with_file(picture, content)


OUTSIDE = ("../outside.png", "images/../../outside.png", "..\\outside.png", "../../etc/passwd")


@pytest.mark.parametrize("reference", OUTSIDE)
@pytest.mark.parametrize("name", ["coco", "cvat", "labelstudio"])
def test_references_do_not_leave_the_folder(name: str, reference: str, tmp_path: Path) -> None:
    ground = Ground(name, tmp_path)
    (tmp_path / "outside.png").write_bytes(png())
    content = ground.files[ground.annotation].replace(
        b"images/a.png",
        json.dumps(reference)[1:-1].encode() if name != "cvat" else reference.encode(),
    )
    result = ground.with_file(ground.annotation, content)
    assert isinstance(result, InputError)
    assert "outside" in str(result) or "none of the 1 images" in str(result)


@pytest.mark.parametrize("reference", OUTSIDE)
def test_labelme_references_do_not_leave_the_folder(reference: str, tmp_path: Path) -> None:
    ground = Ground("labelme", tmp_path)
    (tmp_path / "outside.png").write_bytes(png())
    tree = json.loads(ground.files[ground.annotation]) | {"imagePath": "../" + reference}
    stray = ground.root / "images" / "stray.json"
    stray.write_text(json.dumps(tree))
    result = ground.outcome()
    assert isinstance(result, InputError)
    assert result.source == str(stray)


def test_a_file_larger_than_any_annotation_is_not_read(tmp_path: Path) -> None:
    for name in ("txt", "coco"):
        folder = tmp_path / name
        folder.mkdir()
        ground = Ground(name, folder)
        with (ground.root / ground.annotation).open("r+b") as stream:
            stream.truncate(3_000_000_000)  # sparse: it takes no room
        with memory_limit():
            result = ground.outcome()
        assert isinstance(result, InputError)
        assert "too many" in str(result)


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    ground = Ground("txt", tmp_path)
    (ground.root / "again").symlink_to(ground.root)
    (ground.root / "images" / "up").symlink_to(ground.root)
    result = ground.outcome()
    assert isinstance(result, Dataset)
    assert len(result) == 1
