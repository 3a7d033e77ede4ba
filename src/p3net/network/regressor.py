"""Regressors of the baselines: one density map, no distributions.

BL's network is VGG-19, upsampling to stride 8 and a small convolutional head; VGG19+Trans puts
a transformer encoder between them. The same heads serve DM-Count.

Shapes: B images, H×W pixels, d channels, h×w cells of 8×8 px, N = h'·w' positions.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from p3net.network.backbones import BACKBONES
from p3net.network.decoder import Attention
from p3net.network.fusion import crop, upsample
from p3net.network.p3net import Output
from p3net.network.winograd import Conv3x3
from p3net.targets import CELL, grid_hw


class RegressorArchitecture(BaseModel):
    """Everything that decides the shape of a regressor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["regressor"] = "regressor"
    backbone: Literal["vgg19", "vgg19-merged", "lite0", "lite0-deep", "small"] = "vgg19"
    encoder_layers: int = Field(default=0, ge=0, description="4 for VGG19+Trans, 0 for BL")
    heads: int = Field(default=4, ge=1)
    hidden: int = Field(default=2048, ge=1)
    dropout: float = Field(default=0.1, ge=0, lt=1)


class EncoderLayer(nn.Module):
    """Self-attention over all positions and a feed-forward network, post-norm."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, dropout)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """B×N×d → B×N×d."""
        x = self.norm1(x + self.dropout(self.self_attn(x, x)))
        hidden = self.dropout(F.relu(self.linear1(x)))
        normalised: Tensor = self.norm2(x + self.dropout(self.linear2(hidden)))
        return normalised


class Regressor(nn.Module):
    """Backbone, optional encoder, upsampling to stride 8, three convolutions."""

    def __init__(self, architecture: RegressorArchitecture | None = None) -> None:
        super().__init__()
        self.architecture = arch = architecture or RegressorArchitecture()
        self.backbone = BACKBONES[arch.backbone]()
        width = self.backbone.channels
        self.encoder = nn.Sequential(
            *(
                EncoderLayer(width, arch.heads, arch.hidden, arch.dropout)
                for _ in range(arch.encoder_layers)
            )
        )
        self.head = nn.Sequential(
            Conv3x3(width, 256),
            nn.ReLU(inplace=True),
            Conv3x3(256, 128),
            nn.ReLU(inplace=True),
            nn.Conv2d(128, 1, 1),
        )

    def forward(self, images: Tensor) -> Output:
        """B×3×H×W, RGB in [0, 1] → B×⌈H/8⌉×⌈W/8⌉ heads per cell, never negative."""
        rows, columns = grid_hw((images.shape[-2], images.shape[-1]))
        features: Tensor = self.backbone(images)
        positions = self.encoder(features.flatten(2).transpose(1, 2))
        features = positions.transpose(1, 2).reshape(features.shape)
        factor = self.backbone.stride // CELL
        size_hw = (features.shape[-2] * factor, features.shape[-1] * factor)
        density = self.head(upsample(features, size_hw)).abs().squeeze(1)
        return Output(crop(density, (rows, columns)))
