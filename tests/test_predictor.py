"""The predictor: features, latency model, fitting, profile files, the start-up sweep, online refinement."""

import functools
import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import examples
from support.tables import for_each

from engine.limits import Limits
from engine.profiling.calibration import StepShape, anchor_shapes, find_knee, plan_sweep, run_sweep
from predictor.features import BatchFeatures
from predictor.fitting import fit
from predictor.model import LINEAR_TERMS, LatencyModel, Sample, SampleLog, default_knots, split_samples
from predictor.online import NUM_REGIMES, OnlineModel, Tail
from predictor.profile import Profile, ProfileError, ProfileKey


def roofline(features: BatchFeatures) -> float:
    """Seconds of a step on a device that is not the model's own regression: overhead + max(bytes, FLOPs) + attention.

    The corner of the maximum is slightly rounded, as measured devices show it.
    """
    memory, compute = 3.3e-3, features.num_tokens * 2.7e-5
    linear = (memory**6 + compute**6) ** (1 / 6)
    attention = features.decode_context_sum * 3.3e-8 + features.attention_work * 1.3e-9
    return 3e-4 + linear + attention + 1e-6 * features.num_decodes + 5e-6 * features.num_prefill_chunks


def random_step(rng: random.Random, token_limit: int = 2048) -> BatchFeatures:
    while True:
        features = BatchFeatures()
        if rng.random() < 0.8:
            count = int(2 ** rng.uniform(0, 8))
            features.add_decodes(count, int(count * 2 ** rng.uniform(5, 12)))
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            features.add_chunk(int(2 ** rng.uniform(0, 12)) - 1, int(2 ** rng.uniform(1, 11)))
        if 0 < features.num_tokens <= token_limit:
            return features


def noisy_samples(count: int, seed: int, noise: float = 0.01) -> list[Sample]:
    rng = random.Random(seed)
    steps = [random_step(rng) for _ in range(count)]
    return [Sample(step, roofline(step) * math.exp(rng.gauss(0, noise))) for step in steps]


coefficient = st.one_of(st.just(0.0), st.floats(1e-9, 1e-2))
chunk = st.tuples(st.integers(0, 5000), st.integers(1, 700))


@st.composite
def models(draw: st.DrawFn) -> LatencyModel:
    token_limit = draw(st.sampled_from((1, 100, 1000, 3000)))
    knots = draw(st.sampled_from(((), (0,), default_knots(token_limit))))
    buckets = draw(st.sampled_from(((), (8, 64, 256, 512), (1, 2, 4, 1024))))
    linear = {name: draw(coefficient) for name in LINEAR_TERMS}
    hinges = tuple(draw(st.lists(coefficient, min_size=len(knots), max_size=len(knots))))
    return LatencyModel(**linear, knots=knots, hinges=hinges, token_limit=token_limit, buckets=buckets)


@st.composite
def batches(draw: st.DrawFn) -> BatchFeatures:
    features = BatchFeatures()
    count = draw(st.integers(0, 300))
    features.add_decodes(count, count * draw(st.integers(1, 4000)))
    for start, length in draw(st.lists(chunk, max_size=4)):
        features.add_chunk(start, length)
    return features


# Features


def test_features_are_the_sums_of_the_definition() -> None:
    features = BatchFeatures()
    features.add_decodes(3, 300)
    features.add_chunk(99, 1)
    features.add_chunk(10, 4)
    features.add_chunk(0, 2)
    features.add_cache_work(compact_tokens=5, restored_tokens=6, transferred_bytes=7)
    features.add_adapted(2, 4)
    features.add_masked(2)
    features.add_masked(1)
    attention = sum(10 + i for i in (1, 2, 3, 4)) + 1 + 2
    assert features.row() == (10, 4, 400, 2, 6, attention, 5, 6, 7, 2, 4, 14 + 2, 1, 3)


def test_a_sample_log_keeps_samples_and_overwrites_the_oldest() -> None:
    samples = noisy_samples(10, 0)
    assert list(SampleLog(samples)) == samples
    ring = SampleLog(samples, capacity=4)
    assert len(ring) == 4
    assert sorted(s.seconds for s in ring) == sorted(s.seconds for s in samples[-4:])


