"""Pictures for a browser: thumbnails, and images it can show; few are decoded at a time."""

from __future__ import annotations

import io
import threading
from functools import lru_cache
from pathlib import Path

from PIL import Image

from p3net.data.images import open_bytes, open_image, orientation_tag, to_rgb, upright_size_hw
from p3net.errors import InputError

SHOWN_PIXELS = 48_000_000
"""Larger images are shown shrunk; coordinates stay those of the original."""

THUMBNAIL = 192
"""The longer side of a thumbnail in pixels."""

DIRECT = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
"""Formats a browser gets as they are, where nothing must be turned or shrunk."""


_decoding = threading.BoundedSemaphore(2)


def check_pixels(content: bytes, most: int) -> None:
    """Refuse what is no image or has too many pixels, before anything is decoded."""
    width, height = open_bytes(content).size
    if width * height > most:
        raise InputError(f"{width} × {height} pixels are more than the {most:,} this page takes")


def size_hw(path: Path) -> tuple[int, int]:
    """Height and width of the upright image."""
    return upright_size_hw(open_image(path))


def small(path: Path) -> Image.Image:
    """The upright image, its longer side at most a thumbnail's."""
    with _decoding:
        image = open_image(path)
        image.draft("RGB", (THUMBNAIL, THUMBNAIL))  # JPEGs are decoded at a fraction of their size
        rgb = to_rgb(image)
        rgb.thumbnail((THUMBNAIL, THUMBNAIL))
        return rgb


def thumbnail(path: Path) -> bytes:
    """A small JPEG, kept while the file stays as it is."""
    return _thumbnail(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4096)
def _thumbnail(path: Path, _changed_ns: int) -> bytes:
    return jpeg(small(path), quality=80)


def shown(image: Image.Image, content: bytes) -> tuple[bytes, str]:
    """What a browser shows of an opened image, and its media type."""
    direct = DIRECT.get(image.format or "")
    pixels = image.width * image.height
    if direct and orientation_tag(image) == 1 and pixels <= SHOWN_PIXELS:
        return content, direct
    with _decoding:
        rgb = to_rgb(image)
        if pixels > SHOWN_PIXELS:
            scale = (SHOWN_PIXELS / pixels) ** 0.5
            size = (max(1, int(rgb.width * scale)), max(1, int(rgb.height * scale)))
            rgb = rgb.resize(size, Image.Resampling.BOX)
        return jpeg(rgb), "image/jpeg"


def jpeg(image: Image.Image, *, quality: int = 92) -> bytes:
    """An image as the bytes of a JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
