"""The latency profile: measured on a runner, kept, read again, refused when damaged or foreign."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.runner import FakeRunner, features_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import llama_config

from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, Tier
from engine.execution.cpu.device import TorchDevice
from engine.execution.runner import Runner
from engine.limits import Limits
from engine.models.decoder import Decoder
from engine.models.spec import spec_from_config
from engine.models.weights import DummyTensors, build_weights
from engine.profiling.calibration import (
    KV_ONLY,
    CacheTiers,
    StepShape,
    load_or_measure,
    load_profile,
    measure_cache_costs,
    measure_profile,
)
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput
from predictor.model import LatencyModel
from predictor.profile import NOT_MEASURED, CacheCosts, Profile, ProfileError, ProfileKey, affine

TRUTH = LatencyModel(intercept=0.004, decode_context=2e-6, prefill_chunks=1e-4, knots=(0, 64), hinges=(1e-5, 1e-4))
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=256, num_units=2 * 200, block_size=16)
KEY = ProfileKey("model", "device", "float32", "1")


class TimedRunner(FakeRunner):
    """Takes the time of a known law, and checks every step like any fake runner."""

    def __init__(self) -> None:
        super().__init__(block_size=16, vocab_size=50, latency=lambda output: TRUTH.predict(features_of(output)))

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The sweep reads cells that were never written: only the shape of a step is checked."""
        assert all(chunk.start + chunk.length <= LIMITS.max_model_len for chunk in output.chunks)
        assert all(new.sampling.temperature == 1 for new in output.new_requests), "tokens are drawn, as users have it"
        units = [u for new in output.new_requests for entry in new.entries for u in entry.units]
        assert len(units) == len(set(units)) and all(u < LIMITS.num_units for u in units)
        latency = self._latency(output)
        return ModelRunnerOutput(output.step_id, [1] * sum(c.sample for c in output.chunks), None, latency)


def test_a_sweep_recovers_the_law_of_the_device() -> None:
    profile = measure_profile(TimedRunner(), LIMITS, 50, KEY, seconds=5.0)
    assert profile.held_out_mape < 0.02
    assert profile.num_samples > 30


def test_a_sweep_finds_what_adapters_cost() -> None:
    """A fixed part for each in a step, and one for each of their tokens."""
    truth, seen = replace(TRUTH, adapters=0.003, adapted_tokens=5e-5), set[int]()

    class Adapted(TimedRunner):
        def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
            seen.update(new.adapter for new in output.new_requests)
            return replace(super()._execute(output), latency=truth.predict(features_of(output)))

    model = measure_profile(Adapted(), LIMITS, 50, KEY, seconds=2.0, adapters=3).model
    assert seen == {0, 1, 2, 3}
    assert model.adapters == pytest.approx(0.003, rel=0.05) and model.adapted_tokens == pytest.approx(5e-5, rel=0.1)
    assert measure_profile(TimedRunner(), LIMITS, 50, KEY, seconds=0.5).model.adapters == 0.0


class OverlappingRunner(TimedRunner):
    """A device whose steps run while the host launches the next one, on a clock of their own."""

    HOST = 0.003

    def __init__(self) -> None:
        super().__init__()
        self._now = self._free = self._last_end = 0.0

    def launch(self, output: SchedulerOutput) -> Collect:
        began, self._now = self._now, self._now + self.HOST
        result = self._execute(output)
        self._free = end = max(self._now, self._free) + result.latency

        def collect() -> ModelRunnerOutput:
            self._now = max(self._now, end)
            latency, self._last_end = end - max(began, self._last_end), end
            return replace(result, latency=latency)

        return collect


def test_steps_of_a_device_that_takes_them_ahead_are_timed_behind_one_another() -> None:
    decode = StepShape(4, 200).features()
    for ahead, host in ((True, 0.0), (False, OverlappingRunner.HOST)):
        model = measure_profile(OverlappingRunner(), LIMITS, 50, KEY, 0.5, ahead=ahead).model
        assert model.predict(decode) == pytest.approx(TRUTH.predict(decode) + host, rel=0.02)


def test_measured_once_then_read(tmp_path: Path) -> None:
    said: list[str] = []
    first = load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 2.0, said.append)
    again = load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 2.0, said.append)
    assert again == first
    assert [line.split(" ")[0] for line in said] == ["measuring", "measured"], "a stored profile is read in silence"


