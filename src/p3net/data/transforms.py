"""One crop of one image: a `View` is drawn, then applied to the pixels and to the points.

A view's box has whole pixels of the upright source image, so cropping is a slice, and crop
and scale are one resampling step. H×W×3 arrays are uint8 RGB; sizes are pixels.

Resampling, one rule for both backends: what lies outside the box has no influence;
antialiased when shrinking, bilinear when enlarging. "cv2" takes INTER_AREA and INTER_LINEAR,
"pillow" takes BILINEAR, whose triangle widens when shrinking. Decoding is Pillow's in both,
so the backends agree wherever the scale is 1. The filter changes results a little, so a run
records its backend.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from p3net.data.images import orientation_tag, to_rgb, upright_size_hw
from p3net.errors import InputError
from p3net.structures import Points, as_points, inside

Pixels = NDArray[np.uint8]
"""Array H×W×3, RGB."""

Box = tuple[int, int, int, int]
"""Left, top, right, bottom: half-open, in whole pixels."""

Backend = Literal["cv2", "pillow"]

_REDUCTIONS = (8, 4, 2)  # what a JPEG decoder can shrink by while it decodes

# upright = (transposed if swap) then mirrored in x, then in y; by orientation tag
_TURNS = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size at which whole images are learned from and counted.

    Attributes:
        max_shorter_side: images are no larger than this, px; larger ones are shrunk to it.
        zoom: images are enlarged this many times.
        longer_side: and no further than until their longer side has this many px; 0 for no such
            limit. Small pictures of a crowd are often large ones made small: they gain most.
    """

    max_shorter_side: float = 2048
    zoom: float = 1.0
    longer_side: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_shorter_side < 1:
            raise InputError(f"max_shorter_side must be at least 1 px, got {self.max_shorter_side}")
        if not 0 < self.zoom < float("inf"):
            raise InputError(f"zoom must be above 0, got {self.zoom}")
        if self.longer_side < 0:
            raise InputError(f"longer_side cannot be below 0, got {self.longer_side}")

    def scale(self, size_hw: tuple[int, int]) -> float:
        """How many times an image of this size is enlarged.

        >>> small = Sizing(zoom=2.5, longer_side=1280)
        >>> [small.scale(size_hw) for size_hw in ((200, 300), (768, 1024), (1500, 2000))]
        [2.5, 1.25, 1.0]
        """
        zoom = self.zoom
        if self.longer_side:
            zoom = min(zoom, max(1.0, self.longer_side / max(size_hw)))
        return min(zoom, self.max_shorter_side / min(size_hw))


@dataclass(frozen=True, slots=True)
class Augmentation:
    """What may happen to a training image.

    Attributes:
        scale_range: the random scale is uniform between these.
        flip: probability of mirroring left and right.
        crop: side of the square crop, px.
        grey: probability of taking the colour away.
        sizing: of the image before the random scale.
    """

    scale_range: tuple[float, float] = (0.7, 1.3)
    flip: float = 0.5
    crop: int = 256
    grey: float = 0.0
    sizing: Sizing = Sizing()

    def __post_init__(self) -> None:
        """Check the ranges."""
        low, high = self.scale_range
        if not 0 < low <= high < float("inf"):
            raise InputError(f"scale_range must be 0 < low <= high, got {self.scale_range}")
        for name, share in (("flip", self.flip), ("grey", self.grey)):
            if not 0 <= share <= 1:
                raise InputError(f"{name} is a probability between 0 and 1, got {share}")
        if self.crop < 1:
            raise InputError(f"crop must be at least 1 px, got {self.crop}")


@dataclass(frozen=True, slots=True)
class View:
    """A part of an image, scaled and perhaps mirrored: geometry without pixels.

    Attributes:
        box_xyxy: the part, in whole pixels of the upright source.
        size_hw: height and width it is scaled to.
        flip: mirror left and right, after scaling.
        grey: take the colour away.
    """

    box_xyxy: Box
    size_hw: tuple[int, int]
    flip: bool = False
    grey: bool = False

    @property
    def scale_xy(self) -> tuple[float, float]:
        """Output pixels for one source pixel."""
        left, top, right, bottom = self.box_xyxy
        height, width = self.size_hw
        return width / (right - left), height / (bottom - top)


