"""A training step of EfficientNet-Lite0's features with 1×1 convolutions by torch's two paths.

    python benchmarks/pointwise.py [--crops 8] [--side 256] [--threads 1] [--rounds 5]

With one thread and fewer than 16 images torch multiplies matrices itself for a 1×1 filter; given a
dilation, which means nothing there, it asks oneDNN as for any other filter. Both take turns.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from p3net.allocator import keep_freed_memory
from p3net.network.backbones import BACKBONES


def spread_of_ones(network: nn.Module, spread: int) -> None:
    """Set the dilation of every 1×1 convolution."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.dilation = (spread, spread)


def seconds(network: nn.Module, images: Tensor) -> tuple[float, float]:
    """Of the map alone, and of the map and its gradients."""
    started = time.perf_counter()
    with torch.no_grad():
        network(images)
    alone = time.perf_counter() - started
    started = time.perf_counter()
    network(images).sum().backward()
    return alone, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("crops", 8), ("side", 256), ("threads", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backbone", choices=("lite0", "lite0-deep"), default="lite0-deep")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    last = torch.channels_last
    network = BACKBONES[args.backbone]().train().to(memory_format=last)  # type: ignore[call-overload]
    images = torch.rand(args.crops, 3, args.side, args.side).to(memory_format=last)
    least = {spread: (float("inf"), float("inf")) for spread in (1, 2)}
    for turn in range(args.rounds + 1):
        for spread, best in least.items():
            spread_of_ones(network, spread)
            found = seconds(network, images)
            if turn:
                least[spread] = (min(best[0], found[0]), min(best[1], found[1]))
    for index, what in enumerate(("map", "map and gradients")):
        plain, ours = least[1][index], least[2][index]
        print(f"{what:18}{plain:7.3f} s → {ours:.3f} s: {plain / ours:.2f} times as fast")


if __name__ == "__main__":
    main()
