from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from p3net.app.data import app
from p3net.data import splits
from p3net.data.splits import ROLES, Split, apply, draw, from_lists, parse_amount, read_list
from p3net.errors import InputError
from p3net.structures import Dataset, Marks, Sample, as_points


def _image() -> Image.Image:
    return Image.new("RGB", (64, 64))


def _marks(count: int) -> Marks:
    return Marks(as_points(np.full((count, 2), 5.0)))


def make(train: int = 100, val: int = 0, test: int = 7, bare: int = 0, folder: str = "") -> Dataset:
    """Images IMG_1, IMG_2, … of each part; image k of the training part has k people."""
    samples = [
        Sample(f"{folder}IMG_{k}.jpg", _image, partial(_marks, k), part)
        for part, number in (("train", train), ("val", val), ("test", test))
        for k in range(1, number + 1)
    ]
    samples += [Sample(f"bare_{k}.jpg", _image) for k in range(bare)]
    return Dataset("folder", "photos", tuple(samples))


def counts(keys: tuple[str, ...]) -> list[int]:
    """The number in a key's name, which is its number of people."""
    return [int(key.rpartition("_")[2].removesuffix(".jpg")) for key in keys]


# Split.


def test_one_role_an_image():
    with pytest.raises(InputError, match=r"train/a \(labelled and test\)"):
        Split(labelled=("train/a",), test=("train/a",))
    with pytest.raises(InputError, match=r"train/b \(unlabelled and validation\)"):
        Split(labelled=("train/a",), unlabelled=("train/b",), validation=("train/b",))
    with pytest.raises(InputError, match=r"train/a \(labelled and labelled\)"):
        Split(labelled=("train/a", "train/a"))
    many = tuple(f"train/{k}" for k in range(5))
    with pytest.raises(InputError, match=r"train/2.* and 2 more"):
        Split(labelled=many, validation=many)


def test_hash_is_of_the_sorted_keys_of_each_role():
    split = Split(("train/b", "train/a"), ("train/c",), (), ("test/d",), {"seed": 1})
    text = "labelled\ttrain/a\nlabelled\ttrain/b\nunlabelled\ttrain/c\ntest\ttest/d\n"
    assert split.hash == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert split.hash == Split(("train/a", "train/b"), ("train/c",), (), ("test/d",)).hash
    assert split.hash != Split(("train/a", "train/b"), (), ("train/c",), ("test/d",)).hash


@pytest.mark.parametrize(
    ("text", "amount"),
    [("5%", 0.05), ("0.05", 0.05), ("15", 15), (" 100% ", 1.0), ("1", 1), ("1.0", 1.0), ("0", 0)],
)
def test_amounts(text, amount):
    assert parse_amount(text) == amount
    assert type(parse_amount(text)) is type(amount)


@pytest.mark.parametrize(
    "text", ["", "%", "many", "5 %%", "nan", "inf", "-3", "-5%", "101%", "1.5"]
)
def test_wrong_amounts(text):
    with pytest.raises(InputError, match="share"):
        parse_amount(text)


# Drawing.


def test_numbers_and_roles():
    split = draw(make(train=300, test=20), labelled=0.05, seed=1)
    assert [len(split.keys(role)) for role in ROLES] == [15, 255, 30, 20]
    assert set(split.labelled + split.unlabelled + split.validation) == {
        f"train/IMG_{k}.jpg" for k in range(1, 301)
    }
    assert split.test == tuple(f"test/IMG_{k}.jpg" for k in range(1, 21))
    assert len(draw(make(train=2272), labelled=0.05, seed=1).labelled) == 114  # of 113.6


def test_published_validation_is_used_unless_an_amount_is_given():
    dataset = make(train=40, val=6)
    assert draw(dataset, labelled=4, seed=1).validation == tuple(
        sorted(f"val/IMG_{k}.jpg" for k in range(1, 7))
    )
    split = draw(dataset, labelled=4, seed=1, validation=5)
    assert len(split.validation) == 5
    assert all(key.startswith("train/") for key in split.validation)
    assert not any(key.startswith("val/") for role in ROLES for key in split.keys(role))
    assert draw(dataset, labelled=4, seed=1, validation=0).validation == ()


