"""`p3net figure`: the paper's pictures, of your own models.

`densities` is fig:comp_unlabel, density maps of several models below their images; `attention`
is fig:viz, where each density token of both branches looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p3net.app.data import Data
from p3net.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from p3net.counting import Counter
    from p3net.structures import Dataset, Sample

app = typer.Typer(help="The paper's pictures, of your own models.", no_args_is_help=True)

COLUMNS = 6  # of the grid of attention maps, as in fig:viz
_GAP, _CAPTION = 6, 18

Picture = Annotated[Path, typer.Option(metavar="OUT.png", help="The picture to write.")]


@app.command()
def densities(
    data: Data,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…", help="Runs' folders or files of weights; NAME=PATH to call one so."
        ),
    ],
    *,
    out: Picture = Path("densities.png"),
    split: Annotated[
        str | None,
        typer.Option(
            metavar="SPLIT",
            help="test, val or train. By default labelled and unlabelled images of the first "
            "model's own training, where its folder says which.",
        ),
    ] = None,
    number: Annotated[int, typer.Option("--images", min=1, help="Images of each kind.")] = 2,
) -> None:
    """Density maps of several models side by side (fig:comp_unlabel).

    p3net figure densities sha:part_A MT=runs/teacher P³Net=runs/square --out maps.png
    """
    from p3net.app.console import console
    from p3net.app.contact_sheet import require_picture_path, save_picture
    from p3net.checkpoint import load
    from p3net.data.catalogue import open_dataset

    require_picture_path(out)
    paths = named(models)
    counters = {name: load(path) for name, path in paths.items()}
    chosen = choose(open_dataset(data), next(iter(paths.values())), split, number)
    save_picture(density_sheet(chosen, counters), out)
    console.print(str(out), markup=False, soft_wrap=True)


@app.command()
def attention(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run's folder, or a file of weights.")
    ],
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The image to look at.")],
    *,
    out: Picture = Path("attention.png"),
    layer: Annotated[int, typer.Option(help="Decoder layer, from 1; -1 is the last.")] = -1,
    width: Annotated[int, typer.Option(min=32, help="Of each picture, in pixels.")] = 200,
) -> None:
    """Where every density token looks: A1…A25 and B1…B25 over the image (fig:viz)."""
    from p3net.app.console import console
    from p3net.app.contact_sheet import require_picture_path, save_picture
    from p3net.checkpoint import load
    from p3net.data.images import open_image

    require_picture_path(out)
    counter = load(model)
    save_picture(attention_sheet(counter, open_image(image), layer=layer, width=width), out)
    console.print(str(out), markup=False, soft_wrap=True)


def named(models: Sequence[str]) -> dict[str, Path]:
    """Models by the names in `NAME=PATH`, or by the last part of their paths; the whole of twins.

    >>> {name: path.as_posix() for name, path in named(["MT=runs/a", "runs/b"]).items()}
    {'MT': 'runs/a', 'b': 'runs/b'}
    """
    result: dict[str, Path] = {}
    for text in models:
        name, equals, rest = text.partition("=")
        plain = not equals or Path(text).exists()
        path = Path(text if plain else rest)
        name = path.name if plain else name
        result[str(path) if name in result else name] = path
    return result


# --- densities -----------------------------------------------------------------------------------


def choose(
    dataset: Dataset, model: Path, split: str | None, number: int
) -> list[tuple[str, Sample]]:
    """Images, each with a word on its kind: labelled, unlabelled, or the name of a split."""
    from p3net.app.evaluate import part
    from p3net.data import splits

    if split is not None:
        return [(split, sample) for sample in _spread(part(dataset, split), number)]
    folder = (model if model.is_dir() else model.parent) / "split"
    if not folder.is_dir():
        raise InputError(
            "this model's folder does not say which images it was trained on; name a --split",
            source=model,
        )
    own = splits.read(folder)
    found = []
    for role in ("labelled", "unlabelled"):
        found += [(role, sample) for sample in _spread(dataset.pick(own.keys(role)), number)]
    return found


def _spread(dataset: Dataset, number: int) -> list[Sample]:
    """At most `number` images, evenly from the dataset's order."""
    number = min(number, len(dataset))
    return [dataset.samples[(2 * i + 1) * len(dataset) // (2 * number)] for i in range(number)]


def density_sheet(
    chosen: Sequence[tuple[str, Sample]], counters: dict[str, Counter], *, height: int = 200
) -> Image.Image:
    """A column for each image: itself and its true count, then each model's density and count."""
    from PIL import Image

    from p3net.app.figures import heat
    from p3net.data.images import to_rgb
    from p3net.structures import inside

    columns = []
    for kind, sample in chosen:
        with sample.open() as opened:
            picture = to_rgb(opened)
        width = max(1, round(picture.width * height / picture.height))
        truth = "no points"
        if sample.labelled:
            shown = inside(sample.marks().points_xy, (picture.height, picture.width))
            truth = f"GT: {int(shown.sum()):,}"
        made = {name: counter.count(picture) for name, counter in counters.items()}
        peak = max(0.05, *(float(each.density.max()) for each in made.values()))
        small = picture.resize((width, height), Image.Resampling.LANCZOS)
        tiles = [(small, f"{truth} ({kind})")]
        for name, each in made.items():
            scale = height / each.size_hw[0]
            cell_xy = (each.cell_xy[0] * scale, each.cell_xy[1] * scale)
            map_ = heat(each.density, (height, width), peak=peak, cell_xy=cell_xy)
            tiles.append((map_, f"{name}: {each.count:,.0f}"))
        columns.append(tiles)
    rows = [[column[i] for column in columns] for i in range(len(counters) + 1)]
    return sheet(rows)


# --- attention -----------------------------------------------------------------------------------


def attention_sheet(
    counter: Counter, image: Image.Image, *, layer: int = -1, width: int = 200
) -> Image.Image:
    """The image, then one tile for every token of both branches, six in a row."""
    import numpy as np
    from PIL import Image

    from p3net.app.figures import overlay
    from p3net.data.images import to_rgb

    first, second, cell_xy = attention_of(counter, image, layer=layer)
    picture = to_rgb(image)
    size = (width, max(1, round(picture.height * width / picture.width)))
    small = picture.resize(size, Image.Resampling.LANCZOS)
    cell_xy = (cell_xy[0] * size[0] / picture.width, cell_xy[1] * size[1] / picture.height)
    tiles = [(small, "image")]
    dim = Image.blend(small, Image.new("RGB", size), 0.6)
    for letter, maps in (("A", first), ("B", second)):
        for token, map_ in enumerate(maps, start=1):
            broad = _broadened(map_, cell_xy)
            peak = float(np.quantile(broad, 0.995))  # else one position outshines all others
            tiles.append((overlay(dim, broad, peak=peak, cell_xy=cell_xy), f"{letter}{token}"))
    return sheet([tiles[i : i + COLUMNS] for i in range(0, len(tiles), COLUMNS)])


def _broadened(
    map_: NDArray[np.float32], cell_xy: tuple[float, float], spot_px: float = 6.0
) -> NDArray[np.float32]:
    """The largest value around each position, so that a single one is wide enough to be seen."""
    import torch
    from torch.nn import functional as F

    reach = max(0, round((spot_px / min(cell_xy) - 1) / 2))
    grid = torch.from_numpy(map_)[None]
    return F.max_pool2d(grid, 2 * reach + 1, stride=1, padding=reach)[0].numpy()


def attention_of(
    counter: Counter, image: Image.Image, *, layer: int = -1
) -> tuple[NDArray[np.float32], NDArray[np.float32], tuple[float, float]]:
    """Cross-attention of one layer, mean over heads: C×h'×w' for each branch, each map sums to 1.

    The third value is the width and height of a position in pixels of the image; the last ones
    may reach beyond it.
    """
    import torch

    from p3net.data.transforms import to_float
    from p3net.network.p3net import P3Net

    network = counter.network
    if not isinstance(network, P3Net):
        raise InputError("a regressor has no density tokens; give a model of P³Net")
    layers = network.architecture.layers
    index = layer - 1 if layer > 0 else layers + layer
    if not 0 <= index < layers:
        raise InputError(f"there is no layer {layer}; this model has {layers}, from 1")
    pixels, scale_xy = counter.prepare(image)
    stride = network.backbone.stride
    with torch.inference_mode():
        one, two = network.eval().attention_maps(to_float(torch.from_numpy(pixels[None])))
    cell_xy = (stride / scale_xy[0], stride / scale_xy[1])
    return one[0, index].numpy(), two[0, index].numpy(), cell_xy


# --- sheets --------------------------------------------------------------------------------------


def sheet(rows: Sequence[Sequence[tuple[Image.Image, str]]]) -> Image.Image:
    """Rows of pictures on white, each with its caption below; columns are as wide as need be."""
    from PIL import Image, ImageDraw, ImageFont

    count = max(map(len, rows))
    widths = [max(row[i][0].width for row in rows if i < len(row)) for i in range(count)]
    heights = [max(tile.height for tile, _ in row) + _CAPTION for row in rows]
    size = (sum(widths) + _GAP * (count + 1), sum(heights) + _GAP * (len(rows) + 1))
    result = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(result)
    font = ImageFont.load_default(12)
    top = _GAP
    for row, height in zip(rows, heights, strict=True):
        left = _GAP
        for (tile, caption), width in zip(row, widths, strict=False):
            result.paste(tile, (left, top))
            draw.text((left, top + tile.height + 2), caption, fill="black", font=font)
            left += width + _GAP
        top += height + _GAP
    return result
