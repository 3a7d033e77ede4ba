"""Crops per second from 2048×1536 JPEGs, against plain Pillow; and the time spent waiting.

    python benchmarks/loading.py            crops per second, one core, as ratios
    python benchmarks/loading.py --wait 0.5 share of a step of 0.5 s spent waiting for data

The plain way opens the image, converts it to RGB, scales all of it, crops, and turns the crop
to normalised floats. All ways make the same views of the same images in turns, so that a
busy machine slows all of them alike; the time of each is the median over the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from p3net.data.cache import Cache
from p3net.data.images import open_image
from p3net.data.loading import Step, loader, paired
from p3net.data.transforms import Augmentation, View, apply_view, draw_view, to_float
from p3net.randomness import generator
from p3net.structures import Marks, Sample, as_points

SIZE_HW = (1536, 2048)
MEAN, DEVIATION = (
    torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)


def photograph(seed: int) -> Image.Image:
    """A picture that compresses like a photograph: smooth light, many edges, some noise."""
    rng = np.random.default_rng(seed)
    height, width = SIZE_HW
    picture = np.zeros((height, width, 3), np.float32)
    for coarse in (4, 16, 64, 256):
        noise = rng.normal(128, 10 * coarse**0.4, (height // coarse, width // coarse, 3))
        layer = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
        picture += np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    picture = picture - 3 * 128
    for x, y, radius in rng.uniform((0, 0, 4), (width, height, 24), (400, 3)).astype(int):
        top, left = max(0, y - radius), max(0, x - radius)
        ys, xs = np.ogrid[top : min(height, y + radius), left : min(width, x + radius)]
        disc = (xs - x) ** 2 + (ys - y) ** 2 < radius**2
        picture[top : y + radius, left : x + radius][disc] = rng.uniform(20, 230, 3)
    picture += rng.normal(0, 3, picture.shape)
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))


def make_samples(folder: Path, count: int) -> list[Sample]:
    marks = Marks(as_points(np.random.default_rng(0).random((300, 2)) * SIZE_HW[::-1]))
    samples = []
    for number in range(count):
        path = folder / f"{number}.jpg"
        photograph(number).save(path, quality=90)
        samples.append(Sample(path.name, partial(open_image, path), lambda: marks, path=path))
    return samples


def plain(sample: Sample, view: View) -> Tensor:
    """What most training code does."""
    assert sample.path is not None
    with Image.open(sample.path) as file:
        image = file.convert("RGB")
    scale_x, scale_y = view.scale_xy
    height, width = SIZE_HW
    image = image.resize(
        (round(width * scale_x), round(height * scale_y)), Image.Resampling.BILINEAR
    )
    left, top = round(view.box_xyxy[0] * scale_x), round(view.box_xyxy[1] * scale_y)
    image = image.crop((left, top, left + view.size_hw[1], top + view.size_hw[0]))
    if view.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    return (tensor - MEAN) / DEVIATION


def ours(sample: Sample, view: View, backend: str) -> Tensor:
    pixels = apply_view(sample.open(), view, backend=backend)  # type: ignore[arg-type]
    return to_float(torch.from_numpy(pixels[None]))[0]


def cached(sample: Sample, view: View, cache: Cache) -> Tensor:
    pixels, _ = cache.prepared(sample)
    return to_float(torch.from_numpy(apply_view(pixels, view)[None]))[0]


def compare_speed(folder: Path, *, crop: int, images: int, rounds: int) -> None:
    samples = make_samples(folder, images)
    size = sum(sample.path.stat().st_size for sample in samples if sample.path) / images
    cache = Cache(folder / "cache")
    ways: dict[str, Callable[[Sample, View], Tensor]] = {
        "plain Pillow": plain,
        "p3net, pillow": partial(ours, backend="pillow"),
        "p3net, cv2": partial(ours, backend="cv2"),
        "p3net, cached, cv2": partial(cached, cache=cache),
    }
    augmentation = Augmentation(crop=crop)
    for way in ways.values():  # warm up, and fill the cache
        for sample in samples:
            way(sample, draw_view(SIZE_HW, augmentation, generator(0)))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for number, sample in enumerate(samples):
            view = draw_view(SIZE_HW, augmentation, generator(1, turn, number))
            for name, way in ways.items():
                began = time.perf_counter()
                way(sample, view)
                seconds[name].append(time.perf_counter() - began)
    print(f"{images} JPEGs of 2048×1536, {size / 1e6:.1f} MB each, crops of {crop}², one core")
    base = median(seconds["plain Pillow"])
    for name, times in seconds.items():
        rate = 1 / median(times)
        print(f"{name:20} {rate:8.1f} crops/s {base / median(times):6.1f}×")


def share_waiting(steps: Iterable[Step], work: Callable[[Step], object]) -> float:
    """The share of the time spent waiting for the next step; the first one is not counted."""
    waited, began = 0.0, time.perf_counter()
    asked = began
    for number, step in enumerate(steps):
        now = time.perf_counter()
        if number == 0:
            waited, began = 0.0, now  # starting the workers is no part of a step
        else:
            waited += now - asked
        work(step)
        asked = time.perf_counter()
    return waited / (time.perf_counter() - began)


def measure_waiting(folder: Path, *, crop: int, images: int, seconds: float, steps: int) -> None:
    samples = make_samples(folder, images)
    stream = paired(samples, samples, labelled_per_batch=2, unlabelled_per_batch=2)
    print(f"steps of {seconds} s, 2 labelled and 2 unlabelled crops of {crop}²")
    for workers in (0, 1, 2):
        made = loader(stream, Augmentation(crop=crop), seed=0, steps=steps, workers=workers)
        share = share_waiting(made, lambda _: time.sleep(seconds))
        print(f"{workers} workers: {share:6.1%} of the time waiting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crop", type=int, default=256)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="length of a pretended step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.wait is None:
            compare_speed(folder, crop=options.crop, images=options.images, rounds=options.rounds)
        else:
            measure_waiting(
                folder, crop=options.crop, images=options.images, seconds=options.wait, steps=21
            )


if __name__ == "__main__":
    main()
