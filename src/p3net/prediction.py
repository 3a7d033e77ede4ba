"""What is counted and what comes out: any image in, one frozen `Prediction` out.

Coordinates are pixels of the upright image. Shapes: H×W pixels, h×w cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from p3net.data.images import open_bytes, open_image, to_rgb
from p3net.data.transforms import Pixels
from p3net.errors import InputError

if TYPE_CHECKING:
    from p3net.points import Points

Countable = str | Path | bytes | Image.Image | NDArray[Any] | Tensor
"""What `Counter.count` takes."""

Grid = NDArray[np.float32]
"""Read-only array h×w, one number a cell."""

OVERLAY_SIDE = 2048
"""The longer side of an overlay in pixels, at most."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the true number lies, low ≤ count ≤ high.

    Attributes:
        low: never below 0.
        high: the other end.
        level: the share of images whose true number such an interval is to hold, 0–1.
        calibrated: whether images with known counts, unseen in training, say so.
    """

    low: float
    high: float
    level: float
    calibrated: bool

    def __post_init__(self) -> None:
        """Check the order of the ends and the level."""
        if not 0 <= self.low <= self.high < math.inf:
            raise InputError(f"an interval needs 0 <= low <= high, got {self.low} and {self.high}")
        if not 0 < self.level < 1:
            raise InputError(f"a level lies between 0 and 1, got {self.level}")


@dataclass(frozen=True, slots=True)
class RegionCount:
    """The count inside one named polygon.

    Attributes:
        name: of the region.
        count: the density inside it, cells on its border by their share.
        interval: for this count; None for a regressor.
        area_m2: its area on the ground, where the scale is known.
    """

    name: str
    count: float
    interval: Interval | None = None
    area_m2: float | None = None

    @property
    def per_m2(self) -> float | None:
        """People per square metre, where the area is known."""
        return self.count / self.area_m2 if self.area_m2 else None


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """The count of one image.

    Attributes:
        count: the sum of the density.
        density: h×w heads per cell, read-only.
        size_hw: height and width of the image in pixels, upright.
        cell_xy: width and height of a cell in pixels of that image.
        interval: where the true number lies; None for a regressor, which has no distribution.
        variance: h×w, of each cell's predicted distribution, the branches' disagreement
            included; read-only; None for a regressor.
        branches: each branch's density, h×w; none for a regressor.
        regions: by name; empty unless regions were asked for.
        source: what was counted; `overlay` opens it again.
    """

    count: float
    density: Grid
    size_hw: tuple[int, int]
    cell_xy: tuple[float, float]
    interval: Interval | None = None
    variance: Grid | None = None
    branches: tuple[Grid, ...] = ()
    regions: Mapping[str, RegionCount] = field(default_factory=lambda: MappingProxyType({}))
    source: Countable | None = None

    def points(self) -> Points:
        """As many points as were counted, placed by the density (OT-M)."""
        from p3net.points import place

        return place(self.density, self.cell_xy, self.size_hw)

    def overlay(
        self, *, opacity: float = 0.6, points: bool = False, image: Countable | None = None
    ) -> Image.Image:
        """The image under a wash of colour: the denser, the warmer and the more opaque.

        Args:
            opacity: of the densest cells, 0–1.
            points: draw the points too.
            image: laid under the colours instead of what was counted.
        """
        if not 0 <= opacity <= 1:
            raise InputError(f"opacity lies between 0 and 1, got {opacity}")
        under = image if image is not None else self.source
        if under is None:
            raise InputError("the image is not known any more; give it: overlay(image=…)")
        canvas = _shrunk(open_source(under))
        scale_xy = canvas.width / self.size_hw[1], canvas.height / self.size_hw[0]
        cell_xy = self.cell_xy[0] * scale_xy[0], self.cell_xy[1] * scale_xy[1]
        washed = _wash(np.asarray(canvas), stretch(self.density, canvas.size, cell_xy), opacity)
        canvas = Image.fromarray(washed)
        if points:
            draw, radius = ImageDraw.Draw(canvas), max(1.5, max(canvas.size) / 600)
            for x, y in self.points().xy * np.array(scale_xy):
                box = (x - radius, y - radius, x + radius, y + radius)
                draw.ellipse(box, fill=(255, 255, 255), outline=(0, 0, 0))
        return canvas

    def to_dict(self) -> dict[str, Any]:
        """Everything but the arrays, ready for JSON."""
        height, width = self.size_hw
        return {
            "source": str(self.source) if isinstance(self.source, str | Path) else None,
            "count": self.count,
            "interval": None if self.interval is None else asdict(self.interval),
            "width": width,
            "height": height,
            "regions": {
                name: {
                    "count": each.count,
                    "interval": None if each.interval is None else asdict(each.interval),
                    "area_m2": each.area_m2,
                    "per_m2": each.per_m2,
                }
                for name, each in self.regions.items()
            },
        }


# --- what is counted ---------------------------------------------------------------------------


def open_source(image: Countable) -> Image.Image | Pixels:
    """A file is opened but not decoded; an array or a tensor becomes H×W×3 uint8.

    Arrays are H×W or H×W×3, tensors H×W or 3×H×W; both hold 0–255 as integers or 0–1 as floats.
    """
    if isinstance(image, str | Path):
        return open_image(Path(image))
    if isinstance(image, bytes):
        return open_bytes(image)
    if isinstance(image, Image.Image):
        if not image.width or not image.height:
            raise InputError(f"the image is empty: {image.width}×{image.height} px")
        return image
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
        image = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
    return _as_pixels(np.asarray(image))


def _as_pixels(array: NDArray[Any]) -> Pixels:
    if array.dtype.kind not in "fiu":
        raise InputError(
            "an image is a path, the bytes of a file, a PIL image, an array or a tensor of "
            f"numbers, not {array.dtype}"
        )
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise InputError(
            "an array H×W (grey) or H×W×3 (RGB), or a tensor 3×H×W or H×W, was expected, "
            f"got shape {array.shape}"
        )
    if not array.size:
        raise InputError(f"the image is empty: shape {array.shape}")
    if array.dtype.kind == "f":
        if not (array.min() >= 0 and array.max() <= 1):  # NaN fails too
            raise InputError("floats of an image must be finite and between 0 and 1")
        array = np.round(array * 255)
    elif array.dtype != np.uint8 and (array.min() < 0 or array.max() > 255):
        raise InputError("integers of an image must be between 0 and 255")
    pixels = array.astype(np.uint8, copy=False)
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)


# --- the overlay -------------------------------------------------------------------------------

_COLOURS = np.array(((40, 60, 190), (20, 190, 210), (250, 220, 60), (220, 30, 30)), np.float32)
"""From sparse to dense."""


FAINT = 0.1
"""Heads per cell shown as the densest where no cell holds more, so that noise stays pale."""


def _shrunk(image: Image.Image | Pixels) -> Image.Image:
    """RGB with its longer side at most `OVERLAY_SIDE`."""
    canvas = Image.fromarray(image) if isinstance(image, np.ndarray) else to_rgb(image)
    scale = min(1.0, OVERLAY_SIDE / max(canvas.size))
    if scale == 1.0:
        return canvas
    size = (max(1, round(canvas.width * scale)), max(1, round(canvas.height * scale)))
    return canvas.resize(size, Image.Resampling.BOX)


def stretch(density: Grid, size_wh: tuple[int, int], cell_xy: tuple[float, float]) -> Grid:
    """h×w cells → one number a pixel of a canvas, bilinear; 0 where no cell lies."""
    width, height = size_wh
    columns, rows = width / cell_xy[0], height / cell_xy[1]
    below = max(0, int(np.ceil(rows)) - density.shape[0])
    right = max(0, int(np.ceil(columns)) - density.shape[1])
    padded = np.pad(density, ((0, below), (0, right)))
    stretched = Image.fromarray(padded).resize(
        size_wh, Image.Resampling.BILINEAR, box=(0, 0, columns, rows)
    )
    return np.asarray(stretched, np.float32)


def _wash(pixels: Pixels, density: Grid, opacity: float) -> Pixels:
    """H×W×3 under the colours of H×W densities; the densest is fully warm."""
    share = np.sqrt(np.clip(density / max(float(density.max()), FAINT), 0, 1))
    steps = np.linspace(0, 1, len(_COLOURS))
    colours = np.stack([np.interp(share, steps, _COLOURS[:, c]) for c in range(3)], axis=-1)
    alpha = (opacity * share)[..., None]
    washed: Pixels = np.rint(pixels * (1 - alpha) + colours * alpha).astype(np.uint8)
    return washed