def draw_view(
    size_hw: tuple[int, int], augmentation: Augmentation, rng: np.random.Generator
) -> View:
    """Draw a square crop of an image of the given height and width.

    The scale is drawn, then rounded so that the box has whole pixels (under half a pixel of
    the box's side). An image that would be smaller than the crop is scaled up until it fits.
    A view that shrinks by two or more lies on the grid of a JPEG's reduced decoding. Five
    numbers are drawn whatever the settings, so changing one leaves the other draws alone.
    """
    height, width = size_hw
    shorter, crop = min(size_hw), augmentation.crop
    by_scale, by_x, by_y, by_flip, by_grey = rng.random(5)
    low, high = augmentation.scale_range
    scale = (low + (high - low) * by_scale) * augmentation.sizing.scale(size_hw)
    side = min(crop / scale, shorter)
    grid = next((factor for factor in _REDUCTIONS if side >= factor * crop), 1)
    whole = min(max(1, round(side / grid)), shorter // grid) * grid
    left = int(by_x * ((width - whole) // grid + 1)) * grid
    top = int(by_y * ((height - whole) // grid + 1)) * grid
    return View(
        box_xyxy=(left, top, left + whole, top + whole),
        size_hw=(crop, crop),
        flip=bool(by_flip < augmentation.flip),
        grey=bool(by_grey < augmentation.grey),
    )


def whole_view(size_hw: tuple[int, int], sizing: Sizing) -> View:
    """The whole image at its size, aspect kept.

    >>> whole_view((3072, 4096), Sizing()).size_hw, whole_view((100, 150), Sizing(zoom=1.5)).size_hw
    ((2048, 2731), (150, 225))
    """
    height, width = size_hw
    scale = sizing.scale(size_hw)
    scaled_hw = (round(height * scale), round(width * scale))
    return View(box_xyxy=(0, 0, width, height), size_hw=scaled_hw)


def apply_view(
    image: Image.Image | Pixels, view: View, *, backend: Backend | None = None
) -> Pixels:
    """The pixels of a view: a new H×W×3 array.

    Args:
        image: an image as `Sample.open` gives it, decoded no further than the view needs, or
            the upright pixels themselves (in memory or mapped from a file).
        view: drawn for the image's upright size.
        backend: what scales; `default_backend()` where not given.
    """
    size_hw = image.shape[:2] if isinstance(image, np.ndarray) else upright_size_hw(image)
    left, top, right, bottom = view.box_xyxy
    if not (0 <= left < right <= size_hw[1] and 0 <= top < bottom <= size_hw[0]):
        raise InputError(f"the box {view.box_xyxy} leaves the image of {size_hw[::-1]} px")
    if isinstance(image, np.ndarray):
        region: Pixels = image[top:bottom, left:right]
    elif _is_undecoded_jpeg(image):
        region = _decode_jpeg(image, view)
    else:
        region = np.asarray(to_rgb(image).crop(view.box_xyxy))
    pixels = _resample(region, view.size_hw, backend or default_backend())
    if view.grey:
        pixels = _without_colour(pixels)
    return np.ascontiguousarray(pixels[:, ::-1]) if view.flip else pixels


def apply_to_points(points_xy: Points, view: View) -> Points:
    """The points inside the view's box, in pixels of the view.

    A point on the left or top edge of the box is in, one on the right or bottom edge is not,
    mirrored or not, so that neighbouring boxes share no point.
    """
    left, top, right, bottom = view.box_xyxy
    height, width = view.size_hw
    corner = np.array((left, top))
    kept = points_xy[inside(points_xy - corner, (bottom - top, right - left))]
    moved = (kept - corner) * np.array(view.scale_xy)
    if view.flip:
        moved[:, 0] = width - moved[:, 0]
    # A mirrored left edge, or rounding, can reach the far edge, which is outside.
    return as_points(np.minimum(moved, np.nextafter((width, height), 0.0)))


def prepare(
    image: Image.Image,
    *,
    max_shorter_side: float = 2048,
    backend: Backend | None = None,
) -> tuple[Pixels, tuple[float, float]]:
    """A whole image for the cache: its pixels, and output pixels for one source pixel (x, y)."""
    view = whole_view(upright_size_hw(image), Sizing(max_shorter_side))
    return apply_view(image, view, backend=backend), view.scale_xy


def to_float(pixels: Tensor) -> Tensor:
    """uint8 B×H×W×3 to contiguous float32 B×3×H×W in [0, 1], in one pass."""
    count, height, width, channels = pixels.shape
    images = torch.empty(count, channels, height, width)
    return torch.div(pixels.permute(0, 3, 1, 2), 255, out=images)


@cache
def default_backend() -> Backend:
    """OpenCV where it is installed, otherwise Pillow."""
    return "cv2" if find_spec("cv2") else "pillow"


def _resample(region: Pixels, size_hw: tuple[int, int], backend: Backend) -> Pixels:
    """Scale an array to a size; always a new, contiguous array."""
    height, width = size_hw
    if region.shape[:2] == size_hw:
        return np.array(region, order="C")
    if backend == "pillow":
        image = Image.fromarray(np.ascontiguousarray(region))
        return np.array(image.resize((width, height), Image.Resampling.BILINEAR))
    if backend != "cv2":
        raise InputError(f"unknown backend {backend!r}; use one of {', '.join(get_args(Backend))}")
    try:
        import cv2  # optional
    except ImportError:
        raise InputError(
            "the backend cv2 needs OpenCV: pip install 'p3net[fast]', or use pillow"
        ) from None
    shrinks = height * width < region.shape[0] * region.shape[1]
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(region, (width, height), interpolation=how), np.uint8)


def _without_colour(pixels: Pixels) -> Pixels:
    """Luma (ITU-R 601) in all three channels, in integers: the same on every machine."""
    luma = (pixels.astype(np.uint16) @ np.array((77, 150, 29), np.uint16) + 128) >> 8
    return np.repeat(luma.astype(np.uint8)[..., None], 3, axis=2)


def _is_undecoded_jpeg(image: Image.Image) -> bool:
    return (
        isinstance(image, JpegImageFile)
        and image.mode in ("RGB", "L")
        and bool(image.tile)
        and image.fp is not None
    )


def _decode_jpeg(image: Image.Image, view: View) -> Pixels:
    """The pixels of a view's box, upright, perhaps reduced; decoded down to its last row only."""
    swap, mirror_x, mirror_y = _TURNS[orientation_tag(image)]
    height, width = upright_size_hw(image)
    left, top, right, bottom = view.box_xyxy
    if mirror_x:
        left, right = width - right, width - left
    if mirror_y:
        top, bottom = height - bottom, height - top
    shrinks = min((bottom - top) / view.size_hw[0], (right - left) / view.size_hw[1])
    stored = (top, left, bottom, right) if swap else (left, top, right, bottom)
    factor = next(
        (f for f in _REDUCTIONS if shrinks >= f and not any(edge % f for edge in stored)), 1
    )
    source = getattr(image, "filename", None) or None
    try:
        file = image.fp  # type: ignore[attr-defined]  # an image file, not yet decoded
        file.seek(0)
        part = JpegImageFile(io.BytesIO(_first_rows(file.read(), stored[3] + 32, image.height)))
        if factor > 1:
            part.draft(part.mode, (part.width // factor, part.height // factor))
        left, top, right, bottom = (edge // factor for edge in stored)
        region = np.asarray(part.crop((left, top, right, bottom)).convert("RGB"))
    except Exception as error:
        raise InputError(f"truncated or damaged image: {error}", source=source) from error
    region = region.swapaxes(0, 1) if swap else region
    return np.ascontiguousarray(region[:: -1 if mirror_y else 1, :: -1 if mirror_x else 1])


def _first_rows(jpeg: bytes, rows: int, height: int) -> bytes:
    """A JPEG that ends after some rows, where its rows are stored in order; else all of it.

    Only the height in the header changes, so a decoder stops there. A progressive file, or
    one with a scan for each colour, spreads a row over the whole file. The caller asks for
    some rows more than it needs: the colour of the last ones leans on the next block.
    """
    height_at, components, at = 0, 0, 2
    while rows < height and at + 10 <= len(jpeg) and jpeg[at] == 0xFF:
        marker = jpeg[at + 1]
        if marker in (0xC0, 0xC1):  # start of a sequential frame
            height_at, components = at + 5, jpeg[at + 9]
        elif marker == 0xDA:  # start of the first scan
            if height_at and jpeg[at + 4] == components:
                return jpeg[:height_at] + rows.to_bytes(2, "big") + jpeg[height_at + 2 :]
            break
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return jpeg
