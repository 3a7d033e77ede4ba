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
from p3net.data.transforms import Sizing, apply_view, whole_view
from p3net.errors import InputError
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.regions import Region, Regions
from p3net.structures import as_points


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
        "read-only": np.asarray(Image.fromarray(pixels)),
        "a view from the other end": np.ascontiguousarray(pixels[::-1, ::-1])[::-1, ::-1],
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
    small = Counter(counter.network, Sizing(64))
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


def test_a_size_that_nothing_was_calibrated_at_has_no_calibrated_interval(counter):
    known = {"calibration": {"scores": [0.5] * 20}}
    small = Counter(counter.network, Sizing(64), metadata=known)
    for size_hw, full_size, calibrated in (
        ((128, 128), False, True),
        ((128, 128), True, False),
        ((60, 200), True, True),
    ):
        interval = small.count(noise(*size_hw), full_size=full_size).interval
        assert interval is not None
        assert interval.calibrated is calibrated


@pytest.mark.parametrize("own", ["pillow", "cv2"])
def test_images_are_scaled_as_in_training(counter, own):
    pytest.importorskip("cv2")
    model = Counter(counter.network, Sizing(64), metadata={"preparation": {"backend": own}})
    image = noise(128, 200)
    pixels, _ = model.prepare(image)
    expected = apply_view(image, whole_view((128, 200), Sizing(64)), backend=own)
    assert np.array_equal(pixels, expected)


def test_smaller_images_are_enlarged_as_in_training(counter):
    zoomed = Counter(counter.network, Sizing(64, 1.5))
    pixels = noise(40, 56)
    prediction = zoomed.count(pixels)
    assert prediction.size_hw == (40, 56)
    assert prediction.cell_xy == pytest.approx((8 / 1.5, 8 / 1.5))
    enlarged, scale_xy = zoomed.prepare(pixels)
    assert (enlarged.shape, scale_xy) == ((60, 84, 3), (1.5, 1.5))
    assert prediction.count == counter.count(enlarged).count
    assert zoomed.prepare(noise(50, 56))[0].shape == (64, 72, 3)  # as far as the limit
    assert zoomed.prepare(noise(50, 56), full_size=True)[0].shape == (75, 84, 3)


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


# --- lists, regions, sizes, intervals ----------------------------------------------------------


def test_a_list_gives_a_list_and_a_stream_comes_one_by_one(counter):
    images = [noise(), noise(48, 64, seed=1)]
    expected = [counter.count(image).count for image in images]
    assert [each.count for each in counter.count(images)] == expected
    assert [each.count for each in counter.count(tuple(images))] == expected
    assert counter.count([]) == []

    def endless() -> Any:
        while True:
            yield images[0]

    first = next(counter.stream(endless(), level=0.5))
    assert first.count == expected[0]
    assert first.interval is not None
    assert first.interval.level == 0.5


def test_regions_share_out_the_count(counter):
    """Two halves, cut through the cells: together everybody; by a loop over the cells."""
    pixels = noise(40, 56)
    left = Region("left", as_points([[0, 0], [20, 0], [20, 40], [0, 40]]))
    right = Region("right", as_points([[20, 0], [56, 0], [56, 40], [20, 40]]))
    found = counter.count(pixels, regions=[left, right])
    by_hand = sum(
        float(found.density[y, x]) * (1 if x < 2 else 0.5) for y in range(5) for x in range(3)
    )
    assert list(found.regions) == ["left", "right"]
    assert found.regions["left"].count == pytest.approx(by_hand, rel=1e-5)
    total = found.regions["left"].count + found.regions["right"].count
    assert total == pytest.approx(found.count, rel=1e-5)
    for each in found.regions.values():
        assert each.interval is not None
        assert each.interval.low <= each.count <= each.interval.high
        assert not each.interval.calibrated
        assert each.area_m2 is None
    scaled = counter.count(pixels, regions=Regions((left,), metres_per_pixel=0.5))
    assert scaled.regions["left"].area_m2 == pytest.approx(200)
    assert scaled.regions["left"].per_m2 == pytest.approx(by_hand / 200, rel=1e-5)


def test_full_size_and_tiles(counter):
    small = Counter(counter.network, Sizing(64))
    pixels = noise(130, 203)
    assert small.count(pixels).density.shape == (8, 13)
    whole = small.count(pixels, full_size=True)
    assert whole.density.shape == (17, 26)
    assert whole.cell_xy == (8.0, 8.0)
    tiled = small.count(pixels, full_size=True, tile=64)
    np.testing.assert_allclose(tiled.density, whole.density, rtol=1e-4, atol=1e-5)
    assert tiled.count == pytest.approx(whole.count, rel=1e-5)


def test_every_count_has_an_interval_that_says_whether_to_trust_it(counter):
    found = counter.count(noise(), level=0.8)
    assert found.interval is not None
    assert found.interval.low <= found.count <= found.interval.high
    assert (found.interval.level, found.interval.calibrated) == (0.8, False)
    assert found.variance is not None
    assert found.variance.shape == found.density.shape
    assert not found.variance.flags.writeable
    assert len(found.branches) == 2
    known = {"calibration": {"scores": [-2.0] * 5 + [1.0] * 5}}
    after = Counter(counter.network, metadata=known).count(noise(), level=0.5)
    assert after.interval is not None
    assert after.interval.calibrated
    unit = 3 + np.sqrt(found.variance.astype(np.float64)).sum()
    assert after.interval.high == pytest.approx(found.count + 2 * unit, rel=1e-5)


def test_a_regressor_has_no_interval(counter):
    own = Counter(Regressor(RegressorArchitecture(backbone="small"))).count(noise())
    assert own.interval is None
    assert own.variance is None
    assert own.branches == ()


@pytest.mark.parametrize("level", [0, 1, 90, -0.5])
def test_levels_lie_between_0_and_1(counter, level):
    with pytest.raises(InputError, match="between 0 and 1"):
        counter.count(noise(), level=level)


def test_the_package_offers_it():
    assert p3net.Counter is Counter
    assert p3net.Prediction is Prediction
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        p3net.nothing  # noqa: B018
