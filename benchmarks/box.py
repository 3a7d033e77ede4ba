"""The model in the box beside the paper's network: one photo, counted by both in turn.

    python benchmarks/box.py [--sizes 1024 384] [--threads 2] [--repeats 5]

The box enlarges an image before it counts, one of 1024² to 1280²; "as it is" leaves that out, so
that both networks see the same pixels. VGG-19 has random weights, which cost the same time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import p3net
from p3net.allocator import keep_freed_memory
from p3net.counting import Counter
from p3net.data.synthetic import render
from p3net.data.transforms import Sizing
from p3net.network.p3net import Architecture, P3Net


def best_of(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each, the least of some rounds in which all take turns; the first is not timed."""
    least = dict.fromkeys(ways, float("inf"))
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                least[name] = min(least[name], time.perf_counter() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as `p3net count` does
    box = p3net.load()
    as_it_is = Counter(box.network, Sizing(box.sizing.max_shorter_side))
    paper = Counter(P3Net(Architecture(scaled_logits=True)).eval())
    models = {"VGG-19": paper, "the box, as it is": as_it_is, "the box, enlarged": box}
    for size in args.sizes:
        photo = render(1, 0, 3)[0].resize((size, size))
        ways = {n: lambda m=m, p=photo: m.count(p) for n, m in models.items()}  # type: ignore[misc]
        seconds = best_of(ways, args.repeats)
        for name, least in seconds.items():
            ratio = seconds["VGG-19"] / least
            print(f"{size:5d}²  {name:18}{least * 1e3:8.0f} ms {ratio:6.2f}×", flush=True)


if __name__ == "__main__":
    main()
