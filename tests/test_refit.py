"""A latency model that is fitted anew while the server runs: a device that changes its shape, refusals, the profile."""

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.colocation.keeper import Colocation
from engine.colocation.refit import ModelRefit
from engine.colocation.waits import initial_budget
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.machine.child import ChildError, Turn, run_child
from predictor.features import BatchFeatures
from predictor.fitting import FEWEST, error_of, fit, refit
from predictor.model import LatencyModel, Sample
from predictor.online import OnlineModel
from predictor.profile import Profile, ProfileKey
from predictor.slo import SLO

KEY = ProfileKey("m", "d", "bfloat16", "1")
CONFIG = SchedulerConfig(num_units=2 * 600, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=512)


def step_of(rng: random.Random) -> BatchFeatures:
    """As a server runs them: decodes, mostly, and now and then a chunk beside them."""
    features = BatchFeatures()
    count = rng.choice((0, 1, 2, 4, 8, 16, 32))
    features.add_decodes(count, sum(rng.randrange(20, 1500) for _ in range(count)))
    if count == 0 or rng.random() < 0.4:
        features.add_chunk(rng.choice((0, 128, 700)), rng.choice((16, 60, 128, 300, 480)))
    return features


def device(features: BatchFeatures, decodes: float = 1.0) -> float:
    """Seconds of a step; `decodes`: the cost of a decode, as a share of its cost during the sweep."""
    decode = 4e-5 * features.num_decodes + 2e-7 * features.decode_context_sum
    prompt = 6e-5 * features.prefill_token_sum + 3e-8 * features.attention_work
    return 2e-3 + decodes * decode + prompt


def measured(rng: random.Random, count: int, decodes: float = 1.0, noise: float = 0.01) -> list[Sample]:
    steps = [step_of(rng) for _ in range(count)]
    return [Sample(step, device(step, decodes) * rng.lognormvariate(0.0, noise)) for step in steps]


SWEEP = measured(random.Random(1), 250)
BEFORE = fit(SWEEP, token_limit=512)


def test_a_device_whose_decodes_cost_twice_as_much_is_put_right() -> None:
    rng = random.Random(2)
    online = OnlineModel(BEFORE)
    for step, seconds in measured(rng, 1500, decodes=2.0):
        online.observe(step, seconds)
    found = refit(online.model, SWEEP, list(online.recent()))
    assert found is not None and found.better
    later = measured(random.Random(3), 400, decodes=2.0, noise=0.0)
    scaled = error_of(online.as_fixed(), later)
    assert scaled > 0.06, "no scale fits both"
    assert error_of(found.model, later) < 0.02
    online.replace(found.model, found.error)
    before_and_after = list(online.recent())
    for step, seconds in measured(rng, 300, decodes=2.0):
        online.observe(step, seconds)
    assert error_of(online.as_fixed(), later) < 0.03 and online.scale == pytest.approx(1.0, abs=0.03)
    assert len(list(online.recent())) >= len(before_and_after), "the record of steps does not start over"


def test_what_nobody_ran_of_late_still_stands_on_the_sweep() -> None:
    """Only small steps of late, all twice as slow: large ones are taken for twice as slow, too."""
    rng = random.Random(4)
    small = [s for s in measured(rng, 3000) if s.features.num_tokens <= 64]
    found = refit(BEFORE, SWEEP, [Sample(f, 2.0 * s) for f, s in small])
    assert found is not None
    large = [Sample(f, 2.0 * s) for f, s in measured(rng, 400, noise=0.0) if f.num_tokens >= 256]
    assert error_of(found.model, large) < 0.1


def test_a_fit_that_is_no_better_is_refused() -> None:
    same = measured(random.Random(5), 800)
    found = refit(BEFORE, SWEEP, same)
    assert found is not None and not found.better
    assert refit(BEFORE, SWEEP, same[: FEWEST - 1]) is None, "too few steps to say"
    noise = random.Random(6)
    chaos = [Sample(f, noise.uniform(1e-3, 0.1)) for f, _ in same]
    found = refit(fit(chaos, token_limit=512), SWEEP, chaos)
    assert found is not None and not found.better, "times that follow nothing"


def test_cache_work_keeps_its_own_price() -> None:
    costs: dict[str, Any] = {"compact": 1e-6, "restored": 2e-6, "transferred": 3e-12, "compact_step": 1e-3}
    model = LatencyModel(intercept=1e-3, **costs, token_limit=512)
    steps = measured(random.Random(7), 400)
    dirty = BatchFeatures()
    dirty.add_decodes(1, 10)
    dirty.add_cache_work(restored_tokens=1000)
    found = refit(model, SWEEP, [*steps, *[Sample(dirty, 5.0)] * 100])
    assert found is not None and found.better
    assert {name: getattr(found.model, name) for name in costs} == costs
    assert error_of(found.model, steps) < 0.02


