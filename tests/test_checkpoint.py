from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import p3net
from p3net import checkpoint
from p3net.errors import InputError
from p3net.intervals import Intervals
from p3net.network.p3net import PLANS, Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture

PAIR = (
    Intervals((0.1, 1 / 3, 0.7), (0.0, 0.1 + 0.2, 0.5, 0.1 + 2 / 3)),
    Intervals((0.2, 0.5, 3.0), (0.0, 0.3, 1.1, 4.7)),
)


def tiny(seed: int = 1, **fields: Any) -> P3Net:
    torch.manual_seed(seed)
    return P3Net(Architecture(backbone="small", layers=1, hidden=8, **fields), PAIR).eval()


def same(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


# --- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", ["learned", "random"])
@pytest.mark.parametrize("plan", sorted(PLANS))
def test_a_network_of_every_plan_comes_back(tmp_path, plan, queries):
    network = tiny(plan=plan, queries=queries, decoding="maximum")
    checkpoint.save(tmp_path / "deep" / "m.safetensors", network, {"note": "ü"})
    counter = p3net.load(tmp_path / "deep" / "m.safetensors")
    assert same(counter.network, network)
    assert counter.network.architecture == network.architecture
    assert not counter.network.training
    assert counter.metadata["note"] == "ü"
    # bit for bit, of the numbers as they stand
    for got, expected in zip(counter.network.intervals, network.intervals, strict=True):
        assert [v.hex() for v in got.values] == [v.hex() for v in expected.values]
        assert [v.hex() for v in got.borders] == [v.hex() for v in expected.borders]
    images = torch.rand(1, 3, 40, 24)
    assert torch.equal(counter.predict(images).density, network(images).density)
    # what was shared is shared again, and stored once
    assert len(list(counter.network.parameters())) == len(list(network.parameters()))
    assert len(load_file(tmp_path / "deep" / "m.safetensors")) == len(
        {t.data_ptr() for t in network.state_dict().values()}
    )
    assert names(tmp_path / "deep") == ["m.safetensors"]


@pytest.mark.parametrize("layers", [0, 1])
def test_a_regressor_comes_back(tmp_path, layers):
    arch = RegressorArchitecture(backbone="small", encoder_layers=layers, hidden=8)
    network = Regressor(arch).eval()
    checkpoint.save(tmp_path / "m.safetensors", network, {})
    counter = p3net.load(str(tmp_path / "m.safetensors"))
    assert isinstance(counter.network, Regressor)
    assert counter.network.architecture == arch
    assert same(counter.network, network)


def test_averaged_weights_are_preferred(tmp_path):
    """A file of the training loop holds both; counting takes the average."""
    now, average = tiny(1), tiny(2)
    tensors = {f"network.{n}": t for n, t in now.state_dict().items()}
    tensors |= {f"average.{n}": t for n, t in average.state_dict().items()}
    checkpoint.write(tmp_path / "l.safetensors", tensors, {"network": checkpoint.describe(now)})
    assert same(p3net.load(tmp_path / "l.safetensors").network, average)


def test_a_folder_gives_its_best_file(tmp_path):
    for seed, name in enumerate(("last", "best", "model")):
        checkpoint.save(tmp_path / f"{name}.safetensors", tiny(seed), {})
        assert same(p3net.load(tmp_path).network, tiny(seed))


def test_preparation_is_part_of_the_model(tmp_path):
    preparation = {"preparation": {"max_shorter_side": 512}}
    checkpoint.save(tmp_path / "m.safetensors", tiny(), preparation)
    assert p3net.load(tmp_path / "m.safetensors").sizing.max_shorter_side == 512
    checkpoint.save(tmp_path / "m.safetensors", tiny(), {})
    assert p3net.load(tmp_path / "m.safetensors").sizing.max_shorter_side == 2048


def test_other_modules_are_not_saved(tmp_path):
    with pytest.raises(InputError, match="a Linear cannot be saved"):
        checkpoint.save(tmp_path / "m.safetensors", nn.Linear(1, 1), {})


def test_versions_name_what_numbers_depend_on():
    found = checkpoint.versions()
    assert found["torch"] == torch.__version__
    assert found["p3net"] == p3net.__version__


# --- writing -----------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, tiny(1), {})
    before = path.read_bytes()

    def fill_up(_tensors: object, file: Path, _metadata: object) -> None:
        Path(file).write_bytes(before[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fill_up)
    with pytest.raises(InputError, match=r"No space left.*The previous checkpoint is intact"):
        checkpoint.save(path, tiny(2), {})
    assert path.read_bytes() == before
    assert names(tmp_path) == ["m.safetensors"]
    with pytest.raises(InputError, match="Nothing was there"):
        checkpoint.save(tmp_path / "new.safetensors", tiny(2), {})
    assert names(tmp_path) == ["m.safetensors"]


def test_an_interrupt_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, tiny(1), {})
    before = path.read_bytes()

    def interrupt(_tensors: object, file: Path, _metadata: object) -> None:
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, tiny(2), {})
    assert path.read_bytes() == before
    assert names(tmp_path) == ["m.safetensors"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="could not be written"):
        checkpoint.save(tmp_path / "file" / "m.safetensors", tiny(), {})


