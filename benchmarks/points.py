"""Density to points: time and memory for 100 to 20,000 heads, and how far they end from the truth.

Beside it, for few heads, OT-M the plain way: a dense plan of every cell to every point by
`losses.transport.sinkhorn`, with the same ε-scaling, rounds and end, from a systematic sample.

    OMP_NUM_THREADS=1 python benchmarks/points.py [--heads 100 1000 5000 20000]
"""

from __future__ import annotations

import argparse
import math
import time
import tracemalloc

import numpy as np
import torch
from scipy.spatial import cKDTree

from p3net import points
from p3net.losses.transport import sinkhorn
from p3net.targets import CELL, density

SPACING = 39  # px: 5,000 heads on 300×400 cells
DENSE = 200  # heads


def scene(count: int) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Heads, density and size: heads anywhere in an image of 4 to 3."""
    height = max(16, round(math.sqrt(count * 0.75) * SPACING))
    size = height, height * 4 // 3
    heads = np.random.default_rng(0).uniform((0, 0), size[::-1], (count, 2))
    return heads, density(torch.from_numpy(heads), size).numpy(), size


def dense(masses: np.ndarray, count: int) -> np.ndarray:
    row, column = np.nonzero(masses)
    cells = torch.from_numpy(np.stack([column, row], axis=1) + 0.5)
    a = torch.from_numpy(masses[row, column]).double()
    a, b = a / a.sum(), torch.full((count,), 1 / count, dtype=torch.float64)
    found = cells[torch.searchsorted(a.cumsum(0), (torch.arange(count) + 0.5) / count)]
    for _ in range(points.ROUNDS):
        cost = torch.cdist(cells, found).square()
        entropic, f = float(cost.max()), None
        while True:
            f, g = sinkhorn(cost, a, b, entropic=entropic, iterations=points.ITERATIONS, start=f)
            if entropic <= points.SHARPEST:
                break
            entropic = max(entropic * points.COOLING, points.SHARPEST)
        plan = a[:, None] * b * ((f[:, None] + g - cost) / entropic).exp()
        moved = plan.T @ cells / plan.sum(0)[:, None]
        step, found = float((moved - found).norm(dim=1).mean()), moved
        if step * CELL < points.STILL:
            break
    return found.numpy() * CELL


def far(heads: np.ndarray, found: np.ndarray) -> float:
    """Median distance in px from a head to the nearest point."""
    return float(np.median(cKDTree(found).query(heads)[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--heads", type=int, nargs="+", default=[100, 1_000, 5_000, 20_000])
    torch.set_num_threads(1)
    scene_small = scene(20)
    points.place(scene_small[1], (CELL, CELL), scene_small[2])  # imports
    print(f"{'heads':>6} {'cells':>9} {'CPU s':>7} {'ms/head':>8} {'peak MB':>8} {'median px':>9}")
    for count in parser.parse_args().heads:
        heads, masses, size = scene(count)
        start = time.process_time()
        found = points.place(masses, (CELL, CELL), size)
        seconds = time.process_time() - start
        tracemalloc.start()
        points.place(masses, (CELL, CELL), size)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        grid = f"{masses.shape[0]}×{masses.shape[1]}"
        print(
            f"{count:6d} {grid:>9} {seconds:7.2f} {1e3 * seconds / count:8.2f} {peak:8.1f} "
            f"{far(heads, found.xy):9.2f}",
            flush=True,
        )
        if count <= DENSE:
            start = time.process_time()
            other = dense(masses, count)
            ratio = (time.process_time() - start) / seconds
            print(
                f"       dense plan: {ratio:.0f} times as long, median {far(heads, other):.2f} px"
            )


if __name__ == "__main__":
    main()
