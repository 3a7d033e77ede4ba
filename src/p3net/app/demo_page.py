"""The demo's page: one HTML file with everything in it, no request to anywhere."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from p3net.app import figures
from p3net.checkpoint import load
from p3net.data.catalogue import open_dataset
from p3net.evaluation import ImageResult

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5c6670; --line: #dfe3e7; --page: #fff;
  --tint: #f4f6f8; --mark: #b8324a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #9aa4ad; --line: #333a41;
  --page: #15191d; --tint: #1e2429; --mark: #f0808f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 17px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 3.5rem 1.5rem 5rem; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 .6rem; letter-spacing: -.02em; }
h2 { font-size: 1.3rem; margin: 3.2rem 0 .6rem; letter-spacing: -.01em; }
h3 { font-size: 1rem; margin: 2rem 0 .5rem; }
p, ul { max-width: 44rem; margin: .6rem 0; }
.lead { font-size: 1.15rem; color: var(--soft); }
.verdict { border-left: 4px solid var(--mark); padding: .2rem 0 .2rem 1rem; font-size: 1.1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0;
  font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .8rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { font-weight: 600; color: var(--soft); font-size: .85rem; }
td small, .soft { color: var(--soft); font-size: .82rem; }
tr.ours td { font-weight: 650; } tr.ours small { font-weight: 400; }
.scene { display: grid; grid-template-columns: repeat(4, 1fr); gap: .8rem; margin: .4rem 0 0; }
@media (max-width: 700px) { .scene { grid-template-columns: repeat(2, 1fr); } }
figure { margin: 0; }
figcaption { font-size: .82rem; color: var(--soft); line-height: 1.35; margin-top: .25rem; }
figcaption b { color: var(--ink); font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; display: block; border-radius: 4px; }
.scene img { width: 100%; }
.keys { display: flex; flex-wrap: wrap; gap: .4rem 2rem; font-size: .82rem; color: var(--soft); }
.keys i { display: inline-block; width: 9rem; height: .7rem; border-radius: 3px;
  vertical-align: middle; margin: 0 .4rem; }
pre { background: var(--tint); padding: 1rem 1.2rem; border-radius: 6px; overflow-x: auto;
  font: 14px/1.7 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font: .92em ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
"""


def write(out: Path, results: Mapping[str, Any]) -> Path:
    """Write `index.html` into the demo's folder from its results, models and records."""
    runs = results["runs"]
    titles = {name: run["title"] for name, run in runs.items()}
    logs = {titles[name]: read_log(out / name) for name in runs}
    counts = {
        titles[name]: [
            ImageResult(each["key"], each["truth"], each["counted"], {})
            for each in run["per_image"]
        ]
        for name, run in runs.items()
    }
    body = [
        _introduction(results),
        "<h2>The result</h2>",
        f'<p class="verdict">{escape(results["verdict"])}</p>',
        table(runs),
        "<h2>Scenes no network has seen</h2>",
        _pictures(out, results),
        "<h2>Every unseen scene</h2>",
        "<p>Each dot is a scene; on the dashed line, the count is right.</p>",
        _plot(figures.scatter, counts, "people against counted, for the three networks"),
        "<h2>How they learned</h2>",
        _plot(figures.curves, logs, "learning curves of the three networks"),
        _about_curves(logs),
        "<h2>What it means</h2>",
        _meaning(results),
        "<h2>Next</h2>",
        _next(out, results),
    ]
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>P³Net: counting from few labels</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )
    path = out / "index.html"
    path.write_text(html, encoding="utf-8")
    return path


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `log.jsonl`."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# --- words ------------------------------------------------------------------------------------