# --- files that cannot be used -----------------------------------------------------------------


def refused(path: Path, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        p3net.load(path)
    assert caught.value.source == str(path)


def test_missing_files_and_folders(tmp_path):
    refused(tmp_path / "none.safetensors", "no such checkpoint")
    refused(tmp_path / "none.pth", "no such weights file")
    refused(tmp_path / "none", "no such weights file")
    refused(tmp_path, r"no model in this folder; looked for model\.safetensors")


def test_damaged_files(tmp_path):
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, tiny(), {})
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:100], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        refused(path, "damaged checkpoint")


def test_safetensors_of_others(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(1)}, path)
    refused(path, "not a checkpoint of p3net")
    save_file({"a": torch.ones(1)}, path, {"format": "pt"})
    refused(path, "not a checkpoint of p3net")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", "damaged checkpoint"),
        ("[1]", "damaged checkpoint"),
        ("{}", "format None is not known"),
        ('{"format": 99}', "format 99 is not known to this version, which reads 1"),
        ('{"format": 1}', "description of the network is damaged"),
        ('{"format": 1, "network": 3}', "description of the network is damaged"),
        ('{"format": 1, "network": {"architecture": {}}}', "description of the network"),
        ('{"format": 1, "preparation": 3}', "damaged checkpoint"),
    ],
)
def test_damaged_descriptions(tmp_path, record, words):
    save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors", {"p3net": record})
    refused(tmp_path / "m.safetensors", words)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": {"backbone": "resnet"}},
        {"architecture": {"backbone": "small", "colour": 1}},
        {"architecture": {"backbone": "small", "heads": 3}},
        {"architecture": {"kind": "regressor", "layers": 4}},
        {"intervals": [{"borders": [1.0], "values": [0.0, 2.0]}]},
        {"intervals": [{"borders": [1.0], "values": [3.0, 2.0]}] * 2},
        {"intervals": [{"borders": [1.0]}] * 2},
    ],
)
def test_networks_that_cannot_be_built(tmp_path, change):
    record = {"format": 1, "network": {**checkpoint.describe(tiny()), **change}}
    save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors", {"p3net": json.dumps(record)})
    refused(tmp_path / "m.safetensors", "description of the network is damaged")


def test_weights_of_another_network(tmp_path):
    path = tmp_path / "m.safetensors"
    network = tiny()
    tensors = {f"network.{n}": t for n, t in network.state_dict().items()}
    for other in (tiny(tokens="zeros"), Regressor(RegressorArchitecture(backbone="small"))):
        record = {"network": checkpoint.describe(other)}
        checkpoint.write(path, tensors, record)
        if isinstance(other, P3Net):  # the same shape: this one fits
            assert same(p3net.load(path).network, network)
        else:
            refused(path, "these are weights of another network")
    del tensors["network.tokens.1"]
    checkpoint.write(path, tensors, {"network": checkpoint.describe(network)})
    refused(path, r"1 of \d+ tensors are missing .* first tokens\.1")


