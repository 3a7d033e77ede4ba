"""Whole images in bounded memory: peak memory and time for a megapixel, by size.

Every size runs in a process of its own, so that its peak is its own. The image is random 8-bit
pixels, made before the clock starts; the network has fresh weights, which cost the same. Time is
that of the processor, which what else the machine does hardly changes.

    OMP_NUM_THREADS=1 python benchmarks/whole_image.py --backbone lite0 --megapixels 2 8 32
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def measure(backbone: str, megapixels: float, tile: int | None) -> None:
    """Count one image, twice as wide as high, and print what it took as JSON."""
    import numpy as np
    import torch

    from p3net.counting import Counter
    from p3net.network.p3net import Architecture, P3Net

    torch.manual_seed(0)
    counter = Counter(P3Net(Architecture(backbone=backbone)))  # type: ignore[arg-type]
    height = round((megapixels * 1e6 / 2) ** 0.5)
    rng = np.random.default_rng(0)
    image = np.empty((height, 2 * height, 3), np.uint8)
    for row in image:  # no second copy of it
        row[:] = rng.integers(0, 256, row.shape, np.uint8)
    before = _peak_mb()
    started = time.process_time()
    counter.count(image, tile=tile, full_size=True)
    seconds = time.process_time() - started
    found = {
        "size": f"{2 * height}×{height}",
        "image_mb": image.nbytes / 1e6,
        "before_mb": before,
        "peak_mb": _peak_mb(),
        "seconds": seconds,
        "seconds_per_megapixel": seconds / (image.size / 3e6),
    }
    print(json.dumps(found))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", default="lite0", choices=("vgg19", "lite0", "small"))
    parser.add_argument("--megapixels", type=float, nargs="+", default=[2, 8, 32])
    parser.add_argument("--tile", type=int, help="side in px; chosen to fit if not given")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(given.backbone, given.megapixels[0], given.tile)
        return
    print(f"{given.backbone}\n{'size':>14} {'image':>9} {'peak':>9} {'time':>9} {'per Mpx':>9}")
    for size in given.megapixels:
        command = [sys.executable, __file__, "--one", "--backbone", given.backbone]
        command += ["--megapixels", str(size)]
        command += ["--tile", str(given.tile)] if given.tile else []
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        print(
            f"{found['size']:>14} {found['image_mb']:>6.0f} MB {found['peak_mb']:>6.0f} MB "
            f"{found['seconds']:>7.1f} s {found['seconds_per_megapixel']:>7.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
