"""Videos of `p3net count`: times people write, the chart over time, the annotated video."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p3net.app.rows import Row, Sink, clock, ends
from p3net.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

    from p3net.data.video import Frame
    from p3net.prediction import Prediction
    from p3net.regions import Regions

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TICKS = 60_000  # of the annotated video's clock in a second: whole for all usual rates
_MOST_SIDE = 1920  # px of its longer side


def seconds(text: str) -> float:
    """A time or a span as people write it.

    >>> seconds("1.5"), seconds("500ms"), seconds("2m"), seconds("1:02:03.5")
    (1.5, 0.5, 120.0, 3723.5)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip())
    if found and found[2] in _UNITS:
        return float(found[1]) * _UNITS[found[2]]
    if re.fullmatch(r"\d+(:[0-5]?\d){1,2}(\.\d+)?", text.strip()):
        total = 0.0
        for part in text.strip().split(":"):
            total = 60 * total + float(part)
        return total
    raise InputError(f"{text!r} is no time; write 1.5s, 500ms, 2m, 1h or 1:30")


@contextmanager
def chart(path: Path) -> Iterator[Sink]:
    """The counts of a video over time; drawn when the context ends, however it does."""
    from p3net.app import figures
    from p3net.app.contact_sheet import save_picture

    series: list[tuple[float, Prediction]] = []

    def add(row: Row) -> None:
        if row.prediction is not None and row.time_s is not None:
            series.append((row.time_s, _without_arrays(row.prediction)))

    try:
        yield add
    finally:
        if series:
            save_picture(figures.on_white(figures.over_time(series)), path)


def _without_arrays(prediction: Prediction) -> Prediction:
    """What a chart needs: a stream may run for days."""
    from dataclasses import replace

    import numpy as np

    nothing = np.zeros((0, 0), np.float32)
    return replace(prediction, density=nothing, variance=None, branches=(), source=None)


# --- the annotated video --------------------------------------------------------------------


Draw = Callable[["Frame", "Prediction"], None]


@contextmanager
def annotated(path: Path, regions: Regions | None = None) -> Iterator[Draw]:
    """A video of the frames given, each at its own time, with the heat and the count over them."""
    import av
    import numpy as np
    from av.error import FFmpegError

    try:
        out = av.open(str(path.absolute()), "w")
    except (FFmpegError, OSError, ValueError) as error:
        raise InputError(f"cannot be written as a video: {error}", source=path) from None
    stream: Any = None
    first_s, last = 0.0, -1
    drawn: tuple[Prediction, tuple[int, int]] | None = None
    wash: Callable[[Image.Image], Image.Image]

    def draw(frame: Frame, prediction: Prediction) -> None:
        nonlocal stream, first_s, last, drawn, wash
        picture = _fitting(frame.image)
        if drawn != (prediction, picture.size):
            drawn, wash = (prediction, picture.size), overlay(prediction, picture.size)
        picture = wash(picture)
        outline(picture, prediction, regions)
        label(picture, prediction, frame.time_s)
        if stream is None:
            stream = _video_stream(out, picture.size)
            first_s = frame.time_s
        picture = picture.resize((stream.width, stream.height))  # streams may change their size
        coded = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
        last = max(last + 1, round((frame.time_s - first_s) * _TICKS))
        coded.pts, coded.time_base = last, Fraction(1, _TICKS)
        out.mux(stream.encode(coded))

    try:
        yield draw
    finally:
        if stream is not None:
            out.mux(stream.encode())  # the encoder holds some frames back
        out.close()


def _video_stream(out: Any, size_wh: tuple[int, int]) -> Any:
    """H.264 where the wheel has it, MPEG-4 elsewhere; sides are even."""
    from av.codec import codecs_available

    name = "libx264" if "libx264" in codecs_available else "mpeg4"
    options = {"preset": "veryfast", "crf": "22"} if name == "libx264" else {"qscale": "4"}
    stream = out.add_stream(name, rate=25, options=options)
    stream.width, stream.height = (side - side % 2 for side in size_wh)
    stream.pix_fmt = "yuv420p"
    stream.codec_context.time_base = Fraction(1, _TICKS)
    return stream