def test_split_is_deterministic_and_disjoint() -> None:
    samples = noisy_samples(50, 0)
    train, held = split_samples(samples, 0.2, seed=3)
    assert (len(train), len(held)) == (40, 10)
    assert sorted(s.seconds for s in train + held) == sorted(s.seconds for s in samples)
    assert split_samples(samples, 0.2, seed=3) == (train, held)
    assert split_samples(samples, 0.2, seed=4) != (train, held)
    with pytest.raises(ValueError, match="held_out"):
        split_samples(samples, 1.0)


# The latency model


LINEAR = {
    "decodes": "num_decodes", "decode_context": "decode_context_sum", "prefill_chunks": "num_prefill_chunks",
    "attention": "attention_work", "prefill_tokens": "prefill_token_sum", "prefill_context": "prefill_context_sum",
    "compact": "compact_tokens", "restored": "restored_tokens", "transferred": "transferred_bytes",
    "adapters": "adapters", "adapted_tokens": "adapted_tokens", "masked_rows": "masked_rows",
}  # fmt: skip
ONCE_A_STEP = {"masks": "masked_rows", "compact_step": "compact_tokens", "restored_step": "restored_tokens"}
"""Coefficients of the model, and the feature that each is the price of."""


def by_definition(model: LatencyModel, f: BatchFeatures) -> float:
    """The formula written out, without tables."""
    padded = min((b for b in model.buckets if b >= f.num_tokens), default=f.num_tokens) if f.num_tokens else 0
    hinges = sum(h * max(0, padded - k) for k, h in zip(model.knots, model.hinges, strict=True))
    linear = [getattr(model, price) * getattr(f, feature) for price, feature in LINEAR.items()]
    steps = [getattr(model, price) * (getattr(f, feature) > 0) for price, feature in ONCE_A_STEP.items()]
    return math.fsum((model.intercept, *linear, *steps, hinges))


@given(models(), batches(), st.integers(0, 9))
@settings(deadline=None)
def test_predict_is_the_formula(model: LatencyModel, features: BatchFeatures, cache_work: int) -> None:
    features.add_cache_work(cache_work, 2 * cache_work, 3 * cache_work)
    before = model.predict(features)
    features.add_adapted(cache_work, 5 * cache_work)
    before += model.adapter_work(cache_work, 5 * cache_work)
    for rows in (cache_work, 2):
        before += model.mask_work(features, rows)
        features.add_masked(rows)
    assert model.predict(features) == pytest.approx(by_definition(model, features), rel=1e-9)
    assert model.predict(features) == pytest.approx(before)


@given(models(), batches(), chunk, st.integers(0, 300), st.integers(1, 4000))
@settings(deadline=None)
def test_marginals_are_differences_of_predictions(
    model: LatencyModel, features: BatchFeatures, added: tuple[int, int], count: int, context: int
) -> None:
    """Of a chunk, and of decodes in bulk."""
    before, marginal = model.predict(features), model.marginal(features, *added)
    features.add_chunk(*added)
    after = model.predict(features)
    assert marginal >= 0
    assert marginal == pytest.approx(after - before, rel=1e-6, abs=1e-9 * after)
    bulk = model.marginal_decodes(features, count, count * context)
    if count == 1:
        assert bulk == pytest.approx(model.marginal(features, context - 1, 1))
    features.add_decodes(count, count * context)
    more = model.predict(features)
    assert bulk == pytest.approx(more - after, rel=1e-6, abs=1e-9 * more)


@given(models(), batches(), st.integers(0, 4000), st.integers(0, 300), st.floats(0, 3), st.floats(0, 1))
@settings(max_examples=examples(200), deadline=None)
def test_max_prefill_is_maximal_and_monotone(
    model: LatencyModel, features: BatchFeatures, start: int, max_tokens: int, share: float, less: float
) -> None:
    seconds = share * model.marginal(features, start, max(1, max_tokens))
    costs = {length: model.marginal(features, start, length) for length in range(1, max_tokens + 1)}
    best = max((length for length, cost in costs.items() if cost <= seconds), default=0)
    assert model.max_prefill(features, seconds, max_tokens, start) == best
    assert model.max_prefill(features, seconds * less, max_tokens, start) <= best


