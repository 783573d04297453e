"""A device whose steps are padded, as CUDA graphs have it: what decodes alone are padded to, and what steps with
prompts are, are features of the sweep, the fit and the planner, and a part of the profile's key."""

import random
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from engine.execution.cuda.buffers import Buckets, decode_buckets, mixed_buckets
from engine.limits import Limits, Padding
from engine.profiling.calibration import StepShape, edge_shapes, run_sweep
from predictor.features import BatchFeatures
from predictor.fitting import fit
from predictor.model import LatencyModel, Sample
from predictor.profile import Profile, ProfileError, ProfileKey

SEQS, TOKENS = 128, 2048
PADDING = Padding(tuple(decode_buckets(SEQS)), tuple(mixed_buckets(TOKENS)))
LIMITS = Limits(SEQS, TOKENS, max_model_len=4096, num_units=2 * 20_000, padding=PADDING)


def padded(features: BatchFeatures) -> int:
    sizes = PADDING.mixed if features.num_prefill_chunks else PADDING.decode
    index = bisect_left(sizes, features.num_tokens)
    return sizes[index] if index < len(sizes) else features.num_tokens


def device(features: BatchFeatures) -> float:
    """Seconds: a floor that bends into a slope over what really runs, attention, and something for every prompt."""
    tokens = padded(features)
    linear = (4e-3**4 + (1.2e-5 * tokens) ** 4) ** 0.25
    return (
        linear
        + 1.5e-8 * features.decode_context_sum
        + 6e-10 * features.attention_work
        + 2e-5 * (features.num_prefill_chunks + features.num_decodes / 8)
    )


def sweep(noise: float, limits: Limits = LIMITS) -> list[Sample]:
    rng, now = random.Random(1), [0.0]

    def measure(shape: StepShape) -> float:
        seconds = device(shape.features()) * rng.lognormvariate(0.0, noise)
        now[0] += seconds
        return seconds

    return run_sweep(measure, limits, 60.0, lambda: now[0])


def steps_between(count: int = 600) -> list[BatchFeatures]:
    """Steps as a server runs them: of any size, hardly ever at an edge."""
    rng, found = random.Random(2), []
    for _ in range(count):
        features = BatchFeatures()
        decodes = rng.randrange(0, SEQS)
        features.add_decodes(decodes, sum(rng.randrange(1, 2000) for _ in range(decodes)))
        if decodes == 0 or rng.random() < 0.5:
            features.add_chunk(rng.randrange(0, 2000), round(2 ** rng.uniform(1, 10.5)))
        found.append(features)
    return found


def fitted(samples: list[Sample], padding: Padding) -> LatencyModel:
    sizes = {"buckets": padding.mixed, "decode_buckets": padding.decode}
    return fit(samples, token_limit=TOKENS, jump_at=padding.jump, **sizes)


def errors_of(model: LatencyModel) -> list[float]:
    """Return predicted ÷ taken without noise - 1."""
    return [model.predict(features) / device(features) - 1.0 for features in steps_between()]


def test_a_staircase_is_fitted_as_one() -> None:
    samples = sweep(noise=0.01)
    aware, unaware = (errors_of(fitted(samples, padding)) for padding in (PADDING, Padding()))
    mean = fmean(map(abs, aware))
    assert mean < 0.003, f"{mean:.2%} beside a noise of 1 %"
    assert min(aware) > -0.03, f"{min(aware):.2%}: a plan on it would break the promise"
    assert fmean(map(abs, unaware)) > 3 * mean and min(unaware) < -0.05