def _fitting(image: Image.Image) -> Image.Image:
    """No larger than Full HD, no smaller than a player can show."""
    scale = min(1.0, _MOST_SIDE / max(image.size))
    size = [max(2, round(side * scale)) for side in image.size]
    width, height = (side - side % 2 for side in size)
    return image if image.size == (width, height) else image.resize((width, height))


def overlay(
    prediction: Prediction, size_wh: tuple[int, int]
) -> Callable[[Image.Image], Image.Image]:
    """`Prediction.overlay` as a function of the picture, quick for many pictures of a size.

    Every pixel p becomes p (1 − α) + α c, so black and white tell all there is to know.
    """
    from PIL import Image, ImageChops

    black, white = (Image.new("RGB", size_wh, colour) for colour in ("black", "white"))
    colour = prediction.overlay(image=black)
    rest = ImageChops.subtract(prediction.overlay(image=white), colour)
    return lambda picture: ImageChops.add(ImageChops.multiply(picture, rest), colour)


def outline(picture: Image.Image, prediction: Prediction, regions: Regions | None) -> None:
    """Draw the regions with their names and counts."""
    from PIL import ImageDraw, ImageFont

    pen = ImageDraw.Draw(picture)
    size = max(9, round(min(picture.size) / 24))
    scale = picture.width / prediction.size_hw[1], picture.height / prediction.size_hw[0]
    for region in regions or ():
        corners = [(x * scale[0], y * scale[1]) for x, y in region.polygon_xy]
        pen.line([*corners, corners[0]], fill="white", width=max(1, size // 8))
        text = f"{region.name}: {prediction.regions[region.name].count:,.0f}"
        middle = [sum(values) / len(corners) for values in zip(*corners, strict=True)]
        pen.text(
            (middle[0], middle[1]),
            text,
            fill="white",
            font=ImageFont.load_default(size),
            anchor="mm",
            stroke_width=max(1, size // 8),
            stroke_fill="black",
        )


def label(picture: Image.Image, prediction: Prediction, time_s: float) -> None:
    """Write the count, its interval and the time into the upper left corner."""
    from PIL import Image, ImageDraw, ImageFont

    size = max(10, round(min(picture.size) / 12))
    large, small = ImageFont.load_default(size), ImageFont.load_default(max(9, size * 5 // 9))
    lines = [(f"{prediction.count:,.0f}", large)]
    if prediction.interval is not None:
        lines.append((ends(prediction.interval).replace("–", "-"), small))  # not in the font
    lines.append((clock(time_s), small))
    pen = ImageDraw.Draw(picture)
    boxes = [pen.textbbox((0, 0), text, font) for text, font in lines]
    margin = size // 3
    width = round(max(box[2] for box in boxes)) + 2 * margin
    height = round(sum(box[3] for box in boxes)) + (len(lines) + 1) * margin
    shade = Image.new("RGB", (width, height), (12, 14, 18))
    corner = (0, 0, width, height)
    picture.paste(Image.blend(picture.crop(corner), shade, 0.72), corner)
    y = float(margin)
    for (text, font), box in zip(lines, boxes, strict=True):
        pen.text((margin, y - box[1] / 2), text, fill="white", font=font)
        y += box[3] + margin


def require_video_path(path: Path) -> None:
    """Say early that a video cannot be written there."""
    from p3net.data.video_source import is_video_name

    if not is_video_name(path):
        raise InputError("expected the name of a video, such as out.mp4", source=path)
    if not path.parent.is_dir():
        raise InputError("its folder does not exist; make it first", source=path)
    with suppress(ImportError):
        import av  # noqa: F401  (only whether it is there)

        return
    raise InputError("videos need PyAV, which comes with an extra: pip install 'p3net[video]'")
