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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from p3net import checkpoint
from p3net.data.cache import Cache
from p3net.data.loading import Step, Stream, loader
from p3net.data.transforms import Augmentation
from p3net.errors import InputError
from p3net.methods.base import Divisors, Losses, Method
from p3net.network.backbone import Backbone
from p3net.randomness import torch_generator
from p3net.structures import Batch


class Term(BaseModel):
    """How much one loss weighs: nothing before `start`, all of `weight` from start + ramp on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, ge=0)
    start: int = Field(default=0, ge=0, description="first step that it counts")
    ramp: int = Field(
        default=0, ge=0, description="steps over which the weight grows to its full size"
    )

    def at(self, step: int) -> float:
        """The weight in a step.

        >>> term = Term(weight=2.0, start=10, ramp=4)
        >>> [term.at(step) for step in (9, 10, 11, 13, 14)]
        [0.0, 0.5, 1.0, 2.0, 2.0]
        """
        if step < self.start:
            return 0.0
        return self.weight * min(1.0, (step - self.start + 1) / max(self.ramp, 1))


class Recipe(BaseModel):
    """How to optimise: nothing here depends on the method or the data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=20_000, ge=1)
    optimiser: Literal["adam", "adamw"] = "adam"
    learning_rate: float = Field(default=1e-5, gt=0)
    backbone_factor: float = Field(
        default=1.0, ge=0, description="backbone's share of the learning rate"
    )
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0, description="steps of linear warm-up")
    clip: float | None = Field(default=None, gt=0, description="largest norm of the gradient")
    average: float = Field(
        default=0.0, ge=0, lt=1, description="decay of averaged weights; 0 for none"
    )
    accumulate: int = Field(default=1, ge=1, description="batches whose gradients make one step")
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    freeze: int = Field(
        default=0, ge=0, description="blocks of the backbone, from below, left as they are"
    )
    terms: dict[str, Term] = Field(default_factory=lambda: {"ecr": Term(weight=0.01)})
    validate_every: int = Field(default=500, ge=1)
    save_every: int = Field(default=200, ge=1)
    choose: Literal["best", "last"] = "best"
    workers: int = Field(default=1, ge=0, description="loading processes")

    def weight(self, name: str, step: int) -> float:
        """The weight of a loss in a step; 1 for a loss that `terms` does not name."""
        return self.terms.get(name, Term()).at(step)

    def rate(self, step: int) -> float:
        """The learning rate's factor in a step: warm-up, then constant or a cosine to 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of a run's record.

    Attributes:
        step: steps done.
        losses: unweighted, by name; the mean over the processes.
        records: what the method noted: mask share and the like.
        validation: metrics by name where this step was validated.
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
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(device=device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if cuda else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), device)


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
        parts: dict[str, nn.Module | None] = {
            "network": self.method.network,
            "method": self.method,
            "average": self.average,
        }
        tensors: dict[str, Tensor] = {}
        for part, module in parts.items():
            for name, tensor in module.state_dict().items() if module is not None else ():
                if not (part == "method" and name.startswith("network.")):
                    tensors[f"{part}.{name}"] = tensor
        for index, parameter in enumerate(_parameters(self.optimiser)):
            for name, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{index}.{name}"] = torch.as_tensor(value)
        # Shared tensors are written once; every name needs its own storage.
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any], path: Path) -> None:
        """Continue where a checkpoint left off."""
        checkpoint.fill(self.method.network, tensors, "network.", path)
        own = [n for n in self.method.state_dict() if not n.startswith("network.")]
        state = {n: tensors[f"method.{n}"] for n in own if f"method.{n}" in tensors}
        self.method.load_state_dict(state, strict=False)
        if self.average is not None:
            checkpoint.fill(self.average, tensors, "average.", path)
        for index, parameter in enumerate(_parameters(self.optimiser)):
            prefix = f"optimiser.{index}."
            state = {
                name.removeprefix(prefix): tensor.clone()
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            if state:
                self.optimiser.state[parameter] = state
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
    resume: bool = False,
    cache: Cache | None = None,
    world: World | None = None,
) -> nn.Module:
    """Train to the end of the recipe and return the network to count with.

    In `folder`: `log.jsonl` (a line per step), `last.safetensors` (all state), and at the end
    `model.safetensors`; with validation also `best.safetensors`, by 2·RMSE + MAE. One process
    writes. A loss that is not finite stops the run; the last checkpoint stays.
    """
    world = world or World()
    run = _begin(method, recipe, world)
    last = folder / "last.safetensors"
    if resume and last.exists():
        run.restore(*checkpoint.read(last), last)
    log = _Log(folder / "log.jsonl", keep=run.step, writes=world.rank == 0)
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
    saved = time.monotonic()
    while run.step < recipe.steps:
        started = time.perf_counter()
        torch.manual_seed(torch_generator(seed, run.step, world.rank, 2).initial_seed())
        losses, records, waited = _step(wrapped, steps, run, recipe, divisors, world)
        seconds = time.perf_counter() - started
        run.step += 1
        done = run.step == recipe.steps
        measured = None
        if validate is not None and (done or run.step % recipe.validate_every == 0):
            if world.rank == 0:
                measured = dict(validate(run.counting_network))
                run.history.append({"step": run.step, **measured})
            if world.size > 1:
                dist.barrier()
        progress = Progress(
            step=run.step,
            losses=losses,
            records=records,
            validation=measured,
            rate=recipe.learning_rate * recipe.rate(run.step - 1),
            images_per_second=crops / seconds,
            waited=waited / seconds,
        )
        log.write(progress)
        report(progress)
        if world.rank == 0:
            if measured is not None and _is_best(run.history):
                _save(folder / "best.safetensors", run, metadata)
            if done or run.step % recipe.save_every == 0 or time.monotonic() - saved > 300:
                record = {**metadata, "step": run.step, "history": run.history}
                network = checkpoint.describe(method.network)
                checkpoint.write(last, run.tensors(), {**record, "network": network})
                saved = time.monotonic()
    return _finish(folder, run, recipe, metadata, world)


def _begin(method: Method, recipe: Recipe, world: World) -> Run:
    method.to(world.device)
    if recipe.channels_last:
        cast("Any", method).to(memory_format=torch.channels_last)
    backbone = method.network.backbone
    assert isinstance(backbone, Backbone)  # noqa: S101 (every network of this package has one)
    for block in backbone.blocks()[: recipe.freeze]:
        block.requires_grad_(requires_grad=False)
    lower = [p for p in backbone.parameters() if p.requires_grad]
    known = {id(p) for p in backbone.parameters()}
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
    )
    average = None
    if recipe.average:
        average = copy.deepcopy(method.network).requires_grad_(requires_grad=False)
    return Run(method, optimiser, average)


def _step(
    wrapped: nn.Module,
    steps: Any,
    run: Run,
    recipe: Recipe,
    divisors: Divisors,
    world: World,
) -> tuple[dict[str, float], dict[str, float], float]:
    """One optimiser step; gives the losses, the method's records and the seconds waited."""
    run.method.train()
    run.optimiser.zero_grad(set_to_none=True)
    summed: dict[str, float] = {}
    records: dict[str, float] = {}
    waited = 0.0
    for _ in range(recipe.accumulate):
        before = time.perf_counter()
        step: Step = _to(next(steps), world.device, recipe)
        waited += time.perf_counter() - before
        with torch.autocast(
            world.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"
        ):
            result: Losses = wrapped(step, divisors)
        _guard(result, step)
        weighed = [recipe.weight(name, run.step) * term for name, term in result.terms.items()]
        # Processes' gradients are averaged, but each divided by the whole step's images.
        total = torch.stack(weighed).sum() * world.size / recipe.accumulate
        total.backward()  # type: ignore[no-untyped-call]
        for name, term in result.terms.items():
            part = float(term.detach()) * world.size / recipe.accumulate
            summed[name] = summed.get(name, 0.0) + part
        records = dict(result.records)
    if recipe.clip is not None:
        records["gradient"] = float(
            nn.utils.clip_grad_norm_(_parameters(run.optimiser), recipe.clip)
        )
    for group in run.optimiser.param_groups:
        group["lr"] = recipe.learning_rate * recipe.rate(run.step) * group["factor"]
    run.optimiser.step()
    run.method.after_step(run.step)
    if run.average is not None:
        _follow(run.average, run.method.network, recipe.average, run.step)
    return _mean_over(summed, world), records, waited


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