def _introduction(results: Mapping[str, Any]) -> str:
    few, ours = results["runs"]["labels"], results["runs"]["p3net"]
    everything = results["runs"]["all"]
    scenes = ours["labelled_images"] + ours["unlabelled_images"]
    minutes = sum(run["minutes"] for run in results["runs"].values())
    return f"""<h1>Counting from {few["labelled_images"]} labelled scenes</h1>
<p class="lead">P³Net learns to count people from a few images with marked heads and many
without. Here it did so on this machine, in {minutes:.0f} minutes of computing.</p>
<p>{scenes:,} scenes of streets and squares were rendered. In {few["labelled_images"]} of them,
every head is marked: {few["labelled_points"]:,} points. Three networks of the same shape then
learned for {results["steps"]:,} steps each:</p>
<ul>
<li><b>{escape(few["title"])}</b>: the {few["labelled_images"]} labelled scenes and nothing
else;</li>
<li><b>{escape(ours["title"])}</b>: besides them, the {ours["unlabelled_images"]:,} scenes without
labels. The network has two branches that divide densities at different borders, and on unlabelled
scenes their expectations must agree (ECR): each branch, shown the scene in other light, is drawn to
what the other branch's averaged weights say of the plain one;</li>
<li><b>{escape(everything["title"])}</b>: all {everything["labelled_images"]:,} scenes with
{everything["labelled_points"]:,} marked heads, the best that labels can buy.</li>
</ul>
<p>All labelled scenes were shown in changing light too. All three then counted
{ours["images"]:,} other scenes.</p>"""


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The three runs' figures on the unseen scenes."""
    head = ("method", "labelled scenes", "MAE", "RMSE", "NAE", "training min")
    rows = []
    for name, run in runs.items():
        cells = (
            escape(run["title"]),
            f"{run['labelled_images']:,}",
            *(estimate(run[metric], digits) for metric, digits in METRICS.items()),
            f"{run['minutes']:.1f}",
        )
        ours = ' class="ours"' if name == "p3net" else ""
        rows.append(
            f'<tr{ours} data-run="{name}">' + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
        )
    header = "".join(f"<th>{name}</th>" for name in head)
    return f"""<div class="scroll"><table><thead><tr>{header}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>
<p class="soft">MAE: mean absolute error in people per scene. RMSE: root of the mean squared error,
called MSE in the papers; it weighs large misses more. NAE: mean error as a share of the people
there. Lower is better. Small: 95&nbsp;% interval over scenes drawn again.</p>"""


METRICS = {"mae": 2, "rmse": 2, "nae": 3}
"""The table's metrics, each with its digits after the point."""


def estimate(figure: Mapping[str, float | None], digits: int) -> str:
    """A figure and its interval; a dash where there is none."""
    value, low, high = figure["value"], figure["low"], figure["high"]
    if value is None or low is None or high is None:
        return "–"
    return f"{value:.{digits}f} <small>{low:.{digits}f}–{high:.{digits}f}</small>"


