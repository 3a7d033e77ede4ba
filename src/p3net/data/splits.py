"""Which images are labelled, unlabelled, for validation and for the test: drawn, read, recorded.

The default makes it impossible to choose a model on the test images: validation is the set's
published part or comes out of the training images, and test images are never drawn from.
Every split has a hash that a run records. Keys are `Sample.key`, `split/name`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, cast, get_args

from numpy.random import Generator

from p3net.errors import InputError
from p3net.randomness import generator
from p3net.structures import Dataset, Sample

Amount = int | float
"""A number of images (int) or a share of the annotated training images (float in [0, 1])."""

Order = Literal["random", "crowded", "sparse"]
"""Which images are labelled first: any, or the paper's two extremes by number of people."""

ROLES = ("labelled", "unlabelled", "validation", "test")
VALIDATION = 0.1
"""The share of the training images that validation takes where none is published."""


@dataclass(frozen=True, slots=True)
class Split:
    """Keys of images by role; no image has two.

    Attributes:
        labelled: training images with points, in the order in which they were drawn.
        unlabelled: training images whose points, if any, are out of reach.
        validation: for choosing a model.
        test: for the final figure.
        how: what drew it, as JSON; not part of the hash.
    """

    labelled: tuple[str, ...]
    unlabelled: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    how: Mapping[str, object] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Refuse an image with two roles or listed twice."""
        roles: dict[str, list[str]] = {}
        for role in ROLES:
            for key in self.keys(role):
                roles.setdefault(key, []).append(role)
        if twice := [f"{key} ({' and '.join(at)})" for key, at in roles.items() if len(at) > 1]:
            raise InputError(
                f"an image may have one role only, but {_some(twice)}; "
                "take it out of all roles but one"
            )

    def keys(self, role: str) -> tuple[str, ...]:
        """The keys of a role."""
        keys: tuple[str, ...] = getattr(self, role)
        return keys

    @property
    def hash(self) -> str:
        """16 hex digits of the SHA-256 over each role's sorted keys; the order does not matter."""
        lines = (f"{role}\t{key}\n" for role in ROLES for key in sorted(self.keys(role)))
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


class SplitData(NamedTuple):
    """A dataset by role; reading the points of an unlabelled image is an error."""

    labelled: Dataset
    unlabelled: Dataset
    validation: Dataset
    test: Dataset


def parse_amount(text: str) -> Amount:
    """Read `5%` or `0.05` (a share) or `15` (a number).

    >>> parse_amount("5%"), parse_amount("0.05"), parse_amount("15")
    (0.05, 0.05, 15)
    """
    text = text.strip()
    try:
        if text.endswith("%"):
            amount: Amount = float(text[:-1]) / 100
        else:
            amount = int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InputError(f"expected a share (5%, 0.05) or a number (15), got {text!r}") from None
    return _checked(amount)


def parse_order(text: str) -> Order:
    """Read the name of an order."""
    if text not in get_args(Order):
        raise InputError(f"unknown order {text!r}; use {', '.join(get_args(Order))}")
    return cast("Order", text)


def draw(
    dataset: Dataset,
    *,
    labelled: Amount,
    seed: int,
    validation: Amount | Path | None = None,
    order: Order = "random",
    stratified: bool = False,
) -> Split:
    """Draw the labelled and, where none is published, the validation images from the training ones.

    Shares are of the annotated training images; a share of labels never reaches into the
    validation images, so 100% means all others. A number of labels does: validation images that
    nobody asked for make way for it. With one seed and one validation amount the
    labelled images of a smaller amount are among those of a larger one. The draw depends on
    the names, not on the order in which they were listed.

    Args:
        dataset: its test images become the test role, untouched.
        labelled: how many images may be used with their points.
        seed: of the draw.
        validation: how many training images to put aside, at random whatever the order, or a
            list of them; None for the published validation images, or 10 % where there are none
            (and fewer where that many labels are asked for).
        order: "crowded" or "sparse" labels the images with the most or fewest people first.
        stratified: spread the labelled images evenly over the counts. This and `order` look
            at the counts of all training images, which a real labelling could not.
    """
    parse_order(order)
    if stratified and order != "random":
        raise InputError(f"stratified contradicts the order {order!r}; choose one of them")
    if seed < 0:
        raise InputError(f"the seed must be at least 0, got {seed}")
    pool = _annotated(dataset, "train")
    if not pool:
        raise InputError("no annotated training image to draw from", source=dataset.root)
    total = len(pool)
    shuffled = _shuffle(pool, seed)
    wanted = _number(labelled, total)
    spare = max(0, total - wanted) if isinstance(labelled, int) else total
    held = _validation(dataset, shuffled, total, validation, spare)
    rest = _without(shuffled, held)
    if isinstance(labelled, float):
        wanted = min(max(wanted, 1), len(rest))
    if not 1 <= wanted <= len(rest):
        raise InputError(
            f"{wanted} labelled images asked for; validation takes {total - len(rest)} of {total} "
            f"annotated training images, which leaves {len(rest) or 'none'} to label",
            source=dataset.root,
        )
    if stratified:
        rest = _spread(sorted(rest, key=_count), generator(seed, 1))
    elif order != "random":
        rest.sort(key=_count, reverse=order == "crowded")
    held_from = validation.name if isinstance(validation, Path) else validation
    asked = {"labelled": labelled, "validation": held_from, "seed": seed}
    return _complete(
        dataset, rest[:wanted], held, {**asked, "order": order, "stratified": stratified}
    )


