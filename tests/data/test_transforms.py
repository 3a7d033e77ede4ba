from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.Image import Transpose

from p3net.data import transforms
from p3net.data.transforms import (
    Augmentation,
    Sizing,
    View,
    apply_to_points,
    apply_view,
    default_backend,
    draw_view,
    prepare,
    to_float,
    whole_view,
)
from p3net.errors import InputError
from p3net.randomness import generator
from p3net.structures import as_points

BACKENDS = ("cv2", "pillow")

# How a camera stores an upright picture under each orientation tag.
STORED = {
    1: None,
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_90,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_270,
}

sizes = st.tuples(st.integers(1, 5000), st.integers(1, 5000))


def stored_image(
    upright: np.ndarray, *, tag: int = 1, kind: str = "JPEG", **options
) -> Image.Image:
    """An undecoded image whose upright pixels are those given, but for compression."""
    image = Image.fromarray(upright)
    if STORED[tag] is not None:
        image = image.transpose(STORED[tag])
    exif = Image.Exif()
    exif[0x0112] = tag
    file = io.BytesIO()
    options = {"quality": 95, **options} if kind == "JPEG" else options
    image.save(file, kind, exif=exif, **options)
    file.seek(0)
    return Image.open(file)


def texture(height: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return smooth.copy()


def dotted(height: int, width: int, points: np.ndarray, sigma: float) -> np.ndarray:
    """White blobs on black; a pixel's centre is half a pixel from its corner."""
    y, x = np.mgrid[:height, :width] + 0.5
    picture = np.zeros((height, width))
    for px, py in points:
        top, left = max(0, int(py - 6 * sigma)), max(0, int(px - 6 * sigma))
        part = np.s_[top : int(py + 6 * sigma), left : int(px + 6 * sigma)]
        picture[part] += np.exp(-((x[part] - px) ** 2 + (y[part] - py) ** 2) / (2 * sigma**2))
    return np.repeat((255 * picture.clip(0, 1)).astype(np.uint8)[..., None], 3, axis=2)


def blob_centre(crop: np.ndarray, near_xy: np.ndarray, radius: int) -> np.ndarray:
    left, top = (max(0, int(value) - radius) for value in near_xy)
    part = crop[top : int(near_xy[1]) + radius + 1, left : int(near_xy[0]) + radius + 1, 0]
    weight = np.where(part > 40, part, 0).astype(float)
    y, x = np.mgrid[: part.shape[0], : part.shape[1]] + 0.5
    return (
        np.array(
            [(weight * x).sum() + left * weight.sum(), (weight * y).sum() + top * weight.sum()]
        )
        / weight.sum()
    )


# Image size, sigma of the blobs and settings: enlarging, near 1, shrinking inside the decoder.
SCENES = {
    "enlarged": ((150, 190), 2.0, Augmentation(scale_range=(1.5, 2.5), crop=160)),
    "alike": ((301, 403), 3.0, Augmentation(scale_range=(0.7, 1.3), crop=160)),
    "shrunk": ((800, 1208), 9.0, Augmentation(scale_range=(0.2, 0.45), crop=160)),
    "oversized": (
        (900, 1204),
        9.0,
        Augmentation(scale_range=(0.7, 1.3), crop=160, sizing=Sizing(300)),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tag", STORED)
@pytest.mark.parametrize("scene", SCENES)
def test_dots_are_found_where_the_points_went(scene: str, tag: int, backend: str) -> None:
    (height, width), sigma, augmentation = SCENES[scene]
    rng = np.random.default_rng(tag)
    grid = np.stack(np.meshgrid(np.arange(1, 6), np.arange(1, 5)), -1).reshape(-1, 2)
    step = np.array([width / 6, height / 5])
    points = as_points(grid * step + rng.uniform(-0.15, 0.15, (20, 2)) * step)
    upright = dotted(height, width, points, sigma)
    found = 0
    for flip in (0.0, 1.0):
        image = stored_image(upright, tag=tag)
        settled = Augmentation(
            augmentation.scale_range, flip, augmentation.crop, 0.0, augmentation.sizing
        )
        view = draw_view((height, width), settled, rng)
        crop = apply_view(image, view, backend=backend)
        assert crop.shape == (160, 160, 3)
        radius = int(3.5 * sigma * view.scale_xy[0])
        moved = apply_to_points(points, view)
        for point in moved:
            if (point > radius + 1).all() and (point < 159 - radius).all():
                assert np.abs(blob_centre(crop, point, radius) - point).max() < 0.25
                found += 1
    assert found > 0


@pytest.mark.parametrize("tag", STORED)
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 2},
        {"subsampling": 2, "progressive": True},
        {"subsampling": 1, "restart_marker_rows": 1},
        {"mode": "L"},
        {"kind": "PNG"},
    ],
    ids=str,
)
def test_stopping_early_changes_no_pixel(tag: int, options: dict) -> None:
    upright = texture(210, 333)
    if options == {"mode": "L"}:
        upright, options = upright[..., 0], {}
    complete = ImageOps.exif_transpose(stored_image(upright, tag=tag, **options)).convert("RGB")
    assert complete.size == (333, 210)
    for box in [(0, 0, 64, 64), (269, 146, 333, 210), (101, 33, 165, 97)]:
        crop = apply_view(stored_image(upright, tag=tag, **options), View(box, (64, 64)))
        np.testing.assert_array_equal(crop, np.asarray(complete.crop(box)))