@pytest.mark.parametrize(("marked", "held"), [(10, 0), (11, 1), (30, 3)])
def test_validation_that_nobody_asked_for_makes_way_for_a_number_of_labels(marked, held):
    split = draw(make(train=marked), labelled=10, seed=1)
    assert (len(split.labelled), len(split.validation)) == (10, held)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    train=st.integers(2, 80),
    share=st.floats(0, 1),
    more=st.floats(0, 1),
    stratified=st.booleans(),
)
def test_nested_complete_and_independent_of_the_listing(seed, train, share, more, stratified):
    dataset = make(train=train)
    less, larger = sorted((share, more))
    small, large = (
        draw(dataset, labelled=amount, seed=seed, validation=0.2, stratified=stratified)
        for amount in (less, larger)
    )
    assert small.labelled == large.labelled[: len(small.labelled)]
    assert small.validation == large.validation
    everything = small.labelled + small.unlabelled + small.validation + small.test
    assert sorted(everything) == sorted(sample.key for sample in dataset.samples)
    backwards = Dataset("folder", "photos", dataset.samples[::-1])
    again = draw(backwards, labelled=less, seed=seed, validation=0.2, stratified=stratified)
    assert again.hash == small.hash


def test_more_validation_does_not_change_the_first_labels():
    first = draw(make(), labelled=5, seed=3, validation=10)
    assert draw(make(), labelled=5, seed=3, validation=40).labelled == first.labelled
    assert draw(make(), labelled=5, seed=4, validation=10).labelled != first.labelled


def test_every_image_is_drawn_equally_often():
    times = np.zeros(21)
    for seed in range(600):
        times[counts(draw(make(train=20), labelled=5, seed=seed, validation=0).labelled)] += 1
    # 600 draws of probability 1/4: mean 150, deviation 10.6
    assert np.abs(times[1:] - 150).max() < 5 * 10.6


def test_the_two_extremes():
    crowded = draw(make(), labelled=10, seed=1, validation=0, order="crowded")
    sparse = draw(make(), labelled=10, seed=1, validation=0, order="sparse")
    assert counts(crowded.labelled) == list(range(100, 90, -1))
    assert counts(sparse.labelled) == list(range(1, 11))
    held = draw(make(), labelled=10, seed=1, validation=30, order="crowded")
    left = set(range(1, 101)) - set(counts(held.validation))
    assert counts(held.labelled) == sorted(left, reverse=True)[:10]
    assert held.validation == draw(make(), labelled=10, seed=1, validation=30).validation


@pytest.mark.parametrize("number", [2, 4, 8, 16])
def test_stratified_takes_one_of_every_stratum(number):
    for seed in range(10):
        split = draw(make(train=96), labelled=number, seed=seed, validation=0, stratified=True)
        strata = [(count - 1) * number // 96 for count in counts(split.labelled)]
        assert sorted(strata) == list(range(number))


def test_images_without_annotation_are_unlabelled():
    dataset = make(train=10, bare=5)
    split = draw(dataset, labelled=1.0, seed=1, validation=0.2)
    assert [len(split.keys(role)) for role in ROLES] == [8, 5, 2, 7]
    assert all(key.startswith("train/bare") for key in split.unlabelled)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labelled": 0}, "0 labelled images asked for"),
        ({"labelled": 101}, "leaves 100 to label"),
        ({"labelled": 91, "validation": 10}, "leaves 90 to label"),
        ({"labelled": 1.5}, "a share lies between"),
        ({"labelled": -1}, "at least 0"),
        ({"labelled": 5, "validation": 101}, "101 validation images asked for"),
        (
            {"labelled": 0.5, "validation": 1.0},
            "100 of 100 annotated training images, which leaves no",
        ),
        ({"labelled": 5, "order": "dense"}, "random, crowded, sparse"),
        ({"labelled": 5, "order": "sparse", "stratified": True}, "contradicts"),
        ({"labelled": 5, "seed": -1}, "seed must be"),
    ],
)
def test_wrong_draws(options, words):
    with pytest.raises(InputError, match=words):
        draw(make(), **{"seed": 1, **options})


