from __future__ import annotations

import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from p3net.data import images
from p3net.data.images import open_image, to_rgb, upright_size_hw
from p3net.errors import InputError

CORNERS = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[255, 255, 0], [0, 0, 0], [9, 9, 9]]])


def pixels(path: Path) -> np.ndarray:
    image = to_rgb(open_image(path))
    assert image.mode == "RGB"
    return np.asarray(image)


def png(path: Path, width: int, height: int) -> Path:
    """A PNG whose header promises more than its data hold."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(10_000))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )
    return path


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_orientation_is_obeyed_as_pillows_own_function_does(tmp_path, suffix, orientation):
    path = tmp_path / f"a.{suffix}"
    stored = Image.fromarray(CORNERS.astype(np.uint8)).resize((48, 32), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(
        path,
        exif=exif,
        **({"quality": 95, "subsampling": 0} if suffix == "jpg" else {"lossless": True}),
    )
    # The eight turns by hand: what is stored, turned so that row 0 is the top.
    array = np.asarray(stored)
    upright = {
        1: array,
        2: array[:, ::-1],
        3: array[::-1, ::-1],
        4: array[::-1],
        5: array.transpose(1, 0, 2),
        6: array.transpose(1, 0, 2)[:, ::-1],
        7: array.transpose(1, 0, 2)[::-1, ::-1],
        8: array.transpose(1, 0, 2)[::-1],
    }[orientation]
    opened = open_image(path)
    assert upright_size_hw(opened) == upright.shape[:2]
    rgb = to_rgb(opened)
    tolerance = 60 if suffix == "jpg" else 0  # colour edges of a JPEG
    assert np.abs(np.asarray(rgb).astype(int) - upright).max() <= tolerance
    again = to_rgb(rgb)  # the tag is not obeyed twice
    assert np.array_equal(np.asarray(again), np.asarray(rgb))
    assert upright_size_hw(rgb) == upright.shape[:2]
    with Image.open(path) as reference:
        expected = ImageOps.exif_transpose(reference)
        assert expected is not None
        assert np.array_equal(np.asarray(rgb), np.asarray(expected))


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp", "gif", "webp"])
def test_size_needs_no_decoding(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (30, 20)).save(path)
    image = open_image(path)

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(type(image), "load", refuse)
    assert upright_size_hw(image) == (20, 30)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_orientation_tags_are_no_tags(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (30, 20)).save(path, exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert upright_size_hw(open_image(path)) == (20, 30)
    exif = Image.Exif()
    exif[0x0112] = 77
    Image.new("RGB", (30, 20)).save(path, exif=exif)
    assert upright_size_hw(open_image(path)) == (20, 30)
    assert to_rgb(open_image(path)).size == (30, 20)


def test_grey_and_one_bit(tmp_path):
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert np.array_equal(pixels(tmp_path / "a.png"), np.repeat(grey[..., None], 3, axis=2))
    Image.fromarray(grey > 99).save(tmp_path / "b.png")
    assert np.array_equal(pixels(tmp_path / "b.png")[..., 1], np.where(grey > 99, 255, 0))


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path, suffix):
    values = np.array([[0, 128, 257, 32768], [65535, 255, 256, 51400]], dtype=np.uint16)
    path = tmp_path / f"a.{suffix}"
    if suffix == "pgm":
        path.write_bytes(b"P5 4 2 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(path)
    by_hand = [[0, 0, 1, 128], [255, 1, 1, 200]]  # v / 257, rounded
    assert pixels(path)[..., 0].tolist() == by_hand


def test_big_endian_sixteen_bits(tmp_path):
    values = np.array([[0, 65535], [257, 25700]], dtype=">u2")
    image = Image.frombytes("I;16B", (2, 2), values.tobytes())
    assert np.asarray(to_rgb(image))[..., 0].tolist() == [[0, 255], [1, 100]]


def test_32_bit_integers_and_floats():
    wide = Image.fromarray(np.array([[0, 65535, 131070]], dtype=np.int32))
    assert np.asarray(to_rgb(wide))[0, :, 0].tolist() == [0, 128, 255]
    small = Image.fromarray(np.array([[0, 51400, -7]], dtype=np.int32))
    assert np.asarray(to_rgb(small))[0, :, 0].tolist() == [0, 200, 0]
    for white in (1.0, 255.0, 65535.0, 1e6):
        values = np.array([[0.0, 0.2 * white, white, np.nan]], dtype=np.float32)
        assert np.asarray(to_rgb(Image.fromarray(values)))[0, :, 2].tolist() == [0, 51, 255, 0]


def test_alpha_is_laid_over_white(tmp_path):
    rgba = np.array([[[200, 0, 0, 255], [200, 0, 0, 0], [0, 0, 0, 51]]], dtype=np.uint8)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    assert pixels(tmp_path / "a.png").tolist() == [[[200, 0, 0], [255, 255, 255], [204, 204, 204]]]
    la = Image.merge("LA", (Image.new("L", (1, 1), 100), Image.new("L", (1, 1), 51)))
    la.save(tmp_path / "b.png")
    assert pixels(tmp_path / "b.png").tolist() == [[[224] * 3]]  # (100·51 + 255·204) / 255
    premultiplied = Image.fromarray(rgba).convert("RGBa")
    assert np.asarray(to_rgb(premultiplied))[0, :2].tolist() == [[200, 0, 0], [255, 255, 255]]
    assert to_rgb(Image.new("La", (1, 1), (0, 0))).getpixel((0, 0)) == (255, 255, 255)


def test_palettes_with_and_without_transparency(tmp_path):
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    image.save(tmp_path / "a.png")
    colours = [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert pixels(tmp_path / "a.png").tolist() == [colours]
    image.save(tmp_path / "b.png", transparency=1)
    assert pixels(tmp_path / "b.png").tolist() == [[colours[0], [255] * 3, colours[2]]]
    image.save(tmp_path / "c.png", transparency=bytes([255, 255, 51]))
    assert pixels(tmp_path / "c.png").tolist() == [[colours[0], colours[1], [204, 204, 255]]]
    image.save(tmp_path / "d.gif", transparency=0)
    assert pixels(tmp_path / "d.gif").tolist() == [[[255] * 3, colours[1], colours[2]]]


def test_a_transparent_colour_in_rgb_and_grey_png(tmp_path):
    rgb = Image.new("RGB", (2, 1), (1, 2, 3))
    rgb.putpixel((1, 0), (50, 60, 70))
    rgb.save(tmp_path / "a.png", transparency=(1, 2, 3))
    assert pixels(tmp_path / "a.png").tolist() == [[[255, 255, 255], [50, 60, 70]]]
    Image.new("L", (1, 1), 9).save(tmp_path / "b.png", transparency=9)
    assert pixels(tmp_path / "b.png").tolist() == [[[255, 255, 255]]]


def test_cmyk_with_adobes_inversion(tmp_path):
    """Pillow writes the Adobe marker and inverted inks, as Photoshop does."""
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow ink: red
    cmyk.save(tmp_path / "a.jpg", quality=100)
    assert b"Adobe" in (tmp_path / "a.jpg").read_bytes()[:200]
    red, green, blue = pixels(tmp_path / "a.jpg")[8, 8]
    assert red > 245
    assert max(green, blue) < 10
    cmyk.save(tmp_path / "a.tif")
    assert pixels(tmp_path / "a.tif")[0, 0].tolist() == [255, 0, 0]
    Image.new("CMYK", (16, 16), (0, 0, 0, 255)).save(tmp_path / "b.jpg", quality=100)
    assert pixels(tmp_path / "b.jpg").max() < 10  # only black ink


def test_animation_gives_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (4, 3), colour) for colour in ("red", "blue", "lime")]
    for name in ("a.gif", "a.png", "a.tif", "a.webp"):
        options = {"lossless": True} if name.endswith("webp") else {}
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **options)
        assert pixels(tmp_path / name)[0, 0].tolist() == [255, 0, 0]


def test_plain_rgb_is_not_copied(tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    image = open_image(tmp_path / "a.png")
    assert to_rgb(image) is image


def test_nothing_stays_open(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (4, 3)).save(path)
    image = open_image(path)
    path.unlink()
    assert to_rgb(image).size == (4, 3)


def expect_error(path: Path, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        to_rgb(open_image(path))
    assert caught.value.source == str(path)


def test_what_is_not_an_image(tmp_path):
    expect_error(tmp_path / "none.jpg", "No such file")
    expect_error(tmp_path, "directory")
    (tmp_path / "empty.jpg").write_bytes(b"")
    expect_error(tmp_path / "empty.jpg", "empty")
    (tmp_path / "text.jpg").write_text("x y\n1 2\n")
    expect_error(tmp_path / "text.jpg", "not an image")
    (tmp_path / "page.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    expect_error(tmp_path / "page.jpg", "not an image")


def test_a_file_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 9)
    (tmp_path / "a.jpg").write_bytes(bytes(10))
    expect_error(tmp_path / "a.jpg", "too many for an image")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp", "gif", "webp"])
def test_truncated_images(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(path)
    whole = path.read_bytes()
    assert pixels(path).shape == (64, 64, 3)
    path.write_bytes(whole[: len(whole) // 2])
    expect_error(path, "damaged|not an image")


def test_a_bomb_of_pixels_is_refused_before_decoding(tmp_path):
    limit = Image.MAX_IMAGE_PIXELS
    path = png(tmp_path / "a.png", 60_000, 60_000)
    with pytest.raises(InputError, match="60000 × 60000 pixels are more than 400,000,000"):
        open_image(path)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_200_megapixels_open_without_a_warning(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        image = open_image(png(tmp_path / "a.png", 20_000, 10_000))
        assert upright_size_hw(image) == (10_000, 20_000)
    assert caught == []


def test_pillows_limit_returns_when_the_last_thread_leaves():
    limit = Image.MAX_IMAGE_PIXELS
    assert limit is not None
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with images._own_pixel_limit():
            inside.set()
            leave.wait(5)

    other = threading.Thread(target=hold)
    other.start()
    assert inside.wait(5)
    with images._own_pixel_limit():
        assert Image.MAX_IMAGE_PIXELS is None
    assert Image.MAX_IMAGE_PIXELS is None
    leave.set()
    other.join()
    assert limit == Image.MAX_IMAGE_PIXELS


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files_give_an_image_or_a_clear_error(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    path = folder / data.draw(
        st.sampled_from(["m.jpg", "m.png", "m.gif", "m.tif", "m.bmp", "m.webp"])
    )
    ramp = np.arange(24 * 24 * 3, dtype=np.uint32).astype(np.uint8).reshape(24, 24, 3)
    Image.fromarray(ramp).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    error = None
    try:
        image = open_image(path)
        size_hw = upright_size_hw(image)
        assert size_hw == to_rgb(image).size[::-1]
    except InputError as caught:
        error = caught
    assert error is None or error.source == str(path)
