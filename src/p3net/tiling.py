"""Whole images in bounded memory, exactly: what the network says, whatever the size of the tiles.

A backbone is local, so its stages run in tiles with a halo as wide as what they depend on; only
true borders of the image are ever padded. The tokens attend to the map in parts, by a running
softmax. Modulation, decoding and fusion go in strips of rows, with the neighbouring rows that
bilinear upsampling needs. One tile, one part and one strip are the plain forward pass. Nothing
larger than the map and a tile is held; the image stays 8-bit and becomes float tile by tile.

Shapes: H×W pixels, d channels, h'×w' positions of the map, h×w cells. A box is top, left,
bottom, right, half-open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p3net.data.transforms import Pixels, to_float
from p3net.errors import InputError
from p3net.network.backbone import Backbone, Stage
from p3net.network.fusion import upsample
from p3net.network.p3net import Output, P3Net
from p3net.network.regressor import Regressor
from p3net.network.vgg import VGG19
from p3net.targets import CELL, grid_hw
from p3net.uncertainty import cell_variance

AT_ONCE = 1 << 14
"""Positions of the map that the tokens attend to at a time."""

STRIP = 1 << 15
"""Cells that are decoded at a time, about: whole rows of them."""

MIN_TILE = 64
"""The smallest tile that may be asked for, px; smaller ones would be nearly all halo."""

Box = tuple[int, int, int, int]
Read = Callable[[Box], Tensor]
"""Gives a window of a map, 1×·×rows×columns."""


class Cells(NamedTuple):
    """What a network says of one image, h×w each.

    Attributes:
        density: heads per cell.
        branches: each branch's density; none for a regressor.
        variance: of each cell's distribution; None for a regressor.
    """

    density: Tensor
    branches: tuple[Tensor, ...]
    variance: Tensor | None


@torch.inference_mode()
def run(network: nn.Module, pixels: Pixels, tile: int | None = None) -> Cells:
    """Count one image, H×W×3, in tiles of `tile` px or of the size that suits each stage.

    A network that another runtime runs sees the whole image, and brings its variance along. So
    does the encoder of VGG19+Trans, which lets every position attend to every other, and a
    backbone other than VGG-19 on the authors' grid.
    """
    if tile is not None and tile < MIN_TILE:
        raise InputError(f"a tile has at least {MIN_TILE} px, got {tile}")
    training = network.training
    network.eval()
    try:
        if isinstance(network, P3Net):
            return _stack(_p3net(network, pixels, tile))
        if isinstance(network, Regressor):
            return _stack(_regressor(network, pixels, tile))
        device = next((each.device for each in network.parameters()), torch.device("cpu"))
        output: Output = network(_image(pixels).to(device))
        return _stack(iter([(output, getattr(output, "variance", None))]))
    finally:
        network.train(training)


def _stack(strips: Iterator[tuple[Output, Tensor | None]]) -> Cells:
    """The cells of all strips, from the top, on the CPU."""
    rows = [
        [
            each.cpu()
            for each in (output.density, *output.expectations, variance)
            if each is not None
        ]
        for output, variance in strips
    ]
    density, *rest = (torch.cat(column, dim=1)[0].float() for column in zip(*rows, strict=True))
    if not rest:
        return Cells(density, (), None)
    one, two, *variances = rest
    return Cells(density, (one, two), variances[0] if variances else None)


def _p3net(
    network: P3Net, pixels: Pixels, tile: int | None
) -> Iterator[tuple[Output, Tensor | None]]:
    height, width = pixels.shape[:2]
    authors = network.architecture.grid == "authors"
    rows, columns = network.cells_hw(torch.empty(1, 3, height, width, device="meta"))
    features = feature_map(network.backbone, pixels, tile, pad=not authors)
    refined = network.refine(features, at_once=AT_ONCE)
    factor = network.backbone.stride // CELL
    full_hw = (features.shape[-2] * factor, features.shape[-1] * factor)
    for top, bottom in _strips(rows, columns):
        cells = upsample_rows(
            features, (rows, columns) if authors else full_hw, (top, bottom), corners=authors
        )
        output = network.read_out(refined, cells[..., :columns])
        yield output, cell_variance(network, output)


def _regressor(
    network: Regressor, pixels: Pixels, tile: int | None
) -> Iterator[tuple[Output, Tensor | None]]:
    rows, columns = grid_hw((pixels.shape[0], pixels.shape[1]))
    features = feature_map(network.backbone, pixels, tile)
    if len(network.encoder):
        positions = network.encoder(features.flatten(2).transpose(1, 2))
        features = positions.transpose(1, 2).reshape(features.shape)
    factor = network.backbone.stride // CELL
    full_hw = (features.shape[-2] * factor, features.shape[-1] * factor)
    reach = 2  # of the head's two 3×3 convolutions
    for top, bottom in _strips(rows, columns):
        first, last = max(0, top - reach), min(full_hw[0], bottom + reach)
        density = network.head(upsample_rows(features, full_hw, (first, last))).abs().squeeze(1)
        yield Output(density[:, top - first : bottom - first, :columns]), None


def _strips(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    return pairwise(_edges(0, rows, max(1, STRIP // columns), 1))


# --- the backbone in tiles ---------------------------------------------------------------------


def feature_map(
    backbone: Backbone, pixels: Pixels, tile: int | None = None, *, pad: bool = True
) -> Tensor:
    """H×W×3 → 1×d×h'×w': what `backbone(image, pad=pad)` gives, up to rounding.

    A stage whose whole map is larger than the last one's is never held whole: the stage above
    reads it window by window.
    """
    height, width = pixels.shape[:2]
    if pad:
        height, width = (
            -(-side // backbone.multiple) * backbone.multiple for side in (height, width)
        )
    elif type(backbone) is not VGG19:  # whose pools drop what does not fill a position
        whole: Tensor = backbone(_image(pixels).to(backbone.mean.device), pad=False)
        return whole
    stages = backbone.stages()
    read, size_hw, stride = _reader(backbone, pixels), (height, width), 1
    last = backbone.channels * (height // backbone.stride) * (width // backbone.stride)
    for stage in stages:
        stride *= stage.stride
        side = stage.tile // stage.stride if tile is None else -(-tile // stride)
        read = _through(stage, read, size_hw, side, backbone.mean)
        size_hw = (size_hw[0] // stage.stride, size_hw[1] // stage.stride)
        if stage.channels * size_hw[0] * size_hw[1] <= last:
            read = _held(read((0, 0, *size_hw)))
    return read((0, 0, *size_hw))


def _reader(backbone: Backbone, pixels: Pixels) -> Read:
    """Windows of the normalised image, continued below and to the right by its mean colour."""

    def read(box: Box) -> Tensor:
        top, left, bottom, right = box
        part = _image(pixels[top:bottom, left:right])
        window = backbone.normalise(part.to(backbone.mean.device))
        missing = (bottom - top - window.shape[-2], right - left - window.shape[-1])
        return F.pad(window, (0, missing[1], 0, missing[0])) if any(missing) else window

    return read


def _image(pixels: Pixels) -> Tensor:
    """H×W×3, in any order and perhaps read-only → 1×3×H×W in [0, 1]."""
    return to_float(torch.from_numpy(np.array(pixels)[None]))


def _held(whole: Tensor) -> Read:
    return lambda box: whole[..., box[0] : box[2], box[1] : box[3]]


def _through(stage: Stage, read: Read, size_hw: tuple[int, int], side: int, like: Tensor) -> Read:
    """Windows of what a stage makes of a map of the given size, in tiles of `side` positions."""
    step = math.lcm(stage.multiple, stage.stride) // stage.stride

    def one(box: Box) -> Tensor:
        top, left, bottom, right = (edge * stage.stride for edge in box)
        first, before = (
            max(0, edge - stage.halo) // stage.multiple * stage.multiple for edge in (top, left)
        )
        last, after = (
            min(size, -(-(edge + stage.halo) // stage.multiple) * stage.multiple)
            for edge, size in zip((bottom, right), size_hw, strict=True)
        )
        made = stage.run(read((first, before, last, after)))
        down, across = box[0] - first // stage.stride, box[1] - before // stage.stride
        return made[..., down : down + box[2] - box[0], across : across + box[3] - box[1]]

    def tiled(box: Box) -> Tensor:
        top, left, bottom, right = box
        rows, columns = _edges(top, bottom, side, step), _edges(left, right, side, step)
        if len(rows) == len(columns) == 2:
            return one(box)
        size = (1, stage.channels, bottom - top, right - left)
        made = torch.empty(
            size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
        )
        for y, y_end in pairwise(rows):
            for x, x_end in pairwise(columns):
                part = made[..., y - top : y_end - top, x - left : x_end - left]
                part.copy_(one((y, x, y_end, x_end)))
        return made

    return tiled


def _edges(start: int, stop: int, at_most: int, step: int) -> list[int]:
    """Borders that cut start…stop into even parts, about `at_most` long, at multiples of `step`.

    >>> _edges(0, 100, 40, 4)
    [0, 36, 72, 100]
    """
    parts = -(-(stop - start) // max(at_most, step))
    length = -(-(stop - start) // (parts * step)) * step
    return [*range(start, stop, length), stop]


def upsample_rows(
    maps: Tensor, size_hw: tuple[int, int], rows: tuple[int, int], *, corners: bool = False
) -> Tensor:
    """Some rows of `upsample(maps, size_hw)`: B×·×h'×w' → B×·×rows×w."""
    first, last = rows
    height = maps.shape[-2]
    if height == size_hw[0] or size_hw[0] == 1:
        picked = maps[..., first:last, :]
    else:
        # float32 throughout, as in torch: the two agree to the last bit of the weights
        number = torch.arange(first, last, dtype=torch.float32, device=maps.device)
        if corners:
            place = number * ((height - 1) / (size_hw[0] - 1))
        else:
            place = ((number + 0.5) * (height / size_hw[0]) - 0.5).clamp_min(0)
        above = place.long()
        below = (above + 1).clamp_max(height - 1)
        share = (place - above).to(maps.dtype)[:, None]
        picked = torch.lerp(maps.index_select(-2, above), maps.index_select(-2, below), share)
    return upsample(picked, (last - first, size_hw[1]), corners=corners)