def test_a_profile_of_a_busy_machine_is_measured_again(tmp_path: Path) -> None:
    said: list[str] = []
    good = load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 1.0, said.append)
    poor = replace(good, held_out_mape=0.44)
    poor.save(tmp_path / KEY.filename())
    assert load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 0.0, said.append) == poor, "no time to do better"
    again = load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 1.0, said.append)
    assert again.held_out_mape < 0.1 and any("is off by 44%; measuring again" in line for line in said)
    assert load_profile(tmp_path, KEY, LIMITS) == again


@pytest.mark.parametrize("shares", [(0.6, 1.0), (1.0, 0.6)])
def test_what_was_measured_beside_other_work_is_measured_again_in_quiet(
    tmp_path: Path, shares: tuple[float, float]
) -> None:
    """Whether that work came before the sweep had ended or went in it."""
    said: list[str] = []
    looks = iter([*shares, 0.5, 0.97, 0.97, 0.98])

    def start(seconds: float = 0.5) -> Profile:
        return load_or_measure(
            tmp_path, TimedRunner(), LIMITS, 50, KEY, seconds, said.append, core_share=lambda: next(looks)
        )

    busy = start()
    assert (
        busy.core_share == 0.6
        and said[-1] == "other work takes 40% of the cores; a start on a quiet machine measures again"
    )
    assert start(seconds=0.0) == busy, "no time to do better"
    assert start() == busy, "it is still busy"
    quiet = start()
    assert quiet.core_share == 0.97 and any(line.endswith("was measured; measuring again") for line in said)
    assert start() == quiet == load_profile(tmp_path, KEY, LIMITS)
    assert next(looks, None) is None, "a quiet one is not looked at again"


def test_a_damaged_profile_is_said_and_measured_again(tmp_path: Path) -> None:
    path = tmp_path / KEY.filename()
    path.write_text('{"schema": 1, "key"')
    with pytest.raises(ProfileError, match="damaged"):
        load_profile(tmp_path, KEY, LIMITS)
    said: list[str] = []
    load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 1.0, said.append)
    assert "damaged" in said[0]
    assert load_profile(tmp_path, KEY, LIMITS) is not None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    load_or_measure(tmp_path / "file" / "below", TimedRunner(), LIMITS, 50, KEY, 0.5, said.append)
    assert "cannot store the profile" in said[-1]


# --- cache costs ---------------------------------------------------------------------------------------------------

TIERS = CacheTiers(scratch_blocks=12, host_units=20, unit_bytes=1000)
RUN_HIDDEN, RESTORE, SWAP_OUT, SWAP_IN = 3e-6, 8e-6, 2e-4, 1e-4
RUN_HIDDEN_STEP, RESTORE_STEP = 1.5e-3, 7e-4


class HybridRunner(FakeRunner):
    """Takes the time of a known law, cache work included; checks that units are used as the pool would allow."""

    def __init__(self) -> None:
        super().__init__(block_size=16, vocab_size=50, scratch_blocks=12, host_units=20)
        self.entries: tuple[CacheEntry, ...] = ()
        self.num_costed_steps = 0
        self.most_rows = 0

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if output.new_requests:
            self.entries = tuple(entry for new in output.new_requests for entry in new.entries)
            assert all(len(new.token_ids) <= LIMITS.max_model_len for new in output.new_requests)
            self.most_rows = max(self.most_rows, len(output.new_requests))
        latency = TRUTH.predict(features_of(output))
        hidden = [entry for entry in self.entries if entry.kind is CacheKind.HIDDEN]
        assert len(hidden) <= self.scratch_blocks
        self.num_costed_steps += bool(hidden or output.operations)
        latency += RUN_HIDDEN * max(0, 16 * len(hidden) - len(output.new_requests)) + RUN_HIDDEN_STEP * bool(hidden)
        latency += RESTORE_STEP * any(each.action is CacheAction.RESTORE for each in output.operations)
        used = [unit for entry in self.entries for unit in entry.units]
        for action, source, target, *_ in output.operations:
            for entry in (source, target):
                limit = LIMITS.num_units if entry.tier is Tier.DEVICE else self.host_units
                assert all(unit < limit for unit in entry.units)
                assert entry.tier is Tier.HOST or not set(entry.units) & set(used), "the request's own units"
            latency += {
                CacheAction.RESTORE: 16 * RESTORE,
                CacheAction.SWAP_OUT: SWAP_OUT,
                CacheAction.SWAP_IN: SWAP_IN,
            }[action]
        return ModelRunnerOutput(output.step_id, [1] * sum(c.sample for c in output.chunks), None, latency)


