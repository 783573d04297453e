"""Layers with a sliding window read the end of a context alone: sweep, fit, planner, simulator and the profile's key
count the tokens that are read, on average over the layers. A model without windows keeps its features and its key."""

import functools
import json
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from fakes.runner import features_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import model_folder

from benchmarks.experiments.machine import true_seconds
from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.build import plan_launch, profile_key
from engine.cache.placement import restore_costs
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.execution.stages import BatchPiece, cost, quickest
from engine.limits import Limits, SchedulerConfig
from engine.profiling.calibration import StepShape, run_sweep
from engine.scheduling.objective import StepObjective, token_costs
from engine.scheduling.output import Chunk, SchedulerOutput
from engine.scheduling.selection import seconds_to_token
from engine.scheduling.urgency import PrefillPace
from engine.virtual import Arrival, PredictedRunner, VirtualDriver
from loadgen.simulation.device import profiled_device
from loadgen.simulation.gpu import DEVICES, MODELS, SimulatedDevice, SimulatedRunner, fit_device
from predictor.budget import BudgetParams
from predictor.features import EVERYTHING, BatchFeatures, Reach
from predictor.fitting import fit, refit
from predictor.model import LatencyModel, Sample
from predictor.online import OnlineModel
from predictor.profile import Profile, ProfileError, ProfileKey

WINDOWS = (1024, 1024, 1024, 1024, 1024, None) * 5
"""As Gemma 3 has them."""
REACH = Reach.of(WINDOWS)
LIMITS = Limits(64, 2048, max_model_len=32_768, num_units=2 * 60_000, reach=REACH)
LAW = LatencyModel(
    intercept=0.004,
    decodes=2e-5,
    decode_context=4e-7,
    attention=3e-10,
    prefill_context=5e-8,
    prefill_chunks=1e-4,
    knots=(0, 64),
    hinges=(1e-5, 2e-5),
    token_limit=2048,
    reach=Reach.of((16, 16, None)),
)
windows = st.lists(st.one_of(st.none(), st.integers(1, 40)), max_size=6)


@functools.cache
def read_by_layer(chunk: tuple[int, int], window: int | None) -> tuple[int, int]:
    """(tokens read, query-key pairs) of a chunk in a layer, query by query."""
    start, length = chunk
    ends = np.arange(start + 1, start + length + 1)
    firsts = np.maximum(0, ends - (window or start + length))
    return start + length - int(firsts[0]), int((ends - firsts).sum())


def read_of(chunk: tuple[int, int], layers: Sequence[int | None] = WINDOWS) -> tuple[float, float]:
    """The same on average over the layers."""
    found = [read_by_layer(chunk, window) for window in layers or [None]]
    return fmean(read for read, _ in found), fmean(pairs for _, pairs in found)


def device(chunks: list[tuple[int, int]]) -> float:
    """Seconds of a step: a floor that bends into a slope, and what every layer reads."""
    tokens = sum(length for _, length in chunks)
    seconds = (4e-3**4 + (1.2e-5 * tokens) ** 4) ** 0.25
    for chunk in chunks:
        read, pairs = read_of(chunk)
        seconds += 1.5e-7 * read if chunk[1] == 1 else 2e-5 + 6e-10 * pairs
    return float(seconds)


def sweep(reach: Reach) -> list[Sample]:
    rng, now = random.Random(1), [0.0]

    def measure(shape: StepShape) -> float:
        seconds = device([(shape.decode_context - 1, 1)] * shape.num_decodes + list(shape.chunks))
        now[0] += seconds
        return seconds * rng.lognormvariate(0.0, 0.01)

    return run_sweep(measure, replace(LIMITS, reach=reach), 60.0, lambda: now[0])