@pytest.mark.parametrize("extra", [0.03, 0.16], ids=["one pass", "16 operators"])
def test_a_jump_is_seen_on_both_sides(extra: float) -> None:
    """An RTX 4090 with Qwen3-8B in 4 bits (computed): steps of more than 32 rows unpack the weights first."""

    def jumping(features: BatchFeatures) -> float:
        tokens, past = padded(features), features.decode_context_sum + features.prefill_context_sum
        return 6e-3 + extra * (tokens > 32) + 9.3e-5 * tokens + 1.6e-7 * past

    rng, now = random.Random(1), [0.0]

    def measure(shape: StepShape) -> float:
        seconds = jumping(shape.features()) * rng.uniform(0.99, 1.01)
        now[0] += seconds
        return seconds

    limits = replace(LIMITS, padding=replace(PADDING, jump=32))
    samples = run_sweep(measure, limits, 30.0, lambda: now[0])
    model = fitted(samples, limits.padding)
    for decodes, chunk in ((1, 0), (16, 0), (32, 0), (33, 0), (40, 0), (64, 0), (8, 16), (8, 100), (32, 512)):
        features = BatchFeatures()
        features.add_decodes(decodes, 512 * decodes)
        if chunk:
            features.add_chunk(0, chunk)
        assert model.predict(features) == pytest.approx(jumping(features), rel=0.1), (decodes, chunk)
    assert model.jump == pytest.approx(extra, rel=0.05) and model.scaled(2.0).jump == 2 * model.jump
    few = BatchFeatures()
    few.add_decodes(20, 20 * 512)
    fits = model.max_prefill(few, extra / 2, 512, 0)
    assert 20 + fits <= 32 < 20 + model.max_prefill(few, 2 * extra, 512, 0), "no plan crosses it by mistake"


def test_decodes_and_prompts_have_steps_of_their_own() -> None:
    model = LatencyModel(intercept=1e-3, knots=(0,), hinges=(1e-5,), buckets=(64, 128), decode_buckets=(4, 16, 80))
    features = BatchFeatures()
    features.add_decodes(5, 100)
    assert model.predict(features) == pytest.approx(1e-3 + 16e-5)
    assert model.marginal_decodes(features, 11, 100) == 0.0 and model.marginal(features, 9, 1) == 0.0
    assert model.marginal(features, 0, 2) == pytest.approx((64 - 16) * 1e-5)
    assert model.max_prefill(features, 48.1e-5, 500, 0) == 59, "the rest of the bucket costs nothing"
    before = model.predict(features)
    features.add_chunk(0, 60)
    assert model.predict(features) - before == pytest.approx((128 - 16) * 1e-5)
    assert model.marginal(features, 9, 1) == 0.0
    alike = replace(model, decode_buckets=())
    decodes = BatchFeatures()
    decodes.add_decodes(5, 100)
    assert alike.predict(decodes) == pytest.approx(1e-3 + 64e-5), "one list for all steps"


def test_a_prompt_never_makes_a_step_cheaper() -> None:
    """The real lists: the smallest step with a prompt is padded to no less than its decodes alone."""
    for seqs in (1, 3, 64, 100, 128, 200, 256, 700):
        for tokens in (64, 512, 2048, 8192):
            buckets = Buckets(seqs, tokens)
            for count in range(1, min(seqs, tokens - 2) + 1):
                assert buckets.fit(count + 2, count).tokens >= buckets.fit(count, count).tokens


def test_the_sweep_measures_every_stair() -> None:
    sizes = [padded(shape.features()) for shape in edge_shapes(LIMITS)]
    assert sizes == [*PADDING.decode, *PADDING.mixed]
    seen = {(sample.features.num_prefill_chunks > 0, padded(sample.features)) for sample in sweep(0.0)}
    assert seen >= {(False, size) for size in PADDING.decode} | {(True, size) for size in PADDING.mixed}


def test_a_profile_of_other_graphs_is_another_profile(tmp_path: Path) -> None:
    key = ProfileKey("m", "d", "bfloat16", "1", str(PADDING))
    profile = Profile(key, "2026-01-02T03:04:05Z", fitted(sweep(0.01), PADDING), 0.01, 100)
    path = tmp_path / key.filename()
    profile.save(path)
    assert Profile.load(path, key) == profile
    for other in (replace(key, padding=""), replace(key, padding=str(replace(PADDING, decode=(1, 2))))):
        assert other.filename() != key.filename()
        with pytest.raises(ProfileError, match="padding"):
            Profile.load(path, other)