@torch.no_grad()
def _follow(average: nn.Module, network: nn.Module, decay: float, step: int) -> None:
    """Average ← d·average + (1−d)·network, with d rising to `decay` over the first steps."""
    keep = min(decay, (1 + step) / (10 + step))
    for own, other in zip(
        average.state_dict().values(), network.state_dict().values(), strict=True
    ):
        if own.is_floating_point():
            own.lerp_(other, 1 - keep)
        else:
            own.copy_(other)


def _guard(losses: Losses, step: Step) -> None:
    bad = [name for name, term in losses.terms.items() if not bool(torch.isfinite(term))]
    if bad:
        names = [n for batch in (step.labelled, step.unlabelled) if batch for n in batch.names]
        raise DivergedError(
            f"{' and '.join(bad)} became NaN or infinite in step {step.index + 1} on "
            f"{', '.join(names)}; the last checkpoint is kept. Lower learning_rate, or set clip"
        )


def _to(step: Step, device: torch.device, recipe: Recipe) -> Step:
    def move(batch: Batch | None) -> Batch | None:
        if batch is None or (device.type == "cpu" and not recipe.channels_last):
            return batch
        form = torch.channels_last if recipe.channels_last else torch.contiguous_format
        images = batch.images.to(device, memory_format=form, non_blocking=True)
        return Batch(images, batch.points_xy, batch.names, batch.shorter_sides)

    return Step(step.index, move(step.labelled), move(step.unlabelled))