def test_cache_costs_are_recovered_and_charged_by_the_model() -> None:
    profile = measure_profile(HybridRunner(), LIMITS, 50, KEY, 0.5, tiers=TIERS)
    costs = profile.cache_costs
    assert (costs.run_hidden, costs.restore) == (pytest.approx(RUN_HIDDEN), pytest.approx(RESTORE))
    assert (costs.swap_out, costs.swap_in) == (pytest.approx(SWAP_OUT), pytest.approx(SWAP_IN))
    step = StepShape(2, 100).features()
    before = profile.model.predict(step)
    work = {"compact_tokens": 10, "restored_tokens": 16, "transferred_bytes": 2000}
    first = profile.model.cache_work(**work, beside=step)
    step.add_cache_work(**work)
    expected = 10 * RUN_HIDDEN + 16 * RESTORE + SWAP_OUT + SWAP_IN
    assert profile.model.predict(step) - before == pytest.approx(expected + RUN_HIDDEN_STEP + RESTORE_STEP)
    assert first == pytest.approx(profile.model.predict(step) - before)
    assert profile.model.cache_work(**work, beside=step) == pytest.approx(expected), "a step pays for the first once"
    assert profile.model.cache_work(compact_tokens=-10, beside=step) == pytest.approx(
        -10 * RUN_HIDDEN - RUN_HIDDEN_STEP
    )


@given(st.integers(1, 500), st.integers(1, 2000), st.floats(0.0, 1e-2), st.floats(1e-9, 1e-4), st.floats(-2e-3, 2e-3))
def test_the_line_through_two_sizes(few: int, more: int, fixed: float, token: float, error: float) -> None:
    """Exact where the law is one; else the nearest that is possible, and never below the least cost of a token."""
    many, floor = few + more, 1e-9
    at_few, at_many = fixed + token * few, fixed + token * many
    found = affine((few, at_few), (many, at_many), floor)
    assert found.token == pytest.approx(token, rel=1e-6, abs=1e-12) and found.fixed == pytest.approx(fixed, abs=1e-12)
    found = affine((few, max(0.0, at_few + error)), (many, at_many), floor)
    assert found.fixed >= 0.0 and found.token >= floor
    errors = [found.fixed + found.token * tokens - seconds for tokens, seconds in ((few, at_few), (many, at_many))]
    assert max(map(abs, errors)) <= abs(error) + 1e-9, "no further from the truth than the worse measurement"
    alone = affine((many, at_many), (many, at_many), floor)
    assert (alone.fixed, alone.token) == (0.0, at_many / many)


@pytest.mark.parametrize(
    ("tiers", "hidden", "host"),
    [
        (KV_ONLY, False, False),
        (replace(TIERS, host_units=0), True, False),
        (replace(TIERS, scratch_blocks=0), False, True),
    ],
    ids=str,
)
def test_only_what_is_offered_is_measured(tiers: CacheTiers, hidden: bool, host: bool) -> None:
    runner = HybridRunner()
    costs = measure_cache_costs(runner, LIMITS, tiers)
    assert (costs.run_hidden is not None, costs.restore is not None) == (hidden, hidden)
    assert (costs.swap_out is not None, costs.swap_in is not None) == (host, host)
    assert costs.covers(hidden=hidden, host=host)
    assert not costs.covers(hidden=True, host=True)
    assert (runner.num_costed_steps > 0) == (hidden or host)


def test_costs_that_a_kept_profile_lacks_are_added(tmp_path: Path) -> None:
    said: list[str] = []
    plain = load_or_measure(tmp_path, HybridRunner(), LIMITS, 50, KEY, 0.5, said.append)
    assert plain.cache_costs == NOT_MEASURED
    hybrid = load_or_measure(tmp_path, HybridRunner(), LIMITS, 50, KEY, 0.5, said.append, TIERS)
    assert hybrid.created_at == plain.created_at and hybrid.num_samples == plain.num_samples
    assert hybrid.cache_costs.covers(hidden=True, host=True)
    runner = HybridRunner()
    assert load_or_measure(tmp_path, runner, LIMITS, 50, KEY, 0.5, said.append, TIERS) == hybrid
    assert runner.num_costed_steps == 0, "measured once"


