"""The only loop: steps of labelled and unlabelled crops, weighed losses, checkpoints.

What step k draws depends on (seed, k) and nothing carried, so a run resumes bit for bit. The
loop prints nothing: it reports `Progress` values, and whoever called it shows them.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from p3net import checkpoint
from p3net.averaging import averaged, follow
from p3net.data.cache import Cache
from p3net.data.loading import Step, Stream, loader
from p3net.data.transforms import Augmentation
from p3net.errors import InputError
from p3net.methods.base import Divisors, Losses, Method
from p3net.network.backbone import Backbone
from p3net.randomness import torch_generator
from p3net.recipe import Recipe
from p3net.structures import Batch


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of a run's record.

    Attributes:
        step: steps done.
        losses: unweighted, by name, of the whole step over all processes.
        records: what the method noted (mask share and the like), and the gradient's norm.
        validation: metrics by name where this step was validated; undefined ones are left out.
        rate: the learning rate.
        images_per_second: crops, over all processes.
        waited: share of the time spent waiting for data.
    """

    step: int
    losses: Mapping[str, float]
    records: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[str, float] | None = None
    rate: float = 0.0
    images_per_second: float = 0.0
    waited: float = 0.0


FILES = ("last.safetensors", "best.safetensors", "log.jsonl")

_Part = tuple[dict[str, float], dict[str, float]]
"""Losses and records of one batch."""


class DivergedError(InputError):
    """A loss is no longer a finite number."""


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many training processes this is."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def join(cls) -> World:
        """Join the group that torchrun started; alone elsewhere."""
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(device=device)
        if not dist.is_initialized():  # the others wait while the first one validates
            dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=6))
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def wait(self) -> None:
        """Until every process has come here."""
        if self.size > 1:
            dist.barrier()


