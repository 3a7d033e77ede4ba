"""Winograd's convolution beside `nn.Conv2d`, for the layers and the trunk of VGG-19.

    python benchmarks/convolution.py [--size 512] [--batch 1] [--threads 2] [--repeats 5]

Both run in turn in one process and the best times are compared, so that a busy machine
disturbs the ratios least. Ratios above 1 favour Winograd; `nn.Conv2d` gets contiguous input,
as it does in torchvision's VGG. The trunk does ReLU and pooling on the way and, counting, keeps
its transformed weights; single layers do neither. Errors are relative to the largest value.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from p3net.network.vgg import VGG19
from p3net.network.winograd import Conv3x3, pays, winograd_conv2d

LAYERS = (  # channels in and out, stride of the map
    (3, 64, 1),
    (64, 64, 1),
    (64, 128, 2),
    (128, 128, 2),
    (128, 256, 4),
    (256, 256, 4),
    (256, 512, 8),
    (512, 512, 8),
    (512, 512, 16),
)
TRUNK = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512)


def plain_trunk() -> nn.Sequential:
    """VGG-19 without its last pool, of torch's own layers; 0 stands for a pool."""
    layers: list[nn.Module] = []
    channels = 3
    for width in TRUNK:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [plain(channels, width), nn.ReLU(inplace=True)]
            channels = width
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers)


def plain(channels_in: int, channels_out: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1)


def single(convolution: Callable[[int, int], nn.Conv2d], c: int, k: int) -> nn.Conv2d:
    layer = convolution(c, k)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


class Always(Conv3x3):
    """Winograd even where it does not pay, to show where that is."""

    def forward(self, x: Tensor, **_: bool) -> Tensor:
        """N×C×H×W to N×K×H×W."""
        return winograd_conv2d(x, self.weight, self.bias)


def forward(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    x.grad = None
    y = model(x)
    y.backward(torch.ones_like(y))


def compare(
    run: Callable[[nn.Module, Tensor], None],
    base: tuple[nn.Module, Tensor],
    ours: tuple[nn.Module, Tensor],
    repeats: int,
) -> tuple[float, float]:
    """Best time of the base in seconds, and its ratio to ours."""
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        for i, (model, x) in enumerate((base, ours)):
            start = time.perf_counter()
            run(model, x)
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0], best[0] / best[1]


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def line(name: str, base: nn.Module, ours: nn.Module, x: Tensor, repeats: int, note: str) -> None:
    ours.load_state_dict(base.state_dict())
    x_ours = x.detach()
    if x.requires_grad:  # a layer within a network: it gets what the layer before it gives
        x_ours = x_ours.to(memory_format=torch.channels_last).requires_grad_()
    step(base, x)
    step(ours, x_ours)
    with torch.no_grad():
        values = error(ours(x_ours), base(x))
    pairs = zip(ours.parameters(), base.parameters(), strict=True)
    slopes = max(
        error(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None
    )
    seconds, ratio = compare(forward, (base, x), (ours, x_ours), repeats)
    seconds_step, ratio_step = compare(step, (base, x), (ours, x_ours), repeats)
    print(
        f"{name:22s} {seconds * 1e3:8.1f} ms {ratio:6.2f}× {seconds_step * 1e3:9.1f} ms"
        f" {ratio_step:6.2f}×   {values:8.1e} {slopes:8.1e}  {note}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=512, help="side of the image in px")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trunk-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{args.batch} × {args.size}² px, {args.threads} threads, best of {args.repeats}")
    heads = ("forward", "ratio", "+ backward", "ratio", "error", "gradient")
    print(
        " " * 22 + "".join(f"{h:>{w}s}" for h, w in zip(heads, (12, 8, 13, 8, 11, 9), strict=True))
    )
    for c, k, stride in () if args.trunk_only else LAYERS:
        side = args.size // stride
        x = torch.randn(args.batch, c, side, side, requires_grad=c > 3)
        base, ours = single(plain, c, k), single(Always, c, k)
        note = "" if pays(x.detach(), torch.empty(k, c, 3, 3)) else "not used"
        line(f"{c} → {k} at {side}²", base, ours, x, args.repeats, note)
    image = torch.randn(args.batch, 3, args.size, args.size)
    line("trunk", plain_trunk(), VGG19().features.eval(), image, args.repeats, "")


if __name__ == "__main__":
    main()
