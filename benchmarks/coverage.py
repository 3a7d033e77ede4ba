"""Do 90 % intervals hold the truth in 90 % of images? On images that a model has not learned from.

    python benchmarks/coverage.py MODEL DATA [--split train] [--list HELD.txt] [--level 0.9]
        [--calibrate 0.5] [--repeats 200] [--together]

The images are drawn apart again and again: on one part the intervals are calibrated, on the other
they are checked. Printed are the mean coverage over the draws and its deviation, and the mean
width, for all images and for the quarter with the fewest and with the most people.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from p3net import checkpoint, evaluation, uncertainty
from p3net.data.catalogue import open_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--split", default="test")
    parser.add_argument("--list", type=Path, help="names of the images to use, one a line")
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--calibrate", type=float, default=0.5, help="share of the images")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--together", action="store_true", help="rank all images in one group")
    args = parser.parse_args()
    images = open_dataset(args.data).part(args.split)
    if args.list:
        names = set(args.list.read_text(encoding="utf-8").split())
        images = images.where(lambda sample: sample.name in names)
    scored = evaluation.score(checkpoint.load(args.model), images)
    truth = np.array([each.truth for each in scored])
    error = np.array([each.counted for each in scored]) - truth
    print(f"{len(scored)} images: MAE {np.abs(error).mean():.2f}, bias {error.mean():+.2f}")
    sparse, dense = np.quantile(truth, (0.25, 0.75))
    groups = {"all": truth >= 0, "sparsest": truth <= sparse, "densest": truth >= dense}
    rng = np.random.default_rng(0)
    held: dict[str, list[float]] = {name: [] for name in groups}
    widths: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(args.repeats):
        order = rng.permutation(len(scored))
        cut = round(args.calibrate * len(scored))
        known = [scored[i] for i in order[:cut]]
        calibration = uncertainty.Calibration(
            tuple(each.score for each in known),
            counts=() if args.together else tuple(each.counted for each in known),
        )
        rest = order[cut:]
        found = [
            uncertainty.interval(scored[i].counted, scored[i].spread, args.level, calibration)
            for i in rest
        ]
        holds = np.array([f.low <= truth[i] <= f.high for i, f in zip(rest, found, strict=True)])
        width = np.array([f.high - f.low for f in found])
        for name, chosen in groups.items():
            held[name].append(float(holds[chosen[rest]].mean()))
            widths[name].append(float(width[chosen[rest]].mean()))
    for name in groups:
        figures = {
            "coverage": round(float(np.mean(held[name])), 3),
            "deviation": round(float(np.std(held[name])), 3),
            "mean width": round(float(np.mean(widths[name])), 1),
            "mean count": round(float(truth[groups[name]].mean()), 1),
        }
        print(name, json.dumps(figures))


if __name__ == "__main__":
    main()
