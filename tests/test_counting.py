from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import p3net
from p3net.counting import Counter, Prediction
from p3net.data.images import open_image
from p3net.errors import InputError
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture


@pytest.fixture(scope="module")
def counter() -> Counter:
    torch.manual_seed(0)
    return Counter(P3Net(Architecture(backbone="small", layers=1, hidden=8)).eval())


def noise(height: int = 40, width: int = 56, seed: int = 0) -> NDArray[np.uint8]:
    blocks = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    blocks[: height // 2] //= 4  # turning it must change something
    return blocks


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_every_kind_of_image_gives_the_same_count(counter, tmp_path):
    pixels = noise()
    path = tmp_path / "a.png"
    path.write_bytes(png(pixels))
    with torch.no_grad():
        batch = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
        expected = counter.network(batch).density[0].numpy()
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    inputs: dict[str, Any] = {
        "path": path,
        "name": str(path),
        "bytes": path.read_bytes(),
        "PIL": Image.fromarray(pixels),
        "PIL, not decoded": open_image(path),
        "uint8": pixels,
        "int64": pixels.astype(np.int64),
        "float64": pixels / 255,
        "float32": (pixels / 255).astype(np.float32),
        "another order": np.asfortranarray(pixels),
        "uint8 tensor": tensor,
        "float tensor": tensor / 255,
        "tensor with a gradient": (tensor / 255).requires_grad_(),
    }
    for kind, image in inputs.items():
        prediction = counter.count(image)
        assert isinstance(prediction, Prediction)
        np.testing.assert_allclose(prediction.density, expected, rtol=1e-5, err_msg=kind)
        assert prediction.count == pytest.approx(expected.sum(dtype=np.float64), rel=1e-6)
        assert prediction.size_hw == (40, 56)
        assert prediction.cell_xy == (8.0, 8.0)
    assert counter.count(noise(seed=1)).count != pytest.approx(expected.sum(), rel=1e-4)


def test_half_precision_tensors(counter):
    half = torch.full((3, 16, 16), 0.5)
    expected = counter.count(half).count
    assert counter.count(half.bfloat16()).count == expected
    assert counter.count(half.half()).count == expected


def test_grey_is_three_equal_colours(counter):
    grey = noise()[..., 0]
    expected = counter.count(np.stack([grey] * 3, axis=-1)).count
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    for image in (grey, grey / 255, torch.from_numpy(grey), Image.fromarray(grey), file.getvalue()):
        assert counter.count(image).count == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["path", "bytes", "PIL"])
def test_photographs_are_counted_upright(counter, tmp_path, kind):
    """Tag 6: the camera was turned, the stored rows run from the right to the left."""
    upright = noise(48, 32)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.png"
    Image.fromarray(np.ascontiguousarray(np.rot90(upright))).save(path, exif=exif)
    image = {"path": path, "bytes": path.read_bytes(), "PIL": open_image(path)}[kind]
    prediction = counter.count(image)
    assert prediction.size_hw == (48, 32)
    expected = counter.count(upright)
    np.testing.assert_allclose(prediction.density, expected.density, rtol=1e-5)
    lying = counter.count(np.ascontiguousarray(np.rot90(upright)))
    assert lying.density.shape != prediction.density.shape


def test_large_images_are_shrunk_and_cells_are_stated_in_their_pixels(counter, tmp_path):
    small = Counter(counter.network, max_shorter_side=64)
    prediction = small.count(noise(128, 200))
    assert prediction.density.shape == (8, 13)  # 64×100 px
    assert prediction.size_hw == (128, 200)
    assert prediction.cell_xy == (16.0, 16.0)
    odd = small.count(noise(100, 151))  # 64×97 px: 96.64 rounded
    assert odd.size_hw == (100, 151)
    assert odd.cell_xy == pytest.approx((8 * 151 / 97, 8 * 100 / 64))
    rows, columns = odd.density.shape
    assert rows * odd.cell_xy[1] >= 100
    assert columns * odd.cell_xy[0] >= 151
    # a JPEG that the decoder shrinks is the same from its path and from its bytes
    path = tmp_path / "a.jpg"
    Image.fromarray(noise(256, 320)).save(path, quality=90)
    assert small.count(path).count == small.count(path.read_bytes()).count


