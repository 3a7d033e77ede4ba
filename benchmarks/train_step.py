"""One training step of P³Net with VGG-19: ours beside the plainest eager loop.

    python benchmarks/train_step.py [--sizes 256 512] [--batches 1 4] [--threads 2] [--repeats 3]

Both do the same work: PDM on labelled crops, summed over cells, and a step of Adam. Ours is
the package's: Winograd convolutions, exact targets in windows, the whole batch at once, Adam in
one kernel. The plain loop uses `nn.Conv2d` in contiguous format, targets as a softmax over all
cells in one dense points × cells matrix, and the images one by one with accumulated gradients.
Both run in turn in one process, and the best times are compared. The gradient's difference is
relative, over all parameters together, on the same targets (ours). Peak memory is that of a
process of its own for each way, less what it held before the first step.
"""

from __future__ import annotations

import argparse
import copy
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from p3net.data.loading import Step
from p3net.intervals import PUBLISHED
from p3net.losses.pdm import pdm
from p3net.methods.base import Divisors
from p3net.methods.supervised import Supervised
from p3net.network.p3net import Architecture, P3Net
from p3net.network.winograd import Conv3x3
from p3net.structures import Batch
from p3net.targets import densities

HEADS = 300  # points in a crop of 512²


def crops(batch: int, size: int) -> Batch:
    draw = torch.Generator().manual_seed(batch * size)
    images = torch.rand(batch, 3, size, size, generator=draw)
    heads = max(HEADS * size * size // 512**2, 4)
    points = tuple(
        torch.rand(heads, 2, generator=draw, dtype=torch.float64) * size for _ in range(batch)
    )
    return Batch(images, points, ("",) * batch, (float(size),) * batch)


def dense_target(points_xy: Tensor, size: int, sigma: float = 8.0) -> Tensor:
    """Every point a softmax over all cells by its squared distance to their centres."""
    centres = torch.arange(size // 8) * 8.0 + 4
    points = points_xy.float()
    x = (points[:, :1] - centres).square()
    y = (points[:, 1:] - centres).square()
    distance = (y[:, :, None] + x[:, None, :]).flatten(1)
    shares = (-distance / (2 * sigma**2)).softmax(dim=1)
    return shares.sum(0).view(size // 8, size // 8)


def plain_network(plain: P3Net) -> P3Net:
    """The same network with torch's own convolutions, changed in place."""
    for parent in list(plain.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, Conv3x3):
                other = nn.Conv2d(module.in_channels, module.out_channels, 3, padding=1)
                other.load_state_dict(module.state_dict())
                setattr(parent, name, other)
    return plain


def our_way(network: P3Net) -> Callable[[Batch], None]:
    method = Supervised(network)

    def gradients(batch: Batch) -> None:
        losses = method(Step(0, batch, None), Divisors(len(batch), 1))
        losses.terms["pdm"].backward()

    return gradients


def plain_way(network: P3Net, *, exact: bool = False) -> Callable[[Batch], None]:
    def gradients(batch: Batch) -> None:
        size = batch.images.shape[-1]
        for image, points in zip(batch.images, batch.points_xy or (), strict=True):
            output = network(image[None])
            if exact:
                target = densities([points], (size, size))
            else:
                target = dense_target(points, size)[None]
            loss = sum(
                pdm(p, intervals.label(target)).sum()
                for p, intervals in zip(output.probabilities, PUBLISHED, strict=True)
            )
            (loss / len(batch)).backward()  # type: ignore[union-attr]

    return gradients


def stepper(
    network: P3Net, gradients: Callable[[Batch], None], *, fused: bool
) -> Callable[[Batch], None]:
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-7, fused=fused)

    def step(batch: Batch) -> None:
        optimiser.zero_grad(set_to_none=True)
        gradients(batch)
        optimiser.step()

    return step


def build() -> P3Net:
    torch.manual_seed(0)
    return P3Net(Architecture(dropout=0.0)).train()


def gradient_difference(network: P3Net, batch: Batch) -> float:
    """‖ours − plain‖ / ‖plain‖ over all parameters, the targets being the same."""
    plain = plain_network(copy.deepcopy(network))
    for net, way in ((network, our_way(network)), (plain, plain_way(plain, exact=True))):
        net.zero_grad(set_to_none=True)
        way(batch)
    pairs = list(zip(network.parameters(), plain.parameters(), strict=True))
    apart = sum(float((p.grad - q.grad).double().square().sum()) for p, q in pairs)
    whole = sum(float(q.grad.double().square().sum()) for _, q in pairs)
    return (apart / whole) ** 0.5


def peak_mb() -> float:
    """Most memory this process ever held; `ru_maxrss` would count its parent's on Linux."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**10
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory(way: str, size: int, batch: int, threads: int) -> float:
    """Peak of a step in MB, in a process of its own."""
    words = [sys.executable, __file__, "--memory", way, "--threads", str(threads)]
    words += ["--sizes", str(size), "--batches", str(batch)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def measure_memory(way: str, size: int, batch: int) -> None:
    network = build()
    if way == "plain":
        network = plain_network(network)
    ours = way == "ours"
    step = stepper(network, our_way(network) if ours else plain_way(network), fused=ours)
    data = crops(batch, size)
    before = peak_mb()
    for _ in range(2):
        step(data)
    print(peak_mb() - before)


def compare(size: int, batch: int, args: argparse.Namespace) -> None:
    data = crops(batch, size)
    network = build()
    difference = gradient_difference(network, data)
    plain = plain_network(copy.deepcopy(network))
    steps = (
        stepper(plain, plain_way(plain), fused=False),
        stepper(network, our_way(network), fused=True),
    )
    best = [float("inf"), float("inf")]
    for repeat in range(args.repeats + 1):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            step(data)
            if repeat:  # the first one makes Adam's moments
                best[i] = min(best[i], time.perf_counter() - start)
    peaks = [memory(way, size, batch, args.threads) for way in ("plain", "ours")]
    times = f"{best[0] * 1e3:9.0f} ms {best[1] * 1e3:8.0f} ms {best[0] / best[1]:6.2f}×"
    room = f"{peaks[0]:8.0f} MB {peaks[1]:7.0f} MB {peaks[0] / peaks[1]:6.2f}×"
    print(f"{batch} × {size:3d}² {times}  {room}  {difference:9.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512], help="crop sides in px")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", choices=("plain", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        measure_memory(args.memory, args.sizes[0], args.batches[0])
        return
    print(f"VGG-19 P³Net, PDM, Adam; {args.threads} threads, best of {args.repeats}")
    print("crops           plain       ours   ratio       plain       ours   ratio   gradient")
    for size in args.sizes:
        for batch in args.batches:
            compare(size, batch, args)


if __name__ == "__main__":
    main()