def test_nothing_to_draw_from():
    with pytest.raises(InputError, match="no annotated training image"):
        draw(make(train=0, bare=3), labelled=1, seed=1)


# Lists.


def test_published_list(tmp_path):
    path = tmp_path / "sha-5.txt"
    path.write_bytes(b"\xef\xbb\xbfIMG_7.jpg\r\nIMG_2.jpg\r\n\r\n  IMG_30.jpg")
    assert read_list(path) == ["IMG_7.jpg", "IMG_2.jpg", "IMG_30.jpg"]
    split = from_lists(make(), labelled=path)
    assert counts(split.labelled) == [7, 2, 30]
    assert [len(split.keys(role)) for role in ROLES] == [3, 87, 10, 7]
    assert all(key.startswith("train/") for key in split.labelled)


def test_a_list_of_all_leaves_nothing_for_validation(tmp_path):
    (tmp_path / "all.txt").write_text("".join(f"IMG_{k}.jpg\n" for k in range(1, 11)))
    split = from_lists(make(train=10), labelled=tmp_path / "all.txt")
    assert (len(split.labelled), len(split.validation)) == (10, 0)


def test_list_forms_and_validation_list(tmp_path):
    labelled, validation = tmp_path / "nwpu-5.txt", tmp_path / "nwpu-val.txt"
    labelled.write_text("IMG_1\n./data/images/IMG_2.jpg\nset\\IMG_3.jpg\ntrain/IMG_4.jpg\n")
    validation.write_text("IMG_5.jpg\nIMG_6.jpg\n")
    split = from_lists(make(), labelled=labelled, validation=validation)
    assert counts(split.labelled) == [1, 2, 3, 4]
    assert counts(split.validation) == [5, 6]
    validation.write_text("IMG_5.jpg\nIMG_1.jpg\n")
    with pytest.raises(InputError, match=r"also in .*nwpu-5.txt: IMG_1.jpg") as caught:
        from_lists(make(), labelled=labelled, validation=validation)
    assert caught.value.source == str(validation)


def test_list_of_images_in_folders(tmp_path):
    names = ("a.jpg", "x/a.jpg", "y/b.jpg", "z/b.jpg")
    samples = [Sample(name, _image, partial(_marks, 1)) for name in names]
    dataset, path = Dataset("folder", "photos", tuple(samples)), tmp_path / "list.txt"
    path.write_text("a.jpg\nz/b.jpg\n")
    assert from_lists(dataset, labelled=path, validation=0).labelled == (
        "train/a.jpg",
        "train/z/b.jpg",
    )
    path.write_text("b.jpg\n")
    with pytest.raises(InputError, match=r"any of train/y/b.jpg, train/z/b.jpg"):
        from_lists(dataset, labelled=path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("IMG_1.jpg\nIMG_900.jpg\nIMG_901.jpg\n", "2 of its images .* IMG_900.jpg, IMG_901.jpg"),
        ("IMG_1.jpg\nIMG_2.jpg\nIMG_1.jpg\n", "more than once: IMG_1.jpg"),
        ("IMG_1.jpg\nIMG_1\n", "more than once: train/IMG_1.jpg"),
        ("late.jpg\n", r"late.jpg \(not a training image\)"),
        ("bare_0.jpg\n", "no annotation"),
        ("\r\n \r\n", "empty list"),
    ],
)
def test_wrong_lists(tmp_path, text, words):
    path = tmp_path / "list.txt"
    path.write_text(text, newline="")
    dataset = make(bare=1)
    late = Sample("late.jpg", _image, partial(_marks, 1), "test")
    dataset = Dataset("folder", "photos", (*dataset.samples, late))
    with pytest.raises(InputError, match=words) as caught:
        from_lists(dataset, labelled=path)
    assert caught.value.source == str(path)


