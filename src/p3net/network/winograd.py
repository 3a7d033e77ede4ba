"""3×3 convolutions on CPUs by Winograd's minimal filtering, F(4×4, 3×3), in plain torch.

A tile of 4×4 outputs Y needs the 6×6 inputs X around it. Direct convolution with a filter w
takes 144 multiplications for it; the minimal filtering equation takes 36,

    Y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ X B)] A,

by evaluating the polynomials behind w and X at 0, ±1, ±2 and ∞, multiplying the values and
interpolating (Lavin and Gray, 2016, arXiv:1509.09308). With

         4  0 -5  0  1  0          1/4     0    0          1  1  1  1  1  0
         0 -4 -4  1  1  0         -1/6  -1/6 -1/6          0  1 -1  2 -2  0
    Bᵀ = 0  4 -4 -1  1  0     G = -1/6   1/6 -1/6     Aᵀ = 0  1  1  4  4  0
         0 -2 -1  2  1  0         1/24  1/12  1/6          0  1 -1  8 -8  1
         0  2 -1 -2  1  0         1/24 -1/12  1/6
         0  4  0 -5  0  1            0     0    1

summing over input channels turns ⊙ into 36 matrix products [T×C]·[C×K], one for each of the
6×6 positions, over all T tiles at once. They are a quarter of the direct arithmetic.

The forward pass is linear in X and in w, so its gradients are its transposes, and use the
same matrices: with dM = A dY Aᵀ for the 6×6 values of each tile,

    dX = B (dM · U) Bᵀ, overlapping tiles added,    dw = Gᵀ (dMᵀ · V) G.

Position (1, 1) evaluates at the point 1, where Aᵀ has a column of ones: a bias added there
reaches all 16 outputs, and dM there is its gradient.

Everything else is about memory. Work goes in strips of some 256 tiles, few enough for their
values to stay in the cache and enough for the products to be fast, in buffers that all strips
and calls share; that also bounds the memory of large images. Channels come last, so that every
transform is a small matrix times long rows, or sums of contiguous channels. ReLU and pooling
act on a strip before it leaves the cache. The backward pass transforms X and w again:
V would take 2.25 times the activations.

Shapes: N images of H×W; C channels in, K out; R tile rows of S tiles; T = N·R·S tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import ceil, prod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

STRIP_TILES = 256  # to transform together; at least one row of them

_BT = ((4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0),
       (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1))  # fmt: skip
_G_BY_24 = ((6, 0, 0), (-4, -4, -4), (-4, 4, -4), (1, 2, 4), (1, -2, 4), (0, 0, 24))
_AT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))

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


def _new_map(like: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    """An uninitialised N×C×H×W, channels last.

    NumPy asks the system for huge pages, which are four times as quick to touch; torch does not.
    """
    size, kind = n * c * h * w, torch.empty(0, dtype=like.dtype).numpy().dtype
    memory = np.empty(size + 64 // kind.itemsize, kind)
    start = -memory.ctypes.data % 64 // kind.itemsize  # a cache line, as torch aligns to
    last = memory[start : start + size].reshape(n, h, w, c)
    return torch.from_numpy(last.transpose(0, 3, 1, 2))  # not a view to autograd


def _channels_last(x: Tensor) -> Tensor:
    """N×C×H×W as a contiguous N×H×W×C, without a copy where it lies so."""
    return x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)


def _strips(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Images and tile rows of x N×H×W×… to take together."""
    images, height, width = x.shape[:3]
    tile_rows = ceil(height / 4)
    fit = STRIP_TILES // ceil(width / 4)
    many = max(min(fit // tile_rows, images), 1)
    rows = max(min(fit // many, tile_rows), 1)
    rows = ceil(tile_rows / ceil(tile_rows / rows))  # strips of like height
    for image in range(0, images, many):
        for row in range(0, tile_rows, rows):
            yield slice(image, min(image + many, images)), slice(row, min(row + rows, tile_rows))


def _tiles(x: Tensor, edge: int = 4) -> Tensor:
    """A view of N×H×W×… as tiles: edge×edge×N×R×S×…."""
    n, height, width, c = x.shape
    shape = (n, height // edge, edge, width // edge, edge, c)
    return x.view(shape).permute(2, 4, 0, 1, 3, 5)


def _sandwich(matrix: Tensor, x: Tensor, out: str) -> Tensor:
    """P x Pᵀ over the first two axes, for a matrix P b×a: a×a×… to b×b×…, in a buffer."""
    b, a = matrix.shape
    half = _buffer("half", x, b, a, x[0, 0].numel())
    torch.mm(matrix, x.view(a, -1), out=half.view(b, -1))
    result = _buffer(out, x, b, b, *x.shape[2:])
    torch.bmm(matrix.expand(b, b, a), half, out=result.view(b, b, -1))
    return result


def _bt(x: Tensor, v: Tensor) -> None:
    """Set v = Bᵀ x along the first axis: 6×… to 6×…."""
    torch.sub(x[4], x[2], alpha=4, out=v[2])
    torch.sub(x[3], x[1], alpha=4, out=v[0])
    torch.add(v[2], v[0], out=v[1])
    v[2].sub_(v[0])
    torch.sub(x[4], x[2], out=v[4])
    torch.sub(x[3], x[1], out=v[0])
    torch.add(v[4], v[0], alpha=2, out=v[3])
    v[4].sub_(v[0], alpha=2)
    torch.sub(x[5], x[3], out=v[5]).sub_(v[0], alpha=4)
    torch.sub(x[4], x[2], alpha=5, out=v[0]).add_(x[0], alpha=4)


def _transform_input(x: Tensor, images: slice, rows: slice) -> Tensor:
    """V = Bᵀ X B of a strip of x N×H×W×C: 6×6×N×R×S×C.

    Bᵀ times whole rows of the image, read in place; then sums along them.
    """
    _, height, width, c = x.shape
    n, r, s = images.stop - images.start, rows.stop - rows.start, ceil(width / 4)
    half = _buffer("half", x, n, r, 6, 4 * s + 2, c)
    half[..., 0, :].zero_()
    half[..., width + 1 :, :].zero_()
    inside, lines, bt = (
        half[..., 1 : width + 1, :].flatten(3),
        x[images].flatten(2),
        _matrix(_BT, x),
    )
    for j in range(r):
        top = 4 * (rows.start + j) - 1
        first, last = max(top, 0), min(top + 6, height)
        for i in range(n):
            torch.mm(bt[:, first - top : last - top], lines[i, first:last], out=inside[i, j])
    v = _buffer("v", x, 6, 6, n, r, s, c)
    _bt(half.unfold(3, 6, 4).permute(5, 2, 0, 1, 3, 4), v.transpose(0, 1))
    return v


def _matrix(rows: tuple[tuple[int, ...], ...], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=like.dtype)


def _transform_output(m: Tensor, *, pool: bool) -> Tensor:
    """Y = Aᵀ M A of 6×6×N×R×S×K: tiles 4×4×N×R×S×K, or pooled to 2×2×…."""
    y = _sandwich(_matrix(_AT, m), m, "v")
    if pool:
        y = torch.maximum(y[::2], y[1::2], out=_buffer("half", m, 2, 4, *m.shape[2:]))
        y = torch.maximum(y[:, ::2], y[:, 1::2], out=_buffer("v", m, 2, 2, *m.shape[2:]))
    return y


def _store(tiles: Tensor, y: Tensor, images: slice, rows: slice, *, relu: bool) -> None:
    """Put a strip's tiles into y N×H×W×K."""
    edge, _, n, r, s, k = tiles.shape
    strip = y[images, edge * rows.start : edge * rows.stop]
    whole = strip.shape[1:3] == (edge * r, edge * s)
    out = strip if whole else _buffer("half", y, n, edge * r, edge * s, k)
    if relu:
        torch.clamp_min(tiles, 0, out=_tiles(out, edge))
    else:
        _tiles(out, edge).copy_(tiles)
    if not whole:
        strip.copy_(out[:, : strip.shape[1], : strip.shape[2]])


def _transform_output_gradient(dy: Tensor, y: Tensor | None, images: slice, rows: slice) -> Tensor:
    """A strip's dM = A dY Aᵀ from dy N×H×W×K, masked where y, the ReLU's result if any, is 0."""
    n, r, s = images.stop - images.start, rows.stop - rows.start, ceil(dy.shape[2] / 4)
    parts = [t[images, 4 * rows.start : 4 * rows.stop] for t in (dy, y) if t is not None]
    below, right = 4 * r - parts[0].shape[1], 4 * s - parts[0].shape[2]
    if below or right:
        parts = [F.pad(part, (0, 0, 0, right, 0, below)) for part in parts]
    tiles = _buffer("v", dy, 4, 4, n, r, s, dy.shape[3])
    if y is None:
        tiles.copy_(_tiles(parts[0]))
    else:
        mask = torch.ops.aten.threshold_backward.grad_input
        mask(_tiles(parts[0]), _tiles(parts[1]), 0, grad_input=tiles)
    return _sandwich(_matrix(_AT, dy).T, tiles, "m")


def _transform_input_gradient(dv: Tensor) -> Tensor:
    """A strip's dX = B dV Bᵀ of 6×6×N×R×S×C: N×(4R+2)×(4S+2)×C, a margin of one around."""
    _, _, n, r, s, c = dv.shape
    windows = _sandwich(_matrix(_BT, dv).T, dv, "m")
    pixels = _buffer("half", dv, n, 4 * r + 2, 4 * s + 2, c)
    pixels[:, 4 * r :].zero_()
    pixels[:, :, 4 * s :].zero_()
    out = pixels.unfold(1, 6, 4).unfold(2, 6, 4).permute(4, 5, 0, 1, 2, 3)
    old, new = slice(0, 4), slice(4, 6)
    out[old, old].copy_(windows[old, old])
    for a, b in ((old, new), (new, old), (new, new)):  # what neighbouring tiles share
        out[a, b].add_(windows[a, b])
    return pixels


def _g_twice(like: Tensor) -> Tensor:
    """G ⊗ G, 36×9: applies G to both axes of a 3×3 filter at once."""
    g = _matrix(_G_BY_24, like) / 24
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


def _convolve(
    x: Tensor, u: Tensor, bias: Tensor | None, *, relu: bool = False, pool: bool = False
) -> Tensor:
    """The convolution of x N×C×H×W by a transformed weight 36×K×C; no gradients."""
    _, k, c = u.shape
    size_hw = [size // 2 if pool else size for size in x.shape[2:]]
    y = _new_map(x, len(x), k, *size_hw)
    x = _channels_last(x)
    for images, rows in _strips(x):
        v = _transform_input(x, images, rows)
        m = _buffer("m", x, *v.shape[:-1], k)
        torch.bmm(v.view(36, -1, c), u.transpose(1, 2), out=m.view(36, -1, k))
        if bias is not None:
            m[1, 1].add_(bias)
        tiles = _transform_output(m, pool=pool)
        _store(tiles, y.permute(0, 2, 3, 1), images, rows, relu=relu)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: Any) -> Tensor:
        y = _convolve(x, _transform_weight(weight), bias, relu=relu)
        ctx.save_for_backward(x, weight, y if relu else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, y = ctx.saved_tensors
        need_dx, need_dw, need_db, _ = ctx.needs_input_grad
        k, c = weight.shape[:2]
        dx = _new_map(x, *x.shape) if need_dx else None
        u = _transform_weight(weight) if need_dx else None
        du = _buffer("du", x, 36, k, c) if need_dw else None
        db = dy.new_zeros(k) if need_db else None
        x, dy = _channels_last(x), _channels_last(dy)
        y = None if y is None else _channels_last(y)
        beta = 0  # the first strip overwrites dU, the others add to it
        for images, rows in _strips(x):
            dm = _transform_output_gradient(dy, y, images, rows)
            dm_36 = dm.view(36, -1, k)
            if db is not None:
                db += dm_36[7].sum(0)  # position (1, 1)
            if du is not None:
                v = _transform_input(x, images, rows)
                du.baddbmm_(dm_36.transpose(1, 2), v.view(36, -1, c), beta=beta)
                beta = 1
            if dx is not None and u is not None:
                dv = _buffer("v", x, *dm.shape[:-1], c)
                torch.bmm(dm_36, u, out=dv.view(36, -1, c))
                _store_gradient(_transform_input_gradient(dv), dx.permute(0, 2, 3, 1), images, rows)
        dw = None if du is None else _transform_weight_gradient(du)
        return dx, dw, db, None


def winograd_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False
) -> Tensor:
    """What `F.conv2d(x, weight, bias, padding=1)` gives, for 3×3 weights on the CPU.

    With `relu`, its positive part. Differentiable once, in every argument that asks for it.
    x is N×C×H×W in any memory order, best channels last; the result N×K×H×W is channels last.
    """
    if weight.shape[1:] != (x.shape[1], 3, 3) or x.numel() == 0 or x.device.type != "cpu":
        raise ValueError(
            f"expected x N×C×H×W on the CPU, not empty, and a weight K×C×3×3; "
            f"got {tuple(x.shape)} on {x.device} and {tuple(weight.shape)}"
        )
    y: Tensor = _Convolution.apply(x, weight, bias, relu)  # type: ignore[no-untyped-call]  # torch's
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
    need 64 channels on either side to be worth their while; transforming the weight needs 32
    tiles (two 16×16 maps); and a narrow layer needs more tiles than a wide one, about 128 at 64
    channels, to outweigh the calls. So VGG's first layer never qualifies, and its last block
    does from two crops of 256 px on.
    """
    k, c, *kernel = weight.shape
    if [c, *kernel] != [x.shape[1], 3, 3] or weight.dtype != x.dtype or not _eager(x):
        return False
    tiles, narrow = len(x) * ceil(x.shape[2] / 4) * ceil(x.shape[3] / 4), min(c, k)
    return narrow >= 64 and tiles >= 32 and tiles * narrow >= 8192


class Conv3x3(nn.Conv2d):
    """A 3×3 convolution of stride 1 and padding 1, by whichever way is faster.

    Parameters and state-dict keys are those of `nn.Conv2d`. Other devices and dtypes, and
    every kind of tracing, get the ordinary convolution. In eval mode the transformed weight,
    four times the size of the weight, is kept for the next image until the weight changes.
    """

    _kept: tuple[tuple[int, int], Tensor, Tensor] | None = None
    """Address and version of the weight, the weight (so that its address stays its own), U."""

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1, bias=bias)

    def forward(self, x: Tensor, *, relu: bool = False, pool: bool = False) -> Tensor:
        """N×C×H×W to N×K×H×W; then optionally ReLU, then 2×2 max-pooling: N×K×⌊H/2⌋×⌊W/2⌋."""
        if pays(x, self.weight):
            if not torch.is_grad_enabled():
                u = _transform_weight(self.weight) if self.training else self._transformed_weight()
                return _convolve(x, u, self.bias, relu=relu, pool=pool)
            x = winograd_conv2d(x, self.weight, self.bias, relu=relu)
        else:
            if x.shape[1] <= 4 and _eager(x):  # an image: twice as fast, and fit for what follows
                x = x.contiguous(memory_format=torch.channels_last)
            x = F.conv2d(x, self.weight, self.bias, padding=1)
            if relu:
                x = F.relu(x, inplace=True)
        return F.max_pool2d(x, 2) if pool else x

    def _transformed_weight(self) -> Tensor:
        weight = self.weight.detach()  # shares memory and version
        if weight.is_inference():  # has no version
            return _transform_weight(weight)
        now = (weight.data_ptr(), weight._version)  # noqa: SLF001 (there is no public one)
        if self._kept is None or self._kept[0] != now:
            self._kept = now, weight, _transform_weight(weight).clone()
        return self._kept[2]

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 (as torch has it)
        """As every module's. Forgets the transformed weight: fused optimisers tell no version."""
        self._kept = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles go without the transformed weight."""
        return {name: value for name, value in vars(self).items() if name != "_kept"}