def test_only_the_rows_needed_are_decoded() -> None:
    upright = texture(400, 300)
    content = bytearray(stored_image(upright).fp.getvalue())
    content[int(len(content) * 0.7) :] = b""  # the lower part of the picture is missing
    top = apply_view(Image.open(io.BytesIO(content)), View((0, 0, 64, 64), (64, 64)))
    assert np.abs(top.astype(int) - upright[:64, :64]).mean() < 6
    with pytest.raises(InputError, match="truncated or damaged"):
        apply_view(Image.open(io.BytesIO(content)), View((0, 336, 64, 400), (64, 64)))


@pytest.mark.parametrize(("scan_components", "cut"), [(3, True), (1, False)])
def test_a_scan_for_each_colour_is_left_whole(scan_components: int, cut: bool) -> None:
    """Headers written by hand: a frame of three components, 400 rows, then its first scan."""
    frame = bytes.fromhex("ffc0 0011 08 0190 012c 03 011100 021100 031100")
    scan = bytes([0xFF, 0xDA, 0, 6 + 2 * scan_components, scan_components]) + bytes(20)
    jpeg = b"\xff\xd8" + frame + scan
    expected = jpeg.replace(bytes.fromhex("0190"), bytes.fromhex("0064")) if cut else jpeg
    assert transforms._first_rows(jpeg, 100, 400) == expected