def errors(reach: Reach) -> list[float]:
    """|predicted ÷ taken - 1| of steps that the sweep has not seen."""
    model, rng, found = fit(sweep(reach), token_limit=2048, reach=reach), random.Random(2), []
    for _ in range(300):
        chunks = [(round(2 ** rng.uniform(4, 14.9)), 1) for _ in range(rng.randrange(0, 40))]
        if not chunks or rng.random() < 0.5:
            chunks.append((round(2 ** rng.uniform(0, 14.8)), round(2 ** rng.uniform(1, 10))))
        features = BatchFeatures(reach)
        for start, length in chunks:
            features.add_chunk(start, length)
        found.append(abs(model.predict(features) / device(chunks) - 1.0))
    return found


@pytest.mark.slow
def test_steps_of_long_contexts_are_predicted_where_layers_have_windows() -> None:
    aware, unaware = errors(REACH), errors(EVERYTHING)
    assert fmean(aware) < 0.005 and max(aware) < 0.03, f"{fmean(aware):.2%}, at worst {max(aware):.2%}"
    assert fmean(unaware) > 10 * fmean(aware) and max(unaware) > 0.1


@given(windows, st.integers(0, 100), st.integers(1, 60))
def test_what_is_read_is_what_layers_read_on_average(layers: list[int | None], start: int, length: int) -> None:
    reach = Reach.of(layers)
    read, pairs = read_of((start, length), layers)
    assert reach.tokens(start, length) == int(read + 1e-9) and reach.pairs(start, length) == int(pairs + 1e-9)
    assert Reach.parse(str(reach)) == reach
    assert reach.tokens(start, length) <= reach.tokens(start + 1, length), "never less behind more"
    assert reach.pairs(start, length) < reach.pairs(start, length + 1)
    contexts = [start + 1, length, start + length]
    assert reach.contexts(contexts) == sum(reach.tokens(context - 1, 1) for context in contexts)


def test_windows_are_listed_in_one_way_only() -> None:
    assert Reach.of((None, 5, None, 3)) == Reach(((3, 1), (5, 1), (0, 2))) and str(Reach.of((None, 5))) == "1x5 1x0"
    assert Reach.of(()) == Reach.of((None, None)) == EVERYTHING and str(EVERYTHING) == ""
    for text in ("1x5 1x3", "0x5", "1x0", "1x0 1x5", "5", "ax3"):
        with pytest.raises(ValueError, match=r".+"):
            Reach.parse(text)


def test_without_windows_features_and_keys_are_what_they_were(tmp_path: Path) -> None:
    features = BatchFeatures()
    for start, length in ((9999, 1), (5000, 300), (0, 17)):
        features.add_chunk(start, length)
    features.add_decodes(3, 4000)
    assert features.row() == (321, 4, 14000, 2, 317, 1545303, 0, 0, 0, 0, 0, 5317, 0, 0)
    key = ProfileKey("m, 12 parameters", "cpu", "bfloat16", "1", "1 2; 64")
    assert key.filename() == "m-12-parameters-cpu-bfloat16-1-adbde0e07e.json"
    profile = Profile(key, "2026-01-02T03:04:05Z", replace(LAW, reach=EVERYTHING), 0.01, 100)
    profile.save(path := tmp_path / key.filename())
    stored = json.loads(path.read_bytes())["key"]
    assert list(stored) == ["model", "device", "dtype", "version", "padding"] and Profile.load(path, key) == profile


def test_a_profile_of_other_windows_is_another_profile(tmp_path: Path) -> None:
    key = ProfileKey("m", "d", "bfloat16", "1", windows=str(LAW.reach))
    profile = Profile(key, "2026-01-02T03:04:05Z", LAW, 0.01, 100)
    profile.save(path := tmp_path / key.filename())
    assert Profile.load(path, key) == profile
    assert profiled_device(path, EngineConfig(max_model_len=512)).model.reach == LAW.reach, "the input of a simulation"
    for other in (replace(key, windows=""), replace(key, windows="3x16")):
        assert other.filename() != key.filename()
        with pytest.raises(ProfileError, match="windows"):
            Profile.load(path, other)
    path.write_text(path.read_text().replace(str(LAW.reach), "1x0"))
    with pytest.raises(ProfileError, match="damaged"):
        Profile.load(path, replace(key, windows="1x0"))


