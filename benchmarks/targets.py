"""Targets against the two ways the field makes them, as ratios in one run.

(a) a map of full resolution, `scipy.ndimage.gaussian_filter`, then sum-pooling to cells;
(b) the authors' way: a dense points×cells matrix of squared distances and a softmax over cells.

    python benchmarks/targets.py [--threads 1]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from p3net.targets import CELL, SIGMA, density

POINTS = (0, 100, 1_000, 5_000, 20_000)
SIZES = (512, 2048)


def full_resolution(points_xy: Tensor, size: int) -> np.ndarray:
    image = np.zeros((size, size), dtype=np.float32)
    xy = points_xy.numpy().astype(int)
    np.add.at(image, (xy[:, 1], xy[:, 0]), 1)
    smooth = gaussian_filter(image, SIGMA, mode="constant")
    return smooth.reshape(size // CELL, CELL, size // CELL, CELL).sum((1, 3))


def dense_softmax(points_xy: Tensor, size: int) -> Tensor:
    centres = torch.arange(size // CELL) * CELL + CELL / 2
    points_xy = points_xy.float()
    x = (points_xy[:, :1] - centres).square()
    y = (points_xy[:, 1:] - centres).square()
    distance = (y[:, :, None] + x[:, None, :]).flatten(1)
    return (-distance / (2 * SIGMA**2)).softmax(1).sum(0).view(len(centres), len(centres))


def median(function: Callable[[], object], seconds: float = 1.0) -> float:
    function()
    times, stop = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def peak_extra_mb(points: int, size: int) -> float:
    """Peak memory of one call beyond what was there before, in a process of its own."""
    code = (
        "import pathlib, re, torch; from p3net.targets import density;"
        "density(torch.rand(10, 2).double() * 500, (512, 512));"
        f"p = torch.rand({points}, 2, dtype=torch.float64) * {size - 1};"
        "pathlib.Path('/proc/self/clear_refs').write_text('5');"  # forget the peak so far
        "status = lambda key: int(re.search(key + r':\\s+(\\d+)', "
        "pathlib.Path('/proc/self/status').read_text())[1]) / 1024;"
        f"before = status('VmRSS'); density(p, ({size}, {size}));"
        "print(status('VmHWM') - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    generator = torch.Generator().manual_seed(0)
    print(
        f"{'size':>5} {'points':>7} {'ours ms':>9} {'(a)/ours':>9} {'(b)/ours':>9} {'L1 to (b)':>9}"
    )
    for size in SIZES:
        for count in POINTS:
            points = torch.rand(count, 2, generator=generator, dtype=torch.float64) * (size - 1)
            ours = median(lambda p=points, s=size: density(p, (s, s)))
            full = median(lambda p=points, s=size: full_resolution(p, s))
            row = f"{size:5d} {count:7d} {ours * 1e3:9.3f} {full / ours:9.1f}"
            gigabytes = count * (size // CELL) ** 2 * 4 * 3 / 1e9
            if gigabytes > 8:
                print(row, f"{'n/a':>9} (b) would need {gigabytes:.0f} GB")
                continue
            dense = median(lambda p=points, s=size: dense_softmax(p, s))
            apart = (dense_softmax(points, size) - density(points, (size, size))).abs().sum()
            print(row, f"{dense / ours:9.1f} {float(apart) / max(count, 1):9.3f}")
    print(f"extra memory, 20,000 points on 2048²: {peak_extra_mb(20_000, 2048):.0f} MB")
    print(f"extra memory, 20,000 points on 4096²: {peak_extra_mb(20_000, 4096):.0f} MB")


if __name__ == "__main__":
    main()
