"""Counting one image, by every way there is, beside plain eager torch.

    python benchmarks/inference.py [--sizes 384 1024] [--backbone vgg19] [--threads 2]
        [--weights FILE | --model MODEL] [--images DATA] [--only default openvino]

Plain is one image at a time through the same network with `nn.Conv2d` in contiguous format; its
time is 1. Every way runs in a process of its own in turn with plain, and the best times are
compared. Memory is the peak of another process that runs this way alone, less what it held after
its imports. The difference in count is relative, over all images. The last column is the
network's multiply-adds, counted for direct convolution, over the time, as a share of the rate at
which `torch.mm` multiplies large matrices in the same process; Winograd does fewer, so it may
pass 100 %.

Without weights the network is random: times hold, differences in count say little, above all for
int8. Images are a dataset or a folder; rendered scenes if none are given.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from p3net import checkpoint, export
from p3net.counting import Counter
from p3net.data.catalogue import open_dataset
from p3net.data.transforms import prepare, to_float
from p3net.errors import InputError
from p3net.network.backbone import load_backbone
from p3net.network.cost import cost
from p3net.network.p3net import Architecture, P3Net
from p3net.network.winograd import Conv3x3
from p3net.runtimes import Exported

Way = Callable[[Tensor], Tensor]
"""Images to densities."""

FITTED = 16  # images for the ranges of int8, and for its check


def build(args: argparse.Namespace) -> P3Net:
    if args.model:
        network = checkpoint.load(args.model).network
        if not isinstance(network, P3Net):
            raise InputError("a P³Net was expected", source=args.model)
        return network
    torch.manual_seed(0)
    network = P3Net(Architecture(backbone=args.backbone, scaled_logits=True)).eval()
    if args.weights:
        load_backbone(network.backbone, Path(args.weights))
    return network


def plain_network(network: P3Net) -> P3Net:
    """A copy with torch's own convolutions."""
    plain = copy.deepcopy(network)
    for parent in list(plain.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, Conv3x3):
                other = nn.Conv2d(module.in_channels, module.out_channels, 3, padding=1)
                other.load_state_dict(module.state_dict())
                setattr(parent, name, other)
    return plain.eval()


# --- ways --------------------------------------------------------------------------------------


def plainly(network: P3Net, _folder: Path) -> Way:
    plain = plain_network(network)
    return lambda images: plain(images).density


def by_default(network: P3Net, _folder: Path) -> Way:
    return lambda images: network(images).density


def channels_last(network: P3Net, _folder: Path) -> Way:
    plain = plain_network(network).to(memory_format=torch.channels_last)
    return lambda images: plain(images.to(memory_format=torch.channels_last)).density


def compiled(network: P3Net, _folder: Path) -> Way:
    made = torch.compile(plain_network(network))
    return lambda images: made(images).density


def exported(name: str, runtime: str) -> Callable[[P3Net, Path], Way]:
    def way(_network: P3Net, folder: Path) -> Way:
        network = Exported(folder / name, runtime)
        return lambda images: network(images).density

    return way


WAYS: dict[str, Callable[[P3Net, Path], Way]] = {
    "plain": plainly,
    "default": by_default,
    "channels-last": channels_last,
    "torch.compile": compiled,
    "onnxruntime": exported("model.onnx", "onnxruntime"),
    "openvino": exported("model.xml", "openvino"),
    "int8": exported("int8.xml", "openvino"),
}


# --- what the processes do ---------------------------------------------------------------------


def squares(args: argparse.Namespace, size: int) -> list[Tensor]:
    """Images 1×3×size×size: scaled until they cover the square, then cut."""
    found = []
    for sample in open_dataset(args.images).samples[: args.count]:
        with sample.open() as image:
            rgb = image.convert("RGB")
        factor = size / min(rgb.size)
        larger = [max(size, round(side * factor)) for side in rgb.size]
        pixels = np.asarray(rgb.resize((larger[0], larger[1])))[:size, :size]
        found.append(to_float(torch.from_numpy(pixels[None].copy())))
    return found


def make_files(args: argparse.Namespace, folder: Path) -> None:
    """The exported files that the chosen ways need; a way that cannot be is said and left out."""
    export.INT8_TOLERANCE = float("inf")  # kept in any case: the table says how far it is
    counter = Counter(build(args))
    makers: dict[str, Callable[[], object]] = {
        "onnxruntime": lambda: export.export(counter, folder / "model.onnx"),
        "openvino": lambda: export.export(counter, folder / "model.xml"),
        "int8": lambda: export.export_int8(counter, folder / "int8.xml", fitting(args)),
    }
    for name in args.only:
        if name in makers:
            try:
                makers[name]()
            except InputError as error:
                print(f"{name}: {error}", file=sys.stderr)


