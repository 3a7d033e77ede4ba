from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p3net import checkpoint, experiment, uncertainty
from p3net.configuration import merge, settings
from p3net.counting import Counter
from p3net.data.catalogue import open_dataset
from p3net.errors import InputError
from p3net.evaluation import Scored, calibrate, calibrated, held_out, true_count
from p3net.intervals import Intervals
from p3net.network.p3net import Architecture, P3Net
from p3net.network.regressor import Regressor, RegressorArchitecture
from p3net.uncertainty import Calibration, interval, rank, spread

FINITE = st.floats(-50, 50, allow_nan=False)


# --- the spread --------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", ["confidence", "average"])
def test_the_variance_of_a_cell_is_that_of_the_mixture(fusion):
    """By enumeration: draw a branch by its weight, then a value by its distribution."""
    pair = (Intervals((0.1, 1.0), (0.0, 0.5, 2.0)), Intervals((0.2, 3.0), (0.0, 1.0, 4.0)))
    network = P3Net(Architecture(backbone="small", layers=1, hidden=8, fusion=fusion), pair).eval()
    with torch.no_grad():
        output = network(torch.rand(2, 3, 24, 32))
        found = uncertainty.cell_variance(network, output)
    p, q = (each.double().numpy() for each in output.probabilities)
    for b, y, x in np.ndindex(2, 3, 4):
        one, two = p[b, :, y, x], q[b, :, y, x]
        omega = one.max() / (one.max() + two.max()) if fusion == "confidence" else 0.5
        chances = np.concatenate([omega * one, (1 - omega) * two])
        values = np.array([0.0, 0.5, 2.0, 0.0, 1.0, 4.0])
        mean = (chances * values).sum()
        assert float(output.density[b, y, x]) == pytest.approx(mean, rel=1e-4, abs=1e-6)
        variance = (chances * (values - mean) ** 2).sum()
        assert float(found[b, y, x]) == pytest.approx(variance, rel=1e-4, abs=1e-6)


def test_the_spread_by_hand():
    variance = np.array([[4.0, 9.0], [0.0, 1.0]], np.float32)
    assert spread(variance) == 3 + 2 + 3 + 0 + 1
    assert spread(variance, np.array([[0.5, 0.0], [1.0, 1.0]], np.float32)) == 3 + 1 + 0 + 0 + 1


# --- conformal quantiles -----------------------------------------------------------------------


@given(st.lists(FINITE, min_size=1, max_size=60), st.floats(0.05, 0.98))
def test_the_multiplier_is_numpys_quantile(scores, level):
    times, enough = Calibration(tuple(scores)).multiplier(level, 0)
    share = math.ceil(round((len(scores) + 1) * level, 9)) / len(scores)
    assert enough == (share <= 1)
    quantile = np.quantile(np.abs(scores), min(share, 1), method="inverted_cdf")
    assert times == (quantile if enough else max(quantile, NormalDist().inv_cdf((1 + level) / 2)))


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_intervals_hold_as_often_as_they_say(level):
    """Exchangeable images with heavy tails and a bias: coverage in [level, level + 1/(n + 1)]."""
    rng, images, trials = np.random.default_rng(0), 30, 2000
    held = 0
    for _ in range(trials):
        unit = rng.uniform(1, 20, images + 1)
        scores = 0.7 + rng.standard_t(2, images + 1)
        count = 1000.0
        truth = count + scores * unit
        calibration = Calibration(tuple(((truth - count) / unit)[:-1]))
        found = interval(count, unit[-1], level, calibration)
        assert found.calibrated
        held += found.low <= truth[-1] <= found.high
    error = 4 * math.sqrt(level * (1 - level) / trials)
    assert level - error <= held / trials <= level + 1 / (images + 1) + error


@pytest.mark.parametrize(("level", "images"), [(0.9, 9), (0.95, 19), (0.5, 1), (0.99, 99)])
def test_how_many_images_a_level_takes(level, images):
    assert rank(level, images) <= images
    enough = Calibration(tuple(range(1, images + 1)))
    assert interval(10, 1, level, enough).calibrated
    if images > 1:
        short = Calibration(tuple(range(1, images)))
        found = interval(200, 1, level, short)
        assert not found.calibrated
        assert (found.low, found.high) == (200 - (images - 1), 200 + (images - 1))  # the worst seen


def test_one_image_that_was_counted_well_is_no_reason_for_a_narrow_interval():
    found = interval(100, 10, 0.95, Calibration((0.01,)))
    assert (found.low, found.high) == pytest.approx((100 - 19.6, 100 + 19.6), abs=0.01)
    assert not found.calibrated


def test_without_a_calibration_the_spread_is_a_deviation():
    found = interval(100, 10, 0.95, None)
    assert found.low == pytest.approx(100 - 19.6, abs=0.01)
    assert found.high == pytest.approx(100 + 19.6, abs=0.01)
    assert found.level == 0.95
    assert not found.calibrated