def keeper_after(decodes: float, steps: int = 800) -> Colocation:
    model = OnlineModel(BEFORE)
    slo = SLO.parse("ttft_p99=1s,tbt_p99=100ms")
    core = EngineCore(CONFIG, model=model)
    keeper = Colocation(core, model, slo, initial_budget(slo, BEFORE))
    for step, seconds in measured(random.Random(8), steps, decodes):
        model.observe(step, seconds)
    return keeper


def profile() -> Profile:
    return Profile(KEY, "2026-01-02T03:04:05Z", BEFORE, 0.01, len(SWEEP), sweep=tuple(SWEEP))


@pytest.mark.timeout(900)  # Python processes on busy cores
async def test_the_server_adopts_a_better_fit_and_keeps_it_with_the_profile(tmp_path: Path) -> None:
    keeper, path = keeper_after(2.0), tmp_path / "profile.json"
    fitter = ModelRefit(keeper, profile(), path, child=partial(run_child, turns=(Turn("usual", 900.0),)))
    assert await fitter.refit()
    later = measured(random.Random(9), 200, 2.0, noise=0.0)
    assert error_of(keeper.model.model, later) < 0.02
    assert (keeper.stats(0.0).model_refits, keeper.stats(0.0).model_refits_refused) == (1, 0)
    errors = keeper.stats(0.0).refit_errors
    assert errors["after"] < 0.03 < errors["before"]
    margins = keeper.stats(0.0).margins
    assert margins[1] > 0.0 and list(margins.values()) == sorted(margins.values())
    kept = Profile.load(path, KEY)
    assert kept == fitter.profile and kept.model == keeper.model.model and kept.sweep == tuple(SWEEP)
    assert kept.held_out_mape < 0.03
    assert not await fitter.refit(), "the next one is no better"
    assert keeper.stats(0.0).model_refits_refused == 1


async def test_a_fit_that_is_worse_or_fails_changes_nothing(tmp_path: Path) -> None:
    async def worse(*job: Any) -> Any:
        found = await fit_here(*job)
        return replace(found, error_before=found.error)

    async def broken(*_job: Any) -> Any:
        raise ChildError("killed")

    for child in (worse, broken):
        keeper = keeper_after(2.0)
        fitter = ModelRefit(keeper, profile(), tmp_path / "profile.json", child=child)
        assert not await fitter.refit()
        assert keeper.model.model is BEFORE and not (tmp_path / "profile.json").exists()
        assert keeper.stats(0.0).model_refits == 0
    few = ModelRefit(keeper_after(2.0, steps=FEWEST - 1), profile(), child=broken)
    assert not await few.refit()


async def fit_here(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


async def test_what_a_slow_device_shows_is_used_and_never_becomes_the_profile(tmp_path: Path) -> None:
    """Decodes three times as long and all else twice, as beside a neighbour: it is predicted by while it lasts."""
    keeper, path = keeper_after(1.0, steps=0), tmp_path / "profile.json"
    fitter = ModelRefit(keeper, profile(), path, child=fit_here)
    for step, seconds in measured(random.Random(10), 1500, 1.5):
        keeper.model.observe(step, 2.0 * seconds)
    assert await fitter.refit() and keeper.model.model is not BEFORE
    assert not path.exists() and fitter.profile == profile()
    for step, seconds in measured(random.Random(11), 6000, 1.5):
        keeper.model.observe(step, seconds)
    await fitter.refit()
    assert error_of(keeper.model.as_fixed(), measured(random.Random(9), 200, 1.5, noise=0.0)) < 0.03
    slow = refit(BEFORE, (), [Sample(f, 2.0 * s) for f, s in measured(random.Random(12), 800)])
    assert slow is not None and slow.is_of_slow_device, "without a sweep by the model itself"


async def test_it_ends_with_the_server() -> None:
    fitter = ModelRefit(keeper_after(1.0), profile())
    await fitter.stop()
    fitter.start()
    await fitter.stop()


def test_a_job_is_small_enough_to_be_written_at_once() -> None:
    """Bounded after any load: the event loop writes it."""
    keeper = keeper_after(1.0, steps=6000)
    job = refit, (keeper.model.model, tuple(SWEEP), keeper.model.recent_log())
    assert len(pickle.dumps(job)) < 1_000_000
