"""MATLAB's .mat files of level 5 (versions 5 to 7), as far as annotations need them.

scipy's reader takes the interpreter down with it on some damaged files. Here every length is
held against the bytes that are there, so whatever the bytes, values or an `InputError` come.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p3net.errors import InputError

Value = NDArray[np.generic] | list["Value"] | dict[str, "Value"] | None
"""Numbers in their shape; a cell array as a list, column by column; a struct array as a list
of dicts; None for anything else: text, complex numbers, sparse arrays, objects."""

MAX_UNPACKED_BYTES = 16_000_000
"""A million heads; the fullest published image has 26,000."""

_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8"}
_NUMBERS |= {12: "i8", 13: "u8"}  # numpy's names of the types of elements
_MATRIX, _COMPRESSED = 14, 15
_CELL, _STRUCT, _NUMERIC = 1, 2, range(6, 16)  # classes of arrays
_COMPLEX = 0x800  # among the flags of an array
_MAX_DEPTH, _MAX_INNER = 8, 10_000  # of arrays in arrays


class _Element(NamedTuple):
    """A tagged run of bytes: the unit the format is made of."""

    kind: int
    body: memoryview


def read_mat(content: bytes, *, source: Path) -> dict[str, Value]:
    """The variables of a file by their names."""
    if content.startswith((b"MATLAB 7.3", b"\x89HDF")):
        raise InputError(
            "saved as MATLAB 7.3; load and save it again with '-v7' in MATLAB", source=source
        )
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None:
        raise InputError("not a .mat file of MATLAB 5 to 7", source=source)
    try:
        return dict(_variables(memoryview(content)[128:], order))
    except (ValueError, zlib.error) as error:
        raise InputError(f"a damaged .mat file: {error}", source=source) from None


def _variables(data: memoryview, order: str) -> Iterator[tuple[str, Value]]:
    budget = MAX_UNPACKED_BYTES
    for element in _elements(data, order):
        kind, body = element
        if kind == _COMPRESSED:
            unpacked = _unpack(body, budget)
            budget -= len(unpacked)
            kind, body = _following(_elements(memoryview(unpacked), order))
        if kind != _MATRIX:
            raise ValueError(f"an element of type {kind} where a variable should be")
        yield _matrix(body, order, depth=0)


def _unpack(body: memoryview, limit: int) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(body, limit + 1)
    if len(content) > limit:
        raise ValueError(f"unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
    if not stream.eof:
        raise ValueError("a compressed part is cut short")
    return content


def _elements(data: memoryview, order: str) -> Iterator[_Element]:
    """The elements one after the other, small ones (up to 4 bytes in the tag) included."""
    tag = Struct(f"{order}II")
    position = 0
    while position < len(data):
        if position + tag.size > len(data):
            raise ValueError("ends in the middle of a tag")
        kind, length = tag.unpack_from(data, position)
        if kind >> 16:
            kind, length, start, end = kind & 0xFFFF, kind >> 16, position + 4, position + 8
            if length > 4:
                raise ValueError(f"a small element of {length} bytes")
        else:
            start = position + tag.size
            padding = 0 if kind == _COMPRESSED else -length % 8
            end = start + length + padding
        if start + length > len(data):
            raise ValueError(f"announces {length:,} bytes where {len(data) - start:,} are left")
        yield _Element(kind, data[start : start + length])
        position = end


def _matrix(body: memoryview, order: str, depth: int) -> tuple[str, Value]:
    """Name and value of one array."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    if not body:
        return "", np.empty((0, 0))
    parts = _elements(body, order)
    flags = _numbers(parts, order)
    shape = _shape(_numbers(parts, order))
    name = _text(parts)
    if flags.dtype.kind != "u" or flags.size != 2:
        raise ValueError("an array without flags")
    word, count = int(flags[0]), math.prod(shape)
    if word & 0xFF in _NUMERIC and not word & _COMPLEX:
        values = _numbers(parts, order)
        if values.size != count:
            raise ValueError(f"{values.size} numbers for an array of {shape}")
        return name, values.reshape(shape, order="F")
    if word & 0xFF == _CELL:
        return name, [_inner(parts, order, depth) for _ in range(_fitting(count, body))]
    if word & 0xFF == _STRUCT:
        fields = _field_names(parts, order)
        _fitting(count * len(fields), body)
        return name, [
            {field: _inner(parts, order, depth) for field in fields} for _ in range(count)
        ]
    return name, None


def _inner(parts: Iterator[_Element], order: str, depth: int) -> Value:
    kind, body = _following(parts)
    if kind != _MATRIX:
        raise ValueError(f"an element of type {kind} in a cell or struct")
    return _matrix(body, order, depth + 1)[1]


def _following(parts: Iterator[_Element]) -> _Element:
    element = next(parts, None)
    if element is None:
        raise ValueError("an array ends early")
    return element


def _numbers(parts: Iterator[_Element], order: str) -> NDArray[np.generic]:
    kind, body = _following(parts)
    if kind not in _NUMBERS:
        raise ValueError(f"numbers of the unknown type {kind}")
    return np.frombuffer(body, f"{order}{_NUMBERS[kind]}")


def _shape(sizes: NDArray[np.generic]) -> tuple[int, ...]:
    if sizes.dtype.kind != "i" or not 2 <= sizes.size <= 8 or (sizes < 0).any():  # type: ignore[operator]
        raise ValueError("an array of no shape")
    return tuple(map(int, sizes))


def _text(parts: Iterator[_Element]) -> str:
    return bytes(_following(parts).body).decode("latin-1")


def _field_names(parts: Iterator[_Element], order: str) -> list[str]:
    length = _numbers(parts, order)
    text = _text(parts)
    if length.size != 1 or not (width := int(length.item())) > 0 or not text:
        raise ValueError("a struct without fields")
    starts = range(0, len(text), width)
    return [text[start : start + width].partition("\0")[0] for start in starts]


def _fitting(count: int, body: memoryview) -> int:
    """The number of arrays inside another: each takes 8 bytes at least."""
    if count > _MAX_INNER or 8 * count > len(body):
        raise ValueError(f"{count:,} values announced in {len(body):,} bytes")
    return count


def describe(variables: Mapping[str, Value]) -> str:
    """What a file holds, for messages."""
    names = sorted(variables)[:5]
    return ", ".join(f"{name[:40]!a}" for name in names) or "no variable"
