"""Synthetic scenes: seconds an image, what the counts and cells are like, and a contact sheet.

python benchmarks/synthetic.py [--scenes 200] [--seed 1] [--sheet docs/synthetic.jpg]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from p3net.data.synthetic import SIZE_HW, render

TILE_WH, COLUMNS, TILES = (320, 240), 6, 24


def contact_sheet(scenes: list[tuple[Image.Image, np.ndarray]]) -> Image.Image:
    width, height = TILE_WH
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(scenes) // COLUMNS) * height))
    for k, (image, points_xy) in enumerate(scenes):
        tile = image.resize(TILE_WH, Image.Resampling.LANCZOS)
        draw = ImageDraw.Draw(tile)
        draw.rectangle((0, 0, 34, 13), fill="black")
        draw.text((4, 1), f"{len(points_xy):,}", fill="white")
        sheet.paste(tile, (k % COLUMNS * width, k // COLUMNS * height))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sheet", type=Path)
    options = parser.parse_args()
    seconds, counts, cells = [], [], []
    for index in range(options.scenes):
        start = time.perf_counter()
        _, points_xy = render(options.seed, 0, index)
        seconds.append(time.perf_counter() - start)
        counts.append(len(points_xy))
        edges = [np.arange(0, side + 1, 8) for side in SIZE_HW]
        cells.append(np.histogram2d(points_xy[:, 1], points_xy[:, 0], bins=edges)[0].ravel())
    heads = np.concatenate(cells)
    height, width = SIZE_HW
    print(f"{options.scenes} scenes of {width}×{height}, one process, {sum(seconds):.1f} s")
    print(f"seconds an image: mean {np.mean(seconds):.3f}, most {max(seconds):.3f}")
    quantiles = np.percentile(counts, (0, 10, 25, 50, 75, 90, 99, 100)).astype(int)
    print("people, quantiles 0 10 25 50 75 90 99 100 %:", *quantiles)
    print(f"empty scenes {np.mean(np.equal(counts, 0)):.1%}, mean {np.mean(counts):.0f}")
    shares = ", ".join(f"{n}: {np.mean(heads == n):.3%}" for n in range(1, 5))
    print(f"cells of 8×8 px with n heads: {shares}; most {heads.max():.0f}")
    if options.sheet:  # from the emptiest to the most crowded, evenly by rank
        ranks = np.linspace(0, options.scenes - 1, TILES).astype(int)
        chosen = np.argsort(counts, kind="stable")[ranks].tolist()
        shown = [render(options.seed, 0, index) for index in chosen]
        contact_sheet(shown).save(options.sheet, quality=82, optimize=True)


if __name__ == "__main__":
    main()
