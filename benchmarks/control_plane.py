"""The control plane's own speed: one `schedule()` and one `update()` with many requests, no model behind them; the
predictor; whole steps by policy and the knapsack alone against the number of candidates (Apt-Serve, Table 6); the
knapsack against the exact optimum; drafts of answers from a prompt of 100,000 tokens, and of free answers."""

import random
import time
from statistics import median

import numpy as np

from benchmarks.machine import describe
from engine.api import EngineRequest, SamplingParams
from engine.core import EngineCore
from engine.limits import UNLIMITED_QUEUE, SchedulerConfig
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import ModelRunnerOutput
from engine.scheduling.policies import find_policy
from engine.scheduling.selection import Columns, apt_values, choose
from engine.scheduling.speculation import Speculation
from engine.speculation.drafts import Drafts
from predictor.features import BatchFeatures
from predictor.fitting import fit
from predictor.model import LatencyModel, SampleLog
from predictor.slo import nearest_rank

RUNNING, WAITING, STEPS = 256, 1600, 400
CANDIDATES = (50, 100, 200, 400, 800, 1600)
PENALTY = 2e-3
"""live · ρ in seconds per KV unit: about half of the candidates are then worth running from compact cache."""


LAW = LatencyModel(intercept=0.008, decode_context=4e-7, attention=2e-9, knots=(128,), hinges=(5e-5,))
"""A step time with a knee."""
LOADS = {"without an SLO": None, "every prompt late": 1.0, "every prompt in time": 1e6, "in time, speculation": 1e6}
"""TTFT objectives of the steps that have room, in seconds. The last load differs from the one before by speculation."""


def make_core(ttft: float | None) -> EngineCore:
    """As it is served; without a TTFT objective as it is without a model."""
    config = SchedulerConfig(
        num_units=2 * 40_000,
        max_model_len=4096,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=2048,
        max_num_waiting=RUNNING + WAITING,
        max_queue_time=UNLIMITED_QUEUE,
    )
    core = EngineCore(config)
    if ttft is not None:
        core = EngineCore(config, online_policy=find_policy("goodput"), model=LAW, objective=StepObjective(ttft, 0.2))
    for index in range(RUNNING + WAITING):
        prompt = tuple((index * 31 + i) % 30_000 for i in range(256))
        core.add_request(EngineRequest(str(index), prompt, SamplingParams(max_tokens=3000)), 0.0)
    return core


def step(core: EngineCore, now: float) -> tuple[float, float, int]:
    """One step; seconds of `schedule`, seconds of `update`, chunks in the step."""
    start = time.perf_counter()
    output = core.schedule(now)
    scheduled = time.perf_counter()
    assert output is not None
    tokens = [7] * sum(chunk.sample for chunk in output.chunks)
    result = ModelRunnerOutput(output.step_id, tokens, None, 0.01)
    before = time.perf_counter()
    core.update(output, result, now)
    return scheduled - start, time.perf_counter() - before, len(output.chunks)


def sample_log(count: int) -> SampleLog:
    """Made-up steps over a law with a knee, a few per cent of noise."""
    generator = random.Random(0)
    log = SampleLog()
    for _ in range(count):
        features = BatchFeatures()
        features.add_decodes(decodes := generator.randrange(1, 256), decodes * generator.randrange(1, 2000))
        features.add_chunk(generator.randrange(2000), generator.randrange(2, 1024))
        log.append(features, LAW.predict(features) * generator.uniform(0.97, 1.03))
    return log


def predictor_bench() -> None:
    log = sample_log(80_000)
    fit(log)
    begin = time.perf_counter()
    model = fit(log)
    print(f"  fit of 80,000 samples {(time.perf_counter() - begin) * 1e3:7.1f} ms")
    features, rounds = BatchFeatures(), 200_000
    features.add_decodes(64, 64 * 500)
    begin = time.perf_counter()
    for _ in range(rounds):
        model.marginal(features, 100, 64)
    print(f"  marginal() {(time.perf_counter() - begin) / rounds * 1e6:.2f} us, loop included")


