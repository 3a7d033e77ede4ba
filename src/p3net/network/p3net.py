"""P³Net: two branches of density tokens over one backbone (fig:structure).

A `BranchPlan` says what the two branches share; its five presets are the paper's model and the
alternatives of its appendix. The forward pass keeps the distributions: losses, intervals of
confidence and figures all read them.

Shapes: B images, H×W pixels, C intervals, d channels, h×w cells of 8×8 px.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from p3net.errors import InputError
from p3net.intervals import PUBLISHED, Pair
from p3net.network.backbones import BACKBONES
from p3net.network.decoder import Decoder
from p3net.network.fusion import DECODINGS, FUSIONS, by_expectation, crop, modulate, upsample
from p3net.targets import CELL, grid_hw


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """What the two branches share."""

    share_decoder: bool
    share_tokens: bool
    share_intervals: bool


PLANS: dict[str, BranchPlan] = {
    "p3net": BranchPlan(share_decoder=False, share_tokens=False, share_intervals=False),
    "sdds": BranchPlan(share_decoder=True, share_tokens=False, share_intervals=False),
    "stds": BranchPlan(share_decoder=False, share_tokens=True, share_intervals=False),
    "stss": BranchPlan(share_decoder=False, share_tokens=True, share_intervals=True),
    "dtss": BranchPlan(share_decoder=False, share_tokens=False, share_intervals=True),
}


class Architecture(BaseModel):
    """Everything that decides the shape of a P³Net but its intervals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["p3net"] = "p3net"
    backbone: Literal["vgg19", "vgg19-merged", "lite0", "lite0-deep", "small"] = "vgg19"
    plan: Literal["p3net", "sdds", "stds", "stss", "dtss"] = "p3net"
    layers: int = Field(default=4, ge=1, description="decoder layers of each branch")
    heads: int = Field(default=4, ge=1)
    hidden: int = Field(default=2048, ge=1, description="width of the feed-forward networks")
    dropout: float = Field(default=0.1, ge=0, lt=1)
    decoding: Literal["expectation", "maximum"] = "expectation"
    fusion: Literal["confidence", "average"] = "confidence"
    queries: Literal["learned", "random"] = Field(
        default="learned", description="random: drawn anew for every image (sec:initialization)"
    )
    tokens: Literal["normal", "zeros"] = Field(
        default="normal", description="learned tokens at the start"
    )
    decoders: Literal["independent", "copies"] = Field(
        default="independent", description="copies: every layer of both decoders starts equal"
    )
    scaled_logits: bool = Field(default=False, description="divide the logits by √d")
    grid: Literal["cover", "authors"] = Field(
        default="cover",
        description="cover: every pixel lies in a cell; authors: partial cells are dropped and "
        "the upsampling aligns corners, as in the authors' code",
    )


class Output(NamedTuple):
    """What a network says of B images.

    Attributes:
        density: B×h×w heads per cell, branches fused.
        logits: per branch B×C×h×w; empty for a regressor.
        probabilities: per branch B×C×h×w, the softmax of the logits; empty for a regressor.
        expectations: per branch B×h×w, whatever the decoding; empty for a regressor.
    """

    density: Tensor
    logits: tuple[Tensor, ...] = ()
    probabilities: tuple[Tensor, ...] = ()
    expectations: tuple[Tensor, ...] = ()