def test_low_is_never_negative_and_parts_are_never_calibrated():
    known = Calibration((-3.0,) * 50)
    assert interval(5, 10, 0.9, known) == uncertainty.Interval(0.0, 35.0, 0.9, calibrated=True)
    assert not interval(5, 10, 0.9, known, part_of=9).calibrated


def test_images_that_chose_the_model_calibrate_nothing():
    scores = tuple(k / 10 for k in range(1, 60))
    fair, chose = Calibration(scores), Calibration(scores, chose=True)
    assert fair.multiplier(0.9, 0) == (5.4, True)
    assert chose.multiplier(0.9, 0) == (5.4, False)
    assert Calibration((0.1,) * 50, chose=True).multiplier(0.9, 0)[0] == pytest.approx(1.645, 1e-3)
    assert Calibration.of({"calibration": chose.to_dict()}) == chose


def test_a_part_of_an_image_is_ranked_with_the_whole():
    """A few people in a dense crowd are off as dense crowds are."""
    known = Calibration((1.0,) * 30 + (5.0,) * 30, counts=(*range(30), *range(1000, 1030)))
    assert interval(5, 10, 0.9, known).high == 15
    assert interval(5, 10, 0.9, known, part_of=1005).high == 55


def test_an_image_is_ranked_among_its_like():
    """Sixty images: half are counted low and off by one spread, half high and off by five."""
    low, high = [float(n) for n in range(30)], [1000.0 + n for n in range(30)]
    counts = [*high, *low]
    scores = (5.0,) * 30 + (-1.0,) * 30
    known = Calibration(scores, counts=tuple(counts))
    assert known.multiplier(0.9, 3.0) == known.multiplier(0.9, 29.0) == (1.0, True)
    assert known.multiplier(0.9, 1001.0) == known.multiplier(0.9, 9999.0) == (5.0, True)
    assert known.multiplier(0.98, 3.0) == (5.0, True)  # takes 49 images: all together
    few = Calibration(scores[1:], counts=tuple(counts[1:]))
    assert few.multiplier(0.9, 3.0) == (5.0, True)  # 59 are no two groups
    assert Calibration(scores).multiplier(0.9, 3.0) == (5.0, True)  # counts not known


@given(st.integers(1, 200), st.floats(-5, 300), st.floats(0.5, 0.95))
def test_every_image_has_one_group_of_its_like(images, count, level):
    """The groups share out all images in order of their counts; a count falls into the nearest."""
    known = Calibration(tuple(map(float, range(images))), counts=tuple(map(float, range(images))))
    groups = dict.fromkeys(known.peers(float(each), level) for each in range(images))
    assert tuple(score for group in groups for score in group) == known.scores
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == 1 or min(sizes) >= max(uncertainty.GROUP, 3 * level / (1 - level) - 1e-6)
    own = known.peers(count, level)
    assert own in groups
    assert own[0] - 1 < count <= own[-1] or own in (known.peers(0, level), [*groups][-1])


def test_intervals_hold_among_dense_images_too():
    """Dense images are off by five times as many spreads: one group for all leaves them out."""
    rng = np.random.default_rng(1)
    held = {True: [0, 0], False: [0, 0]}
    for _ in range(300):
        dense = rng.random(121) < 0.4
        counts = np.where(dense, 500.0, 50.0) + rng.uniform(0, 10, 121)
        scores = rng.normal(size=121) * np.where(dense, 5, 1)
        for grouped, tally in held.items():
            if dense[-1]:
                known = Calibration(
                    tuple(scores[:-1]), counts=tuple(counts[:-1]) if grouped else ()
                )
                tally[0] += abs(scores[-1]) <= known.multiplier(0.9, counts[-1])[0]
                tally[1] += 1
    grouped, together = (held[each][0] / held[each][1] for each in (True, False))
    assert grouped > 0.82 > together


# --- keeping it --------------------------------------------------------------------------------


def test_a_calibration_survives_json():
    known = Calibration((2.0, -1.0, 0.5), "photos")
    assert known.scores == (-1.0, 0.5, 2.0)
    record = known.to_dict()
    assert record == {"scores": [-1.0, 0.5, 2.0], "images": 3, "data": "photos", "chose": False}
    assert Calibration.of({"calibration": record}) == known
    assert Calibration.of({}) is None
    both = Calibration((2.0, -1.0, 0.5), "photos", (7.0, 9.0, 8.0))
    assert (both.scores, both.counts) == ((2.0, 0.5, -1.0), (7.0, 8.0, 9.0))
    assert Calibration.of({"calibration": both.to_dict()}) == both


@pytest.mark.parametrize(
    "record",
    [
        {},
        [],
        3,
        {"scores": []},
        {"scores": ["a"]},
        {"scores": [math.nan]},
        {"scores": [1.0], "counts": [1.0, 2.0]},
        {"scores": [1.0], "counts": [math.inf]},
        {"scores": [1.0], "counts": 3},
    ],
)
def test_a_damaged_calibration(record):
    with pytest.raises(InputError, match="damaged; calibrate it again"):
        Calibration.of({"calibration": record})


@pytest.fixture(scope="module")
def counter() -> Counter:
    torch.manual_seed(0)
    return Counter(P3Net(Architecture(backbone="small", layers=1, hidden=8)).eval())


