"""Image files: opened safely, upright, as 8-bit RGB.

Three steps, so that a caller pays only for what it needs: `open_image` reads the file and
its header, `upright_size_hw` needs no pixels, `to_rgb` decodes. H and W are pixels.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from p3net.errors import InputError

MAX_PIXELS = 400_000_000
"""The largest image opened: 20,000 × 20,000, 1.2 GB as RGB."""

MAX_BYTES = 2_000_000_000
"""The largest file opened."""

# Formats that hold photographs. Others that Pillow knows (EPS, PDF, icons, fonts) start
# programs or hide a second image behind the header that was checked.
_FORMATS = ("JPEG", "MPO", "PNG", "TIFF", "BMP", "GIF", "WEBP", "PPM", "JPEG2000", "AVIF")

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".tif", ".tiff", ".webp"),
    *(".bmp", ".dib", ".gif", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif"),
)
"""Endings, in lower case, of the files that are taken for images."""

OVERLAY = ".overlay.jpg"
"""How the names of our own pictures of counts end."""

# A broken EXIF block is common in photographs, and then the image merely has no orientation.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")

_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def is_image_name(path: str | Path) -> bool:
    """Whether a file is taken for an image, by the ending of its name.

    >>> is_image_name("IMG_1.JPG"), is_image_name("IMG_1.mat"), is_image_name("._IMG_1.jpg")
    (True, False, False)
    """
    path = Path(path)
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def is_overlay(path: str | Path) -> bool:
    """Whether this is one of our own pictures of a count, which nobody wants to learn from.

    >>> is_overlay("a/IMG_1.overlay.jpg"), is_overlay("a/IMG_1.jpg")
    (True, False)
    """
    return Path(path).stem.endswith(OVERLAY.removesuffix(".jpg")) and is_image_name(path)


def image_files(folder: Path) -> list[Path]:
    """The image files of one folder, IMG_2 before IMG_10; none where there is no folder."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(filter(is_image_name, files), key=natural_order)


def natural_order(path: Path) -> tuple[list[str | int], str]:
    """A sorting key that takes runs of digits as numbers.

    >>> sorted([Path("b10"), Path("B2"), Path("a")], key=natural_order) == [
    ...     Path("a"), Path("B2"), Path("b10")]
    True
    """
    words = re.split(r"(\d+)", path.as_posix().lower())
    return [int(word) if i % 2 else word for i, word in enumerate(words)], path.as_posix()


def open_image(path: str | Path) -> Image.Image:
    """Open an image without decoding it; more than `MAX_PIXELS` are refused here.

    The file is read into memory, so nothing stays open behind an image that is never decoded.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"{size:,} bytes are too many for an image", source=path)
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the image: {error.strerror}", source=path) from None
    return open_bytes(content, source=path)


def open_bytes(content: bytes, *, source: Path | None = None) -> Image.Image:
    """The same for the content of an image file."""
    if not content:
        raise InputError("the image file is empty", source=source)
    Image.init()
    formats = [name for name in _FORMATS if name in Image.OPEN]
    try:
        with _own_pixel_limit():
            image = Image.open(io.BytesIO(content), formats=formats)
    except UnidentifiedImageError:
        raise InputError(
            "not an image that can be read; expected JPEG, PNG, TIFF, BMP, GIF, WebP or the like",
            source=source,
        ) from None
    except Exception as error:
        raise InputError(f"a damaged image: {error}", source=source) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InputError(
            f"{width} × {height} pixels are more than {MAX_PIXELS:,}; cut or shrink the image",
            source=source,
        )
    if width < 1 or height < 1:
        raise InputError(f"an image of {width} × {height} pixels", source=source)
    image.filename = "" if source is None else str(source)
    return image


def upright_size_hw(image: Image.Image) -> tuple[int, int]:
    """Height and width after the orientation tag is obeyed, without decoding."""
    width, height = image.size
    return (width, height) if orientation_tag(image) >= 5 else (height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode: upright, mode RGB. Transparency is laid over white, an animation's first frame kept.

    The image given is returned where it is so already; otherwise a new one without the tag.
    """
    source = getattr(image, "filename", None) or None
    orientation = orientation_tag(image)  # before decoding: TIFF forgets it then
    try:
        with _own_pixel_limit():
            image.load()
        upright = image.transpose(_TURN[orientation]) if orientation in _TURN else image
        rgb = _as_rgb(upright)
    except Exception as error:
        raise InputError(f"truncated or damaged image: {error}", source=source) from error
    if rgb is not image:
        rgb.info = {}
    return rgb


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith(("I", "F")):
        return _grey_from_numbers(np.asarray(image))
    if image.has_transparency_data:
        layer = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    # CMYK too: Pillow has already undone the inversion that Adobe's JPEGs carry.
    return image.convert("RGB")


def _grey_from_numbers(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Image.Image:
    """Grey of more than 8 bits, H×W, to RGB.

    White is the full scale of the format: 65,535 for integers; 1, 255 or 65,535 for floats,
    the first that nothing exceeds; the brightest pixel where even that is exceeded.
    """
    numbers = np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    brightest = float(numbers.max())
    scales = (65535.0,) if values.dtype.kind in "iu" else (1.0, 255.0, 65535.0)
    white = next((scale for scale in scales if brightest <= scale), brightest)
    grey = np.rint(np.clip(numbers / np.float32(white), 0, 1) * 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


def orientation_tag(image: Image.Image) -> int:
    """The orientation tag, 1–8; 1 where there is none, it is broken or Pillow obeys it itself."""
    if image.format == "TIFF":
        return 1  # Pillow turns these on decoding and states the turned size
    try:
        # The base class's method: the one for PNG would decode the image to look for late tags.
        tag = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001  a broken tag can raise anything and is no tag
        return 1
    return tag if isinstance(tag, int) and 1 <= tag <= 8 else 1


_limit_lock = Lock()
_limit_users = 0
_limit_saved: int | None = None


@contextmanager
def _own_pixel_limit() -> Iterator[None]:
    """Suspend Pillow's own limit, which warns at 89 and refuses at 179 megapixels.

    `MAX_PIXELS` is checked instead. Pillow's limit is a global of the process, so it is put
    back when the last thread leaves: other users of Pillow keep their protection.
    """
    global _limit_users, _limit_saved  # noqa: PLW0603  it guards a global of Pillow's
    with _limit_lock:
        if _limit_users == 0:
            _limit_saved, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        _limit_users += 1
    try:
        yield
    finally:
        with _limit_lock:
            _limit_users -= 1
            if _limit_users == 0:
                Image.MAX_IMAGE_PIXELS = _limit_saved