def from_lists(
    dataset: Dataset,
    *,
    labelled: Path,
    validation: Path | Amount | None = None,
    seed: int = 0,
) -> Split:
    """The split of published lists of training images, one original file name a line.

    `validation` is a list too, or an amount as in `draw`, taken from the images that the
    labelled list leaves over.
    """
    chosen = listed(dataset, labelled)
    pool = _annotated(dataset, "train")
    free = _without(_shuffle(pool, seed), chosen)
    held = _validation(dataset, free, len(pool), validation, len(free))
    if isinstance(validation, Path):
        keys = {sample.key for sample in chosen}
        if both := [sample.name for sample in held if sample.key in keys]:
            raise InputError(f"also in {labelled}: {_some(both)}", source=validation)
    held_from = validation.name if isinstance(validation, Path) else validation
    asked = {"labelled": labelled.name, "validation": held_from, "seed": seed}
    return _complete(dataset, chosen, held, asked)


def apply(dataset: Dataset, split: Split) -> SplitData:
    """The images of each role; an error if the dataset lacks one or has no points for it."""
    data = SplitData(*(dataset.pick(split.keys(role)) for role in ROLES))
    for role in ("labelled", "validation"):
        bare = [sample.key for sample in getattr(data, role).samples if not sample.labelled]
        if bare:
            raise InputError(
                f"{role} images without annotation: {_some(bare)}", source=dataset.root
            )
    hidden = tuple(sample.without_labels() for sample in data.unlabelled.samples)
    return data._replace(unlabelled=replace(data.unlabelled, samples=hidden))


# Files.