def _mean_over(values: dict[str, float], world: World) -> dict[str, float]:
    """The mean over the processes, for names that any of them has."""
    if world.size == 1:
        return values
    everyone: list[dict[str, float]] = [{} for _ in range(world.size)]
    dist.all_gather_object(everyone, values)
    names = sorted({name for each in everyone for name in each})
    return {name: sum(each.get(name, 0.0) for each in everyone) / world.size for name in names}


def _score(record: Mapping[str, Any]) -> float:
    return 2 * float(record["rmse"]) + float(record["mae"])


def _is_best(history: list[dict[str, Any]]) -> bool:
    return _score(history[-1]) <= min(map(_score, history))


def _save(path: Path, run: Run, metadata: Mapping[str, Any]) -> None:
    record = {**metadata, "step": run.step, "history": run.history}
    checkpoint.save(path, run.counting_network, record)


def _finish(
    folder: Path, run: Run, recipe: Recipe, metadata: Mapping[str, Any], world: World
) -> nn.Module:
    """Put the chosen weights in place as `model.safetensors`."""
    best = folder / "best.safetensors"
    network = run.counting_network
    if recipe.choose == "best" and run.history and best.exists():
        tensors, _ = checkpoint.read(best)
        network = copy.deepcopy(network)
        checkpoint.fill(network, tensors, "network.", best)
    if world.rank == 0:
        record = {**metadata, "step": run.step, "history": run.history, "chosen": recipe.choose}
        checkpoint.save(folder / "model.safetensors", network, record)
    return network.eval()


class _Log:
    """`log.jsonl`: a line per step; on resuming, lines beyond the checkpoint are dropped."""

    def __init__(self, path: Path, *, keep: int, writes: bool) -> None:
        self.path = path
        self.writes = writes
        if not writes:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines()[:keep] if path.exists() else []
        path.write_text("".join(f"{line}\n" for line in lines))

    def write(self, progress: Progress) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(progress)) + "\n")
