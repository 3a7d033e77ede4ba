"""The .mat reader against scipy's, and against files that scipy's does not survive."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from p3net.data import matfile
from p3net.data.matfile import read_mat
from p3net.errors import InputError

HERE = Path("a.mat")
HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
DTYPES = st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])

numbers = DTYPES.flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=2, max_dims=3, min_side=0))
)
names = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)


def cell(values: list[Any]) -> np.ndarray:
    result = np.empty((len(values), 1), dtype=object)
    for i, value in enumerate(values):
        result[i, 0] = value
    return result


def saved(variables: dict[str, Any], *, compressed: bool = False) -> bytes:
    stream = io.BytesIO()
    scipy.io.savemat(stream, variables, do_compression=compressed)
    return stream.getvalue()


values = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(cell)
        | st.dictionaries(names, inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)


def same(ours: Any, scipys: Any) -> bool:
    """Whether a value is what scipy read: arrays, cells as lists, structs as lists of dicts."""
    if scipys.dtype.names:
        return all(
            set(one) == set(scipys.dtype.names)
            and all(same(one[name], other[name]) for name in scipys.dtype.names)
            for one, other in zip(ours, scipys.ravel(order="F"), strict=True)
        )
    if scipys.dtype == object:
        return all(map(same, ours, scipys.ravel(order="F"))) and len(ours) == scipys.size
    return ours.shape == scipys.shape and np.array_equal(ours, scipys, equal_nan=True)


@settings(deadline=None)
@given(variables=st.dictionaries(names, values, min_size=1, max_size=3), compressed=st.booleans())
def test_the_same_values_as_scipy(variables, compressed):
    content = saved(variables, compressed=compressed)
    scipys = scipy.io.loadmat(io.BytesIO(content))
    ours = read_mat(content, source=HERE)
    assert set(ours) == set(variables)
    for name in variables:
        assert same(ours[name], scipys[name])


def test_what_is_neither_numbers_nor_cells_nor_structs_is_none():
    odd = {"text": "abc", "complex": np.array([[1 + 2j]]), "sparse": scipy.sparse.eye(3).tocsc()}
    ours = read_mat(saved({**odd, "points": np.ones((2, 2))}), source=HERE)
    assert ours.pop("points") is not None
    assert ours == dict.fromkeys(odd)


def element(kind: int, body: bytes, order: str = "<") -> bytes:
    return struct.pack(f"{order}II", kind, len(body)) + body + bytes(-len(body) % 8)


def array(
    class_: int, shape: tuple[int, ...], rest: bytes, order: str = "<", name: bytes = b"a"
) -> bytes:
    flags = element(6, struct.pack(f"{order}II", class_, 0), order)
    sizes = element(5, struct.pack(f"{order}{len(shape)}i", *shape), order)
    return element(14, flags + sizes + element(1, name, order) + rest, order)


def test_big_endian_and_small_elements_by_hand():
    doubles = element(9, struct.pack(">4d", 1, 2, 3, 4), ">")
    content = HEADER[:-2] + b"MI" + array(6, (2, 2), doubles, ">")
    found = read_mat(content, source=HERE)["a"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[1, 3], [2, 4]]  # column by column
    small = struct.pack("<HH", 4, 4) + struct.pack("<2H", 513, 7)  # type 4, 4 bytes, in the tag
    found = read_mat(HEADER + array(6, (1, 2), small), source=HERE)["a"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[513, 7]]


def nested(depth: int) -> bytes:
    content = array(6, (1, 1), element(2, b"\x07"))
    for _ in range(depth):
        content = array(1, (1, 1), content)
    return content


def fields(width: int, text: bytes) -> bytes:
    return element(5, struct.pack("<i", width)) + element(1, text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a .mat file"),
        (HEADER[:126], "not a .mat file"),
        (b"MATLAB 7.3 MAT-file".ljust(126) + b"IM", "MATLAB 7.3"),
        (b"\x89HDF\r\n\x1a\n" + bytes(999), "MATLAB 7.3"),
        (HEADER + b"\x0e", "middle of a tag"),
        (HEADER + element(9, bytes(8)), "where a variable should be"),
        (HEADER + struct.pack("<II", 14, 2**32 - 1), "announces 4,294,967,295 bytes where 0"),
        (HEADER + struct.pack("<HH", 14, 9) + bytes(20), "small element of 9 bytes"),
        (HEADER + element(14, element(6, bytes(8))), "ends early"),
        (HEADER + element(14, element(77, bytes(8)) * 4), "unknown type 77"),
        (HEADER + array(6, (2, 2), element(9, bytes(24))), "3 numbers for an array"),
        (HEADER + array(6, (2**31 - 1,) * 4, element(9, bytes(8))), "1 numbers for an array"),
        (HEADER + array(6, (2, 2), element(9, bytes(31))), "damaged"),
        (HEADER + array(6, (-1, 2), element(9, b"")), "no shape"),
        (HEADER + array(6, (2,), element(9, bytes(16))), "no shape"),
        (HEADER + array(6, (2, 2), b""), "ends early"),
        (HEADER + array(1, (2**31 - 1, 2), b""), "values announced"),
        (HEADER + array(1, (10_001, 1), element(14, b"") * 10_001), "10,001 values announced"),
        (HEADER + array(1, (1, 1), element(9, bytes(8))), "type 9 in a cell"),
        (HEADER + array(1, (2, 1), nested(0)), "ends early"),
        (HEADER + array(2, (1, 1), fields(0, b"ab")), "without fields"),
        (HEADER + array(2, (1, 1), fields(-8, b"ab")), "without fields"),
        (HEADER + array(2, (1, 1), fields(1, b"ab") + nested(0)), "ends early"),
        (HEADER + array(2, (2**31 - 1, 9), fields(1, b"ab")), "values announced"),
        (HEADER + nested(9), "nested more than 8 deep"),
        (HEADER + element(15, b"no zlib stream"), "damaged"),
        (HEADER + element(15, zlib.compress(nested(0))[:-9]), "damaged"),
        (HEADER + element(15, zlib.compress(b"")), "ends early"),
    ],
)
def test_damaged_files_say_what_is_wrong(content, words):
    with pytest.raises(InputError, match=words) as caught:
        read_mat(content, source=HERE)
    assert caught.value.source == str(HERE)
    assert len(str(caught.value)) < 200


def test_depth_that_is_allowed():
    value = read_mat(HEADER + nested(8), source=HERE)["a"]
    for _ in range(8):
        assert isinstance(value, list)
        (value,) = value
    assert isinstance(value, np.ndarray)
    assert value.tolist() == [[7]]


def test_what_inflates_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(matfile, "MAX_UNPACKED_BYTES", 100_000)
    doubles = array(6, (5_000, 2), element(9, bytes(80_000)))
    one = element(15, zlib.compress(doubles))[: 8 + len(zlib.compress(doubles))]
    assert set(read_mat(HEADER + one, source=HERE)) == {"a"}
    with pytest.raises(InputError, match="unpacks to more than 100,000 bytes"):
        read_mat(HEADER + one + one, source=HERE)


def test_any_flipped_bytes_give_values_or_a_clear_error():
    """On some of such files scipy's reader ends the whole process."""
    inner = {"location": np.arange(6.0).reshape(3, 2), "number": 3}
    whole = np.frombuffer(saved({"image_info": cell([inner])}), np.uint8)
    rng = np.random.default_rng(0)
    outcomes = {True: 0, False: 0}
    for _ in range(4_000):
        mangled = whole.copy()
        places = rng.integers(0, len(mangled), rng.integers(1, 6))
        mangled[places] = rng.choice([0, 1, 14, 15, 127, 128, 255], len(places))
        try:
            read_mat(mangled.tobytes(), source=HERE)
            outcomes[True] += 1
        except InputError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 100