@for_each("change", [
    {"knots": (0, 32), "hinges": (1.0,)}, {"knots": (32, 0), "hinges": (1.0, 1.0)}, {"buckets": (8, 8)},
    {"buckets": (0, 8)}, {"token_limit": 0}, {"intercept": -1.0}, {"attention": math.nan}, {"decodes": math.inf},
])  # fmt: skip
def test_a_model_refuses_parts_that_do_not_fit(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        LatencyModel(**change)  # type: ignore[arg-type]


def test_the_tail_of_the_step_times() -> None:
    rng, tail = random.Random(0), Tail()
    assert tail.excess(2e-4) == 0.0
    for _ in range(20_000):
        tail.add(rng.expovariate(100.0) if rng.random() < 0.005 else -0.001)
    assert 0.02 < tail.excess(2e-4) < 0.045, "about 10 ms times the logarithm of 25"
    assert tail.excess(0.5) == 0.0


# Fitting


@pytest.mark.parametrize("buckets", [(), (32, 64, 128, 256, 512, 1024, 2048)])
def test_fit_recovers_known_coefficients(buckets: tuple[int, ...]) -> None:
    knots = default_knots(2048)
    hinges = tuple({0: 1e-6, 96: 5e-6, 256: 2e-5}.get(knot, 0.0) for knot in knots)
    linear = {"intercept": 3e-3, "decodes": 1e-6, "decode_context": 3e-8, "prefill_chunks": 7e-6, "attention": 2e-9}
    cache = {"compact": 1e-7, "restored": 2e-6, "transferred": 2e-11, "prefill_context": 6e-7}
    truth = LatencyModel(**linear, **cache, knots=knots, hinges=hinges, token_limit=2048, buckets=buckets)
    rng = random.Random(5)
    samples = []
    for _ in range(1500):
        step = random_step(rng)
        step.add_cache_work(rng.randrange(5000), rng.randrange(200), rng.randrange(10**8))
        samples.append(Sample(step, truth.predict(step)))
    found = fit(samples, token_limit=2048, buckets=buckets)
    assert found.mape(samples) < 1e-6
    for name, value in (*linear.items(), *cache.items()):
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name
    if not buckets:
        assert found.hinges == pytest.approx(hinges, rel=1e-2, abs=1e-8)


def test_fit_takes_few_samples_and_outliers() -> None:
    train, held = noisy_samples(200, 3), noisy_samples(300, 4)
    assert fit(train, token_limit=2048).mape(held) < 0.02
    hiccups = [Sample(f, seconds * (10 if index % 50 == 7 else 1)) for index, (f, seconds) in enumerate(train)]
    assert fit(hiccups, token_limit=2048).mape(held) < 0.05


def test_coefficients_are_never_negative_even_where_that_would_fit_better() -> None:
    steps = [StepShape(count, 100).features() for count in range(1, 60)]
    falling = [Sample(step, 1.0 / step.num_tokens) for step in steps]
    model = fit(falling, token_limit=64)
    assert min(getattr(model, name) for name in LINEAR_TERMS) >= 0.0
    assert min(model.hinges) >= 0.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_fit_refuses_impossible_times(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        fit([Sample(StepShape(1, 1).features(), seconds)])
    with pytest.raises(ValueError, match="at least one sample"):
        fit([])


# Profile files

KEY = ProfileKey("org/Model 8B", "NVIDIA H200", "bfloat16", "0.1.0")


@pytest.fixture
def profile() -> Profile:
    model = fit(noisy_samples(100, 0), token_limit=2048, buckets=(16, 256))
    return Profile(KEY, "2026-01-02T03:04:05Z", model, 0.0123, 100)


def test_a_profile_survives_the_disk(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "made" / KEY.filename()
    profile.save(path)
    loaded = Profile.load(path, KEY)
    assert loaded == profile
    step = random_step(random.Random(0))
    assert loaded.model.predict(step) == profile.model.predict(step)
    profile.save(path)
    assert [entry.name for entry in path.parent.iterdir()] == [KEY.filename()]


def test_file_names_are_safe_and_distinct() -> None:
    names = {replace(KEY, model=model).filename() for model in ("a/b", "a-b", "a_b", "../../etc", "x" * 400)}
    assert len(names) == 5
    assert all("/" not in name and not name.startswith(".") and len(name) < 200 for name in names)


@pytest.mark.parametrize("field", ["model", "device", "dtype", "version"])
def test_a_profile_of_something_else_is_refused(tmp_path: Path, profile: Profile, field: str) -> None:
    profile.save(tmp_path / "p.json")
    with pytest.raises(ProfileError, match=rf"p\.json was made for {field} '.*', not 'other'"):
        Profile.load(tmp_path / "p.json", replace(KEY, **{field: "other"}))


def damaged(text: str, **changes: object) -> str:
    document = json.loads(text)
    for name, value in changes.items():
        if value is None:
            del document[name]
        else:
            document[name] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: "", "not JSON"),
        (lambda text: "\x00\xff", "not JSON"),
        (lambda text: "[" * 100_000, "not JSON"),
        (lambda text: "[]", "schema None"),
        (lambda text: damaged(text, schema=99), "schema 99"),
        (lambda text: damaged(text, coefficients=None), "missing 'coefficients'"),
        (lambda text: damaged(text, coefficients={"intercept": 1.0}), "missing 'decodes'"),
        (lambda text: damaged(text, hinges=[[0, -1.0]]), "not negative"),
        (lambda text: damaged(text, hinges=[[0]]), "damaged"),
        (lambda text: damaged(text, hinges=[[0.5, 1.0]]), "whole number"),
        (lambda text: damaged(text, hinges=7), "damaged"),
        (lambda text: damaged(text, held_out_mape="low"), "finite number"),
        (lambda text: damaged(text, held_out_mape=-0.1), "negative"),
        (lambda text: damaged(text, key="x"), "damaged"),
        (lambda text: damaged(text, key={}), "missing 'model'"),
        (lambda text: damaged(text, token_limit=True), "whole number"),
        (lambda text: damaged(text, schema=1, cache_costs=None), "schema 1; this version reads schema 9"),
        (lambda text: damaged(text, cache_costs=None), "missing 'cache_costs'"),
        (lambda text: damaged(text, cache_costs={}), "missing 'run_hidden'"),
        (lambda text: text.replace('"swap_in": null', '"swap_in": -1'), "above zero"),
        (lambda text: text.replace('"swap_in": null', '"swap_in": 0'), "above zero"),
        (lambda text: text.replace('"restore": null', '"restore": "much"'), "finite number"),
        (lambda text: text.replace('"intercept": ', '"intercept": NaN, "x": '), "finite number"),
    ],
)
def test_a_damaged_profile_is_one_clear_line(tmp_path: Path, profile: Profile, damage: object, reason: str) -> None:
    path = tmp_path / "p.json"
    profile.save(path)
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(ProfileError, match=reason) as caught:
        Profile.load(path, KEY)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_crash_while_writing_leaves_the_old_profile(
    tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    profile.save(path)

    def crash(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        replace(profile, num_samples=1).save(path)
    assert Profile.load(path, KEY) == profile
    assert list(tmp_path.iterdir()) == [path]


# The start-up sweep

LIMITS = Limits(256, 2048, 4096, num_units=2 * 20_000)


class Device:
    """A roofline device on a virtual clock."""

    def __init__(self, slowdown: float = 1.0) -> None:
        self.now = 0.0
        self.runs = 0
        self._slowdown = slowdown
        self._rng = random.Random(0)

    def measure(self, shape: StepShape) -> float:
        seconds = self._slowdown * roofline(shape.features()) * math.exp(self._rng.gauss(0, 0.005))
        self.now += seconds + 1e-4
        self.runs += 1
        return seconds

    def clock(self) -> float:
        return self.now


limits_strategy = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 300),
    max_num_batched_tokens=st.integers(1, 5000),
    max_model_len=st.integers(2, 9000),
    num_units=st.integers(600, 50_000),
    block_size=st.sampled_from((1, 16, 64)),
)