def test_the_density_cannot_be_changed(counter):
    density = counter.count(noise()).density
    assert density.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        density[0, 0] = 1


def test_counting_needs_no_gradient_and_restores_the_mode(counter):
    network = P3Net(Architecture(backbone="small", layers=1, hidden=8, dropout=0.5)).train()
    own = Counter(network)
    first = own.count(noise())
    assert network.training
    assert own.count(noise()).count == first.count  # dropout was off
    assert all(parameter.grad is None for parameter in network.parameters())
    with pytest.raises(InputError):
        own.count(noise(4, 4))
    assert network.training


def test_a_regressor_counts_too():
    torch.manual_seed(0)
    own = Counter(Regressor(RegressorArchitecture(backbone="small")))
    prediction = own.count(noise())
    assert prediction.count == pytest.approx(float(prediction.density.sum()), rel=1e-5)
    assert prediction.density.shape == (5, 7)


BAD: dict[str, tuple[Any, str]] = {
    "NaN": (np.full((16, 16, 3), np.nan), "finite and between 0 and 1"),
    "infinite": (np.full((16, 16), np.inf), "finite and between 0 and 1"),
    "floats of 255": (np.full((16, 16, 3), 255.0), "between 0 and 1"),
    "negative": (np.full((16, 16, 3), -1), "between 0 and 255"),
    "16 bits": (np.full((16, 16, 3), 256), "between 0 and 255"),
    "channels first": (np.zeros((3, 16, 16)), "H×W×3"),
    "four channels": (np.zeros((16, 16, 4)), "H×W×3"),
    "channels last, a tensor": (torch.zeros(16, 16, 3), "tensor 3×H×W"),
    "a batch": (torch.zeros(1, 3, 16, 16), "tensor 3×H×W"),
    "a row": (np.zeros(16), "H×W"),
    "no pixels": (np.zeros((0, 16, 3)), "empty"),
    "no pixels, PIL": (Image.new("RGB", (0, 16)), "empty"),
    "booleans": (np.zeros((16, 16), bool), "numbers, not bool"),
    "complex": (np.zeros((16, 16), complex), "numbers, not complex"),
    "words": (np.full((16, 16), "a"), "numbers, not <U1"),
    "nothing": (None, "numbers, not object"),
    "one pixel": (np.zeros((1, 1, 3), np.uint8), "1×1 px is smaller than one cell"),
    "one pixel, PIL": (Image.new("RGB", (1, 1)), "1×1 px is smaller than one cell"),
    "empty bytes": (b"", "empty"),
    "bytes of text": (b"hello, no image", "not an image"),
    "half a file": (png(noise())[:300], "truncated|damaged"),
    "no file": (Path("none.jpg"), "none.jpg: cannot read the image"),
}


@pytest.mark.parametrize("case", BAD)
def test_images_that_cannot_be_counted(counter, case):
    image, words = BAD[case]
    with pytest.raises(InputError, match=words):
        counter.count(image)


def test_files_that_cannot_be_counted_are_named(counter, tmp_path):
    for name, content in (
        ("empty.jpg", b""),
        ("text.jpg", b"hello"),
        ("cut.png", png(noise())[:99]),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError) as caught:
            counter.count(tmp_path / name)
        assert caught.value.source == str(tmp_path / name)


def test_bytes_are_opened_as_carefully_as_files(counter, monkeypatch):
    monkeypatch.setattr("p3net.data.images.MAX_PIXELS", 1000)
    with pytest.raises(InputError, match="more than 1,000"):
        counter.count(png(noise()))
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    with pytest.raises(InputError, match="not an image"):  # Pillow would start Ghostscript
        counter.count(eps)


def test_the_package_offers_it():
    assert p3net.Counter is Counter
    assert p3net.Prediction is Prediction
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        p3net.nothing  # noqa: B018
