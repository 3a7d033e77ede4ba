"""The loop: schedules, averages, accumulation, guards, choice, records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p3net import checkpoint
from p3net.data.catalogue import open_dataset
from p3net.data.loading import Step, Stream, mixed, paired
from p3net.data.transforms import Augmentation
from p3net.errors import InputError
from p3net.methods.base import Divisors, Losses, Method
from p3net.methods.p3net import P3NetMethod
from p3net.methods.supervised import Supervised
from p3net.network.p3net import Architecture, P3Net
from p3net.recipe import Recipe, Term
from p3net.training import DivergedError, Progress, train

TINY = Architecture(backbone="small", layers=1, hidden=32, heads=2, dropout=0.0)
CROPS = Augmentation(crop=64)
QUICK = Recipe(steps=4, workers=0, learning_rate=1e-3, save_every=2, validate_every=2)


def method(**changes: Any) -> P3NetMethod:
    torch.manual_seed(0)
    return P3NetMethod(P3Net(TINY.model_copy(update=changes)), threshold=0.0, per_cell=True)


def stream(labelled: int = 2, unlabelled: int = 2) -> Stream:
    samples = open_dataset("synthetic:3?train=6&val=0&test=0&size=96x128").samples
    return paired(
        samples[:3], samples[3:], labelled_per_batch=labelled, unlabelled_per_batch=unlabelled
    )


def run(
    folder: Path, how: Method | None = None, recipe: Recipe = QUICK, **more: Any
) -> tuple[nn.Module, list[Progress]]:
    seen: list[Progress] = []
    network = train(
        how or method(),
        more.pop("stream", None) or stream(),
        CROPS,
        recipe,
        folder=folder,
        seed=5,
        metadata={},
        **{"report": seen.append, **more},
    )
    return network, seen


def weights(path: Path) -> dict[str, Tensor]:
    return checkpoint.read(path)[0]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- values worked by hand --------------------------------------------------------------------


def test_a_term_starts_and_ramps():
    term = Term(weight=6.0, start=3, ramp=3)
    assert [term.at(step, epoch=0) for step in range(8)] == [0, 0, 0, 2, 4, 6, 6, 6]
    assert [Term(weight=2.0, start=1).at(step, epoch=0) for step in range(3)] == [0, 2, 2]
    later = Term(weight=3.0, from_epoch=5)
    assert [later.at(9, epoch) for epoch in (0, 4, 5, 6)] == [0, 0, 3, 3]
    recipe = Recipe(terms={"ecr": term})
    assert (recipe.weight("ecr", 4, epoch=0), recipe.weight("pdm", 4, epoch=0)) == (4, 1)


def test_the_learning_rate_warms_up_and_falls_to_zero():
    recipe = Recipe(steps=12, warmup=4, schedule="cosine")
    got = [recipe.rate(step) for step in (0, 1, 3, 4, 6, 8, 10, 12)]
    half = math.sqrt(0.5)
    expected = [0.25, 0.5, 1, 1, (1 + half) / 2, 0.5, (1 - half) / 2, 0]
    assert got == pytest.approx(expected)
    assert Recipe(steps=12, warmup=2).rate(11) == 1


def test_the_rates_that_were_used_are_reported_and_the_backbone_gets_its_share(tmp_path):
    """Adam's first step moves every weight by the learning rate, wherever it has a gradient."""
    recipe = QUICK.model_copy(
        update={"steps": 1, "warmup": 2, "backbone_factor": 0.1, "learning_rate": 1e-3}
    )
    how = method()
    before = {n: t.clone() for n, t in how.network.state_dict().items()}
    _, seen = run(tmp_path, how, recipe)
    assert seen[0].rate == pytest.approx(5e-4)
    after = how.network.state_dict()
    moved = {n: float((after[n] - before[n]).abs().max()) for n in after}
    assert moved["tokens.0"] == pytest.approx(5e-4, rel=1e-3)
    assert moved["backbone.layers.0.convolution.weight"] == pytest.approx(5e-5, rel=1e-3)


# --- gradients --------------------------------------------------------------------------------


