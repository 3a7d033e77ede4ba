"""Counting one image, by every way there is, beside plain eager torch.

    python benchmarks/inference.py [--sizes 384 1024] [--backbone vgg19] [--threads 2]
        [--weights FILE | --model MODEL] [--images DATA] [--only default openvino]

Plain is one image at a time through the same network with `nn.Conv2d` in contiguous format; its
time is 1. Every way has a process of its own. First it runs alone: the peak is the most the
process held, less what it held after its imports. Then it runs in turn with plain, and the best
times are compared. The difference in count is relative, over the images timed. The last column is
the network's multiply-adds, counted for direct convolution, over the time, as a share of the rate
at which `torch.mm` multiplies large matrices in the same process; Winograd does fewer, so it may
pass 100 %.

Without weights the network is random: times hold, differences in count say little. Images
are a dataset or a folder; rendered scenes if none are given.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from p3net import checkpoint, export
from p3net.counting import Counter
from p3net.data.catalogue import open_dataset
from p3net.data.transforms import to_float
from p3net.errors import InputError
from p3net.network.cost import cost
from p3net.network.p3net import Architecture, P3Net
from p3net.network.weights import load_backbone
from p3net.network.winograd import Conv3x3
from p3net.runtimes import Exported

Way = Callable[[Tensor], Tensor]
"""Images to densities."""


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


# --- ways --------------------------------------------------------------------------------------


def plain_network(args: argparse.Namespace) -> P3Net:
    """The network with torch's own convolutions."""
    plain = build(args)
    for parent in list(plain.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, Conv3x3):
                other = nn.Conv2d(module.in_channels, module.out_channels, 3, padding=1)
                other.load_state_dict(module.state_dict())
                setattr(parent, name, other)
    return plain.eval()


def plainly(args: argparse.Namespace) -> Way:
    plain = plain_network(args)
    return lambda images: plain(images).density


def by_default(args: argparse.Namespace) -> Way:
    network = build(args)
    return lambda images: network(images).density


def channels_last(args: argparse.Namespace) -> Way:
    plain = plain_network(args).to(memory_format=torch.channels_last)
    return lambda images: plain(images.to(memory_format=torch.channels_last)).density


def compiled(args: argparse.Namespace) -> Way:
    made = torch.compile(plain_network(args))
    return lambda images: made(images).density


def exported(name: str, runtime: str) -> Callable[[argparse.Namespace], Way]:
    def way(args: argparse.Namespace) -> Way:
        network = Exported(args.folder / name, runtime)
        return lambda images: network(images).density

    return way


WAYS: dict[str, Callable[[argparse.Namespace], Way]] = {
    "plain": plainly,
    "default": by_default,
    "channels-last": channels_last,
    "torch.compile": compiled,
    "onnxruntime": exported("model.onnx", "onnxruntime"),
    "openvino": exported("model.onnx", "openvino"),
}


# --- what the processes do ---------------------------------------------------------------------


def make_onnx(args: argparse.Namespace) -> dict[str, float]:
    return {"parity": export.export(Counter(build(args)), args.folder / "model.onnx").worst}


def measure(args: argparse.Namespace) -> dict[str, float]:
    (size,) = args.sizes
    images = squares(args, size)
    before = resident_mb("VmRSS")
    way = WAYS[args.way](args)
    for _ in range(2):  # the first run compiles, packs weights and fills caches
        way(images[0])
    peak = resident_mb("VmHWM") - before
    runs = [way]
    if args.way != "plain":
        runs.insert(0, plainly(args))
        runs[0](images[0])
    best, apart, total = [float("inf")] * len(runs), 0.0, 0.0
    end = time.perf_counter() + args.seconds
    for done, image in enumerate(cycle(images)):
        if done >= args.repeats or (done >= 2 and time.perf_counter() > end):
            break
        counts = []
        for i, run in enumerate(runs):
            start = time.perf_counter()
            density = run(image)
            best[i] = min(best[i], time.perf_counter() - start)
            counts.append(float(density.double().sum()))
        apart, total = apart + abs(counts[-1] - counts[0]), total + counts[0]
    architecture = build(args).architecture
    flops = 2 * cost(lambda: P3Net(architecture), (size, size)).multiply_adds
    return {
        "seconds": best[-1],
        "ratio": best[0] / best[-1],
        "peak_mb": peak,
        "difference": apart / total,
        "share": flops / best[-1] / matrix_rate(),
    }


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


def resident_mb(field: str) -> float:
    """VmHWM, the most this process ever held, or VmRSS, what it holds."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 2**10
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def matrix_rate(side: int = 2048) -> float:
    """Multiplications and additions a second of `torch.mm`, the best of five."""
    a, b = torch.rand(side, side), torch.rand(side, side)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


TASKS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "onnx": make_onnx,
    "measure": measure,
}


def work(args: argparse.Namespace) -> None:
    """A task in this process; its figures, or why there are none, as JSON."""
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    try:
        with torch.inference_mode(args.task == "measure"):
            print(json.dumps(TASKS[args.task](args)))
    except InputError as error:
        print(json.dumps({"error": str(error)}))


# --- the table ---------------------------------------------------------------------------------


def child(task: str, way: str, size: int, folder: Path) -> dict[str, Any]:
    """This command again for one task; of an option given twice the last one counts."""
    words = [*sys.argv, "--task", task, "--way", way, "--folder", str(folder), "--sizes", str(size)]
    done = subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True)
    try:
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        return {"error": last[0]}
    return figures


def row(way: str, size: int, folder: Path, failed: dict[str, Any]) -> str:
    found = failed if "error" in failed else child("measure", way, size, folder)
    if "error" in found:
        return f"{way:16s}   {found['error']}"
    return (
        f"{way:16s}{found['ratio']:12.2f}×{found['seconds'] * 1e3:10.0f} ms"
        f"{found['peak_mb']:10.0f} MB{found['difference']:13.1e}{found['share']:13.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[384, 1024], help="sides in px")
    parser.add_argument("--backbone", choices=("vgg19", "lite0", "small"), default="vgg19")
    parser.add_argument("--weights", help="a backbone's weights (.pth or .safetensors)")
    parser.add_argument("--model", help="a trained P³Net instead of a random one")
    parser.add_argument("--images", default="synthetic:0", help="a dataset or a folder")
    parser.add_argument("--count", type=int, default=3, help="how many images")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="of the timing, at most")
    parser.add_argument("--seconds", type=float, default=12, help="after which it is not repeated")
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--task", choices=tuple(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        work(args)
        return
    what = args.model or f"{args.backbone}, {args.weights or 'random weights'}"
    print(f"{what}; {args.images}; {args.threads} threads")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files: dict[str, dict[str, Any]] = {}
        if {"onnxruntime", "openvino"} & set(args.only):
            files["onnxruntime"] = files["openvino"] = child("onnx", "", 0, folder)
        for size in args.sizes:
            heads = ("ratio", "time", "peak", "count off", "of torch.mm")
            print(f"{size}²".ljust(16) + "".join(f"{head:>13s}" for head in heads), flush=True)
            for way in args.only:
                print(row(way, size, folder, files.get(way, {})), flush=True)


if __name__ == "__main__":
    main()