@pytest.fixture(scope="module")
def images() -> Any:
    return open_dataset("synthetic:3?train=10&val=0&test=0&size=64x96").part("train")


def test_calibrating_a_model(counter, images, tmp_path):
    sample = images.samples[0]
    with sample.open() as image:
        before = counter.count(image)
    assert before.interval is not None
    assert not before.interval.calibrated
    known = calibrate(counter, images)
    assert "calibration" not in counter.metadata
    counted = []
    for each in images.samples:
        with each.open() as image:
            found = counter.count(image)
        unit = 3 + float(np.sqrt(found.variance).sum())
        counted.append((found.count, (true_count(each) - found.count) / unit))
    counts, scores = zip(*sorted(counted), strict=True)
    assert known.metadata["calibration"]["scores"] == pytest.approx(scores, rel=1e-5)
    assert known.metadata["calibration"]["counts"] == pytest.approx(counts, rel=1e-5)
    assert known.metadata["calibration"]["images"] == 10
    checkpoint.save(tmp_path / "model.safetensors", known.network, known.metadata)
    with sample.open() as image:
        after = checkpoint.load(tmp_path).count(image, level=0.8)
    largest = sorted(map(abs, scores))[8]  # ⌈11·0.8⌉ = 9th of 10
    unit = 3 + float(np.sqrt(after.variance).sum())
    assert after.interval is not None
    assert after.interval.calibrated
    assert after.interval.high == pytest.approx(after.count + largest * unit, rel=1e-5)
    assert after.count == pytest.approx(before.count, rel=1e-6)


def test_a_regressor_has_nothing_to_calibrate(images):
    with pytest.raises(InputError, match="no distributions"):
        calibrate(Counter(Regressor(RegressorArchitecture(backbone="small"))), images)


def test_held_out_coverage_by_a_slow_loop(counter):
    rng = np.random.default_rng(1)
    scored = [
        Scored(
            str(i), int(rng.integers(0, 90)), float(rng.uniform(0, 90)), float(rng.uniform(3, 9))
        )
        for i in range(25)
    ]
    held, widths = [], []
    for one in scored:
        others = sorted(
            abs(each.truth - each.counted) / each.spread for each in scored if each is not one
        )
        reach = others[math.ceil(25 * 0.8) - 1] * one.spread
        low, high = max(0, one.counted - reach), one.counted + reach
        held.append(low <= one.truth <= high)
        widths.append(high - low)
    found = held_out(scored, 0.8)
    assert (found.images, found.level) == (25, 0.8)
    assert found.share == pytest.approx(np.mean(held))
    assert found.width == pytest.approx(np.mean(widths))
    with pytest.raises(InputError, match="two images at least"):
        held_out(scored[:1], 0.8)


def test_which_images_it_was_is_written_down(counter):
    scored = [Scored("train/a.jpg", 3, 2.0, 4.0), Scored("train/b.jpg", 3, 5.0, 4.0)]
    one = calibrated(counter, scored, "photos").metadata["calibration"]
    two = calibrated(counter, scored[::-1], "photos").metadata["calibration"]
    other = calibrated(counter, [replace(scored[0], key="c"), scored[1]], "photos")
    assert one == two
    assert one["scores"] == [0.25, -0.5]  # in order of what was counted
    assert one["data"].startswith("photos (images ")
    assert other.metadata["calibration"]["data"] != one["data"]


TINY = {
    "data": "synthetic:3?train=4&val=3&test=1&size=64x96",
    "labelled": "2",
    "weights": "none",
    "network": {"backbone": "small", "layers": 1, "hidden": 8, "heads": 2},
    "views": {"crop": 64},
    "recipe": {"steps": 1, "workers": 0, "validate_every": 1},
}


@pytest.mark.parametrize(("choose", "chose"), [("best", True), ("last", False)])
def test_a_run_says_whether_its_validation_images_chose_the_model(tmp_path, choose, chose):
    given = merge(TINY, {"recipe": {"steps": 2, "choose": choose}})
    counter = experiment.run(experiment.prepare(settings(given)), tmp_path / "run")
    assert counter.metadata["calibration"]["chose"] is chose


def test_a_run_calibrates_its_model_on_the_validation_images(tmp_path):
    chosen = settings(TINY)
    prepared = experiment.prepare(chosen)
    counter = experiment.run(prepared, tmp_path / "run")
    record = checkpoint.load(tmp_path / "run").metadata
    assert record["calibration"] == counter.metadata["calibration"]
    assert record["calibration"]["images"] == 3
    assert record["step"] == 1  # what training wrote is still there
    assert not record["calibration"]["chose"]  # there was one model to choose from
    scores = []
    for sample in prepared.data.validation.samples:
        with sample.open() as image:
            found = counter.count(image)
        assert found.variance is not None
        unit = 3 + float(np.sqrt(found.variance).sum())
        scores.append((true_count(sample) - found.count) / unit)
    assert sorted(record["calibration"]["scores"]) == pytest.approx(sorted(scores), rel=1e-5)
