"""Whole images of any kind → Prediction. Evaluation, the command line and pages all count here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor, nn

from p3net import tiling
from p3net.data.images import upright_size_hw
from p3net.data.transforms import Backend, Pixels, Sizing, apply_view, whole_view
from p3net.errors import InputError
from p3net.network.p3net import Output
from p3net.prediction import Countable, Grid, Prediction, RegionCount, open_source
from p3net.regions import Region, Regions, coverage
from p3net.targets import CELL
from p3net.uncertainty import Calibration, interval, spread


@dataclass(frozen=True)
class Counter:
    """A network ready to count, with what is known of it.

    Attributes:
        network: P³Net or a regressor, in eval mode.
        sizing: the size at which images are counted: that of training.
        metadata: configuration, intervals, splits, calibration and history, as the checkpoint
            has them.
    """

    network: nn.Module
    sizing: Sizing = field(default_factory=Sizing)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @overload
    def count(
        self,
        image: Countable,
        *,
        level: float = 0.9,
        regions: Regions | Iterable[Region] | None = None,
        tile: int | None = None,
        full_size: bool = False,
    ) -> Prediction: ...

    @overload
    def count(
        self,
        image: list[Countable] | tuple[Countable, ...],
        *,
        level: float = 0.9,
        regions: Regions | Iterable[Region] | None = None,
        tile: int | None = None,
        full_size: bool = False,
    ) -> list[Prediction]: ...

    def count(
        self,
        image: Countable | list[Countable] | tuple[Countable, ...],
        *,
        level: float = 0.9,
        regions: Regions | Iterable[Region] | None = None,
        tile: int | None = None,
        full_size: bool = False,
    ) -> Prediction | list[Prediction]:
        """Count an image: a path, the bytes of a file, a PIL image, an array or a tensor.

        A list of them gives a list. Arrays are H×W or H×W×3, tensors H×W or 3×H×W; both hold
        0–255 as integers or 0–1 as floats.

        Args:
            image: what to count.
            level: of the interval, between 0 and 1.
            regions: polygons in pixels of the upright image, each counted by itself as well.
            tile: side in px of the tiles a large image is worked on in; the result is the same
                up to rounding, whatever it is. Chosen to fit a fixed memory if not given.
            full_size: do not shrink to `sizing.max_shorter_side`.
        """
        if not 0 < level < 1:
            raise InputError(f"a level lies between 0 and 1, such as 0.9; got {level}")
        areas = _as_regions(regions)
        if isinstance(image, list | tuple):
            return [
                self._count(each, level=level, regions=areas, tile=tile, full_size=full_size)
                for each in image
            ]
        return self._count(image, level=level, regions=areas, tile=tile, full_size=full_size)

    def stream(self, images: Iterable[Countable], **how: Any) -> Iterator[Prediction]:
        """Count images one by one, as they come; the words of `count` apply."""
        for image in images:
            yield self.count(image, **how)

    def _count(
        self,
        image: Countable,
        *,
        level: float,
        regions: Regions | None,
        tile: int | None,
        full_size: bool,
    ) -> Prediction:
        pixels, (scale_x, scale_y) = self.prepare(image, full_size=full_size)
        cells = tiling.run(self.network, pixels, tile)
        density = _frozen(cells.density)
        variance = None if cells.variance is None else _frozen(cells.variance)
        count = float(density.sum(dtype=np.float64))
        size_hw = (round(pixels.shape[0] / scale_y), round(pixels.shape[1] / scale_x))
        cell_xy = (CELL / scale_x, CELL / scale_y)
        calibration = Calibration.of(self.metadata)
        parts = {}
        for region in regions or ():
            share = coverage(region.polygon_xy, density.shape, cell_xy, size_hw)
            inside = float(np.vdot(density.astype(np.float64), share))
            parts[region.name] = RegionCount(
                name=region.name,
                count=inside,
                interval=None
                if variance is None
                else interval(inside, spread(variance, share), level, calibration, part_of=count),
                area_m2=regions.area_m2(region, size_hw) if regions is not None else None,
            )
        own = None
        if variance is not None:
            own = interval(count, spread(variance), level, calibration)
            if min(pixels.shape[:2]) > self.sizing.max_shorter_side:  # calibrated on smaller ones
                own = replace(own, calibrated=False)
        return Prediction(
            count=count,
            density=density,
            size_hw=size_hw,
            cell_xy=cell_xy,
            interval=own,
            variance=variance,
            branches=tuple(map(_frozen, cells.branches)),
            regions=MappingProxyType(parts),
            source=image,
        )

    def prepare(
        self, image: Countable, *, full_size: bool = False
    ) -> tuple[Pixels, tuple[float, float]]:
        """The pixels to count, and how many of them make one of the image's (x, y)."""
        opened = open_source(image)
        if isinstance(opened, np.ndarray):
            size_hw = (opened.shape[0], opened.shape[1])
        else:
            size_hw = upright_size_hw(opened)
        sizing = replace(self.sizing, max_shorter_side=math.inf) if full_size else self.sizing
        view = whole_view(size_hw, sizing)
        if isinstance(opened, np.ndarray) and view.size_hw == size_hw:
            return opened, view.scale_xy  # no copy: it may be large
        return apply_view(opened, view, backend=self._backend()), view.scale_xy

    def _backend(self) -> Backend | None:
        """What scaled the images that the model learned from, where it is installed."""
        own: Backend | None = self.metadata.get("preparation", {}).get("backend")
        return "pillow" if own == "pillow" else None

    @torch.inference_mode()
    def predict(self, images: Tensor) -> Output:
        """B×3×H×W in [0, 1] → the network's output, in eval mode and without gradients."""
        training = self.network.training
        self.network.eval()
        try:
            return cast("Output", self.network(images))
        finally:
            self.network.train(training)


def _frozen(cells: Tensor) -> Grid:
    grid: Grid = cells.numpy()
    grid.flags.writeable = False
    return grid


def _as_regions(regions: Regions | Iterable[Region] | None) -> Regions | None:
    if regions is None or isinstance(regions, Regions):
        return regions
    return Regions(tuple(regions))