def fitting(args: argparse.Namespace) -> list[NDArray[np.uint8]]:
    samples = open_dataset(args.images).samples[args.count :][:FITTED]  # others than the timed
    images = []
    for sample in samples:
        with sample.open() as image:
            images.append(prepare(image)[0])
    return images


def resident_mb(field: str) -> float:
    """VmHWM, the most this process ever held, or VmRSS, what it holds."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 2**10
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure_memory(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    image = squares(args, args.sizes[0])[0]
    before = resident_mb("VmRSS")
    light = args.way in ("onnxruntime", "openvino", "int8")  # they hold their own weights
    way = WAYS[args.way](P3Net.__new__(P3Net) if light else build(args), folder)
    for _ in range(2):
        way(image)
    return {"peak_mb": resident_mb("VmHWM") - before}


def measure_time(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    size = args.sizes[0]
    images = squares(args, size)
    network = build(args)
    base, way = plainly(network, folder), WAYS[args.way](network, folder)
    counts = [[float(run(image).double().sum()) for image in images] for run in (base, way)]
    best = [float("inf"), float("inf")]
    for repeat in range(args.repeats):
        for i, run in enumerate((base, way)):
            best[i] = min(best[i], seconds(run, images[repeat % len(images)]))
    flops = 2 * cost(lambda: P3Net(network.architecture), (size, size)).multiply_adds
    return {
        "seconds": best[1],
        "ratio": best[0] / best[1],
        "difference": sum(abs(a - b) for a, b in zip(*counts, strict=True)) / sum(counts[0]),
        "share": flops / best[1] / matrix_rate(),
    }


def seconds(run: Way, image: Tensor) -> float:
    start = time.perf_counter()
    run(image)
    return time.perf_counter() - start


def matrix_rate(side: int = 2048) -> float:
    """Multiplications and additions a second of `torch.mm`, the best of five."""
    a, b = torch.rand(side, side), torch.rand(side, side)
    return 2 * side**3 / min(seconds(lambda x: x @ b, a) for _ in range(5))


# --- the table ---------------------------------------------------------------------------------


def child(
    task: str, way: str, size: int, args: argparse.Namespace, folder: Path
) -> dict[str, float]:
    words = [sys.executable, __file__, "--task", task, "--way", way, "--folder", str(folder)]
    words += ["--sizes", str(size), "--backbone", args.backbone, "--images", args.images]
    words += ["--threads", str(args.threads), "--repeats", str(args.repeats)]
    words += ["--count", str(args.count), "--only", *args.only]
    for option in ("weights", "model"):
        words += [f"--{option}", getattr(args, option)] if getattr(args, option) else []
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode or task == "files":
        sys.stderr.write(done.stderr if task == "files" else done.stderr[-400:])
    figures: dict[str, float] = json.loads(done.stdout or "{}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[384, 1024], help="sides in px")
    parser.add_argument("--backbone", choices=("vgg19", "lite0", "small"), default="vgg19")
    parser.add_argument("--weights", help="a backbone's weights (.pth or .safetensors)")
    parser.add_argument("--model", help="a trained P³Net instead of a random one")
    parser.add_argument("--images", default="synthetic:0", help="a dataset or a folder")
    parser.add_argument("--count", type=int, default=3, help="how many images")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--task", choices=("files", "memory", "time"), help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        torch.set_num_threads(args.threads)
        warnings.simplefilter("ignore")
        with torch.inference_mode(args.task != "files"):
            task = {"files": make_files, "memory": measure_memory, "time": measure_time}[args.task]
            print(json.dumps(task(args, args.folder)))
        return
    what = args.model or f"{args.backbone}, {args.weights or 'random weights'}"
    print(f"{what}; {args.images}; {args.threads} threads, best of {args.repeats}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if {"onnxruntime", "openvino", "int8"} & set(args.only):
            child("files", "plain", args.sizes[0], args, folder)
        for size in args.sizes:
            heads = ("ratio", "time", "peak", "count off", "of torch.mm")
            print(f"{size}²".ljust(16) + "".join(f"{head:>13s}" for head in heads))
            for way in args.only:
                time_of = child("time", way, size, args, folder)
                if not time_of:
                    print(f"{way:16s}   could not run, see above", flush=True)
                    continue
                peak = child("memory", way, size, args, folder).get("peak_mb", float("nan"))
                print(
                    f"{way:16s}{time_of['ratio']:12.2f}×{time_of['seconds'] * 1e3:10.0f} ms"
                    f"{peak:10.0f} MB{time_of['difference']:13.1e}{time_of['share']:13.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
