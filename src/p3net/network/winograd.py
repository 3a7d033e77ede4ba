"""3×3 convolutions on CPUs by Winograd's minimal filtering, F(4×4, 3×3), in plain torch.

A tile of 4×4 outputs Y needs the 6×6 inputs X around it. Direct convolution with a filter w
takes 144 multiplications for it; the minimal filtering equation takes 36,

    Y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ X B)] A,

by evaluating the polynomials behind w and X at 0, ±1, ±2 and ∞, multiplying the values and
interpolating (Lavin and Gray, 2016, arXiv:1509.09308). With

         4  0 -5  0  1  0          1/4    0    0           1  1  1  1  1  0
         0 -4 -4  1  1  0         -1/6 -1/6 -1/6           0  1 -1  2 -2  0
    Bᵀ = 0 -4  4  1 -1  0     G =  1/6 -1/6  1/6      Aᵀ = 0  1  1  4  4  0
         0 -2 -1  2  1  0         1/24 1/12  1/6           0  1 -1  8 -8  1
         0 -2  1  2 -1  0        -1/24 1/12 -1/6
         0  4  0 -5  0  1            0    0    1

(rows 2 and 4 of Bᵀ and G carry a common sign, which cancels and lets the sums run in place)
summing over input channels turns ⊙ into 36 matrix products [T×C]·[C×K], one for each of the
6×6 positions, over all T tiles at once. They are a quarter of the direct arithmetic.

The forward pass is linear in X and in w, so its gradients are its transposes, and use the
same matrices: with dM = A dY Aᵀ for the 6×6 values of each tile,

    dX = B (dM · U) Bᵀ, overlapping tiles added,    dw = Gᵀ (dMᵀ · V) G.

Everything else is about memory. Channels come last, so that every sum runs over contiguous
channels and reads its tiles in place, by strides. Work goes in strips of tile rows whose
values stay in the cache, in buffers that all strips and calls share; that also bounds the
memory of large images. The backward pass transforms X and w again: V would take
2.25 times the activations, and U is sooner computed than fresh memory for it first touched.

Shapes: N images of H×W; C channels in, K out; R tile rows of S tiles; T = N·R·S tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

STRIP_BYTES = 16 << 20
"""Size of the transformed tiles V and M of one strip (at least one row of tiles)."""

_G_BY_24 = ((6, 0, 0), (-4, -4, -4), (4, -4, 4), (1, 2, 4), (-1, 2, -4), (0, 0, 24))


def _bt(x: Tensor, v: Tensor) -> None:
    """Set v = Bᵀ x along the first axis: 6×… to 6×…."""
    torch.sub(x[4:6], x[2:4], alpha=5, out=v[::5]).add_(x[0:2], alpha=4)
    torch.sub(x[3:5], x[1:3], alpha=4, out=v[1:3])
    torch.sub(x[3:5], x[1:3], out=v[3:5])
    v[1].add_(v[2])
    torch.sub(v[1], v[2], alpha=2, out=v[2])
    torch.add(v[4], v[3], alpha=2, out=v[3])
    torch.sub(v[3], v[4], alpha=2, out=v[4])


def _sums_and_differences(v: Tensor) -> None:
    """Replace (v1, v2) and (v3, v4) by their sums and differences."""
    v[1:5:2].add_(v[2:5:2])
    torch.sub(v[1:5:2], v[2:5:2], alpha=2, out=v[2:5:2])


def _at(m: Tensor, y: Tensor) -> None:
    """Set y = Aᵀ m along the first axis: 6×… to 4×…; m is overwritten."""
    _sums_and_differences(m)
    torch.add(m[0], m[1], out=y[0]).add_(m[3])
    torch.add(m[2], m[4], alpha=2, out=y[1])
    torch.add(m[1], m[3], alpha=4, out=y[2])
    torch.add(m[2], m[4], alpha=8, out=y[3]).add_(m[5])


def _a(y: Tensor, m: Tensor) -> None:
    """Set m = A y along the first axis: 4×… to 6×…."""
    m[::5].copy_(y[::3])
    torch.add(y[0:2], y[2:4], out=m[1:3])
    torch.add(y[0:2], y[2:4], alpha=4, out=m[3:5])
    m[1].add_(m[2])
    torch.sub(m[1], m[2], alpha=2, out=m[2])
    m[3].add_(m[4], alpha=2)
    torch.sub(m[3], m[4], alpha=4, out=m[4])


def _b(v: Tensor, x: Tensor, overlap: Tensor) -> None:
    """Set x = B v along the first axis, four rows, adding the last two to `overlap`; v is lost."""
    _sums_and_differences(v)
    torch.mul(v[0], 4, out=x[0])
    torch.sub(v[5], v[1], out=x[1]).mul_(4).sub_(v[3], alpha=2)
    torch.add(v[4], v[0], alpha=5, out=x[2]).add_(v[2], alpha=4).neg_()
    torch.add(v[1], v[3], alpha=2, out=x[3]).sub_(v[5], alpha=5)
    overlap[0].add_(v[0]).add_(v[2]).add_(v[4])
    overlap[1].add_(v[5])


_memory = threading.local()


def _buffer(name: str, like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory that a thread keeps from call to call.

    Fresh memory costs more to touch for the first time than all the sums of a transform.
    """
    size, key = prod(shape), f"{name}_{like.dtype}"
    buffer: Tensor | None = getattr(_memory, key, None)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(mode=False):  # usable in every mode later
            buffer = torch.empty(size, dtype=like.dtype, device="cpu")
        setattr(_memory, key, buffer)
    return buffer[:size].view(shape)