def test_the_decoder_shrinks_where_the_box_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        transforms.JpegImageFile, "draft", lambda self, mode, size: asked.append(size)
    )
    upright = texture(512, 514)
    for box in [(0, 0, 512, 512), (2, 0, 514, 512), (1, 0, 513, 512)]:
        apply_view(stored_image(upright), View(box, (128, 128)))
    # By four; by two, for the edges are even only; not at all.
    assert asked == [(128, 128), (257, 256)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", [100, 160, 256])
def test_backends_scale_like_averaging_exact_light(backend: str, side: int) -> None:
    """A linear ramp keeps its values at the new pixel centres, whatever the filter."""
    ramp = np.repeat((np.arange(256) * 0.9 + 10)[None, :], 256, axis=0)
    picture = np.repeat(ramp.astype(np.uint8)[..., None], 3, axis=2)
    crop = apply_view(picture, View((0, 0, side, side), (128, 128)), backend=backend)
    expected = (np.arange(128) + 0.5) * side / 128 - 0.5
    inner = slice(4, -4)
    assert np.abs(crop[64, inner, 0] - (expected * 0.9 + 9.5)[inner]).max() < 1.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_shrinking_is_antialiased(backend: str) -> None:
    """Stripes one pixel wide turn to even grey, not to stripes of another width."""
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    crop = apply_view(stripes, View((0, 0, 256, 256), (64, 64)), backend=backend)
    assert np.abs(crop[8:-8, 8:-8].astype(int) - 127).max() <= 8


def test_arrays_and_files_give_the_same_view() -> None:
    upright = texture(240, 320)
    image = stored_image(upright, tag=6)
    pixels = np.asarray(ImageOps.exif_transpose(stored_image(upright, tag=6)))
    for step in range(10):
        view = draw_view((240, 320), Augmentation(crop=96), generator(0, step))
        np.testing.assert_array_equal(apply_view(image, view), apply_view(pixels, view))
    image.load()  # decoded already: no shortcut is left, the result is the same
    np.testing.assert_array_equal(apply_view(image, view), apply_view(pixels, view))


@settings(max_examples=300, deadline=None)
@given(
    size_hw=sizes,
    crop=st.sampled_from([1, 64, 256, 512]),
    limit=st.sampled_from([128, 2048]),
    low=st.floats(0.05, 2),
    ratio=st.floats(1, 3),
    seed=st.integers(0, 2**32),
)
def test_views_lie_inside_and_keep_aspect_and_range(size_hw, crop, limit, low, ratio, seed) -> None:
    augmentation = Augmentation((low, low * ratio), crop=crop, sizing=Sizing(limit))
    view = draw_view(size_hw, augmentation, generator(seed))
    left, top, right, bottom = view.box_xyxy
    assert 0 <= left < right <= size_hw[1]
    assert 0 <= top < bottom <= size_hw[0]
    assert right - left == bottom - top
    assert view.size_hw == (crop, crop)
    side, shorter = right - left, min(size_hw)
    shrunk = min(1, limit / shorter)
    largest, smallest = (min(crop / (s * shrunk), shorter) for s in (low, low * ratio))
    slack = max(1, 8 * (side >= 2 * crop))
    assert smallest - slack <= side <= largest + slack


def test_scales_are_uniform_and_every_place_is_reached() -> None:
    views = [draw_view((300, 400), Augmentation(), generator(1, step)) for step in range(4000)]
    scales = np.array([view.scale_xy[0] for view in views])
    # Below 256/300 the image would be smaller than the crop: the whole height, that scale.
    free = scales[scales > 256 / 300 + 1e-9]
    assert abs(len(free) / len(scales) - (1.3 - 256 / 300) / 0.6) < 0.03
    assert abs(np.median(free) - (1.3 + 256 / 300) / 2) < 0.02
    assert 0.47 < np.mean([view.flip for view in views]) < 0.53
    assert {0, 400} <= {edge for view in views for edge in (view.box_xyxy[0], view.box_xyxy[2])}
    assert {0, 300} <= {edge for view in views for edge in (view.box_xyxy[1], view.box_xyxy[3])}


def test_oversized_images_count_as_shrunk_first() -> None:
    still = Augmentation(scale_range=(1, 1), flip=0)
    assert draw_view((4096, 6000), still, generator(0)).scale_xy == (0.5, 0.5)
    assert draw_view((2048, 6000), still, generator(0)).scale_xy == (1, 1)
    assert draw_view((128, 6000), still, generator(0)).scale_xy == (2, 2)


def test_a_setting_leaves_the_other_draws_alone() -> None:
    plain = draw_view((600, 800), Augmentation(), generator(3))
    other = draw_view((600, 800), Augmentation(flip=1.0, grey=1.0), generator(3))
    assert plain.box_xyxy == other.box_xyxy
    assert other.flip
    assert other.grey


def test_the_share_of_grey_crops() -> None:
    some = Augmentation(grey=0.12)
    drawn = [draw_view((600, 800), some, generator(0, k)).grey for k in range(2000)]
    assert abs(np.mean(drawn) - 0.12) < 0.025


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_range": (0.0, 1.0)}, "scale_range"),
        ({"scale_range": (1.3, 0.7)}, "scale_range"),
        ({"scale_range": (0.7, float("nan"))}, "scale_range"),
        ({"flip": 1.5}, "flip"),
        ({"grey": -0.1}, "grey"),
        ({"crop": 0}, "crop"),
    ],
)
def test_impossible_settings_are_named(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Augmentation(**change)


@pytest.mark.parametrize(
    "change", [{"max_shorter_side": 0}, {"zoom": 0.0}, {"zoom": float("inf")}, {"longer_side": -1}]
)
def test_impossible_sizes_are_named(change: dict) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        Sizing(**change)


@settings(max_examples=200, deadline=None)
@given(
    size_hw=sizes,
    limit=st.integers(1, 3000),
    zoom=st.floats(1, 8),
    longer=st.integers(1, 3000),
)
def test_images_are_enlarged_to_a_longer_side_and_no_further(size_hw, limit, zoom, longer) -> None:
    scale = Sizing(limit, zoom, longer).scale(size_hw)
    assert scale * min(size_hw) <= limit * (1 + 1e-12)
    assert scale <= zoom
    if scale > 1:
        assert scale * max(size_hw) <= longer * (1 + 1e-12)
    unlimited = Sizing(limit, zoom).scale(size_hw)
    assert scale <= unlimited
    if scale < unlimited:  # what held it back was the longer side alone
        assert scale == pytest.approx(max(1.0, longer / max(size_hw)))


def test_grey_is_luma_in_three_channels() -> None:
    picture = np.zeros((2, 3, 3), np.uint8)
    picture[0] = np.eye(3) * 255
    picture[1] = 200
    grey = apply_view(picture, View((0, 0, 3, 2), (2, 3), grey=True))
    assert (grey == grey[..., :1]).all()
    assert np.abs(grey[0, :, 0] - 255 * np.array([0.299, 0.587, 0.114])).max() < 1
    assert (grey[1] == 200).all()


def test_points_worked_by_hand() -> None:
    view = View((10, 20, 30, 40), (40, 40))
    points = as_points([[10, 20], [15, 25], [29.5, 39.5], [30, 25], [15, 40], [9.9, 30]])
    assert apply_to_points(points, view).tolist() == [[0, 0], [10, 10], [39, 39]]
    mirrored = apply_to_points(points, View((10, 20, 30, 40), (40, 40), flip=True))
    np.testing.assert_allclose(mirrored, [[40, 0], [30, 10], [1, 39]], atol=1e-12)
    assert (mirrored < 40).all()
    assert apply_to_points(as_points([]), view).shape == (0, 2)


@settings(max_examples=200, deadline=None)
@given(
    points=st.lists(st.tuples(st.floats(-5, 65), st.floats(-5, 65)), max_size=20),
    output=st.integers(1, 100),
    flip=st.booleans(),
)
def test_neighbouring_boxes_share_the_points_out(points, output, flip) -> None:
    frozen = as_points(points)
    total = 0
    for left in (0, 20, 40):
        for top in (0, 20, 40):
            moved = apply_to_points(
                frozen, View((left, top, left + 20, top + 20), (output, output), flip=flip)
            )
            assert ((moved >= 0) & (moved < output)).all()
            total += len(moved)
    assert total == sum(0 <= x < 60 and 0 <= y < 60 for x, y in points)


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_images_are_prepared(backend: str) -> None:
    upright = texture(300, 451)
    pixels, scale_xy = prepare(stored_image(upright, tag=8), max_shorter_side=100, backend=backend)
    assert pixels.shape == (100, 150, 3)
    assert scale_xy == (150 / 451, 100 / 300)
    small, scale_xy = prepare(stored_image(upright), backend=backend)
    assert small.shape == (300, 451, 3)
    assert scale_xy == (1, 1)


def test_crops_are_of_enlarged_images() -> None:
    rng = np.random.default_rng(0)
    for zoom, limit, scale in ((1.5, 2048, 1.5), (1.5, 360, 1.2), (0.5, 2048, 0.5)):
        augmentation = Augmentation((1.0, 1.0), 0.0, 96, sizing=Sizing(limit, zoom))
        view = draw_view((300, 400), augmentation, rng)
        assert view.scale_xy == pytest.approx((scale, scale), rel=0.01)


@settings(max_examples=200, deadline=None)
@given(size_hw=sizes, limit=st.integers(1, 3000))
def test_whole_views_keep_the_aspect(size_hw, limit) -> None:
    view = whole_view(size_hw, Sizing(limit))
    assert min(view.size_hw) == min(*size_hw, limit)
    scale = min(view.size_hw) / min(size_hw)
    assert all(
        abs(new - old * scale) <= 0.5 for new, old in zip(view.size_hw, size_hw, strict=True)
    )


def test_a_box_outside_the_image_is_refused() -> None:
    with pytest.raises(InputError, match="leaves the image"):
        apply_view(texture(20, 30), View((0, 0, 31, 20), (8, 8)))


def test_a_damaged_image_is_named() -> None:
    image = stored_image(texture(64, 64))
    content = image.fp.getvalue()
    broken = Image.open(io.BytesIO(content[: len(content) // 2]))
    broken.filename = "holiday.jpg"
    with pytest.raises(InputError, match=r"^holiday\.jpg: truncated or damaged"):
        apply_view(broken, View((0, 0, 64, 64), (32, 32)))


def test_backends_that_are_missing_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    picture, view = texture(20, 20), View((0, 0, 20, 20), (8, 8))
    with pytest.raises(InputError, match="unknown backend 'gpu'"):
        apply_view(picture, view, backend="gpu")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(InputError, match=r"pip install 'p3net\[fast\]'"):
        apply_view(picture, view, backend="cv2")


def test_the_default_backend_is_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((object(), "cv2"), (None, "pillow")):
        monkeypatch.setattr(transforms, "find_spec", lambda name, found=found: found)
        assert default_backend.__wrapped__() == expected


def test_bytes_become_fractions_in_torch_order() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), np.uint8)
    images = to_float(torch.from_numpy(pixels))
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    expected = np.moveaxis(pixels, 3, 1).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(images.numpy(), expected)
