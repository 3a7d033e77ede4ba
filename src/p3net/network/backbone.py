"""What every backbone is: an RGB image in [0, 1] → one feature map.

A backbone says its `stride` (pixels per position), its `channels` and the `multiple` its input
is padded to, and carries its normalisation, so that training and counting cannot differ.
Every backbone is local: a position depends on a bounded window of pixels, never on the rest of
the image or of the batch (in eval mode). Its stages say how wide: whole images are run in tiles.

Shapes: B images, H×W pixels, h×w = H/stride×W/stride positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)


class Stage(NamedTuple):
    """A local part of a backbone.

    Attributes:
        run: B×·×H×W → B×channels×H/stride×W/stride.
        stride: positions of its input for one of its output.
        channels: of its output.
        halo: how many positions of the input, on every side of a window, the outputs of that
            window depend on; no others have any influence.
        multiple: windows of the input begin at multiples of this, and `halo` is one.
        tile: side in positions of the input of the windows it is best run in: as large as the
            halo asks for, as small as caches and memory do.
    """

    run: Callable[[Tensor], Tensor]
    stride: int
    channels: int
    halo: int
    multiple: int
    tile: int


class Backbone(nn.Module):
    """The contract; `mean` and `deviation` are saved with the weights."""

    stride: int
    channels: int
    multiple: int
    mean: Tensor
    deviation: Tensor
    added: tuple[str, ...] = ()
    """Its modules that no published file has: they begin at random."""

    def __init__(
        self,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        deviation: tuple[float, ...] = IMAGENET_DEVIATION,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor(deviation).view(3, 1, 1))

    def forward(self, images: Tensor, *, pad: bool = True) -> Tensor:
        """B×3×H×W in [0, 1] → B×channels×h×w, with h = ⌈H/multiple⌉·multiple/stride.

        The image is continued to the right and below by its mean colour up to the next multiple;
        without `pad` what does not fill a position is dropped.
        """
        normalised = self.normalise(images)
        if pad:
            height, width = images.shape[-2:]
            below, right = -height % self.multiple, -width % self.multiple
            normalised = F.pad(normalised, (0, right, 0, below))
        for stage in self.stages():
            normalised = stage.run(normalised)
        return normalised

    def normalise(self, images: Tensor) -> Tensor:
        """Mean colour 0, deviation 1."""
        return (images - self.mean) / self.deviation

    def stages(self) -> tuple[Stage, ...]:
        """Parts from the normalised image to the map, each run on the one before."""
        raise NotImplementedError

    def blocks(self) -> list[nn.Module]:
        """Parts from the image upwards, for freezing the lower ones."""
        raise NotImplementedError

    def published(self) -> list[nn.Parameter]:
        """Its parameters but for those of `added`: what may learn more slowly than the rest."""
        return [
            p for name, p in self.named_parameters() if name.partition(".")[0] not in self.added
        ]

    def translate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries of a published weights file that this network uses, by its own names."""
        return {name: tensor for name, tensor in weights.items() if name in self.state_dict()}