class P3Net(nn.Module):
    """Backbone, two sets of density tokens, two decoders, modulation, fusion."""

    fixed_queries: Tensor

    def __init__(
        self, architecture: Architecture | None = None, intervals: Pair = PUBLISHED
    ) -> None:
        super().__init__()
        self.architecture = arch = architecture or Architecture()
        plan = PLANS[arch.plan]
        if len(intervals[0]) != len(intervals[1]):
            raise InputError(
                f"both branches need the same number of intervals, got "
                f"{len(intervals[0])} and {len(intervals[1])}"
            )
        self.intervals: Pair = (intervals[1], intervals[1]) if plan.share_intervals else intervals
        self.backbone = BACKBONES[arch.backbone]()
        width = self.backbone.channels
        one = Decoder(arch.layers, width, arch.heads, arch.hidden, arch.dropout)
        two = one
        if not plan.share_decoder:
            two = Decoder(arch.layers, width, arch.heads, arch.hidden, arch.dropout)
        if arch.decoders == "copies":
            for layer in (*one.layers, *two.layers):
                layer.load_state_dict(copy.deepcopy(one.layers[0].state_dict()))
        self.decoders = nn.ModuleList((one, two))
        count = 1 if plan.share_tokens else 2
        start = torch.randn if arch.tokens == "normal" else torch.zeros
        tokens = [start(len(intervals[0]), width) for _ in range(count)]
        if arch.queries == "learned":
            parameters = [nn.Parameter(each) for each in tokens]
            self.tokens = nn.ParameterList((parameters[0], parameters[-1]))
        else:  # in eval mode one fixed draw serves, so that a count is a function of the image
            fixed = torch.Generator().manual_seed(0)
            draw = torch.randn(count, len(intervals[0]), width, generator=fixed)
            self.register_buffer("fixed_queries", draw)

    def forward(self, images: Tensor) -> Output:
        """B×3×H×W, RGB in [0, 1] → distributions, expectations and density on the h×w grid.

        h×w is ⌈H/8⌉×⌈W/8⌉; every image of the batch is attended by its own copy of the tokens.
        """
        size_hw = self.cells_hw(images)
        features = self.features(images)
        return self.read_out(self.refine(features), self.resample(features, size_hw))

    def cells_hw(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of the output grid for these images."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise InputError(f"images must be B×3×H×W, got {tuple(images.shape)}")
        height, width = images.shape[-2:]
        if self.architecture.grid == "authors":
            if height < self.backbone.stride or width < self.backbone.stride:
                raise InputError(
                    f"an image of {width}×{height} px is smaller than one position of "
                    f"{self.backbone.stride} px"
                )
            return height // CELL, width // CELL
        return grid_hw((height, width))

    def features(self, images: Tensor) -> Tensor:
        """B×3×H×W → B×d×h'×w', the map that the tokens attend to."""
        features: Tensor = self.backbone(images, pad=self.architecture.grid == "cover")
        return features

    def refine(self, features: Tensor, *, at_once: int | None = None) -> tuple[Tensor, Tensor]:
        """B×d×h'×w' → the refined tokens of both branches, B×C×d each."""
        one, two = self.queries(features.shape[0])  # `len` would fix the batch of an export
        first: Tensor = self.decoders[0](one, features, at_once=at_once)
        second: Tensor = self.decoders[1](two, features, at_once=at_once)
        return first, second

    def queries(self, batch: int) -> tuple[Tensor, Tensor]:
        """B×C×d copies of each branch's tokens."""
        if self.architecture.queries == "learned":
            one, two = self.tokens
        elif self.training:
            sets, *shape = self.fixed_queries.shape
            drawn = torch.randn(sets, batch, *shape, device=self.fixed_queries.device)
            return drawn[0], drawn[-1]
        else:
            one, two = self.fixed_queries[0], self.fixed_queries[-1]
        return one.expand(batch, -1, -1), two.expand(batch, -1, -1)

    def resample(self, maps: Tensor, size_hw: tuple[int, int]) -> Tensor:
        """B×·×h'×w' maps of the backbone's stride → the h×w cells of the output grid."""
        if self.architecture.grid == "authors":
            return upsample(maps, size_hw, corners=True)
        factor = self.backbone.stride // CELL
        height, width = maps.shape[-2] * factor, maps.shape[-1] * factor
        return crop(upsample(maps, (height, width)), size_hw)

    def read_out(self, refined: tuple[Tensor, Tensor], cells: Tensor) -> Output:
        """Refined tokens B×C×d and features on the grid B×d×h×w → the output there.

        Never in half precision, which rounds distributions that are nearly certain, and counts.
        """
        kind = cells.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            first, second = refined
            with torch.autocast(kind, enabled=False):
                return self.read_out((first.float(), second.float()), cells.float())
        arch = self.architecture
        scale = cells.shape[1] ** -0.5 if arch.scaled_logits else 1.0
        logits = tuple(modulate(tokens * scale, cells) for tokens in refined)
        p, q = (each.softmax(dim=1) for each in logits)
        one, two = self.intervals
        expected = by_expectation(p, one), by_expectation(q, two)
        decode = DECODINGS[arch.decoding]
        pair = expected if decode is by_expectation else (decode(p, one), decode(q, two))
        fused = FUSIONS[arch.fusion](p, q, *pair)
        return Output(fused, logits, (p, q), expected)

    def attention_maps(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-attention per token, A1…AC and B1…BC of fig:viz: B×L×C×h'×w' for each branch."""
        features = self.features(images)
        one, two = self.queries(len(features))
        first, second = (cast("Decoder", decoder) for decoder in self.decoders)
        return first.attention_maps(one, features), second.attention_maps(two, features)
