"""The control plane's own speed: one `schedule()` and one `update()` with many requests, no model behind them."""

import time
from statistics import median, quantiles

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.request import EngineRequest, SamplingParams
from engine.scheduling.output import ModelRunnerOutput
from loadgen.bench.machine import describe

RUNNING, WAITING, STEPS = 256, 1600, 400


def make_core() -> EngineCore:
    config = SchedulerConfig(
        num_units=2 * 40_000,
        max_model_len=4096,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=2048,
        max_num_waiting=RUNNING + WAITING,
    )
    core = EngineCore(config)
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


def main(_argv: list[str] | None = None) -> None:
    core = make_core()
    for now in range(60):
        step(core, float(now))
    timed = [step(core, 100.0 + i) for i in range(STEPS)]
    assert all(chunks == RUNNING for _, _, chunks in timed), "the benchmark's steps are not full"
    print(f"control plane: {RUNNING} running, {WAITING} waiting, {STEPS} steps; {describe()}")
    for name, column in (("schedule()", 0), ("update()", 1)):
        values = [row[column] * 1e3 for row in timed]
        print(f"  {name:12} median {median(values):.3f} ms, P99 {quantiles(values, n=100)[98]:.3f} ms")


if __name__ == "__main__":
    main()
