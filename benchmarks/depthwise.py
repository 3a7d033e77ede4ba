"""A training step of EfficientNet-Lite0's features, its 5×5 filters' gradients whole and in pieces.

    python benchmarks/depthwise.py [--crops 8] [--side 256] [--threads 1] [--rounds 5]

Both take turns in one process; the least time of each is compared.
"""

from __future__ import annotations

import argparse
import time
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from p3net.allocator import keep_freed_memory
from p3net.network import lite0
from p3net.network.backbones import BACKBONES


def whole(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """Torch's own."""
    return F.conv2d(x, weight, bias, stride, padding, groups=len(weight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("crops", 8), ("side", 256), ("threads", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    images = torch.rand(args.crops, 3, args.side, args.side)
    for name in ("lite0", "lite0-deep"):
        network = BACKBONES[name]().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for block in network.blocks()[:3]:  # as `quick` has it
            block.requires_grad_(requires_grad=False)
        least = {"whole": float("inf"), "in pieces": float("inf")}
        for turn in range(args.rounds + 1):
            for how, convolution in (("whole", whole), ("in pieces", lite0.depthwise)):
                with patch.object(lite0, "depthwise", convolution):
                    network.zero_grad(set_to_none=True)
                    started = time.perf_counter()
                    network(images).sum().backward()
                    if turn:
                        least[how] = min(least[how], time.perf_counter() - started)
        plain, ours = least.values()
        print(f"{name:12}{plain:7.3f} s → {ours:.3f} s: {plain / ours:.2f} times as fast")


if __name__ == "__main__":
    main()
