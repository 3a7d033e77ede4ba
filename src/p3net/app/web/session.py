"""What the page works with: a model, a folder, its runs, and the counts made so far.

The model is used by the worker's thread alone. Everything here is bounded: the queue, the counts
that are kept, the pictures decoded at a time.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from p3net.app.web import pictures
from p3net.app.web.jobs import WAITING, Worker
from p3net.app.web.runs import Runs
from p3net.app.web.store import Entry, Store
from p3net.checkpoint import load
from p3net.counting import Counter
from p3net.errors import InputError
from p3net.network.p3net import P3Net
from p3net.prediction import Prediction
from p3net.proposals import Proposal, describe, propose
from p3net.regions import Regions


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    upload_bytes: int = 64_000_000
    upload_pixels: int = 100_000_000
    waiting: int = WAITING
    kept_bytes: int = 256_000_000
    kept_counts: int = 64


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A counter and what the page says of it."""

    counter: Counter
    name: str
    run: int | None = None

    @property
    def mae(self) -> float | None:
        """On the validation images of its own run, where there were any."""
        record = self.counter.metadata
        at = [each for each in record.get("history", ()) if each["step"] == record.get("step")]
        return float(at[-1]["mae"]) if at else None

    @property
    def tokens(self) -> int:
        """C, the density tokens of each branch; 0 for a regressor."""
        network = self.counter.network
        return len(network.intervals[0]) if isinstance(network, P3Net) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """One count, kept for its maps and pictures."""

    id: str
    content: bytes
    prediction: Prediction
    model: Model

    @property
    def size(self) -> int:
        """Bytes it occupies."""
        grids = 2 + len(self.prediction.branches)
        return len(self.content) + grids * self.prediction.density.nbytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a model says of an unmarked image: its count, and the variance per person."""

    count: float
    low: float | None
    high: float | None
    doubt: float | None


@dataclass(frozen=True, slots=True)
class Next:
    """An image to mark, and why."""

    entry: Entry
    proposal: Proposal
    why: str


class NoModelError(Exception):
    """There is nothing to count with yet."""


class NoFolderError(Exception):
    """The server was started without --data."""


class UnknownCountError(LookupError):
    """A count that was never made, or that is no longer kept."""


@dataclass
class Session:
    """The state behind one server.

    Attributes:
        store: images and marks; None when only counting.
        model: what counts; None when only marking.
        overrides: settings for every training run.
    """

    store: Store | None = None
    model: Model | None = None
    overrides: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Take the newest model of the folder where none is given, and begin to work."""
        self._counts: OrderedDict[str, Counted] = OrderedDict()
        self._attention: tuple[str, tuple[NDArray[np.float32], ...]] | None = None
        self._features: dict[str, NDArray[np.float64]] = {}
        self._estimates: dict[str, Estimate] = {}
        self._scouting = False
        self._watched: int | None = None
        self._changing = threading.Lock()
        self.runs: Runs | None = None
        if self.store is not None:
            home = self.store.hidden / "runs"
            self.runs = Runs(self.store.folder, home, self.overrides)
            self._watched = self.runs.active()
            if self.model is None and (newest := self.runs.newest_finished()) is not None:
                with suppress(InputError):  # a damaged model does not keep anybody from marking
                    self.use(newest)
        self.worker = Worker(self._idle, waiting=self.limits.waiting)

    def close(self) -> None:
        """Finish what is at hand, stop training, free the folder. Marks are on disk already."""
        self.worker.close()
        if self.runs is not None:
            self.runs.close()
        if self.store is not None:
            self.store.close()

    # --- counting: in the worker's thread ------------------------------------------------------

    def count(self, content: bytes, regions: Regions | None = None) -> Counted:
        """Count an uploaded image and keep the result."""
        model = self.need_model()
        pictures.check_pixels(content, self.limits.upload_pixels)
        prediction = model.counter.count(content, regions=regions)
        counted = Counted(secrets.token_hex(8), content, prediction, model)
        with self._changing:
            self._counts[counted.id] = counted
            while len(self._counts) > 1 and (
                len(self._counts) > self.limits.kept_counts
                or sum(each.size for each in self._counts.values()) > self.limits.kept_bytes
            ):
                self._counts.popitem(last=False)
        return counted

    def counted(self, id_: str) -> Counted:
        """A count that is still kept."""
        with self._changing:
            try:
                self._counts.move_to_end(id_)
                return self._counts[id_]
            except KeyError:
                raise UnknownCountError(id_) from None

    def attention(self, counted: Counted, branch: int, token: int) -> NDArray[np.float32]:
        """h'×w' cross-attention of one token in the last layer; its sum is 1."""
        network = counted.model.counter.network
        if not isinstance(network, P3Net):
            raise InputError("this model is a regressor: it has no tokens that attend")
        if self._attention is None or self._attention[0] != counted.id:
            self._attention = (counted.id, _attention_maps(counted))
        maps = self._attention[1]
        if not (0 <= branch < len(maps) and 0 <= token < len(maps[0])):
            raise InputError(f"there are 2 branches of {len(maps[0])} tokens")
        chosen: NDArray[np.float32] = maps[branch][token]
        return chosen

    def draft(self, entry: Entry) -> Prediction:
        """The model's own count of an image of the folder."""
        return self.need_model().counter.count(entry.path)

    def need_model(self) -> Model:
        """The model; an error where there is none."""
        if self.model is None:
            raise NoModelError
        return self.model

    def use(self, number: int) -> Model:
        """Count with the model of a run from now on."""
        assert self.runs is not None  # noqa: S101  only called where there is a folder
        model = Model(load(self.runs.path(number)), f"run {number}", number)
        self.model = model
        self._estimates.clear()
        return model

    # --- what to mark next ---------------------------------------------------------------------

    def next(self, number: int) -> tuple[list[Next], int, int]:
        """Images to mark, how many the model has looked at, and of how many."""
        store = self.need_store()
        entries = [entry for entry in store.refresh().values() if self._describe(entry) is not None]
        if not entries:
            return [], 0, 0
        marked = [i for i, entry in enumerate(entries) if store.marked(entry) is not None]
        unmarked = [entry for i, entry in enumerate(entries) if i not in set(marked)]
        self._scouting = True
        features = np.stack([self._features[entry.id] for entry in entries])
        estimates = dict(self._estimates)
        seen = [entry for entry in unmarked if entry.id in estimates]
        doubts: NDArray[np.float64] | None = None
        if self.model is not None and seen:
            found = (estimates.get(entry.id) for entry in entries)
            values = [None if each is None else each.doubt for each in found]
            doubts = np.array([np.nan if value is None else value for value in values])
        chosen = propose(features, marked=marked, doubts=doubts, number=number)
        result = [
            Next(
                entries[each.index],
                each,
                _why(each, estimates.get(entries[each.index].id), first=not marked),
            )
            for each in chosen
        ]
        return result, len(seen), len(unmarked) if self.model is not None else 0

    def need_store(self) -> Store:
        """The folder; an error where there is none."""
        if self.store is None:
            raise NoFolderError
        return self.store

    def _describe(self, entry: Entry) -> NDArray[np.float64] | None:
        """What an image looks like, kept; None of a damaged one, which nobody can mark."""
        if entry.id not in self._features:
            try:
                self._features[entry.id] = describe(pictures.small(entry.path))
            except InputError:
                return None
        return self._features[entry.id]

    # --- idle work -----------------------------------------------------------------------------

    def _idle(self) -> bool:
        """Load the model of a run that has just ended; else look at one more unmarked image."""
        if self.runs is None or self.store is None:
            return False
        active = self.runs.active()
        ended, self._watched = self._watched, active
        if ended is not None and active is None and self.runs.newest_finished() == ended:
            self.use(ended)
        if active is not None or not self._scouting or self.model is None:
            return False
        store = self.store
        waiting = (
            entry
            for entry in list(store.entries.values())
            if entry.id not in self._estimates and store.marked(entry) is None
        )
        entry = next(waiting, None)
        if entry is None:
            return False
        try:
            self._estimates[entry.id] = _estimate(self.draft(entry))
        except InputError:
            self._estimates[entry.id] = Estimate(0.0, None, None, None)
        return True


