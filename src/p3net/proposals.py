"""What to mark next: images the model is unsure of, spread over the variety of the folder.

A greedy k-centre (Sener & Savarese 2018) weighted by uncertainty: the next image is the one with
the largest (doubt × distance to the nearest image that is marked or proposed already). Without a
model all doubts are equal and variety alone decides.

Shapes: N images, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from p3net.errors import InputError

SIDE = 32
"""Pixels of the small square copy that an image is described by."""

BLOCKS = 4
"""Blocks along each side of the copy."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One image to mark.

    Attributes:
        index: of the image.
        doubt: its uncertainty as a share of the largest; 1 where there is no model.
        novelty: its distance to the nearest image taken before, as a share of the largest
            distance between two images.
    """

    index: int
    doubt: float
    novelty: float


def describe(image: Image.Image) -> Floats:
    """An RGB image → D numbers in about [0, 1]: colour and texture of 4×4 blocks.

    Of each block the mean and the deviation of its three colours; a small and equally small cost
    for every image, with or without a model.
    """
    small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    pixels = np.asarray(small, np.float64) / 255
    side = SIDE // BLOCKS
    blocks = pixels.reshape(BLOCKS, side, BLOCKS, side, 3)
    colour, texture = blocks.mean(axis=(1, 3)), blocks.std(axis=(1, 3))
    return np.concatenate([colour.ravel(), 2 * texture.ravel()])


def propose(
    features: ArrayLike,
    *,
    marked: Sequence[int] = (),
    doubts: ArrayLike | None = None,
    number: int = 8,
) -> list[Proposal]:
    """Choose images to mark, the most useful first; nothing is drawn at random.

    Args:
        features: N×D, the same scale in all D.
        marked: indices of images that have marks and are not proposed.
        doubts: N uncertainties, at least 0; NaN where not known, which counts as the mean of the
            known. None without a model.
        number: how many at most.
    """
    points = np.asarray(features, np.float64)
    if points.ndim != 2 or not np.isfinite(points).all():
        raise InputError(f"features must be N×D finite numbers, got shape {points.shape}")
    weights = _weights(doubts, len(points))
    free = np.ones(len(points), bool)
    free[list(marked)] = False
    if not free.any():
        return []
    centre = np.linalg.norm(points - points.mean(axis=0), axis=1)
    distance = np.full(len(points), np.inf)
    for index in marked:
        distance = np.minimum(distance, np.linalg.norm(points - points[index], axis=1))
    widest = max(_widest(points), 1e-12)
    chosen: list[Proposal] = []
    while len(chosen) < number and free.any():
        # The first of all is the most doubtful; among equals the most ordinary image.
        first = not len(marked) and not chosen
        score = weights - 1e-6 * centre / widest if first else weights * (distance + 1e-9 * widest)
        index = int(np.argmax(np.where(free, score, -np.inf)))
        novelty = 1.0 if first else float(min(distance[index] / widest, 1.0))
        chosen.append(Proposal(index, float(weights[index]), novelty))
        free[index] = False
        distance = np.minimum(distance, np.linalg.norm(points - points[index], axis=1))
    return chosen


def _weights(doubts: ArrayLike | None, count: int) -> Floats:
    """Shares of the largest doubt, the unknown ones at the mean of the others."""
    if doubts is None:
        return np.ones(count)
    given = np.asarray(doubts, np.float64)
    if given.shape != (count,) or np.isinf(given).any() or (given < 0).any():
        raise InputError(f"doubts must be {count} finite numbers of at least 0, or NaN")
    known = ~np.isnan(given)
    if not known.any() or given[known].max() == 0:
        return np.ones(count)
    filled = np.where(known, given, given[known].mean())
    return np.asarray(filled / filled.max(), np.float64)


def _widest(points: Floats) -> float:
    """The largest distance between two images, within a factor of two: from the middle and back."""
    far = points[np.argmax(np.linalg.norm(points - points.mean(axis=0), axis=1))]
    return float(np.linalg.norm(points - far, axis=1).max())