class Malice:
    """Unpickling this with `pickle` makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.mkdir, (self.folder,))


def test_a_pickle_with_code_is_not_run(tmp_path):
    content = {"count_query1": torch.ones(25, 1, 512), "x": Malice(tmp_path / "ran")}
    torch.save(content, tmp_path / "best_model.pth")
    refused(tmp_path / "best_model.pth", "could run code")
    assert not (tmp_path / "ran").exists()


def test_others_may_read_a_model_as_far_as_they_may_read_any_file(tmp_path):
    (tmp_path / "plain").touch()
    checkpoint.write(tmp_path / "a.safetensors", {"x": torch.ones(1)}, {})
    modes = [(tmp_path / name).stat().st_mode for name in ("plain", "a.safetensors")]
    assert modes[0] == modes[1]


def test_a_model_is_put_on_the_device_that_is_asked_for():
    assert {each.device.type for each in checkpoint.load().network.parameters()} == {"cpu"}
    elsewhere = checkpoint.load(device="meta").network
    assert {each.device.type for each in elsewhere.parameters()} == {"meta"}


def test_a_state_dict_of_neither_kind(tmp_path):
    torch.save({"conv.weight": torch.ones(1)}, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", r"neither .* of p3net nor of the authors' code; .* conv\.weight")


# --- the authors' network, restated ------------------------------------------------------------

_CONFIGURATION = "64 64 M 128 128 M 256 256 256 256 M 512 512 512 512 M 512 512 512 512"
# the paper's published intervals, typed again
_BORDERS_1 = """0.00016 0.001929451850323205 0.008082773401606307 0.016486622634959903
0.027201606048777624 0.040376651083361484 0.05635653159451606 0.07564311114549255
0.09873047409540833 0.1263212381117904 0.15925543689080027 0.19863706203617743
0.24597249461239232 0.3025175130111165 0.3707221162631514 0.4537206813235279 0.5560940547912038
0.6838185522926952 0.8476390438597705 1.0642417040590761 1.3645639664610938 1.8055319029995607
2.541316177212592 3.87642023839676"""
_VALUES_1 = """0 0.0008736941759623788 0.00460105649110827 0.011909992029514994
0.021447560775165905 0.03335742127399603 0.04785158393927123 0.06538952954794941
0.08647975537451662 0.11168024780931907 0.14175821026385504 0.17778540202168958
0.22097960677712483 0.2724192081348686 0.3344926685808885 0.40938709885499597 0.5012436541947841
0.6149288298909453 0.7585325340575756 0.9452185066011628 1.1967563985336944 1.5541906336372862
2.0969205546489382 2.9970217618726727 4.51882041862729"""
VALUES_1 = [float(word) for word in _VALUES_1.split()]
VALUES_2 = [0.0, *[float(word) for word in _BORDERS_1.split()][1:], 8.247815291086832]


class Restated(nn.Module):
    """Their network in eval mode, one image at a time, in torch's own modules."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        inputs = 3
        for word in _CONFIGURATION.split():
            if word == "M":
                parts.append(nn.MaxPool2d(kernel_size=2, stride=2))
            else:
                parts += [nn.Conv2d(inputs, int(word), kernel_size=3, padding=1), nn.ReLU()]
                inputs = int(word)
        self.features = nn.Sequential(*parts)
        layer = nn.TransformerDecoderLayer(512, 4)
        self.decoder1 = nn.TransformerDecoder(layer, layers)
        self.decoder2 = nn.TransformerDecoder(layer, layers)
        self.count_query1 = nn.Parameter(torch.zeros(25, 1, 512))
        self.count_query2 = nn.Parameter(torch.zeros(25, 1, 512))

    def forward(self, image: Tensor) -> tuple[list[Tensor], Tensor]:
        """1×3×H×W in [0, 1] → the logits of both branches, 25×h×w, and the count."""
        mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
        x = self.features((image - mean.view(3, 1, 1)) / deviation.view(3, 1, 1))
        memory = x.flatten(2).permute(2, 0, 1)
        height, width = image.shape[-2] // 8, image.shape[-1] // 8
        cells = F.interpolate(x, size=(height, width), mode="bilinear", align_corners=True)
        logits, expectations, sure = [], [], []
        for query, decoder, values in (
            (self.count_query1, self.decoder1, VALUES_1),
            (self.count_query2, self.decoder2, VALUES_2),
        ):
            refined = decoder(query, memory)[:, 0]
            logits.append(torch.einsum("cd,dhw->chw", refined, cells[0]))
            p = logits[-1].softmax(0)
            expectations.append((p * torch.tensor(values).view(25, 1, 1)).sum(0))
            sure.append(p.max(0).values)
        omega = sure[0] / (sure[0] + sure[1])
        return logits, (omega * expectations[0] + (1 - omega) * expectations[1]).sum()