def test_lists_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="cannot read the list"):
        read_list(tmp_path / "absent.txt")
    (tmp_path / "picture.txt").write_bytes(b"\xff\xd8\xff\xe0\x00")
    with pytest.raises(InputError, match="not a text file"):
        read_list(tmp_path / "picture.txt")


# On disk.


def test_there_and_back(tmp_path):
    split = draw(make(), labelled=5, seed=1)
    splits.write(split, tmp_path / "split")
    again = splits.read(tmp_path / "split")
    assert again == split
    assert again.how == split.how
    record = json.loads((tmp_path / "split" / "split.json").read_text())
    assert record["hash"] == split.hash
    assert record["how"]["seed"] == 1
    assert record["counts"] == {"labelled": 5, "unlabelled": 85, "validation": 10, "test": 7}
    splits.write(split, tmp_path / "split")  # the same again is no harm


def test_faults_on_disk(tmp_path):
    split = draw(make(), labelled=5, seed=1)
    splits.write(split, tmp_path)
    with pytest.raises(InputError, match=f"another split, {split.hash}"):
        splits.write(draw(make(), labelled=5, seed=2), tmp_path)
    (tmp_path / "test.txt").write_text("test/IMG_1.jpg\n")
    with pytest.raises(InputError, match=f"not {split.hash}"):
        splits.read(tmp_path)
    (tmp_path / "split.json").write_text('{"hash": 3}')
    with pytest.raises(InputError, match="not the record of a split"):
        splits.read(tmp_path)
    with pytest.raises(InputError, match="cannot read the split"):
        splits.read(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the split"):
        splits.write(split, tmp_path / "file" / "below")


def test_apply_puts_points_out_of_reach():
    dataset = make(train=20)
    data = apply(dataset, draw(dataset, labelled=4, seed=1, validation=3))
    assert [len(part) for part in data] == [4, 13, 3, 7]
    assert all(sample.labelled for sample in data.labelled.samples + data.validation.samples)
    for sample in data.unlabelled.samples:
        with pytest.raises(InputError, match="withheld"):
            sample.marks()


def test_apply_checks_the_dataset():
    with pytest.raises(InputError, match=r"not found, first train/other.jpg"):
        apply(make(), Split(labelled=("train/other.jpg",)))
    with pytest.raises(InputError, match=r"labelled images without annotation: train/bare_0.jpg"):
        apply(make(bare=1), Split(labelled=("train/bare_0.jpg",)))


# The command.


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["split", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for k in range(1, 11):
        _image().save(folder / f"p{k}.png")
        (folder / f"p{k}.txt").write_text("5 6\n" * k)
    return folder


def test_command(photos, tmp_path):
    out = tmp_path / "split"
    text = run(photos, "--labelled", "20%", "--order", "crowded", "--validation", 0, "--out", out)
    split = splits.read(out)
    assert set(split.labelled) == {"train/p10.png", "train/p9.png"}
    assert split.hash in text
    assert ["labelled", "2", "19"] in [line.split() for line in text.splitlines()]
    assert ["unlabelled", "8"] in [line.split() for line in text.splitlines()]


def test_command_with_a_list_as_json(photos, tmp_path):
    (tmp_path / "list.txt").write_bytes(b"p3.png\r\np4.png\r\n")
    record = json.loads(run(photos, "--list", tmp_path / "list.txt", "--json"))
    assert record["labelled"] == ["train/p3.png", "train/p4.png"]
    assert record["points"] == 7
    assert len(record["validation"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--labelled 5% or --list FILE"),
        (["--labelled", "5%", "--list", "a.txt"], "one of them"),
        (["--labelled", "5%", "--validation-list", "a.txt"], "goes with --list"),
        (["--list", "a.txt", "--stratified"], "leave out --order"),
        (["--list", "a.txt", "--validation-list", "b.txt", "--validation", "1"], "leave out"),
        (["--labelled", "5%", "--order", "dense"], "random, crowded, sparse"),
    ],
)
def test_command_refuses(photos, arguments, words):
    with pytest.raises(InputError, match=words):
        run(photos, *arguments)
