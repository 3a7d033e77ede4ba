"""How to optimise: a validated value that depends on neither the method nor the data."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Term(BaseModel):
    """How much one loss weighs: nothing before `start`, all of `weight` from start + ramp on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, ge=0)
    start: int = Field(default=0, ge=0, description="first step that it counts")
    ramp: int = Field(
        default=0, ge=0, description="steps over which the weight grows to its full size"
    )

    from_epoch: int = Field(default=0, ge=0, description="first pass over the images it counts in")
    shape: Literal["linear", "sigmoid"] = Field(
        default="linear", description="of the ramp; sigmoid: exp(−5(1−t)²), Mean Teacher's"
    )

    def at(self, step: int, epoch: int) -> float:
        """The weight in a step.

        >>> term = Term(weight=2.0, start=10, ramp=4)
        >>> [term.at(step, epoch=0) for step in (9, 10, 11, 13, 14)]
        [0.0, 0.5, 1.0, 2.0, 2.0]
        """
        if step < self.start or epoch < self.from_epoch:
            return 0.0
        done = min(1.0, (step - self.start + 1) / max(self.ramp, 1))
        return self.weight * (done if self.shape == "linear" else math.exp(-5 * (1 - done) ** 2))


class Recipe(BaseModel):
    """Steps, learning rate, weights of the losses, when to validate and to save."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=20_000, ge=1)
    optimiser: Literal["adam", "adamw"] = "adam"
    learning_rate: float = Field(default=1e-5, gt=0)
    backbone_factor: float = Field(
        default=1.0, ge=0, description="backbone's share of the learning rate"
    )
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0, description="steps of linear warm-up")
    clip: float | None = Field(default=None, gt=0, description="largest norm of the gradient")
    average: float = Field(
        default=0.0, ge=0, lt=1, description="decay of averaged weights; 0 for none"
    )
    accumulate: int = Field(default=1, ge=1, description="batches whose gradients make one step")
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    freeze: int = Field(
        default=0,
        ge=0,
        description="blocks of the backbone, from below, left as they are, unless weights: none",
    )
    terms: dict[str, Term] = Field(default_factory=lambda: {"ecr": Term(weight=0.01)})
    validate_every: int = Field(default=500, ge=1)
    save_every: int = Field(default=200, ge=1)
    choose: Literal["best", "last"] = "best"
    workers: int = Field(default=1, ge=0, description="loading processes")

    def weight(self, name: str, step: int, epoch: int) -> float:
        """The weight of a loss in a step; 1 for a loss that `terms` does not name."""
        return self.terms.get(name, Term()).at(step, epoch)

    def rate(self, step: int) -> float:
        """The learning rate's factor in a step: warm-up, then constant or a cosine to 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * done))