@given(limits_strategy, st.sampled_from((32, 100, 1024)))
@settings(max_examples=examples(60), deadline=None)
def test_every_planned_shape_is_within_the_limits_and_new(limits: Limits, knee: int) -> None:
    shapes = list(plan_sweep(limits, knee, max_shapes=60))
    assert len(shapes) == len(set(shapes)) <= 60
    for shape in shapes:
        features = shape.features()
        contexts = [shape.decode_context] * shape.num_decodes + [start + length for start, length in shape.chunks]
        assert all(1 <= context <= limits.max_model_len for context in contexts)
        assert 1 <= features.num_tokens <= limits.max_num_batched_tokens
        assert len(contexts) <= limits.max_num_seqs
        assert sum(2 * math.ceil(context / limits.block_size) for context in contexts) <= limits.num_units
    assert any(shape.fits(limits) for shape in anchor_shapes(limits)), "there is always something to measure"


def test_a_sweep_of_the_device_gives_a_good_fit() -> None:
    device = Device()
    train, held = split_samples(run_sweep(device.measure, LIMITS, 60.0, device.clock), 0.2)
    assert device.now < 60.0
    assert fit(train, token_limit=2048).mape(held) < 0.015
    assert fit(train, token_limit=2048).mape(noisy_samples(300, 9)) < 0.02