@pytest.mark.parametrize(("name", "kinds"), [("gemma3", "4x17 1x0"), ("mistral-window", "3x17"), ("llama-gqa2", "")])
def test_a_launch_knows_what_its_layers_read(name: str, kinds: str) -> None:
    plan = plan_launch(EngineConfig(model=str(model_folder(name)), device="cpu"))
    assert str(plan.limits.reach) == str(plan.limits.held.reach) == profile_key(plan).windows == kinds
    assert plan.limits.reach == Reach.of(plan.spec.windows)
    theirs = plan_launch(EngineConfig(model=str(model_folder(name)), device="cpu", model_impl="transformers"))
    assert theirs.limits.reach == plan.limits.reach, "by modules of the project or of transformers"


@given(st.lists(st.integers(0, 200), max_size=4), st.integers(0, 200), st.integers(1, 200))
def test_what_a_chunk_adds_is_what_the_step_takes_more(contexts: list[int], start: int, length: int) -> None:
    features = BatchFeatures(LAW.reach)
    for context in contexts:
        features.add_chunk(context, 1)
    before, marginal = LAW.predict(features), LAW.marginal(features, start, length)
    assert features.copy().reach == LAW.reach
    features.add_chunk(start, length)
    assert marginal == pytest.approx(LAW.predict(features) - before, abs=1e-12)
    online = OnlineModel(LAW)
    assert online.reach == LAW.reach and online.as_fixed().reach == LAW.reach


class Watched(PredictedRunner):
    """Keeps each planned step."""

    def __init__(self) -> None:
        super().__init__(LAW)
        self.steps: list[SchedulerOutput] = []

    def launch(self, output: SchedulerOutput):  # type: ignore[no-untyped-def]
        self.steps.append(output)
        return super().launch(output)


def test_steps_are_planned_by_what_is_read() -> None:
    """Chats and offline lines of contexts far beyond the window: every step takes the predicted time, and a budget
    that full contexts would break is used."""
    config = SchedulerConfig(num_units=2 * 2000, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=256)
    budget = BudgetParams("tidemill", 0.012)
    core = EngineCore(config, model=LAW, objective=StepObjective(budget=budget, tbt=0.02, ttft=4.0))

    def request(name: str, prompt: int, output: int, kind: RequestClass) -> EngineRequest:
        sampling = SamplingParams(max_tokens=output)
        return EngineRequest(name, tuple(range(prompt)), sampling, request_class=kind)

    chats = [Arrival(0.05 * i, request(f"on{i}", 40 + 700 * (i % 3), 30, RequestClass.ONLINE)) for i in range(12)]
    lines = (request(f"off{i}", 900, 60, RequestClass.OFFLINE) for i in count())
    VirtualDriver(core, runner := Watched(), chats, lines, backlog=8).run(3.0)
    assert len(runner.steps) > 100 and any(chunk.start > 700 for step in runner.steps for chunk in step.chunks)
    for step in runner.steps:
        taken = LAW.predict(features_of(step, LAW.reach))
        assert step.predicted_latency == pytest.approx(taken, rel=1e-9)
    whole = replace(LAW, reach=EVERYTHING)
    assert any(
        whole.predict(features_of(step)) > 1.1 * LAW.predict(features_of(step, LAW.reach)) for step in runner.steps
    )


