"""Settings, presets, splits and records of a run; errors that name the key and the remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from p3net import checkpoint
from p3net.configuration import PRESETS, Settings, assignments, merge, read_yaml, settings
from p3net.data.catalogue import open_dataset
from p3net.errors import InputError
from p3net.experiment import prepare, run, split_of
from p3net.network.p3net import P3Net

DATA = "synthetic:3?train=8&val=2&test=2&size=96x128"
TINY: dict[str, Any] = {
    "data": DATA,
    "labelled": "3",
    "weights": "none",
    "network": {"backbone": "small", "layers": 1, "hidden": 32, "heads": 2},
    "views": {"crop": 64},
    "recipe": {"steps": 2, "workers": 0, "validate_every": 1},
}


def tiny(preset: str = "quick", **more: Any) -> Settings:
    return settings(merge(TINY, more), preset=preset)


def complaint(**given: Any) -> str:
    with pytest.raises(InputError) as caught:
        prepare(tiny(**given))
    return str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_takes_two_steps(tmp_path, preset):
    counter = run(prepare(tiny(preset)), tmp_path / "run")
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert counter.count(torch.zeros(3, 64, 64)).count >= 0
    loaded = checkpoint.load(tmp_path / "run")
    image = torch.rand(3, 64, 64)
    assert loaded.count(image).count == counter.count(image).count


def test_the_presets_hold_the_two_columns_of_the_paper_and_its_code():
    paper, code = (settings({"data": DATA}, preset=name) for name in ("paper", "authors"))
    for chosen, decay in ((paper, 0.0), (code, 1e-4)):
        assert (chosen.threshold, chosen.network.backbone, chosen.per_cell) == (0.5, "vgg19", False)
        assert (chosen.recipe.optimiser, chosen.recipe.weight_decay) == ("adam", decay)
        assert (chosen.views.crop, chosen.recipe.choose) == (512, "best")
    assert [each.recipe.weight("ecr", 10**6, epoch=5) for each in (paper, code)] == [0.01, 0.1]
    assert [each.recipe.learning_rate for each in (paper, code)] == [1e-5, 5e-6]
    assert [each.views.scale for each in (paper, code)] == [(0.7, 1.3), (0.75, 1.25)]
    assert [each.views.grey for each in (paper, code)] == [0, 0.12]
    assert [each.network.tokens for each in (paper, code)] == ["normal", "zeros"]  # type: ignore[union-attr]
    assert [each.network.decoders for each in (paper, code)] == ["independent", "copies"]  # type: ignore[union-attr]


# --- wrong configuration ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"treshold": 0.5}, "unknown key 'treshold'; did you mean 'threshold'?"),
        (
            {"recipe": {"learnig_rate": 1e-3}},
            "unknown key 'recipe.learnig_rate'; did you mean 'recipe.learning_rate'?",
        ),
        ({"learning_rate": 1e-3}, "did you mean 'recipe.learning_rate'?"),
        (
            {"recipe": {"terms": {"ecr": {"wieght": 1}}}},
            "unknown key 'recipe.terms.ecr.wieght'; did you mean 'recipe.terms.ecr.weight'?",
        ),
        ({"recipe": {"terms": {"erc": {"weight": 1}}}}, "recipe.terms.erc: no loss is called so"),
        ({"network": {"laiers": 1}}, "did you mean 'network.layers'?"),
        ({"recipe": {"steps": "many"}}, "recipe.steps: "),
        ({"recipe": {"steps": "many"}}, "got 'many'"),
        ({"network": {"backbone": "vgg18"}}, "network.backbone: Input should be 'vgg19'"),
        ({"views": {"crop": 100}}, "crop 100 is not a multiple of 16; use 96 or 112"),
        ({"network": {"decoding": "maximum"}, "total": True}, "a density that has no gradient"),
        ({"network": {"decoding": "maximum"}, "loss": "bl"}, "set total: false and a loss on the"),
        ({"network": {"kind": "regressor"}}, "use method: supervised"),
        ({"network": {"kind": "regressor"}, "method": "supervised"}, "use bl or dm"),
        ({"data": "nowhere/at/all"}, "nowhere/at/all: no such file or folder"),
        ({"labelled": "absent.txt"}, "absent.txt: no such list of labelled images"),
        (
            {"labelled": "many"},
            "labelled: expected a share (5%, 0.05) or a number (15), got 'many'",
        ),
        ({"validation": "some"}, "validation: expected a share"),
        ({"validation": "test"}, "test_as_validation=true"),
        ({"weights": "absent.pth"}, "absent.pth: no such weights file"),
        ({"weights": "imagenet"}, "small has no ImageNet weights"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(given, message):
    network = given.get("network", {})
    if network.get("kind") == "regressor":
        with pytest.raises(InputError) as caught:
            settings({"data": DATA, **given}, preset="quick")
        assert message in str(caught.value)
    else:
        assert message in complaint(**given)


def test_data_missing_and_a_preset_unknown():
    with pytest.raises(InputError, match="data is missing; it has no default"):
        settings({})
    with pytest.raises(InputError, match="unknown preset 'papr'; use one of paper, authors, quick"):
        settings({"data": DATA}, preset="papr")


def test_a_list_that_names_absent_images(tmp_path):
    names = tmp_path / "list.txt"
    names.write_text("train_0001.png\ntrain_0099.png\ntest_0000.png\n")
    message = complaint(labelled=str(names))
    assert message.startswith(f"{names}: 2 of its images are not among the 8 training images")
    assert "train_0099.png, test_0000.png (not a training image)" in message


def test_a_validation_list_with_a_share_of_the_others(tmp_path):
    names = tmp_path / "held.txt"
    names.write_text("train_0001.png\n")
    split = prepare(tiny(labelled="100%", validation=str(names))).split
    assert split.validation == ("train/train_0001.png",)
    assert len(split.labelled) == 7


def test_intervals_are_fitted_at_the_size_of_counting():
    def highest(zoom: float) -> float:
        chosen = prepare(tiny(views={"zoom": zoom}))
        network = chosen.method.network
        assert isinstance(network, P3Net)
        assert chosen.metadata["preparation"]["zoom"] == zoom
        return network.intervals[1].values[-1]

    assert highest(2.0) < 0.6 * highest(1.0)


def test_a_run_from_a_model_keeps_its_network_and_intervals(tmp_path):
    first = run(prepare(tiny()), tmp_path / "first")
    again = prepare(tiny(weights=str(tmp_path / "first"), intervals="auto", labelled="2", seed=5))
    for name, tensor in first.network.state_dict().items():
        assert torch.equal(tensor, again.method.network.state_dict()[name]), name
    assert again.metadata["chosen_intervals"]["how"] == "kept"
    assert again.method.network.intervals == first.network.intervals
    fitted = prepare(tiny(weights=str(tmp_path / "first"), labelled="2", seed=5))
    assert fitted.method.network.intervals != first.network.intervals
    assert torch.equal(fitted.method.network.tokens[0], first.network.tokens[0])
    message = complaint(weights=str(tmp_path / "first"), network={"layers": 2})
    assert "needs its network: layers was 1 and is 2" in message


def test_a_value_that_is_no_yaml_is_named():
    with pytest.raises(InputError, match=r"--set recipe\.steps=\[1: the value cannot be read"):
        assignments(["recipe.steps=[1"])


def test_yaml_and_assignments(tmp_path):
    file = tmp_path / "a.yaml"
    for text, message in (("[1, 2]", "a mapping of settings was expected"), ("a: [", "as YAML")):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            read_yaml(file)
    with pytest.raises(InputError, match="cannot be read as YAML"):
        read_yaml(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="expected key=value after --set, got 'steps'"):
        assignments(["steps"])
    got = assignments(["recipe.steps=5", "views.scale=[1, 2]", "recipe.clip=null"])
    assert got == {"recipe": {"steps": 5, "clip": None}, "views": {"scale": [1, 2]}}


def test_a_regressor_over_a_preset_keeps_what_it_shares():
    chosen = settings(
        {"data": DATA, "network": {"kind": "regressor"}, "method": "supervised", "loss": "bl"},
        preset="quick",
    )
    assert (chosen.network.kind, chosen.network.backbone) == ("regressor", "lite0-deep")


def test_a_preset_knows_the_backbone_that_is_named():
    def quick(**given: Any) -> Settings:
        return settings({"data": DATA, **given}, preset="quick")

    lite, merged = quick(), quick(network={"backbone": "vgg19-merged"})
    assert (lite.views.zoom, lite.streaming.labelled, lite.recipe.backbone_factor) == (2.5, 8, 0.3)
    assert (merged.views.zoom, merged.streaming.labelled) == (1.0, 4)
    assert merged.recipe.backbone_factor == 0.05
    assert merged.network.scaled_logits  # the rest of the preset stays
    own = quick(network={"backbone": "vgg19"}, views={"zoom": 2})
    assert own.views.zoom == 2


# --- splits and records -----------------------------------------------------------------------


def test_validation_is_published_or_drawn_or_listed(tmp_path):
    def held(**given: Any) -> set[str]:
        return set(prepare(tiny(**given)).split.validation)

    assert held() == {"val/val_0000.png", "val/val_0001.png"}
    assert held(validation="0") == set()
    drawn = held(validation="2")
    assert len(drawn) == 2
    assert all(key.startswith("train/") for key in drawn)
    bare = "synthetic:3?train=20&val=0&test=2&size=96x128"
    assert len(held(data=bare)) == 2  # 10 % of 20
    lists = [tmp_path / name for name in ("labelled.txt", "held.txt")]
    for file, names in zip(lists, ("train_0001.png\n", "train_0002.png\n"), strict=True):
        file.write_text(names)
    assert held(labelled=str(lists[0]), validation=str(lists[1])) == {"train/train_0002.png"}


def test_all_that_is_marked_of_own_images_is_used_and_of_other_sets_five_percent(tmp_path):
    for k in range(12):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{k}.png")
        if k < 10:
            (tmp_path / f"{k}.csv").write_text("x,y\n30,30\n")

    def used(data: str, **given: Any) -> list[int]:
        split = split_of(open_dataset(data), settings({"data": data, **given}))
        return [len(split.labelled), len(split.unlabelled), len(split.validation)]

    assert used(f"folder:{tmp_path}") == [9, 2, 1]
    assert used(f"folder:{tmp_path}", labelled="10") == [10, 2, 0]  # as the README has it
    assert used(f"folder:{tmp_path} + folder:{tmp_path}") == [18, 4, 2]
    assert used(f"folder:{tmp_path} + surfaces:7?train=3") == [12, 2, 1]
    assert used("synthetic:3?train=40&val=0&test=2&size=96x128") == [2, 34, 4]


def test_intervals_that_are_asked_for_are_not_the_published_ones(tmp_path):
    asked = tiny("paper", partition="uniform-length", intervals_count=6)
    dataset = replace(open_dataset(asked.data), kind="sha")
    assert prepare(asked, dataset).metadata["chosen_intervals"]["how"] == "fit"
    assert prepare(tiny("paper"), dataset).metadata["chosen_intervals"]["how"] == "published"
    assert "25 by uep" in complaint(intervals="published", intervals_count=6)


def test_a_run_whose_points_were_changed_is_not_resumed(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for k in range(4):
        Image.new("RGB", (64, 64)).save(photos / f"{k}.png")
        (photos / f"{k}.csv").write_text(f"x,y\n30,30\n{10 + k},12\n")
    chosen = tiny(data=f"folder:{photos}", labelled="100%", validation="0", intervals="fit")
    run(prepare(chosen), tmp_path / "run")
    run(prepare(chosen), tmp_path / "run", resume=True)
    (photos / "0.csv").write_text("x,y\n" + "30,30\n31,30\n" * 20)
    with pytest.raises(InputError, match=r"density intervals \(have points been changed since"):
        run(prepare(chosen), tmp_path / "run", resume=True)


def test_a_split_that_was_written_is_read_again(tmp_path):
    first = prepare(tiny())
    run(first, tmp_path / "run")
    again = prepare(tiny(labelled=str(tmp_path / "run" / "split"), seed=9))
    assert again.split == first.split
    assert again.metadata["split"]["hash"] == first.split.hash


def test_choosing_on_test_is_recorded_for_ever(tmp_path):
    prepared = prepare(tiny(validation="test", test_as_validation=True))
    assert prepared.split.validation == ("test/test_0000.png", "test/test_0001.png")
    assert prepared.split.test == ()
    assert len(prepared.split.labelled) + len(prepared.split.unlabelled) == 8
    run(prepared, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["chosen_on_test"] is True
    for name in ("model", "best", "last"):
        _, record = checkpoint.read(tmp_path / "run" / f"{name}.safetensors")
        assert record["chosen_on_test"] is True
    honest = prepare(tiny())
    assert honest.metadata["chosen_on_test"] is False


def test_choosing_on_test_needs_test_images():
    data = "synthetic:3?train=8&val=2&test=0&size=96x128"
    assert "no test images" in complaint(data=data, validation="test", test_as_validation=True)


def test_intervals_are_fitted_on_the_labelled_images_or_published():
    fitted = prepare(tiny("paper"))
    assert fitted.metadata["chosen_intervals"]["how"] == "fit"  # synthetic is not of the paper
    published = prepare(tiny("paper", intervals="published"))
    assert published.metadata["chosen_intervals"]["how"] == "published"
    assert len(published.method.network.intervals[0]) == 25  # type: ignore[union-attr]


def test_supervised_has_no_unlabelled_crops():
    prepared = prepare(tiny(method="supervised"))
    assert len(prepared.stream.lanes) == 1
    assert len(prepare(tiny()).stream.lanes) == 2


def test_a_folder_is_claimed_once(tmp_path):
    folder = tmp_path / "run"
    run(prepare(tiny()), folder)
    with pytest.raises(InputError, match="holds a run already; continue it with --resume"):
        run(prepare(tiny()), folder)
    with pytest.raises(InputError, match=r"seed was 1 and is 2"):
        run(prepare(tiny(seed=2)), folder, resume=True)
    (folder / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json: the record of a run cannot be read"):
        run(prepare(tiny()), folder, resume=True)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="file/run: a run cannot be kept here"):
        run(prepare(tiny()), Path(file) / "run")
