"""Whole images of any kind → Prediction. Evaluation, the command line and pages all count here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from p3net.data.images import open_bytes, open_image
from p3net.data.transforms import prepare, to_float
from p3net.errors import InputError
from p3net.network.p3net import Output
from p3net.targets import CELL

Countable = str | Path | bytes | Image.Image | NDArray[Any] | Tensor
"""What `Counter.count` takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """The count of one image.

    Attributes:
        count: the sum of the density.
        density: h×w heads per cell, read-only.
        size_hw: height and width of the image in pixels, upright.
        cell_xy: width and height of a cell in pixels of that image.
    """

    count: float
    density: NDArray[np.float32]
    size_hw: tuple[int, int]
    cell_xy: tuple[float, float]


@dataclass(frozen=True)
class Counter:
    """A network ready to count, with what is known of it.

    Attributes:
        network: P³Net or a regressor, in eval mode.
        max_shorter_side: larger images are shrunk to this first, as in training.
        metadata: configuration, intervals, splits and history, as the checkpoint has them.
    """

    network: nn.Module
    max_shorter_side: int = 2048
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def count(self, image: Countable) -> Prediction:
        """Count one image: a path, the bytes of a file, a PIL image, an array or a tensor.

        Arrays are H×W or H×W×3, tensors 3×H×W; both hold 0–255 as integers or 0–1 as floats.
        """
        pixels, (scale_x, scale_y) = prepare(
            _as_image(image), max_shorter_side=self.max_shorter_side
        )
        device = next(self.network.parameters()).device
        batch = to_float(torch.from_numpy(pixels[None])).to(device)
        output = self.predict(batch)
        density = output.density[0].float().cpu().numpy()
        density.flags.writeable = False
        height, width = pixels.shape[:2]
        return Prediction(
            count=float(density.sum(dtype=np.float64)),
            density=density,
            size_hw=(round(height / scale_y), round(width / scale_x)),
            cell_xy=(CELL / scale_x, CELL / scale_y),
        )

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Output:
        """B×3×H×W in [0, 1] → the network's output, in eval mode and without gradients."""
        training = self.network.training
        self.network.eval()
        try:
            return cast("Output", self.network(images))
        finally:
            self.network.train(training)


def _as_image(image: Countable) -> Image.Image:
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
    array = np.asarray(image)
    if array.dtype.kind not in "fiu":
        raise InputError(f"an image must hold numbers, not {array.dtype}")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise InputError(
            f"an array H×W or H×W×3, or a tensor 3×H×W, was expected, got shape {array.shape}"
        )
    if not array.size:
        raise InputError(f"the image is empty: shape {array.shape}")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise InputError("floats of an image must be finite and between 0 and 1")
        array = np.round(array * 255)
    elif array.min() < 0 or array.max() > 255:
        raise InputError("integers of an image must be between 0 and 255")
    return Image.fromarray(array.astype(np.uint8))