def read_list(path: Path) -> list[str]:
    """The names in a list: one a line, any line ends, blank lines skipped; none twice."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read the list: {error.strerror}", source=path) from None
    except UnicodeDecodeError:
        raise InputError("not a text file; expected one image name a line", source=path) from None
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise InputError(f"listed more than once: {_some(twice)}", source=path)
    return names


def write(split: Split, folder: Path) -> None:
    """Write a list of keys for each role, and `split.json` last; never over another split."""
    record = folder / "split.json"
    if record.exists() and (other := read(folder)).hash != split.hash:
        raise InputError(f"holds another split, {other.hash}; choose a new folder", source=folder)
    counts = {role: len(split.keys(role)) for role in ROLES}
    facts = {"hash": split.hash, "counts": counts, "how": dict(split.how)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for role in ROLES:
            lines = "".join(f"{key}\n" for key in split.keys(role))
            (folder / f"{role}.txt").write_text(lines, encoding="utf-8")
        text = json.dumps(facts, indent=2, ensure_ascii=False)
        record.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the split: {error.strerror}", source=folder) from None


def read(folder: Path) -> Split:
    """Read what `write` wrote; an error if a list no longer agrees with the hash."""
    record = folder / "split.json"
    try:
        facts = json.loads(record.read_text(encoding="utf-8"))
        expected, how = facts["hash"], dict(facts["how"])
    except OSError as error:
        raise InputError(f"cannot read the split: {error.strerror}", source=record) from None
    except (ValueError, KeyError, TypeError):
        raise InputError("not the record of a split; write it anew", source=record) from None
    roles = (tuple(read_list(folder / f"{role}.txt")) for role in ROLES)
    labelled, unlabelled, validation, test = roles
    split = Split(labelled, unlabelled, validation, test, how)
    if split.hash != expected:
        raise InputError(
            f"the lists give {split.hash}, not {expected}; write them anew", source=record
        )
    return split


# Drawing.


def _checked(amount: Amount) -> Amount:
    if isinstance(amount, float) and not 0 <= amount <= 1:
        raise InputError(f"a share lies between 0 and 1 (0% and 100%), got {amount:g}")
    if amount < 0:
        raise InputError(f"a number of images must be at least 0, got {amount}")
    return amount


def _number(amount: Amount, total: int) -> int:
    """An amount as a number of images, shares rounded to the nearest."""
    _checked(amount)
    return int(amount * total + 0.5) if isinstance(amount, float) else amount


def _annotated(dataset: Dataset, split: str) -> list[Sample]:
    return [sample for sample in dataset.samples if sample.split == split and sample.labelled]


def _without(samples: Iterable[Sample], taken: Iterable[Sample]) -> list[Sample]:
    keys = {sample.key for sample in taken}
    return [sample for sample in samples if sample.key not in keys]


def _count(sample: Sample) -> int:
    return len(sample.marks().points_xy)


def _shuffle(samples: Iterable[Sample], seed: int) -> list[Sample]:
    ordered = sorted(samples, key=lambda sample: sample.key)
    return [ordered[i] for i in generator(seed).random(len(ordered)).argsort(kind="stable")]


def _spread(ordered: Sequence[Sample], rng: Generator) -> list[Sample]:
    """Reorder so that every beginning is spread evenly: the halves take turns, all the way down."""
    if len(ordered) < 2:
        return list(ordered)
    middle = len(ordered) // 2
    halves = [_spread(ordered[:middle], rng), _spread(ordered[middle:], rng)]
    if rng.random() < 0.5:
        halves.reverse()
    return [sample for pair in zip_longest(*halves) for sample in pair if sample is not None]


def _validation(
    dataset: Dataset,
    candidates: Sequence[Sample],
    total: int,
    amount: Amount | Path | None,
    spare: int,
) -> list[Sample]:
    """Those of a list, the published ones, or the last candidates, `spare` at most unless asked.

    The last, so that labels from the front stay the same.
    """
    if isinstance(amount, Path):
        return listed(dataset, amount)
    published = _annotated(dataset, "val")
    if amount is None and published:
        return published
    number = min(_number(VALIDATION, total), spare) if amount is None else _number(amount, total)
    if number > len(candidates):
        raise InputError(
            f"{number} validation images asked for, but {len(candidates)} of {total} annotated "
            "training images are free; ask for fewer",
            source=dataset.root,
        )
    return list(candidates[len(candidates) - number :])


def _complete(
    dataset: Dataset,
    labelled: Sequence[Sample],
    validation: Sequence[Sample],
    asked: Mapping[str, object],
) -> Split:
    used = {sample.key for sample in (*labelled, *validation)}
    keys = [(sample.split, sample.key) for sample in dataset.samples]
    return Split(
        labelled=tuple(sample.key for sample in labelled),
        unlabelled=tuple(key for part, key in keys if part == "train" and key not in used),
        validation=tuple(sorted(sample.key for sample in validation)),
        test=tuple(key for part, key in keys if part == "test"),
        how={"data": dataset.root, **asked},
    )


# Names in published lists.


def listed(dataset: Dataset, path: Path) -> list[Sample]:
    """The training images a list names: by key, path, file name, or file name without its end."""
    training = dataset.part("train")
    by_form = _forms(training)
    elsewhere = _forms(dataset.where(lambda sample: sample.split != "train"))
    found: dict[str, Sample] = {}
    absent: list[str] = []
    for name in read_list(path):
        place = PurePosixPath(name.replace("\\", "/"))
        matches = next(
            (by_form[form] for form in (str(place), place.name, place.stem) if form in by_form), []
        )
        matches = [sample for sample in matches if sample.name == str(place)] or matches
        if len(matches) > 1:
            several = _some(sample.key for sample in matches)
            raise InputError(f"{name} may be any of {several}; list its path", source=path)
        if not matches:
            absent.append(f"{name} (not a training image)" if place.name in elsewhere else name)
            continue
        if matches[0].key in found:
            raise InputError(f"listed more than once: {matches[0].key}", source=path)
        if not matches[0].labelled:
            raise InputError(f"{matches[0].key} has no annotation; take it out", source=path)
        found[matches[0].key] = matches[0]
    if absent:
        raise InputError(
            f"{len(absent)} of its images are not among the {len(training)} training images of "
            f"{dataset.root}: {_some(absent)}; is it the list of another set?",
            source=path,
        )
    if not found:
        raise InputError("an empty list; expected one image name a line", source=path)
    return list(found.values())


def _forms(dataset: Dataset) -> dict[str, list[Sample]]:
    """The samples by every way of writing their names."""
    forms: dict[str, list[Sample]] = {}
    for sample in dataset.samples:
        name = PurePosixPath(sample.name)
        for form in {sample.key, sample.name, name.name, name.stem, str(name.with_suffix(""))}:
            forms.setdefault(form, []).append(sample)
    return forms


def _some(items: Iterable[str], most: int = 3) -> str:
    """The first few, and how many more."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