PRESSED_UNITS, PRESSED_STEPS, STEP_SECONDS = 2 * 1500, 40, 0.03
ARMS = (("fcfs", 0), ("apt:0", 0), ("apt:0", 700), ("apt:0.4", 700), ("goodput-strict", 0), ("goodput-strict", 700))
"""Policies, and the blocks that may be run from hidden state."""


def pressed_core(policy: str, scratch: int, waiting: int) -> tuple[EngineCore, float]:
    """A pool that 64 requests fill, and `waiting` behind them, a quarter already late; the core
    and its time."""
    generator, knots = random.Random(0), tuple(range(0, 512, 32))
    model = LatencyModel(
        intercept=0.02,
        decodes=2e-5,
        decode_context=4e-7,
        prefill_chunks=2e-4,
        attention=2e-9,
        compact=2e-6,
        restored=2e-5,
        transferred=4e-11,
        knots=knots,
        hinges=tuple(1e-6 * (index + 1) for index in range(len(knots))),
    )
    config = SchedulerConfig(
        num_units=PRESSED_UNITS,
        max_model_len=2048,
        max_num_seqs=RUNNING,
        max_num_waiting=2 * WAITING,
        max_queue_time=UNLIMITED_QUEUE,
        scratch_blocks=scratch,
        rho=2e-7,
    )
    core = EngineCore(config, online_policy=find_policy(policy), model=model, objective=StepObjective(1.0, 1.0))

    def arrive(name: str, length: int, output: int, at: float) -> None:
        prompt = tuple(generator.randrange(30_000) for _ in range(length))
        core.add_request(EngineRequest(name, prompt, SamplingParams(max_tokens=output)), at)

    now = 60 * STEP_SECONDS
    for index in range(64):
        arrive(f"r{index}", generator.randrange(60, 500), 600, 0.0)
    for index in range(60):
        step(core, index * STEP_SECONDS)
    for index in range(waiting):
        length = min(1200, 30 + int(generator.expovariate(1 / 300)))
        arrive(f"w{index}", length, 300, now - 1.3 * (1.0 - index / waiting))
    return core, now


def policies_bench() -> None:
    """Whole `schedule()` calls while memory is short."""
    for policy, scratch in ARMS:
        found = []
        for waiting in (50, 400, WAITING):
            core, now = pressed_core(policy, scratch, waiting)
            timed = [step(core, now + index * STEP_SECONDS)[0] * 1e3 for index in range(PRESSED_STEPS)]
            found.append(f"{median(timed):.2f} ({max(timed):.1f})")
        cache, times = "hybrid" if scratch else "KV", " / ".join(found)
        print(f"  schedule(), {policy:8} {cache:6} 50 / 400 / 1,600 waiting, median (worst): {times} ms")


def queue(count: int, generator: random.Random) -> list[tuple[float, bool, int]]:
    """Waiting requests as (seconds pending, still savable, KV units): exponential waits, 30 to 1,250 tokens."""
    return [(wait := generator.expovariate(2.0), wait < 1.0, 2 * generator.randrange(2, 80)) for _ in range(count)]