@pytest.mark.parametrize("slowdown", [30, 300])
def test_a_slow_device_stops_in_time_with_a_usable_fit(slowdown: float) -> None:
    device = Device(slowdown)
    samples = run_sweep(device.measure, LIMITS, 60.0, device.clock)
    assert device.now <= 63.0, "an underestimated step may overrun by itself, not by its repeats"
    mix = [Sample(f, slowdown * seconds) for f, seconds in noisy_samples(300, 9)]
    assert fit(samples, token_limit=2048).mape(mix) < (0.05 if slowdown == 30 else 0.3)


@pytest.mark.parametrize("token", [3e-4, 2e-3, 8e-3])
def test_a_short_sweep_of_a_device_whose_weights_take_long_knows_that_prompts_take_time(token: float) -> None:
    """Proportional extrapolation from one token would skip each prompt, and the fit would call prompts free."""
    now = 0.0

    def seconds(features: BatchFeatures) -> float:
        return max(0.2, token * features.num_tokens) + 5e-6 * features.decode_context_sum

    def measure(shape: StepShape) -> float:
        nonlocal now
        now += (took := seconds(shape.features()))
        return took

    model = fit(run_sweep(measure, LIMITS, 5.0, lambda: now), token_limit=2048)
    assert now < 5.5
    for length in (256, 512, 1536):
        prompt = BatchFeatures()
        prompt.add_chunk(0, length)
        assert 0.6 < model.predict(prompt) / seconds(prompt) < 1.6, length


def test_a_sample_is_the_median_after_a_warm_up() -> None:
    times = iter([9.0, 1.0, 5.0, 2.0] * 1000)
    samples = run_sweep(lambda shape: next(times), LIMITS, 1.0, lambda: 0.0, max_shapes=3)
    assert {sample.seconds for sample in samples} == {2.0}


def test_long_steps_are_measured_once_but_for_the_very_first() -> None:
    now, runs = 0.0, []

    def measure(shape: StepShape) -> float:
        nonlocal now
        now += 1.0 if shape.num_tokens >= 256 or not runs else 0.01
        runs.append(shape)
        return 1.0

    samples = run_sweep(measure, LIMITS, 30.0, lambda: now)
    counts = {shape: runs.count(shape) for shape in runs}
    assert counts[runs[0]] == 2, "the first run of all is warm-up even when it is long"
    assert {counts[shape] for shape in counts if shape.num_tokens >= 256} == {1}
    assert {counts[s] for s in counts if s != runs[0] and s.num_tokens < 256 and s not in runs[-9:]} == {4}
    assert len(samples) == len(counts) > 20


def test_the_knee_is_where_the_slope_takes_over() -> None:
    device = Device()
    samples = [Sample(shape.features(), device.measure(shape)) for shape in anchor_shapes(LIMITS)]
    assert 90 <= find_knee(samples) <= 160, "3.3 ms ÷ 27 µs = 122 tokens"
    assert find_knee([]) == 256


# Online refinement


def online(noise: float = 0.0) -> tuple[OnlineModel, random.Random]:
    return OnlineModel(fit(noisy_samples(1000, 1, noise), token_limit=2048)), random.Random(11)


def run_steps(model: OnlineModel, rng: random.Random, count: int, factor: float = 1.0, noise: float = 0.02) -> None:
    for _ in range(count):
        step = random_step(rng)
        model.observe(step, factor * roofline(step) * math.exp(rng.gauss(0, noise)))


