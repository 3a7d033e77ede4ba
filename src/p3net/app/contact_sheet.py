"""A contact sheet: images of a dataset with their points, to see at a glance that they fit."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

from p3net.data.images import is_image_name, to_rgb
from p3net.errors import InputError
from p3net.structures import Dataset, Sample

_TILE_WH = (320, 240)
_GAP, _CAPTION = 8, 18  # px between tiles; height of the line below each
_DOT = (255, 40, 40)


def contact_sheet(dataset: Dataset, *, tiles: int = 24, columns: int = 4) -> Image.Image:
    """At most `tiles` images, spread evenly over the dataset's order, with their counts."""
    number = min(tiles, len(dataset))
    chosen = [dataset.samples[i * len(dataset) // number] for i in range(number)]
    columns = min(columns, number)
    step_x, step_y = _TILE_WH[0] + _GAP, _TILE_WH[1] + _CAPTION + _GAP
    size = (columns * step_x + _GAP, -(-number // columns) * step_y + _GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, sample in enumerate(chosen):
        left, top = i % columns * step_x + _GAP, i // columns * step_y + _GAP
        picture, caption = _tile(sample)
        sheet.paste(picture, (left, top))
        draw.text((left, top + picture.height + 2), caption[:52], fill="black")
    return sheet


def require_picture_path(path: Path) -> None:
    """Say early that a picture cannot be written there."""
    Image.init()
    if not is_image_name(path) or Image.EXTENSION.get(path.suffix.lower()) not in Image.SAVE:
        raise InputError("expected the name of a picture, such as sheet.png", source=path)
    if not path.parent.is_dir():
        raise InputError("its folder does not exist; make it first", source=path)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write it, or say why that cannot be."""
    try:
        picture.save(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"could not be written: {reason}", source=path) from None


def _tile(sample: Sample) -> tuple[Image.Image, str]:
    """The small picture, and the line below it: a count, or what is wrong."""
    small = Image.new("RGB", _TILE_WH, "lightgrey")
    try:
        with sample.open() as opened:
            image = to_rgb(opened)
            scale = min(_TILE_WH[0] / image.width, _TILE_WH[1] / image.height)
            size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
            small = image.resize(size, reducing_gap=2.0)
        if not sample.labelled:
            return small, f"{sample.key}: unlabelled"
        points = sample.marks().points_xy
    except InputError as error:
        return small, f"{sample.key}: {error.message}"
    draw = ImageDraw.Draw(small)
    radius = 2.0 if len(points) < 200 else 1.0  # px; larger dots would hide a dense crowd
    for x, y in points * scale - 0.5:  # Pillow's coordinates have pixel centres at whole numbers
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_DOT)
    return small, f"{sample.key}: {len(points):,}"