@dataclass
class Run:
    """All that changes while a run goes on, and how it is saved."""

    method: Method
    optimiser: torch.optim.Optimizer
    average: nn.Module | None
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def counting_network(self) -> nn.Module:
        """The weights that counting uses: the averaged ones where there are any."""
        return self.method.network if self.average is None else self.average

    def tensors(self) -> dict[str, Tensor]:
        """Everything that resuming needs, by name."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.method.state_dict().items():
            tensors[name if name.startswith("network.") else f"method.{name}"] = tensor
        if self.average is not None:
            tensors |= {f"average.{n}": tensor for n, tensor in self.average.state_dict().items()}
        for index, parameter in enumerate(_parameters(self.optimiser)):
            for name, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{index}.{name}"] = torch.as_tensor(value)
        # A file takes no two names of one storage, which branches may share.
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def record(self, metadata: Mapping[str, Any], **more: object) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        return {**metadata, "step": self.step, "history": self.history, **more}

    def restore(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any], path: Path) -> None:
        """Continue where a checkpoint left off."""
        own = {name.removeprefix("method."): tensor for name, tensor in tensors.items()}
        checkpoint.fill(self.method, own, "", path)
        if self.average is not None:
            checkpoint.fill(self.average, tensors, "average.", path)
        moments: dict[int, dict[str, Tensor]] = {}
        parameters = _parameters(self.optimiser)
        for name, tensor in tensors.items():
            if name.startswith("optimiser."):
                _, index, key = name.split(".", 2)
                # In the parameter's own memory order: a fused kernel walks both side by side.
                like = parameters[int(index)].detach()
                like = like if like.shape == tensor.shape else tensor  # "step" is a number
                kept = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
                moments.setdefault(int(index), {})[key] = kept
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": moments})
        self.step = int(record["step"])
        self.history = list(record["history"])


def train(
    method: Method,
    stream: Stream,
    augmentation: Augmentation,
    recipe: Recipe,
    *,
    folder: Path,
    seed: int,
    metadata: Mapping[str, Any],
    validate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    report: Callable[[Progress], None] = lambda _progress: None,
    stopped: Callable[[], bool] = lambda: False,
    resume: bool = False,
    cache: Cache | None = None,
    world: World | None = None,
) -> nn.Module:
    """Train to the end of the recipe and return the network to count with.

    In `folder`: `log.jsonl` (a line per step), `last.safetensors` (all state), and at the end
    `model.safetensors`; with validation also `best.safetensors`, by 2·RMSE + MAE. One process
    writes. A loss that is not finite stops the run; the last checkpoint stays. Once `stopped`, the
    state is saved and KeyboardInterrupt raised.
    """
    world = world or World()
    writes = world.rank == 0
    run = _begin(method, recipe, world)
    last, best, log = (folder / name for name in FILES)
    if resume and last.exists():
        run.restore(*checkpoint.read(last), last)
    if writes:
        _tidy(folder, log, keep=run.step)
    wrapped = DistributedDataParallel(method) if world.size > 1 else method
    steps = loader(
        stream,
        augmentation,
        seed=seed,
        start=run.step * recipe.accumulate,
        steps=recipe.steps * recipe.accumulate,
        workers=recipe.workers,
        rank=world.rank,
        world=world.size,
        cache=cache,
    )
    divisors = Divisors.of(stream)
    crops = stream.crops_per_step * recipe.accumulate
    saved, saved_step = time.monotonic(), run.step
    while run.step < recipe.steps:
        started = time.perf_counter()
        torch.manual_seed(torch_generator(seed, run.step, world.rank, 2).initial_seed())
        epoch = stream.epoch(run.step * recipe.accumulate)
        losses, records, waited = _step(wrapped, steps, run, recipe, divisors, epoch, world)
        seconds = time.perf_counter() - started
        run.step += 1
        done = run.step == recipe.steps
        measured = None
        if validate is not None and (done or run.step % recipe.validate_every == 0):
            if writes:
                metrics = validate(run.counting_network)
                measured = {name: v for name, v in metrics.items() if not math.isnan(v)}
                run.history.append({"step": run.step, **measured})
            world.wait()
        progress = Progress(
            step=run.step,
            losses=losses,
            records=records,
            validation=measured,
            rate=recipe.learning_rate * recipe.rate(run.step - 1),
            images_per_second=crops / seconds,
            waited=waited / seconds,
        )
        if writes:
            _append(log, progress)
            if measured is not None and _is_best(run.history):
                checkpoint.save(best, run.counting_network, run.record(metadata))
            if done or run.step % recipe.save_every == 0 or time.monotonic() - saved > 300:
                _save(last, run, metadata)
                saved, saved_step = time.monotonic(), run.step
        report(progress)
        if stopped() and not done:
            if writes and saved_step < run.step:
                _save(last, run, metadata)
            raise KeyboardInterrupt
    return _finish(folder, run, recipe, metadata, world)


def _save(last: Path, run: Run, metadata: Mapping[str, Any]) -> None:
    """Write all that a run needs to go on."""
    record = run.record(metadata, network=checkpoint.describe(run.method.network))
    checkpoint.write(last, run.tensors(), record)


def _begin(method: Method, recipe: Recipe, world: World) -> Run:
    method.to(world.device)
    if recipe.channels_last:
        cast("Any", method).to(memory_format=torch.channels_last)
    backbone = method.network.backbone
    assert isinstance(backbone, Backbone)  # noqa: S101 (every network of this package has one)
    for block in backbone.blocks()[: recipe.freeze]:
        block.requires_grad_(requires_grad=False)
    published = backbone.published()
    lower = [p for p in published if p.requires_grad]
    known = {id(p) for p in published}
    upper = [p for p in method.parameters() if p.requires_grad and id(p) not in known]
    groups = [
        {"params": upper, "factor": 1.0},
        {"params": lower, "factor": recipe.backbone_factor},
    ]
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimiser = kinds[recipe.optimiser](
        [group for group in groups if group["params"]],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    average = averaged(method.network) if recipe.average else None
    return Run(method, optimiser, average)


def _step(
    wrapped: nn.Module,
    steps: Any,
    run: Run,
    recipe: Recipe,
    divisors: Divisors,
    epoch: int,
    world: World,
) -> tuple[dict[str, float], dict[str, float], float]:
    """One optimiser step; gives the losses, the method's records and the seconds waited."""
    run.method.train()
    run.optimiser.zero_grad(set_to_none=True)
    parts: list[_Part] = []
    names: list[str] = []
    waited = 0.0
    for _ in range(recipe.accumulate):
        before = time.perf_counter()
        step: Step = _to(next(steps), world.device, recipe)
        waited += time.perf_counter() - before
        names += [n for batch in (step.labelled, step.unlabelled) if batch for n in batch.names]
        with torch.autocast(
            world.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"
        ):
            result: Losses = wrapped(step, divisors)
        losses = {name: float(term.detach()) for name, term in result.terms.items()}
        _guard(losses, run.step, names)
        parts.append((losses, result.records))
        weighed = [
            recipe.weight(name, run.step, epoch) * term for name, term in result.terms.items()
        ]
        if weighed:
            # Processes' gradients are averaged, but each divided by the whole step's images.
            total = torch.stack(weighed).sum() * world.size / recipe.accumulate
            total.backward()  # type: ignore[no-untyped-call]
    summed, records = _over_all(parts, recipe, world)
    parameters = _parameters(run.optimiser)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    _guard({"the gradient": float(norm)}, run.step, names)
    if any(recipe.weight(name, run.step, epoch) for name in summed):
        _move(run, recipe, norm)
    return summed, {**records, "gradient": float(norm)}, waited