def test_costs_of_one_representation_outlive_a_launch_with_another(tmp_path: Path) -> None:
    hidden, host = replace(TIERS, host_units=0), replace(TIERS, scratch_blocks=0)
    for tiers in (hidden, host):
        load_or_measure(tmp_path, HybridRunner(), LIMITS, 50, KEY, 0.5, lambda _line: None, tiers)
    runner = HybridRunner()
    both = load_or_measure(tmp_path, runner, LIMITS, 50, KEY, 0.5, lambda _line: None, TIERS)
    assert both.cache_costs.covers(hidden=True, host=True) and runner.num_costed_steps == 0
    assert both.model.compact == pytest.approx(RUN_HIDDEN) and both.model.transferred > 0.0


def test_cache_costs_of_a_real_runner() -> None:
    """The steps that are measured are steps that a real runner accepts."""
    spec = spec_from_config(llama_config(hidden_size=256, num_key_value_heads=4, num_hidden_layers=2))
    decoder = Decoder(spec, build_weights(spec, DummyTensors(0, torch.float32, torch.device("cpu"))))
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, num_units=60, block_size=16)
    runner = Runner(TorchDevice(decoder, limits, scratch_blocks=16, host_units=32))
    costs = measure_cache_costs(runner, limits, CacheTiers(16, 32, 1), repeats=3)
    assert costs.covers(hidden=True, host=True)


class NoisyHybridRunner(HybridRunner):
    """Steps vary by 5 %, every seventh or so is disturbed for far longer than it takes, and the machine slows down."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._random = random.Random(3)
        self._factor = factor

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = super()._execute(output)
        plain = TRUTH.predict(features_of(output))
        seconds = plain + self._factor * (result.latency - plain)
        seconds *= (1.0 + 5e-4 * output.step_id) * self._random.gauss(1.0, 0.05)
        disturbed = 0.05 * (self._random.random() < 0.15)
        return ModelRunnerOutput(output.step_id, result.token_ids, None, max(1e-6, seconds) + disturbed)


def test_cache_costs_do_not_follow_single_disturbed_steps() -> None:
    costs = measure_cache_costs(NoisyHybridRunner(1.0), LIMITS, TIERS)
    # the machine grows slower by a tenth while this runs
    assert costs.swap_out == pytest.approx(SWAP_OUT, rel=0.2)
    assert costs.swap_in == pytest.approx(SWAP_IN, rel=0.4)
    assert costs.restore == pytest.approx(RESTORE, rel=0.4)


@pytest.mark.parametrize("factor", [0.0, -0.2])
def test_no_cache_cost_is_zero_or_less(factor: float) -> None:
    """Work that cannot be told from noise, or even seems to gain time, costs what moving its bytes must."""
    tiers = replace(TIERS, unit_bytes=10**6, copy_rate=1e9)
    costs = measure_cache_costs(NoisyHybridRunner(factor), LIMITS, tiers)
    assert costs.swap_out is not None and costs.swap_in is not None
    assert costs.swap_out >= 1e-3 and costs.swap_in >= 1e-3
    assert costs.run_hidden is not None and costs.restore is not None
    assert costs.run_hidden >= 1e6 / 16 / 1e13 and costs.restore >= 3e6 / 16 / 1e13
    if factor < 0.0:
        assert (costs.swap_out, costs.run_hidden) == (1e-3, 1e6 / 16 / 1e13)


@pytest.mark.parametrize(("seqs", "rows"), [(8, 3), (2, 2)])
def test_more_tokens_than_a_context_run_from_hidden_state_in_several_rows(seqs: int, rows: int) -> None:
    """12 blocks where a context has 5: what every step pays anyway weighs less."""
    runner = HybridRunner()
    limits = replace(LIMITS, max_model_len=5 * 16, max_num_seqs=seqs)
    costs = measure_cache_costs(runner, limits, TIERS)
    assert runner.most_rows == rows
    assert costs.run_hidden == pytest.approx(RUN_HIDDEN) and costs.restore == pytest.approx(RESTORE)


@pytest.mark.parametrize("seconds", [0.0, -1e-9, float("inf"), float("nan")])
def test_costs_that_cannot_be_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        CacheCosts(swap_in=seconds)


def test_no_seconds_measure_one_step_and_keep_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    profile = load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 0.0, said.append)
    assert profile.num_samples >= 1 and not list(tmp_path.iterdir())