def _about_curves(logs: Mapping[str, Iterable[Mapping[str, Any]]]) -> str:
    words = (
        "Left, the loss on labelled crops. Few scenes can be learned by heart, so a low loss is "
        "not yet a low error on new scenes."
    )
    apart = [
        line["records"]["disagreement"]
        for log in logs.values()
        for line in log
        if "disagreement" in line["records"]
    ]
    if apart:
        tail = apart[-max(1, len(apart) // 10) :]
        words += (
            " Right, how far the branches are apart on unlabelled crops, one on the plain view and "
            f"one on the other: {sum(tail) / len(tail):.0%} of the count at the end."
        )
    return f"<p>{words}</p>"


def _meaning(results: Mapping[str, Any]) -> str:
    runs = results["runs"]
    few, ours, every = (runs[name]["mae"]["value"] for name in ("labels", "p3net", "all"))
    people = sum(each["truth"] for each in runs["p3net"]["per_image"]) / runs["p3net"]["images"]
    apart = results["p3net_less_labels"]
    labels = runs["labels"]["labelled_images"]
    share = labels / runs["all"]["labelled_images"]
    price = (
        f"The difference is the price of marking {share:.0%} instead of everything."
        if every < few
        else "So in this run more labels did not help either; it may have been too short for them."
    )
    interval = f"{signed(apart['low'], 2)} to {signed(apart['high'], 2)}"
    return f"""<p>An unseen scene holds {people:.0f} people on average. With labels in {labels}
scenes alone, the network is off by {few:.1f} of them; with labels everywhere, by {every:.1f}.
{price}</p>
<p>Adding the unlabelled scenes changed the error by {signed(apart["mae"], 2)} people per
scene (95&nbsp;% interval {interval}, scene by scene on the same scenes), to {ours:.1f}.
{READINGS[results["outcome"]]}</p>
<p>What this does not show: rendered scenes are easier than photographs, the network is small, and
one seed is one draw of {labels} labelled scenes: another may show less. The figures of several
seeds and of real crowds are in <code>docs/results.md</code>.</p>"""


READINGS = {
    "helped": "The whole interval is below zero, so this is more than luck with these test scenes; "
    "no label was needed for it, only scenes of the same kind and time to compute.",
    "harmed": "The whole interval is above zero: in this run the two branches agreed on wrong "
    "answers, and learning from each other made that worse. That happens when labels are too few "
    "to start from.",
    "small": "The change is real on these scenes but smaller than a hundredth of the error: nobody "
    "would notice it.",
    "uncertain": "The interval contains zero, so with these test scenes this run can show neither "
    "help nor harm. More seeds or more test scenes would.",
}
"""What to think of each outcome."""


def _next(out: Path, results: Mapping[str, Any]) -> str:
    size = results["data"].rpartition("size=")[2]
    other = f"synthetic:7?train=0&val=0&test=100&size={size}"
    commands = f"""# the same comparison with other labels drawn
p3net demo --seed {results["seed"] + 1} --out {out}-{results["seed"] + 1}

# this model on a hundred scenes more, with the worst and the best in a picture
p3net evaluate {out / "p3net"} '{other}' --picture cases.png

# your own images: a folder of photos, some with points beside them
p3net data check PHOTOS
p3net train PHOTOS --labelled 5%"""
    return f"<pre>{escape(commands)}</pre>"


# --- pictures ---------------------------------------------------------------------------------


def pick_scenes(truths: Mapping[str, int]) -> dict[str, str]:
    """A sparse, a medium, a dense and an empty scene, by their true counts alone.

    >>> pick_scenes({"a": 0, "b": 5, "c": 1, "d": 9, "e": 30})
    {'sparse': 'c', 'medium': 'd', 'dense': 'e', 'empty': 'a'}
    """
    ranked = sorted((key for key in truths if truths[key]), key=lambda key: (truths[key], key))
    empty = min((key for key in truths if not truths[key]), default=None)
    result: dict[str, str] = {}
    for name, share in (("sparse", 0.2), ("medium", 0.5), ("dense", 0.92)):
        if ranked and (key := ranked[int(share * len(ranked))]) not in result.values():
            result[name] = key
    return result if empty is None else {**result, "empty": empty}


def _pictures(out: Path, results: Mapping[str, Any]) -> str:
    runs = results["runs"]
    truths = {each["key"]: each["truth"] for each in runs["p3net"]["per_image"]}
    scenes = pick_scenes(truths)
    samples = {
        sample.key: sample for sample in open_dataset(results["data"]).pick(scenes.values()).samples
    }
    counters = {name: load(out / name) for name in runs}
    parts = [
        "<p>Chosen by how many people there are, not by how well they were counted.</p>",
        '<p class="keys">',
        f"<span>density: none{_scale(figures.HEAT)}many</span>",
        f"<span>difference: too few{_scale(figures.SIGNED)}too many</span></p>",
    ]
    for name, key in scenes.items():
        with samples[key].open() as opened:
            image = opened.convert("RGB")
        points = samples[key].marks().points_xy
        predictions = {run: counter.count(image) for run, counter in counters.items()}
        made = {
            run: figures.tiles(image, points, prediction, peak=_peak(points, predictions))
            for run, prediction in predictions.items()
        }
        first = made["p3net"]
        top = [_figure(first.image, f"{name}: <b>{truths[key]:,}</b> people", f"scene {key}")]
        below = [_figure(first.truth, "true density", f"true density of {key}")]
        for run, tile in made.items():
            title = escape(runs[run]["title"])
            count = predictions[run].count
            counted = f"{title}<br>counted <b>{count:,.1f}</b>"
            apart = f"difference <b>{signed(count - truths[key])}</b>"
            top.append(_figure(tile.counted, counted, f"density of {key} by {title}"))
            below.append(_figure(tile.difference, apart, f"difference on {key} of {title}"))
        label = f"<h3>{name.capitalize()}</h3>"
        parts.append(f'{label}<div class="scene">{"".join(top)}{"".join(below)}</div>')
    return "\n".join(parts)


def _peak(points: Any, predictions: Mapping[str, Any]) -> float:
    """One scale of colours for all pictures of a scene."""
    truth = figures.truth_cells(points, next(iter(predictions.values())))
    largest = max(float(each.density.max()) for each in predictions.values())
    return max(float(truth.max()), min(largest, 2 * float(truth.max())), 0.05)


def signed(value: float, digits: int = 1) -> str:
    """A difference with a real minus sign.

    >>> signed(-1234.56), signed(0.04)
    ('−1,234.6', '+0.0')
    """
    return f"{value:+,.{digits}f}".replace("-", "−")


def _scale(anchors: Iterable[tuple[int, int, int]]) -> str:
    stops = ",".join(f"rgb{anchor}" for anchor in anchors)
    return f'<i style="background:linear-gradient(90deg,{stops})"></i>'


def _figure(picture: Image.Image, caption: str, words: str) -> str:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=90)
    source = _uri(file.getvalue(), "jpeg")
    size = f'width="{picture.width}" height="{picture.height}"'
    image = f'<img src="{source}" {size} alt="{escape(words)}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _plot(draw: Callable[..., bytes], content: Any, words: str) -> str:
    """A plot for light and for dark pages, at its size on paper."""
    light, dark = (draw(content, dark=is_dark) for is_dark in (False, True))
    with Image.open(io.BytesIO(light)) as image:
        width = round(image.width / figures.DPI * 96)
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_uri(dark, "png")}">'
        f'<img src="{_uri(light, "png")}" width="{width}" alt="{escape(words)}"></picture>'
    )


def _uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