def _move(run: Run, recipe: Recipe, norm: Tensor) -> None:
    """Move the weights by their gradients of norm `norm`, and what follows them.

    Not after a step in which no loss has weight: Adam would go on from habit.
    """
    if recipe.clip is not None:
        nn.utils.clip_grads_with_norm_(_parameters(run.optimiser), recipe.clip, norm)
    for group in run.optimiser.param_groups:
        group["lr"] = recipe.learning_rate * recipe.rate(run.step) * group["factor"]
    run.optimiser.step()
    run.method.after_step(run.step)
    if run.average is not None:
        follow(run.average, run.method.network, recipe.average, run.step)


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _guard(values: Mapping[str, float], step: int, names: list[str]) -> None:
    """Stop before the weights move when a value is not finite."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise DivergedError(
            f"{' and '.join(bad)} became NaN or infinite in step {step + 1} on "
            f"{', '.join(names)}; the last checkpoint is kept. Lower recipe.learning_rate, or set "
            "recipe.clip"
        )


def _to(step: Step, device: torch.device, recipe: Recipe) -> Step:
    def move(batch: Batch | None) -> Batch | None:
        if batch is None or (device.type == "cpu" and not recipe.channels_last):
            return batch
        form = torch.channels_last if recipe.channels_last else torch.contiguous_format
        images = batch.images.to(device, memory_format=form, non_blocking=True)
        return replace(batch, images=images)

    return Step(step.index, move(step.labelled), move(step.unlabelled))


def _over_all(
    parts: list[_Part], recipe: Recipe, world: World
) -> tuple[dict[str, float], dict[str, float]]:
    """Losses of the whole step and means of the records, over its batches and all processes."""
    everyone: list[list[_Part]] = [parts]
    if world.size > 1:
        everyone = [[] for _ in range(world.size)]
        dist.all_gather_object(everyone, parts)
    losses: dict[str, float] = {}
    noted: dict[str, list[float]] = {}
    for terms, records in (part for each in everyone for part in each):
        for name, value in terms.items():
            losses[name] = losses.get(name, 0.0) + value / recipe.accumulate
        for name, value in records.items():
            noted.setdefault(name, []).append(value)
    return losses, {name: sum(values) / len(values) for name, values in noted.items()}


def _is_best(history: list[dict[str, Any]]) -> bool:
    scores = [2 * float(each["rmse"]) + float(each["mae"]) for each in history]
    return scores[-1] <= min(scores)


def _finish(
    folder: Path, run: Run, recipe: Recipe, metadata: Mapping[str, Any], world: World
) -> nn.Module:
    """Put the chosen weights in place as `model.safetensors`; its step is theirs."""
    best = folder / "best.safetensors"
    network = run.counting_network
    record = run.record(metadata, chosen=recipe.choose)
    world.wait()  # the best may just be on its way to the disk
    if recipe.choose == "best" and run.history and best.exists():
        tensors, found = checkpoint.read(best)
        network = copy.deepcopy(network)
        checkpoint.fill(network, tensors, "network.", best)
        record["step"] = found["step"]
    if world.rank == 0:
        checkpoint.save(folder / "model.safetensors", network, record)
    world.wait()
    plain: Any = network.eval()  # in memory as a file gives it back
    return cast("nn.Module", plain.to(memory_format=torch.contiguous_format))


def _tidy(folder: Path, log: Path, *, keep: int) -> None:
    """Drop what a killed run left: half-written files, and lines beyond its last checkpoint."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.safetensors.*.tmp"):
            leftover.unlink(missing_ok=True)
        if log.exists():  # cut, not rewritten: a kill must not cost the lines that stay
            lines = log.read_bytes().splitlines(keepends=True)
            os.truncate(log, sum(map(len, lines[:keep])))
    except OSError as error:
        raise InputError(f"cannot be written to: {error.strerror}", source=folder) from None


def _append(log: Path, progress: Progress) -> None:
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(progress)) + "\n")
    except OSError as error:
        raise InputError(
            f"could not be written ({error.strerror}); free some space and resume. "
            "The last checkpoint is intact.",
            source=log,
        ) from None
