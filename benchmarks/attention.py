"""Both decoders with few queries turned towards the positions, and with all positions projected.

    python benchmarks/attention.py [--threads 1] [--rounds 5]

EfficientNet-Lite0's decoders on 8 crops of 256² with their gradients, and VGG-19's on one image of
1024² without. Both ways take turns in one process; the least time of each is compared.
"""

from __future__ import annotations

import argparse
import time
from unittest.mock import patch

import torch
from torch import Tensor

from p3net.allocator import keep_freed_memory
from p3net.network.decoder import Attention
from p3net.network.p3net import Architecture, P3Net


def run(network: P3Net, features: Tensor, *, learns: bool) -> float:
    """Seconds for the refined tokens, and their gradients."""
    started = time.perf_counter()
    with torch.set_grad_enabled(learns):
        one, two = network.refine(features)
        if learns:
            (one.square().sum() + two.square().sum()).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - started


def never(_attention: Attention, _query: Tensor, _memory: Tensor) -> bool:
    """Positions are projected."""
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("threads", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    small = Architecture(backbone="lite0-deep", layers=2, hidden=512, dropout=0.0)
    cases = (
        ("Lite0, 8 × 256², gradients", P3Net(small), torch.rand(8, 128, 32, 32), True),
        ("VGG-19, 1024²", P3Net().eval(), torch.rand(1, 512, 64, 64), False),
    )
    for name, network, features, learns in cases:
        inputs = features.requires_grad_(learns)
        least = {"projected": float("inf"), "turned": float("inf")}
        for turn in range(args.rounds + 1):
            for how, best in least.items():
                turns = Attention._turns if how == "turned" else never  # noqa: SLF001
                with patch.object(Attention, "_turns", turns):
                    seconds = run(network, inputs, learns=learns)
                if turn:
                    least[how] = min(best, seconds)
        plain, ours = least.values()
        print(f"{name:28}{plain:7.3f} s → {ours:.3f} s: {plain / ours:.2f} times as fast")


if __name__ == "__main__":
    main()