@pytest.fixture(scope="module")
def authors() -> Restated:
    torch.manual_seed(4)
    network = Restated(layers=1).eval()
    with torch.no_grad():
        for module in network.features:
            if isinstance(module, nn.Conv2d):  # keep the signal, which default weights lose
                nn.init.kaiming_normal_(module.weight)
        for name, parameter in network.named_parameters():
            if "features" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return network


@pytest.fixture(scope="module")
def published(authors: Restated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("authors") / "best_model.pth"
    torch.save(authors.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def counter(published: Path) -> p3net.Counter:
    return p3net.load(published)


@torch.no_grad()
def test_the_authors_checkpoint_counts_as_their_network(authors, counter):
    assert counter.network.architecture.layers == 1
    assert counter.metadata == {"origin": "authors"}
    for size_hw in ((64, 64), (75, 133)):
        image = torch.rand(1, 3, *size_hw)
        logits, count = authors(image)
        output = counter.predict(image)
        assert output.density.shape == (1, size_hw[0] // 8, size_hw[1] // 8)
        for got, expected in zip(output.logits, logits, strict=True):
            scale = float(expected.abs().max())
            torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=1e-5 * scale)
        assert not torch.allclose(*logits)
        assert float(output.density.sum()) == pytest.approx(float(count), rel=1e-3)


@pytest.mark.parametrize("key", [None, "model"])
def test_wrapped_and_parallel_checkpoints_of_the_authors(authors, counter, tmp_path, key):
    prefixed = {f"module.{name}": tensor for name, tensor in authors.state_dict().items()}
    torch.save({key: prefixed, "epoch": 7} if key else prefixed, tmp_path / "m.pth")
    assert same(p3net.load(tmp_path / "m.pth").network, counter.network)


def test_state_dicts_close_to_the_authors(authors):
    state = authors.state_dict()
    second = {name: t for name, t in state.items() if name.startswith("decoder2.")}
    extra = {name.replace("layers.0", "layers.1"): t for name, t in second.items()}
    changes: dict[str, tuple[dict[str, Tensor], str]] = {
        "a deeper second decoder": ({**state, **extra}, r"too many, first decoders\.1"),
        "a final norm": (
            {**state, "decoder1.norm.weight": torch.ones(512)},
            r"too many, first decoders\.0\.norm",
        ),
        "fewer tokens": ({**state, "count_query1": torch.ones(5, 1, 512)}, r"first tokens\.0"),
        "nothing missing but this": (
            {n: t for n, t in state.items() if n != "features.0.bias"},
            r"first backbone\.features\.0\.bias",
        ),
    }
    for weights, words in changes.values():
        with pytest.raises(InputError, match=words):
            checkpoint.from_authors(weights)


def test_an_authors_network_saved_here_comes_back(counter, tmp_path):
    network = counter.network
    checkpoint.save(tmp_path / "m.safetensors", network, {})
    again = p3net.load(tmp_path / "m.safetensors").network
    assert again.architecture.grid == "authors"
    assert same(again, network)
