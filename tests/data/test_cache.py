from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from p3net.data import cache as cache_module
from p3net.data.cache import Cache
from p3net.data.images import open_image
from p3net.data.transforms import Augmentation, apply_view, draw_view, prepare
from p3net.errors import InputError
from p3net.randomness import generator
from p3net.structures import Sample


def photograph(path: Path, *, size_hw: tuple[int, int] = (90, 120), seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying, shown upright
    coarse.resize(size_hw).save(path, quality=90, exif=exif)
    return Sample(path.name, partial(open_image, path), path=path)


def unopened(sample: Sample) -> Sample:
    """The same file, but decoding it is a failure of the test."""

    def fail() -> Image.Image:
        raise AssertionError("decoded again")

    return Sample(sample.name, fail, path=sample.path)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_the_copy_is_the_prepared_image_and_is_used_again(tmp_path: Path) -> None:
    sample = photograph(tmp_path / "a.jpg")
    expected, scale_xy = prepare(sample.open())
    for cache in (Cache(tmp_path / "c"), Cache(tmp_path / "c")):
        for source in (sample, unopened(sample)):
            pixels, scale = cache.prepared(source)
            np.testing.assert_array_equal(pixels, expected)
            assert scale == scale_xy == (1, 1)
    (entry,) = entries(tmp_path / "c")
    np.testing.assert_array_equal(np.load(entry), expected)  # a plain .npy for any reader


def test_crops_from_the_copy_equal_crops_from_the_file(tmp_path: Path) -> None:
    sample = photograph(tmp_path / "a.jpg", size_hw=(300, 400))
    pixels, _ = Cache(tmp_path / "c").prepared(sample)
    for step in range(8):
        view = draw_view(pixels.shape[:2], Augmentation(), generator(0, step))
        np.testing.assert_array_equal(apply_view(pixels, view), apply_view(sample.open(), view))


def test_oversized_images_are_kept_shrunk(tmp_path: Path) -> None:
    sample = photograph(tmp_path / "a.jpg", size_hw=(300, 411))
    cache = Cache(tmp_path / "c")
    cache.prepared(sample, max_shorter_side=100)
    pixels, scale_xy = Cache(tmp_path / "c").prepared(unopened(sample), max_shorter_side=100)
    assert pixels.shape == (100, 137, 3)
    assert scale_xy == (137 / 411, 100 / 300)


def test_content_and_settings_make_the_key(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    first = photograph(tmp_path / "a.jpg")
    before = cache.prepared(first)[0].copy()
    cache.prepared(first, max_shorter_side=50)
    cache.prepared(first, backend="pillow")
    assert len(entries(cache.folder)) == 3
    twin = tmp_path / "twin.jpg"
    twin.write_bytes((tmp_path / "a.jpg").read_bytes())
    cache.prepared(Sample("twin.jpg", partial(open_image, twin), path=twin))
    assert len(entries(cache.folder)) == 3  # the same content under another name
    changed = photograph(tmp_path / "a.jpg", seed=1)  # another content under the same name
    os.utime(tmp_path / "a.jpg", ns=(1, 1))
    assert not np.array_equal(cache.prepared(changed)[0], before)
    assert len(entries(cache.folder)) == 4


def test_images_without_a_file(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    black, white = (Image.new("RGB", (20, 10), colour) for colour in ("black", "white"))
    # The same name in two datasets: what counts is the picture.
    assert cache.prepared(Sample("0.png", lambda: black))[0].max() == 0
    assert cache.prepared(Sample("0.png", lambda: white))[0].min() == 255
    assert len(entries(cache.folder)) == 2


@pytest.mark.parametrize("fault", ["empty", "short", "header", "pixel", "trailer", "other type"])
def test_a_corrupt_entry_is_built_again(tmp_path: Path, fault: str) -> None:
    sample = photograph(tmp_path / "a.jpg")
    expected = Cache(tmp_path / "c").prepared(sample)[0].copy()
    (entry,) = entries(tmp_path / "c")
    content = bytearray(entry.read_bytes())
    if fault == "empty":
        content = bytearray()
    elif fault == "short":
        del content[-500:]
    elif fault == "header":
        content[3] ^= 0xFF
    elif fault == "pixel":
        content[5000] ^= 1
    elif fault == "trailer":
        content[-12] ^= 1  # the original's height
    entry.write_bytes(content)
    if fault == "other type":
        np.save(entry, np.zeros((90, 120, 3), np.float32))
    np.testing.assert_array_equal(Cache(tmp_path / "c").prepared(sample)[0], expected)
    np.testing.assert_array_equal(Cache(tmp_path / "c").prepared(unopened(sample))[0], expected)


def test_a_crash_halfway_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = photograph(tmp_path / "a.jpg")

    def half(file, pixels, **_) -> None:
        file.write(pixels.tobytes()[:1000])
        file.flush()
        raise KeyboardInterrupt

    cache = Cache(tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array", half)
        with pytest.raises(KeyboardInterrupt):
            cache.prepared(sample)
    (partial_file,) = entries(cache.folder)
    assert partial_file.name.startswith(".partial-")
    np.testing.assert_array_equal(cache.prepared(sample)[0], prepare(sample.open())[0])
    Cache(tmp_path / "c")
    assert partial_file.exists()  # young: somebody may be writing it
    long_ago = time.time() - 2 * cache_module._STALE_AFTER_S
    os.utime(partial_file, (long_ago, long_ago))
    Cache(tmp_path / "c")
    assert not partial_file.exists()


def test_a_full_disk_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = photograph(tmp_path / "a.jpg")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    cache = Cache(tmp_path / "c")
    np.testing.assert_array_equal(cache.prepared(sample)[0], prepare(sample.open())[0])
    assert entries(cache.folder) == []


def test_the_budget_is_kept_and_results_stay(tmp_path: Path) -> None:
    samples = [photograph(tmp_path / f"{k}.jpg", seed=k) for k in range(4)]
    one = 90 * 120 * 3
    cache = Cache(tmp_path / "c", budget_bytes=2 * one + 1000)
    for sample in samples * 2:
        pixels, _ = cache.prepared(sample)
        np.testing.assert_array_equal(pixels, prepare(sample.open())[0])
        assert not pixels.flags.writeable
    assert len(entries(cache.folder)) == 2
    assert 2 * one <= cache.used_bytes() <= cache.budget_bytes


def _fill(cache: Cache, samples: list[Sample]) -> None:
    for sample in samples:
        cache.prepared(sample)


def test_several_processes_fill_one_folder(tmp_path: Path) -> None:
    samples = [photograph(tmp_path / f"{k}.jpg", seed=k) for k in range(6)]
    cache = Cache(tmp_path / "c")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_fill, args=(cache, samples)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert len(entries(cache.folder)) == 6
    for sample in samples:
        expected = prepare(sample.open())[0]
        np.testing.assert_array_equal(cache.prepared(unopened(sample))[0], expected)


def test_another_process_gets_the_place_only(tmp_path: Path) -> None:
    sample = photograph(tmp_path / "a.jpg", size_hw=(900, 1200))
    cache = Cache(tmp_path / "c", budget_bytes=10_000_000)
    cache.prepared(sample)
    sent = pickle.dumps(cache)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert received.budget_bytes == 10_000_000
    np.testing.assert_array_equal(received.prepared(unopened(sample))[0], cache.prepared(sample)[0])


def test_a_folder_that_cannot_be_made_and_an_image_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file.*cannot be used as a cache"):
        Cache(tmp_path / "file" / "c")
    gone = Sample(
        "gone.jpg", partial(open_image, tmp_path / "gone.jpg"), path=tmp_path / "gone.jpg"
    )
    with pytest.raises(InputError, match=r"gone\.jpg: cannot read the image"):
        Cache(tmp_path / "c").prepared(gone)
