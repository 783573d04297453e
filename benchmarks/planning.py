"""One second of the engine loop as a trace: planning the next offline fill runs beside the step, not before it.

A runner that sleeps 20 ms a step stands in for a device, so that only the loop's own work is seen. Printed: what a step
took, how much of the planning fell inside a running step, and the gap from a step to the next.
"""

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from benchmarks.machine import describe
from engine.api import EngineInfo, EngineRequest, RequestClass, SamplingParams
from engine.core import EngineCore
from engine.engine import Engine
from engine.limits import SchedulerConfig
from engine.loop.planner import PlanOffline
from engine.scheduling.offline import OfflinePlan
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput

STEP_SECONDS = 0.020
ONLINE, OFFLINE = 32, 1600
MODEL_LEN = 4096

Span = tuple[float, float]


class SleepingRunner:
    """Takes 20 ms a step, as a device would: without holding the interpreter."""

    def __init__(self) -> None:
        self.steps: list[Span] = []

    def launch(self, output: SchedulerOutput) -> Collect:
        begin = time.perf_counter()
        time.sleep(STEP_SECONDS)
        self.steps.append((begin, time.perf_counter()))
        result = ModelRunnerOutput(output.step_id, [7] * sum(c.sample for c in output.chunks), None, STEP_SECONDS)
        return lambda: result


@dataclass(slots=True)
class TracedPlanner:
    """The core's planner with its slices stamped."""

    plan_offline: PlanOffline
    slices: list[Span] = field(default_factory=list)

    def __call__(self, now: float) -> Generator[None, None, OfflinePlan]:
        plan = self.plan_offline(now)
        while True:
            begin = time.perf_counter()
            try:
                next(plan)
            except StopIteration as end:
                found: OfflinePlan = end.value
                return found
            finally:
                self.slices.append((begin, time.perf_counter()))
            yield


def make_engine(max_num_seqs: int) -> tuple[Engine, SleepingRunner, TracedPlanner]:
    config = SchedulerConfig(
        num_units=2 * 40_000, max_model_len=MODEL_LEN, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048
    )
    core = EngineCore(config)
    runner, planner = SleepingRunner(), TracedPlanner(core.plan_offline)
    info = EngineInfo(MODEL_LEN, 50_000, frozenset(), "sleep", "none", "none", 0)
    core.plan_offline = planner  # type: ignore[method-assign]
    return Engine(core, runner, info), runner, planner


async def trace(seconds: float) -> tuple[list[Span], list[Span]]:
    """Steps and planning slices of `seconds` in the steady state, online and offline requests together."""
    engine, runner, planner = make_engine(256)
    await engine.start()
    readers = []
    for index in range(ONLINE + OFFLINE):
        prompt = tuple((index * 31 + i) % 30_000 for i in range(256))
        request_class = RequestClass.ONLINE if index < ONLINE else RequestClass.OFFLINE
        request = EngineRequest(
            str(index), prompt, SamplingParams(max_tokens=3000 if index < ONLINE else 40), request_class
        )
        readers.append(asyncio.ensure_future(_drain(engine, request)))
    await asyncio.sleep(2.0)
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    end = time.perf_counter()
    await engine.stop()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)

    def inside(spans: list[Span]) -> list[Span]:
        return [span for span in spans if begin <= span[0] and span[1] <= end]

    return inside(runner.steps), inside(planner.slices)


async def _drain(engine: Engine, request: EngineRequest) -> None:
    (stream,) = await engine.submit([request])
    async for _ in stream:
        pass


def main(_argv: list[str] | None = None) -> None:
    steps, slices = asyncio.run(trace(1.0))
    overlapped = sum(max(0.0, min(b, d) - max(a, c)) for a, b in slices for c, d in steps)
    planning = sum(b - a for a, b in slices)
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(steps)]
    print(f"planning: {ONLINE} online and {OFFLINE} offline requests, 256 rows, one second; {describe()}")
    print(f"  {len(steps)} steps, median {median(b - a for a, b in steps) * 1e3:.1f} ms")
    longest = max(b - a for a, b in slices)
    print(f"  planning {planning * 1e3:.1f} ms in {len(slices)} slices, longest {longest * 1e3:.2f} ms")
    print(f"  {overlapped / planning:.0%} of it while a step was running")
    print(f"  gap from a step's end to the next one's start: median {median(gaps) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
