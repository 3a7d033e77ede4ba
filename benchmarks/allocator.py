"""A training step of the preset `quick` with and without freed memory kept.

    python benchmarks/allocator.py [--crops 8] [--side 256] [--steps 6] [--threads 1] [--rounds 3]

Each way has processes of its own, in turn; the medians of all their steps are compared.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def measure(args: argparse.Namespace) -> None:
    import torch

    from p3net.allocator import keep_freed_memory
    from p3net.configuration import settings
    from p3net.network.p3net import Architecture, P3Net

    torch.set_num_threads(args.threads)
    if args.way == "kept":
        keep_freed_memory()
    architecture = settings({"data": "none"}, preset="quick").network
    assert isinstance(architecture, Architecture)
    last = torch.channels_last
    network = P3Net(architecture).train().to(memory_format=last)  # type: ignore[call-overload]
    images = torch.rand(args.crops, 3, args.side, args.side).to(memory_format=last)
    for step in range(args.steps + 1):
        started = time.perf_counter()
        network(images).density.sum().backward()
        if step:
            print(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("crops", 8), ("side", 256), ("steps", 6), ("threads", 1), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--way", choices=("plain", "kept"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        measure(args)
        return
    seconds: dict[str, list[float]] = {"plain": [], "kept": []}
    for _ in range(args.rounds):
        for way, found in seconds.items():
            words = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            found.extend(map(float, done.stdout.split()))
    plain, kept = (statistics.median(found) for found in seconds.values())
    print(f"given back {plain:.2f} s, kept {kept:.2f} s: {plain / kept:.2f} times as fast")


if __name__ == "__main__":
    main()