def test_a_long_prompt_takes_what_its_chunks_take() -> None:
    """Estimates for a whole prompt, for recomputing and for micro-batches, against its chunks one by one."""
    chunk, beside = 64, BatchFeatures(LAW.reach)
    beside.add_decodes(4, 4 * LAW.reach.tokens(199, 1))
    step = LAW.predict(beside)
    for start, length in ((0, 64), (0, 640), (32, 1920), (5, 64)):
        starts = range(start, start + length, chunk)
        exact = sum(step + LAW.marginal(beside, at, chunk) for at in starts)
        pace = PrefillPace(LAW, beside, step, chunk, (step + LAW.marginal(beside, 0, chunk)) / chunk)
        assert pace.seconds(start, length) == pytest.approx(exact, rel=0.01)
        assert seconds_to_token(LAW, step, beside, start, length, chunk) == pytest.approx(exact, rel=0.01)
    config = SchedulerConfig(num_units=400, max_model_len=2048, max_num_batched_tokens=64)
    costs, free = restore_costs(LAW, config), BatchFeatures(LAW.reach)
    for start in (0, 100, 1500):
        expected = LAW.marginal(free, start, chunk)
        assert costs.recompute_seconds(start, chunk) == pytest.approx(expected, rel=0.02)
    context = LAW.reach.tokens(511, 1)
    decodes = LAW.intercept + 64 * LAW.decodes + LAW._hinge(64, 0) + LAW.decode_context * 64 * context
    assert token_costs(LAW, config).decode == pytest.approx(decodes / 64)
    pieces = [BatchPiece(0, 1000, 200), BatchPiece(1, 500, 1), BatchPiece(2, 0, 100)]
    features = BatchFeatures(LAW.reach)
    for _, at, length in pieces:
        features.add_chunk(at, length)
    assert cost(pieces, LAW) == LAW.predict(features)
    halves = quickest(pieces, replace(LAW, intercept=0.0), stages=4)
    one, other = (cost(half, replace(LAW, intercept=0.0)) for half in halves) if len(halves) == 2 else (1.0, 1.0)
    assert one == pytest.approx(other, rel=0.2)


def test_a_refit_keeps_the_windows() -> None:
    rng, steps = random.Random(3), []
    for _ in range(400):
        features = BatchFeatures(LAW.reach)
        for _ in range(rng.randrange(1, 8)):
            features.add_chunk(rng.randrange(2000), rng.choice((1, 1, 30, 200)))
        steps.append(Sample(features, LAW.predict(features)))
    found = refit(LAW, steps, steps)
    assert found is not None and found.model.reach == LAW.reach and found.error < 0.01
    assert pickle.loads(pickle.dumps(LAW)) == LAW


def test_the_simulated_device_reads_windows() -> None:
    """A step's time follows what layers read, its oracle and a fit of its sweep know it."""
    plain = MODELS["llama-3-8b"]
    sizes = replace(plain, windows=((1024,) * 3 + (None,)) * 8, max_model_len=32_768)
    windowed, whole = (SimulatedDevice(shape, DEVICES["h100"]) for shape in (sizes, plain))

    def seconds(simulated: SimulatedDevice, *chunks: tuple[int, int]) -> float:
        runner = SimulatedRunner(simulated, noise=0.0)
        return runner.launch(SchedulerOutput(0, tuple(Chunk(i, *c, True) for i, c in enumerate(chunks))))().latency

    far = [(15_999, 1)] * 8
    read = 8 * 16_000 - 8 * (3 * 1024 + 16_000) // 4
    assert seconds(whole, *far) - seconds(windowed, *far) == pytest.approx(read * whole._kv_token_seconds)
    mixed = [*far, (4000, 300), (0, 100)]
    features = BatchFeatures(windowed.model.reach)
    for start, length in mixed:
        features.add_chunk(start, length)
    assert true_seconds(windowed, features) == pytest.approx(seconds(windowed, *mixed))
    room = SchedulerConfig(num_units=2 * 40_000, max_model_len=32_768, max_num_seqs=64)
    fitted, mape = fit_device(windowed, room, 0)
    assert fitted.reach == windowed.model.reach and mape < 0.05