def as_columns(waiting: list[tuple[float, bool, int]]) -> Columns:
    pending, savable, units = (np.array(column) for column in zip(*waiting, strict=True))
    return Columns(apt_values(pending, savable), units, units // 2)


def best_value(columns: Columns, capacity: int) -> float:
    """The exact optimum, by dynamic programming over whole units."""
    best = [0.0] * (capacity + 1)
    for value, kv, compact in zip(*(column.tolist() for column in columns), strict=True):
        forms = [(kv, value), *([(compact, value - PENALTY * kv)] if compact else [])]
        best = [
            max([held, *(best[left - units] + worth for units, worth in forms if units <= left)])
            for left, held in enumerate(best)
        ]
    return best[capacity]


def knapsack_bench() -> None:
    generator = random.Random(0)
    for count in CANDIDATES:
        waiting = queue(count, generator)
        capacity = sum(units for _, _, units in waiting) // 3
        timed = []
        for _ in range(max(50, 20_000 // count)):
            begin = time.perf_counter()
            columns = as_columns(waiting)
            built = time.perf_counter()
            chosen = choose(columns, capacity, live=1, rho=PENALTY)
            end = time.perf_counter()
            timed.append((end - built, end - begin))
        alone, whole = ([row[column] * 1e3 for row in timed] for column in range(2))
        print(
            f"  knapsack, {count:5d} candidates: median {median(alone):.3f} ms, P99 {nearest_rank(alone, 99):.3f}; "
            f"with values {median(whole):.3f}; "
            f"{len(chosen.kv)} KV, {len(chosen.compact)} compact"
        )
    ratios = []
    for _ in range(100):
        columns = as_columns(queue(24, generator))
        capacity = int(generator.uniform(0.15, 0.8) * sum(columns.kv))
        ratios.append(choose(columns, capacity, live=1, rho=PENALTY).value / best_value(columns, capacity))
    print(f"  of the exact optimum, 100 instances of 24: mean {sum(ratios) / 100:.4f}, worst {min(ratios):.3f}")


def drafts_bench() -> None:
    generator = random.Random(0)
    prompt, free = ([min(40_000, int(generator.expovariate(1 / 300))) for _ in range(n)] for n in (100_000, 2_000))
    drafts = Drafts()
    drafts.start("r", prompt, "", "tenant", b"")
    slices, more = [], True
    while more:
        begin = time.perf_counter()
        more = drafts.catch_up()
        slices.append(time.perf_counter() - begin)
    print(f"  drafts, prompt of {len(prompt)} tokens: {sum(slices) * 1e3:.1f} ms in {len(slices)} slices")
    for name, answer in (("from the prompt", prompt[5_000:7_000]), ("free", free)):
        seconds, calls, place = {"propose": 0.0, "judged": 0.0, "extend": 0.0}, 0, 0
        while place < len(answer):
            times = [time.perf_counter()]
            draft = drafts.propose("r", 8)
            times.append(time.perf_counter())
            pairs = zip(draft.tokens, answer[place:], strict=False)
            right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(draft.tokens))
            new = answer[place : place + right + 1]
            times.append(time.perf_counter())
            if draft.tokens:
                drafts.judged("r", draft, right)
            times.append(time.perf_counter())
            drafts.extend("r", new)
            times.append(time.perf_counter())
            drafts.catch_up()
            for part, at in zip(seconds, (0, 2, 3), strict=True):
                seconds[part] += times[at + 1] - times[at]
            place, calls = place + len(new), calls + 1
        means = ", ".join(f"{part} {total / calls * 1e6:.1f}" for part, total in seconds.items())
        print(f"  drafts, answer {name:15} {len(answer) / calls:.2f} tokens a step; µs a step: {means}")


def main(_argv: list[str] | None = None) -> None:
    print(f"control plane: {RUNNING} running, {WAITING} waiting, {STEPS} steps; {describe()}")
    for load, ttft in LOADS.items():
        core = make_core(ttft)
        if "speculation" in load:
            core.state.speculation = Speculation()
        for now in range(60):
            step(core, float(now))
        timed = [step(core, 100.0 + i) for i in range(STEPS)]
        assert all(chunks == RUNNING for _, _, chunks in timed), "the benchmark's steps are not full"
        for name, column in (("schedule()", 0), ("update()", 1)):
            values = [row[column] * 1e3 for row in timed]
            print(f"  {name:12} {load:20} median {median(values):.3f} ms, P99 {nearest_rank(values, 99):.3f} ms")
    predictor_bench()
    policies_bench()
    knapsack_bench()
    drafts_bench()
