"""What every method is: a module that owns the network and names its losses.

The loop weighs, sums and steps; it knows no method. A method divides each loss by the number
of images of its role in the whole step, over all processes, so that the gradient is that of
the mean over the global batch, whoever computes which part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from p3net.data.loading import Step, Stream


@dataclass(frozen=True, slots=True)
class Divisors:
    """How many labelled and unlabelled images a step's losses are means over."""

    labelled: int
    unlabelled: int

    @classmethod
    def of(cls, stream: Stream) -> Divisors:
        """Paired streams: the crops of each lane; mixed streams: all crops of the step."""
        return cls(stream.lanes[0].per_step, stream.lanes[-1].per_step)


@dataclass(frozen=True, slots=True)
class Losses:
    """The result of a method for one process's share of a step.

    Attributes:
        terms: unweighted losses by name, scalars with gradients.
        records: figures worth logging, without gradients.
    """

    terms: dict[str, Tensor]
    records: dict[str, float] = field(default_factory=dict)


class Method(nn.Module):
    """A way to learn. `network` is what counting needs; all else a method keeps is its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, step: Step, divisors: Divisors) -> Losses:
        """The losses of this process's share of a step."""
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Called when the weights have moved; a teacher would follow here."""