def _attention_maps(counted: Counted) -> tuple[NDArray[np.float32], ...]:
    """C×h'×w' of the last layer, for each branch."""
    import torch

    from p3net.data.transforms import to_float

    counter = counted.model.counter
    pixels, _ = counter.prepare(counted.content)
    network = counter.network
    assert isinstance(network, P3Net)  # noqa: S101  the caller has looked
    device = next(network.parameters()).device
    with torch.inference_mode():
        maps = network.attention_maps(to_float(torch.from_numpy(pixels[None])).to(device))
    return tuple(each[0, -1].float().cpu().numpy() for each in maps)


def _estimate(prediction: Prediction) -> Estimate:
    interval, doubt = prediction.interval, None
    if prediction.variance is not None:
        total = float(prediction.variance.sum(dtype=np.float64))
        doubt = (total / (prediction.count + 1)) ** 0.5
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    return Estimate(prediction.count, low, high, doubt)


def _why(proposal: Proposal, estimate: Estimate | None, *, first: bool) -> str:
    """The reason in a sentence or two."""
    words = []
    if estimate is not None and estimate.doubt is not None:
        if estimate.low is not None and estimate.high is not None:
            span = f"somewhere from {estimate.low:,.0f} to {estimate.high:,.0f}"
        else:
            span = f"about {estimate.count:,.0f}"
        level = "very unsure" if proposal.doubt > 2 / 3 else "unsure"
        level = level if proposal.doubt > 1 / 3 else "fairly sure"
        words.append(f"The model counts {estimate.count:,.0f} and is {level} ({span}).")
    if first and proposal.novelty == 1.0:
        words.append("A good first image: it is typical of the folder.")
    elif proposal.novelty > 2 / 3:
        words.append("It looks unlike anything marked or proposed so far.")
    elif proposal.novelty > 1 / 3:
        words.append("It differs from what is marked.")
    else:
        words.append("It resembles marked images.")
    return " ".join(words)