@pytest.mark.parametrize(("quantile", "low", "high"), [(0.95, 920, 999), (0.995, 985, 1000)])
def test_the_margin_covers_the_quantile(quantile: float, low: int, high: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor.online.QUANTILE", quantile)
    model = OnlineModel(fit(noisy_samples(1000, 1, 0.0), token_limit=2048))
    rng = random.Random(11)
    run_steps(model, rng, 4000)
    steps = [random_step(rng) for _ in range(1000)]
    measured = [roofline(step) * math.exp(rng.gauss(0, 0.02)) for step in steps]
    covered = sum(seconds <= model.predict(step) for step, seconds in zip(steps, measured, strict=True))
    assert low <= covered <= high
    assert max(model.predict(step) / model.expected(step) for step in steps) < 1.2, "no more than it takes"
    expected = sum(seconds <= model.expected(step) for step, seconds in zip(steps, measured, strict=True))
    assert 400 <= expected <= 600
    assert 0.012 < model.mape < 0.022, "mean |N(0, 2 %)| is 1.6 %"


@pytest.mark.parametrize("factor", [0.2, 0.5, 2.0, 5.0])
def test_a_profile_of_another_hour_is_put_right_within_a_few_steps(factor: float) -> None:
    """Until then admission refuses requests that could be served, or admits requests that cannot."""
    model, rng = online()
    run_steps(model, rng, 10, factor)
    assert model.scale == pytest.approx(factor, rel=0.05)


def test_a_few_odd_steps_do_not_move_the_scale_at_once() -> None:
    model, rng = online()
    run_steps(model, rng, 50)
    for _ in range(5):
        run_steps(model, rng, 2, 5.0)
        run_steps(model, rng, 2)
    assert model.scale < 1.3


def test_a_fast_spell_is_not_counted_on_until_it_is_the_usual() -> None:
    model, features = OnlineModel(LatencyModel(intercept=0.1)), BatchFeatures()
    features.add_decodes(4, 400)
    for factor, seconds in ((1.0, 60.0), (0.5, 3.0)):
        for _ in range(round(seconds / (0.1 * factor))):
            model.observe(features, 0.1 * factor)
    assert model.expected(features) < 0.06, "as it is now"
    assert model.predict(features) > 0.085, "as it may be in the next step"
    assert model.margin(4) < 0.025
    for _ in range(800):
        model.observe(features, 0.05)
    assert model.predict(features) < 0.07


def test_a_regime_that_is_always_late_is_covered_within_some_steps() -> None:
    """A profile of a quiet machine, and steps that take half as long again from the first on."""
    model, rng = online()
    step = StepShape(4, 200, ((0, 180),)).features()
    late = 0
    for _ in range(40):
        late += model.predict(step) < 1.5 * roofline(step)
        model.observe(step, 1.5 * roofline(step) * math.exp(rng.gauss(0, 0.01)))
    assert late <= 12
    assert model.predict(step) >= 1.5 * roofline(step)


def test_one_outlier_changes_next_to_nothing() -> None:
    model, rng = online()
    run_steps(model, rng, 2000)
    step = random_step(rng)
    before = model.predict(step)
    model.observe(step, 10 * roofline(step))
    assert model.predict(step) == pytest.approx(before, rel=0.02)
    assert model.mape < 0.03
    for nonsense in (0.0, -1.0, math.nan, math.inf):
        model.observe(step, nonsense)
    assert model.num_observed == 2001


@given(st.integers(0, 2**32), batches(), chunk, st.floats(0, 0.1), st.integers(1, 600))
@settings(max_examples=examples(50), deadline=None)
def test_an_online_model_stays_consistent_and_monotone(
    seed: int, features: BatchFeatures, added: tuple[int, int], seconds: float, max_tokens: int
) -> None:
    model, rng = OnlineModel(fitted()), random.Random(seed)
    run_steps(model, rng, 100, factor=rng.uniform(0.3, 3), noise=0.3)
    start = added[0]
    costs = {length: model.marginal(features, start, length) for length in range(1, max_tokens + 1)}
    best = max((length for length, cost in costs.items() if cost <= seconds), default=0)
    assert model.max_prefill(features, seconds, max_tokens, start) == best
    before, marginal = model.predict(features), model.marginal(features, *added)
    bulk = model.marginal_decodes(features, 1, start + 1)
    assert bulk == pytest.approx(model.marginal(features, start, 1), rel=1e-6, abs=1e-12)
    features.add_chunk(*added)
    assert marginal >= 0
    assert marginal == pytest.approx(model.predict(features) - before, rel=1e-6, abs=1e-9)


@functools.cache
def fitted() -> LatencyModel:
    return fit(noisy_samples(300, 1), token_limit=2048)


@pytest.mark.parametrize(("mape", "margin"), [(0.001, 0.05), (0.1, 0.3), (0.9, 0.75)])
def test_a_worse_fit_starts_with_a_wider_margin(mape: float, margin: float) -> None:
    step = StepShape(0, 0, ((0, 512),)).features()
    model = OnlineModel(fitted(), mape)
    assert model.predict(step) == pytest.approx((1.0 + margin) * fitted().predict(step))
    assert model.expected(step) == fitted().predict(step) and model.mape == 0.0


def test_residuals_are_what_steps_took_by_what_was_expected() -> None:
    model, rng = online()
    assert model.residuals() == ()
    run_steps(model, rng, 3000, factor=1.5, noise=0.1)
    ratios = sorted(ratio for regime in model.residuals() for ratio in regime)
    assert ratios[len(ratios) // 2] == pytest.approx(1.0, abs=0.03), "the scale is taken out"
    assert ratios[int(0.84 * len(ratios))] == pytest.approx(1.1, abs=0.04)


def test_residuals_are_kept_by_regime_and_span_a_minute() -> None:
    small, large = StepShape(1, 8).features(), StepShape(0, 0, ((0, 512),)).features()
    model = OnlineModel(LatencyModel(intercept=0.01))
    for _ in range(3_000):
        model.observe(large, 0.012)
        model.observe(small, 0.008)
    residuals = model.residuals()
    assert len(residuals) == NUM_REGIMES
    assert fmean(residuals[10]) / fmean(residuals[1]) == pytest.approx(1.5)
    assert residuals[0] == residuals[1] and residuals[-1] == residuals[10], "the nearest known regime"
    late = OnlineModel(LatencyModel(intercept=0.01))
    for second in range(120):
        for _ in range(100):
            late.observe(small, 0.01 if second < 105 else 0.02)
    ratios = late.residuals()[1]
    slow = sum(ratio > 0.75 * max(ratios) for ratio in ratios) / len(ratios)
    assert 0.4 < slow < 0.6, "the last minute of step time, not the last 256 steps"


def test_the_mean_error_is_that_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WINDOW", 4), ("FORGETTING", 0.0), ("HALF_LIFE", math.inf)):
        monkeypatch.setattr(f"predictor.online.{name}", value)
    model = OnlineModel(LatencyModel(intercept=1.0))
    step = StepShape(1, 1).features()
    for measured in (2.0, 2.0, 1.0, 1.0, 1.0, 1.0):
        model.observe(step, measured)
        if model.num_observed == 2:
            assert model.mape == pytest.approx(0.5)
    assert model.mape == pytest.approx(0.0, abs=1e-12)


def test_recent_steps_keep_all_regimes_for_a_new_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor.online.RING", 20)
    model = OnlineModel(LatencyModel(intercept=1e-3))
    rng = random.Random(3)
    run_steps(model, rng, 400)
    for _ in range(2000):
        step = StepShape(1, rng.randrange(1, 4000)).features()
        model.observe(step, roofline(step))
    recent = list(model.recent())
    assert sum(sample.features.num_tokens == 1 for sample in recent) <= 20
    assert sum(sample.features.num_tokens >= 256 for sample in recent) >= 40
    refitted = fit(recent, token_limit=2048)
    model.replace(refitted, 0.0)
    assert model.scale == 1.0 and model.model is refitted
    assert list(model.recent()) == recent
    assert refitted.mape(noisy_samples(200, 5)) < 0.05


def test_the_host_is_a_time_of_its_own_not_a_slow_device() -> None:
    """A small model: steps of 2 ms between which the host takes as long, and now and then one of 80."""
    fixed = LatencyModel(intercept=1e-3, knots=(0,), hinges=(1.5e-4,))
    model, rng = OnlineModel(fixed), random.Random(5)
    large = StepShape(0, 0, ((0, 512),)).features()
    for index in range(600):
        step = large if index % 20 == 0 else StepShape(rng.randrange(1, 9), 100).features()
        host = rng.uniform(1e-3, 3e-3)
        model.observe(step, fixed.predict(step) * rng.uniform(0.9, 1.1) + host, host)
    assert model.host_seconds == pytest.approx(2e-3, rel=0.3)
    assert model.expected(large) == pytest.approx(fixed.predict(large) + 2e-3, rel=0.1)
    assert model.predict(large) < 1.3 * fixed.predict(large), "what small steps vary by is no margin of large ones"
    assert model.as_fixed().predict(large) == pytest.approx(model.expected(large), rel=0.02)
    model.observe(StepShape(1, 100).features(), 5.0, 4.99)
    assert model.host_seconds < 3e-3, "one hiccup"