class Quadratic(Method):
    """L = mean over labelled crops of w·(mean pixel), so its gradient is known."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.w = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[str, ...]] = []
        self.means: list[Tensor] = []

    def forward(self, step: Step, divisors: Divisors) -> Losses:
        assert step.labelled is not None
        self.seen.append(step.labelled.names)
        means = step.labelled.images.double().mean((1, 2, 3))
        self.means += list(means)
        return Losses({"line": (self.w * means.float()).sum() / divisors.labelled})


def quadratic() -> Quadratic:
    how = Quadratic(P3Net(TINY))
    how.network.requires_grad_(requires_grad=False)
    return how


def test_accumulated_batches_equal_one_large_batch(tmp_path):
    """Crops are drawn by step and position, so the images differ; the sums must still agree."""
    how = quadratic()
    recipe = QUICK.model_copy(update={"steps": 1, "accumulate": 3})
    _, seen = run(tmp_path, how, recipe, stream=stream(2, 0))
    assert len(how.seen) == 3
    expected = torch.stack(how.means).mean()
    assert seen[0].records["gradient"] == pytest.approx(float(expected), rel=1e-6)
    assert seen[0].images_per_second > 0


def test_two_accumulated_batches_equal_one_of_twice_the_size_on_the_same_images(tmp_path):
    class Replay(P3NetMethod):
        """Gives the crops of one large step, all at once or in halves."""

        halves = False

        def forward(self, step: Step, divisors: Divisors) -> Losses:
            batch = kept.labelled
            assert batch is not None
            if not self.halves:
                return super().forward(Step(0, batch, None), Divisors(4, 4))
            part = slice(2 * (step.index % 2), 2 * (step.index % 2) + 2)
            points = batch.points_xy
            assert points is not None
            half = replace(
                batch,
                images=batch.images[part],
                points_xy=points[part],
                names=batch.names[part],
                shorter_sides=batch.shorter_sides[part],
                seeds=batch.seeds[part],
            )
            return super().forward(Step(0, half, None), divisors)

    from p3net.data.loading import loader

    kept = next(loader(stream(4, 0), CROPS, seed=1, steps=1))
    results = []
    for halves in (False, True):
        torch.manual_seed(0)
        how = Replay(P3Net(TINY), per_cell=True)
        how.halves = halves
        recipe = QUICK.model_copy(update={"steps": 1, "accumulate": 2 if halves else 1})
        _, seen = run(tmp_path / str(halves), how, recipe, stream=stream(2, 0))
        grads = [p.grad for p in how.parameters() if p.grad is not None]
        results.append((seen[0].losses["pdm"], torch.cat([g.flatten() for g in grads])))
    (loss, gradient), (loss_halves, gradient_halves) = results
    assert loss_halves == pytest.approx(loss, rel=1e-6)
    assert float((gradient - gradient_halves).norm() / gradient.norm()) < 1e-6


def test_clipping_limits_the_norm_and_reports_the_unclipped_one(tmp_path):
    how = method()
    recipe = QUICK.model_copy(update={"steps": 1, "clip": 1e-3})
    _, seen = run(tmp_path, how, recipe)
    grads = torch.cat([p.grad.flatten() for p in how.parameters() if p.grad is not None])
    assert float(grads.norm()) == pytest.approx(1e-3, rel=1e-3)
    assert seen[0].records["gradient"] > 1e-2


def test_frozen_blocks_stay_and_the_others_move(tmp_path):
    how = method()
    before = {n: t.clone() for n, t in how.network.state_dict().items()}
    run(tmp_path, how, QUICK.model_copy(update={"freeze": 2}))
    after = how.network.state_dict()
    stayed = {
        n.split(".")[2] for n in after if "backbone.layers" in n and after[n].equal(before[n])
    }
    assert {"0", "1"} <= stayed
    assert not after["backbone.layers.2.convolution.weight"].equal(
        before["backbone.layers.2.convolution.weight"]
    )


def test_a_term_without_weight_has_no_gradient(tmp_path):
    """It learns what it would without unlabelled images, though their loss is still reported."""
    recipe = QUICK.model_copy(update={"terms": {"ecr": Term(weight=0.0)}})
    _, seen = run(tmp_path / "a", recipe=recipe)
    torch.manual_seed(0)
    run(tmp_path / "b", Supervised(method().network, per_cell=True), recipe, stream=stream(2, 0))
    assert all(progress.losses["ecr"] > 0 for progress in seen)
    # By what they say, not by their weights: Adam turns the rounding of a gradient that ought to
    # be zero (a key's bias, say) into a step of full length, to no effect.
    image = torch.rand(1, 3, 64, 64)
    one, two = (checkpoint.load(tmp_path / name).predict(image) for name in "ab")
    torch.testing.assert_close(one.density, two.density, rtol=1e-3, atol=1e-4)


# --- averages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["p3net", "stds", "sdds"])
def test_the_average_is_the_recursion_worked_by_hand(tmp_path, plan):
    """Also where branches share tensors, which must move once."""
    how = method(plan=plan)
    snapshots = [how.network.state_dict()["tokens.0"].clone()]
    names = "decoders.1.layers.0.linear1.weight"
    other = [how.network.state_dict()[names].clone()]

    def keep(_progress: Progress) -> None:
        snapshots.append(how.network.state_dict()["tokens.0"].clone())
        other.append(how.network.state_dict()[names].clone())

    network = train(
        how,
        stream(),
        CROPS,
        QUICK.model_copy(update={"average": 0.3, "choose": "last"}),
        folder=tmp_path,
        seed=5,
        metadata={},
        report=keep,
    )
    for name, taken in (("tokens.0", snapshots), (names, other)):
        average = taken[0].double()
        for step, now in enumerate(taken[1:]):
            decay = min(0.3, (1 + step) / (10 + step))
            average = decay * average + (1 - decay) * now.double()
        torch.testing.assert_close(network.state_dict()[name].double(), average, rtol=0, atol=1e-6)
    assert not torch.equal(network.state_dict()["tokens.0"], snapshots[-1])


# --- resuming ---------------------------------------------------------------------------------


class InterruptError(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("average", [0.0, 0.9])
def test_resumed_after_any_step_it_is_the_same_to_the_bit(tmp_path, stop, average):
    recipe = QUICK.model_copy(update={"average": average, "optimiser": "adamw", "clip": 1.0})
    dropout = {"dropout": 0.1}

    def validate(network: nn.Module) -> dict[str, float]:
        total = sum(float(p.detach().abs().sum()) for p in network.parameters())
        return {"mae": total, "rmse": total, "nae": float("nan")}

    run(tmp_path / "whole", method(**dropout), recipe, validate=validate)

    def interrupt(progress: Progress) -> None:
        if progress.step == stop:
            raise InterruptError

    again = tmp_path / "again"
    with pytest.raises(InterruptError):
        train(
            method(**dropout),
            stream(),
            CROPS,
            recipe,
            folder=again,
            seed=5,
            metadata={},
            report=interrupt,
            validate=validate,
        )
    torch.manual_seed(0 if stop == 1 else 99)  # nothing was saved before the second step
    fresh = P3NetMethod(P3Net(TINY.model_copy(update=dropout)), threshold=0.0, per_cell=True)
    run(again, fresh, recipe, validate=validate, resume=True)
    for name in ("last", "model", "best"):
        whole, resumed = (tmp_path / f / f"{name}.safetensors" for f in ("whole", "again"))
        assert same(weights(whole), weights(resumed)), name
        assert checkpoint.read(whole)[1] == checkpoint.read(resumed)[1]
    lines = [json.loads(line) for line in (again / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[1]["validation"].keys() == {"mae", "rmse"}


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(InputError, match=r"last\.safetensors: .* weights of another network"):
        run(tmp_path, method(layers=2), resume=True)


def test_what_a_killed_run_left_is_cleared(tmp_path):
    (tmp_path / ".last.safetensors.123.tmp").write_bytes(b"half")
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st')
    run(tmp_path, resume=True)
    assert not list(tmp_path.glob(".*"))
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4


# --- guards -----------------------------------------------------------------------------------


class Diverging(P3NetMethod):
    """A loss, or its gradient, stops being a number in the third step."""

    where = "loss"

    def forward(self, step: Step, divisors: Divisors) -> Losses:
        losses = super().forward(step, divisors)
        if step.index == 2 and self.where == "loss":
            losses.terms["ecr"] = losses.terms["ecr"] * float("nan")
        if step.index == 2 and self.where == "gradient":  # the root's slope at 0 is infinite
            parameter = next(self.parameters())
            losses.terms["ecr"] = losses.terms["ecr"] + (parameter.flatten()[0] * 0).abs().sqrt()
        return losses


@pytest.mark.parametrize(("where", "named"), [("loss", "ecr"), ("gradient", "the gradient")])
def test_a_nan_stops_the_run_and_names_loss_and_images(tmp_path, where, named):
    torch.manual_seed(0)
    how = Diverging(P3Net(TINY), threshold=0.0, per_cell=True)
    how.where = where
    recipe = QUICK.model_copy(update={"save_every": 1})
    with pytest.raises(DivergedError) as caught:
        run(tmp_path, how, recipe)
    message = str(caught.value)
    assert message.startswith(f"{named} became NaN or infinite in step 3 on train/train_000")
    assert message.count("train/train_000") == 4
    assert "recipe.learning_rate" in message
    tensors, record = checkpoint.read(tmp_path / "last.safetensors")
    assert record["step"] == 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    assert all(bool(torch.isfinite(p).all()) for p in how.parameters())


# --- choosing ---------------------------------------------------------------------------------


def scripted(*scores: tuple[float, float]) -> Any:
    left = list(scores)

    def validate(_network: nn.Module) -> dict[str, float]:
        mae, rmse = left.pop(0)
        return {"mae": mae, "rmse": rmse}

    return validate


@pytest.mark.parametrize("choose", ["best", "last"])
def test_the_best_is_by_twice_rmse_and_mae(tmp_path, choose):
    """2·RMSE + MAE: 5 → 30, 6 → 29 at step 2, 4 → 34: the lowest MAE does not win."""
    recipe = QUICK.model_copy(update={"steps": 3, "validate_every": 1, "choose": choose})
    how, kept = method(), []
    train(
        how,
        stream(),
        CROPS,
        recipe,
        folder=tmp_path,
        seed=5,
        metadata={"note": 1},
        validate=scripted((10, 10), (9, 10), (4, 15)),
        report=lambda _p: kept.append(how.network.state_dict()["tokens.0"].clone()),
    )
    best, found = checkpoint.read(tmp_path / "best.safetensors")
    assert found["step"] == 2
    assert torch.equal(best["network.tokens.0"], kept[1])
    model, record = checkpoint.read(tmp_path / "model.safetensors")
    step = 2 if choose == "best" else 3
    assert (record["step"], record["chosen"], record["note"]) == (step, choose, 1)
    assert torch.equal(model["network.tokens.0"], kept[step - 1])
    assert [each["mae"] for each in record["history"]] == [10, 9, 4]


def test_without_validation_the_last_weights_are_the_model(tmp_path):
    network, _ = run(tmp_path, recipe=QUICK.model_copy(update={"choose": "best"}))
    assert not (tmp_path / "best.safetensors").exists()
    model = weights(tmp_path / "model.safetensors")
    assert torch.equal(model["network.tokens.0"], network.state_dict()["tokens.0"])
    assert not network.training


# --- the rest ---------------------------------------------------------------------------------


def test_a_mixed_stream_trains_on_what_each_step_holds(tmp_path):
    samples = open_dataset("synthetic:3?train=6&val=0&test=0&size=96x128").samples
    flow = mixed(samples[:3], samples[3:], batch=1)
    recipe = QUICK.model_copy(update={"steps": 6})
    _, seen = run(tmp_path, recipe=recipe, stream=flow)
    kinds = [tuple(progress.losses) for progress in seen]
    assert sorted(kinds) == [("ecr",)] * 3 + [("pdm",)] * 3


def test_a_step_in_which_nothing_weighs_moves_nothing(tmp_path):
    """Before its epoch, ECR is reported, and its images are no occasion for Adam to go on."""
    samples = open_dataset("synthetic:3?train=6&val=0&test=0&size=96x128").samples
    how = method()
    recipe = QUICK.model_copy(
        update={"steps": 6, "average": 0.9, "terms": {"ecr": Term(from_epoch=9)}}
    )
    before, moved = how.network.state_dict()["tokens.0"].clone(), []

    def compare(progress: Progress) -> None:
        after = how.network.state_dict()["tokens.0"]
        moved.append((*progress.losses, not torch.equal(before, after)))
        before.copy_(after)

    run(tmp_path, how, recipe, stream=mixed(samples[:3], samples[3:], batch=1), report=compare)
    assert sorted(moved) == [("ecr", False)] * 3 + [("pdm", True)] * 3


@pytest.mark.parametrize("option", [{"channels_last": True}, {"precision": "bfloat16"}])
def test_other_formats_train(tmp_path, option):
    _, plain = run(tmp_path / "a")
    _, other = run(tmp_path / "b", recipe=QUICK.model_copy(update=option))
    assert other[0].losses["pdm"] == pytest.approx(plain[0].losses["pdm"], rel=0.05)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot be written to"):
        run(tmp_path / "file")