def _strips(x: Tensor, c: int, k: int) -> Iterator[tuple[slice, slice]]:
    """Images and tile rows of x N×H×W×… to take together.

    As many as STRIP_BYTES hold, or as the transformed weight takes, which every strip reads.
    """
    channels, strip_bytes = c + k, max(STRIP_BYTES, 36 * c * k * x.element_size())
    images, height, width = x.shape[:3]
    tile_rows = ceil(height / 4)
    fit = strip_bytes // (36 * ceil(width / 4) * channels * x.element_size())
    many = max(min(fit // tile_rows, images), 1)
    rows = max(min(fit // many, tile_rows), 1)
    for image in range(0, images, many):
        for row in range(0, tile_rows, rows):
            yield slice(image, min(image + many, images)), slice(row, min(row + rows, tile_rows))


def _windows(x: Tensor, axis: int, size: int) -> Tensor:
    """A view of every window of `size` along the axis, four apart, its elements first."""
    return x.unfold(axis, size, 4).movedim(-1, 0)


def _load(x: Tensor, images: slice, rows: slice, margin: int) -> Tensor:
    """The pixels N×H×W×C of whole tiles and a margin around them, zero beyond the image."""
    _, height, width, channels = x.shape
    top, bottom = 4 * rows.start - margin, 4 * rows.stop + margin
    first, last = max(top, 0), min(bottom, height)
    count = images.stop - images.start
    out = _buffer("pixels", x, count, bottom - top, 4 * ceil(width / 4) + 2 * margin, channels)
    out[:, : first - top].zero_()
    out[:, last - top :].zero_()
    out[:, :, :margin].zero_()
    out[:, :, margin + width :].zero_()
    out[:, first - top : last - top, margin : margin + width].copy_(x[images, first:last])
    return out


def _transform_input(x: Tensor, images: slice, rows: slice) -> Tensor:
    """V = Bᵀ X B of a strip of x N×H×W×C: 6×6×N×R×S×C."""
    pixels = _load(x, images, rows, 1)
    n, height, width, c = pixels.shape
    r, s = height // 4, width // 4
    half = _buffer("half", x, 6, n, r, width, c)
    v = _buffer("v", x, 6, 6, n, r, s, c)
    _bt(_windows(pixels, 1, 6), half)
    _bt(_windows(half, 3, 6), v.transpose(0, 1))
    return v


def _transform_output(m: Tensor) -> Tensor:
    """Y = Aᵀ M A of 6×6×N×R×S×K: pixels N×4R×4S×K."""
    _, _, n, r, s, k = m.shape
    half = _buffer("half", m, 4, 6, n, r, s, k)
    y = _buffer("pixels", m, n, r, 4, s, 4, k)
    _at(m, half)
    _at(half.transpose(0, 1), y.permute(4, 2, 0, 1, 3, 5))
    return y.view(n, 4 * r, 4 * s, k)


def _transform_output_gradient(dy: Tensor, images: slice, rows: slice) -> Tensor:
    """The transpose of `_transform_output`: dM = A dY Aᵀ of a strip of dy N×H×W×K."""
    pixels = _load(dy, images, rows, 0)
    n, height, width, k = pixels.shape
    r, s = height // 4, width // 4
    half = _buffer("half", dy, 6, n, r, width, k)
    m = _buffer("m", dy, 6, 6, n, r, s, k)
    _a(_windows(pixels, 1, 4), half)
    _a(_windows(half, 3, 4), m.transpose(0, 1))
    return m


def _transform_input_gradient(v: Tensor) -> Tensor:
    """The transpose of `_transform_input`: pixels N×(4R+2)×(4S+2)×C, a margin of one."""
    _, _, n, r, s, c = v.shape
    half = _buffer("half", v, 6, n, r, 4 * s + 2, c)
    pixels = _buffer("pixels", v, n, 4 * r + 2, 4 * s + 2, c)
    half[:, :, :, 4 * s :].zero_()
    pixels[:, 4 * r :].zero_()
    _b(v.transpose(0, 1), _windows(half, 3, 4), _windows(half, 3, 2)[..., 1:, :])
    _b(half, _windows(pixels, 1, 4), _windows(pixels, 1, 2)[:, :, 1:])
    return pixels


def _g_twice(like: Tensor) -> Tensor:
    """G ⊗ G, 36×9: applies G to both axes of a 3×3 filter at once."""
    g = like.new_tensor(_G_BY_24) / 24
    return torch.kron(g, g)


def _transform_weight(weight: Tensor) -> Tensor:
    """U = G w Gᵀ of a weight K×C×3×3: 36×K×C."""
    k, c = weight.shape[:2]
    u = _buffer("u", weight, 36, k, c)
    torch.mm(_g_twice(weight), weight.reshape(k * c, 9).T, out=u.view(36, k * c))
    return u


def _transform_weight_gradient(du: Tensor) -> Tensor:
    """The transpose of `_transform_weight`: dw = Gᵀ dU G."""
    _, k, c = du.shape
    return (_g_twice(du).T @ du.view(36, k * c)).T.reshape(k, c, 3, 3)


def _store_gradient(pixels: Tensor, dx: Tensor, images: slice, rows: slice) -> None:
    """Put a strip's pixels, with their margin, into dx N×H×W×C; strips come from the top."""
    _, height, width, _ = dx.shape
    pixels = pixels[:, :, 1 : width + 1]
    top = 4 * rows.start - 1
    if top < 0:
        shared = 1  # the margin above the image
    else:
        shared = 2  # rows that the strip above has begun
        dx[images, top : top + 2].add_(pixels[:, : min(2, height - top)])
    below = dx[images, top + shared : 4 * rows.stop + 1]
    below.copy_(pixels[:, shared : shared + below.shape[1]])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        k, c = weight.shape[:2]
        size = (len(x), k, *x.shape[2:])  # the result is not a view: a ReLU may overwrite it
        y = torch.empty(size, dtype=x.dtype, memory_format=torch.channels_last)
        x, y_last = x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)
        u = _transform_weight(weight)
        for images, rows in _strips(x, c, k):
            v = _transform_input(x, images, rows)
            m = _buffer("m", x, *v.shape[:-1], k)
            torch.bmm(v.view(36, -1, c), u.transpose(1, 2), out=m.view(36, -1, k))
            out = y_last[images, 4 * rows.start : 4 * rows.stop]
            out.copy_(_transform_output(m)[:, : out.shape[1], : out.shape[2]])
            if bias is not None:
                out.add_(bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad
        k, c = weight.shape[:2]
        dx = torch.empty_like(x, memory_format=torch.channels_last) if need_dx else None
        u = _transform_weight(weight) if need_dx else None
        du = _buffer("du", x, 36, k, c) if need_dw else None
        x, dy = x.permute(0, 2, 3, 1), dy.permute(0, 2, 3, 1)
        beta = 0  # the first strip overwrites dU, the others add to it
        for images, rows in _strips(x, c, k) if need_dx or need_dw else ():
            dm = _transform_output_gradient(dy, images, rows)
            dm_36 = dm.view(36, -1, k)
            if du is not None:
                v = _transform_input(x, images, rows)
                du.baddbmm_(dm_36.transpose(1, 2), v.view(36, -1, c), beta=beta)
                beta = 1
            if dx is not None and u is not None:
                dv = _buffer("v", x, *dm.shape[:-1], c)
                torch.bmm(dm_36, u, out=dv.view(36, -1, c))
                _store_gradient(_transform_input_gradient(dv), dx.permute(0, 2, 3, 1), images, rows)
        dw = None if du is None else _transform_weight_gradient(du)
        return dx, dw, dy.sum((0, 1, 2)) if need_db else None


def winograd_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `F.conv2d(x, weight, bias, padding=1)` gives, for 3×3 weights on the CPU.

    Differentiable once, in every argument that asks for it. x is N×C×H×W in any memory
    order, best channels last; the result N×K×H×W is channels last.
    """
    if weight.shape[1:] != (x.shape[1], 3, 3) or x.numel() == 0 or x.device.type != "cpu":
        raise ValueError(
            f"expected x N×C×H×W on the CPU, not empty, and a weight K×C×3×3; "
            f"got {tuple(x.shape)} on {x.device} and {tuple(weight.shape)}"
        )
    y: Tensor = _Convolution.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch's
    return y


def _eager(x: Tensor) -> bool:
    """Whether x is computed now, in float32 on this CPU: not traced, exported, faked or cast."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.compiler.is_compiling()  # also true inside torch.export
        and not torch.is_autocast_enabled("cpu")
    )


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether `winograd_conv2d` applies and is faster than torch's own convolution.

    Measured layer by layer on one AVX-512 core, forward and backward: the transforms
    need 64 channels on either side to be worth their while; transforming the weight needs 36
    tiles (a 24×24 map); and a narrow layer needs more tiles than a wide one, about 128 at 64
    channels, to outweigh the calls. So VGG's first layer never qualifies, and its last block
    does from crops of 384 px, or four of 256 px, on.
    """
    k, c, *kernel = weight.shape
    if kernel != [3, 3] or weight.dtype != x.dtype or not _eager(x):
        return False
    tiles, narrow = len(x) * ceil(x.shape[2] / 4) * ceil(x.shape[3] / 4), min(c, k)
    return narrow >= 64 and tiles >= 36 and tiles * narrow >= 8192


class Conv3x3(nn.Conv2d):
    """A 3×3 convolution of stride 1 and padding 1, by whichever way is faster.

    Parameters and state-dict keys are those of `nn.Conv2d`. Other devices and dtypes, and
    every kind of tracing, get the ordinary convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """N×C×H×W to N×K×H×W."""
        if pays(x, self.weight):
            return winograd_conv2d(x, self.weight, self.bias)
        if x.shape[1] <= 4 and _eager(x):  # an image: twice as fast, and fit for what follows
            x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, self.weight, self.bias, padding=1)
