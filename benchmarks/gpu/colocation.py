"""Co-location through the engine, without HTTP: saturation, online alone, then both under the online run's SLO.

The budget is searched as the server does it, from the load and the step times of the online run. What is left of the
device is compared with what a scheduler gets that knows the times of steps, on the same replay.
"""

import asyncio
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

from benchmarks.gpu.loop import BLOCK, make_runner, scheduler_config
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.table import Row
from engine.api import EngineInfo, EngineRequest, FinishReason, RequestClass, RequestOutput, SamplingParams
from engine.colocation.keeper import Colocation
from engine.colocation.replay import ReplayedServer, Workload, find_budget, metrics_of, run_workload, step_range
from engine.colocation.search_child import run_child
from engine.core import EngineCore
from engine.engine import Engine
from engine.execution.cuda.device import CudaDevice
from engine.execution.runner import Runner
from engine.limits import SchedulerConfig
from engine.machine import processes
from engine.models.spec import ModelSpec
from engine.profiling.calibration import measure_profile
from engine.scheduling.output import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.report import report_stats
from predictor.budget import BudgetParams
from predictor.budget_search import search_budget
from predictor.load import Lengths
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.profile import ProfileKey
from predictor.slo import SLO, nearest_rank

_MODEL = "Qwen3-0.6B"
_LOAD = 0.3  # online requests, as a share of the rate that saturates the engine
_TTFT = "ttft_p99=1s"
_TOLERANCE = 0.05  # over the P99 gap between tokens of the online run
_PROMPT, _OUTPUT = 256, 128


@dataclass(slots=True)
class Phase:
    """One phase: gaps between tokens of online requests and times to the first, seconds; offline tokens and seconds."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    offline_tokens: int = 0
    ended: int = 0
    seconds: float = 0.0


class WatchedCore(EngineCore):
    """Notes its steps with online tokens: what they were expected to take, how long after the step before they ended,
    and whether offline work got a token in them, too."""

    def __init__(self, config: SchedulerConfig, model: OnlineModel) -> None:
        super().__init__(config, model=model)
        self.steps: list[tuple[float, float, bool]] = []
        self._online_model, self._last = model, math.nan

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput | None, now: float) -> list[RequestOutput]:
        outputs = super().update(output, result, now)
        classes = {each.request_class for each in outputs}
        if RequestClass.ONLINE in classes:
            expected = self._online_model.expected(output.features)
            self.steps.append((expected, now - self._last, RequestClass.OFFLINE in classes))
        self._last = now
        return outputs


class Watched(Colocation):
    """A keeper that says what tells why there is as much offline work as there is."""

    def __init__(self, config: SchedulerConfig, model: LatencyModel, slo: SLO, budget: BudgetParams) -> None:
        online = OnlineModel(model)
        self.core = WatchedCore(config, online)
        super().__init__(self.core, online, slo, budget)

    def describe(self, now: float) -> str:
        stats, core, model, steps = self.stats(now), report_stats(self.core.state), self.model, self.core.steps[1:]
        expected, measured = (median([step[i] for step in steps] or [math.nan]) * 1e3 for i in (0, 1))
        beside = fmean([step[2] for step in steps] or [math.nan])
        cause = f" by {stats.breaker_cause}" if stats.breaker_cause else ""
        room = f"{core.leftover_used_seconds:.2g} of {core.leftover_seconds:.2g} s of room used"
        return (
            f"L {stats.latency_budget * 1e3:.3g} ms ({stats.rule}){', held' if stats.held else ''}, breaker "
            f"{stats.breaker}, opened {stats.breaker_openings} times{cause}; offline tokens in {beside:.2f} of "
            f"{len(steps)} steps with online ones, {room}; such a step (median): expected {expected:.3g} ms, measured "
            f"{measured:.3g} ms; host {model.host_seconds * 1e3:.2g} ms, margin {model.margin(16) * 1e3:.2g} ms at 16 "
            f"tokens, {model.margin(64) * 1e3:.2g} at 64, scale {model.scale:.3g}"
        )


def check_colocation(setup: Setup) -> Iterator[Row]:
    yield from asyncio.run(_check(setup))


async def _check(setup: Setup) -> list[Row]:
    spec, seqs = setup.spec(_MODEL), setup.size(64, 4)
    sizes = Lengths(setup.size(_PROMPT, 12), setup.size(_OUTPUT, 4))
    context = sizes.prompt + sizes.output + 1
    config = scheduler_config(seqs, setup.size(1024, 32), context, 2 * seqs * -(-context // BLOCK))
    runner = make_runner(setup, spec, setup.weights(spec), config)
    key = ProfileKey(_MODEL, setup.device.type, str(setup.dtype), "gpu-check")
    model = measure_profile(runner, config.limits, spec.vocab_size, key, setup.size(15, 1)).model
    seconds = float(setup.size(15, 1))
    setup.release()
    processes.settle()  # as the server does: a full collection is no part of a step
    full = await _phase(_engine(spec, runner, EngineCore(config)), sizes, 0.0, True, seconds)
    rate = _LOAD * full.ended / full.seconds
    before = Watched(config, model, SLO.parse(_TTFT), BudgetParams("tidemill", 0.0))
    alone = await _phase(_engine(spec, runner, before.core, before), sizes, rate, False, seconds)
    slo = SLO.parse(f"{_TTFT},tbt_p99={_TOLERANCE:.0%}")
    server = ReplayedServer(before.model.as_fixed(), slo, config, noise=tuple(before.model.residuals()))
    window = Workload.recorded(tuple(before.load.arrivals), [sizes], rate, setup.size(slo.arrivals_needed // 5, 20), 1)
    answer, oracle = await asyncio.gather(
        run_child(find_budget, window, [], server), asyncio.to_thread(_oracle, window, server)
    )
    keeper = Watched(config, model, slo, answer.params)
    keeper.set_baseline({"tbt_p99": _p99(alone.gaps)}, [], time.monotonic())
    both = await _phase(_engine(spec, runner, keeper.core, keeper), sizes, rate, True, seconds)
    left = (1 - _LOAD) * full.offline_tokens / full.seconds
    share, known = both.offline_tokens / both.seconds / left, oracle * sizes.output / sum(sizes[:2]) / left
    note = (
        f"{full.offline_tokens / full.seconds / 1e3:.3g} k tok/s saturated, online {rate:.3g} requests/s, {_MODEL}; "
        f"{keeper.describe(time.monotonic())}; replayed alone: {answer.best.metrics}"
    )
    times = time.monotonic()
    gaps = (
        f"gaps alone P50 {_percentile(alone.gaps, 50) * 1e3:.3g}, P99 {_p99(alone.gaps) * 1e3:.3g} ms, beside offline "
        f"work {_percentile(both.gaps, 50) * 1e3:.3g}, {_p99(both.gaps) * 1e3:.3g} ms; {before.describe(times)}"
    )
    kept = _p99(both.gaps) / ((1 + _TOLERANCE) * _p99(alone.gaps))
    return [
        Row("co-location at 30 % online load: offline, of what is left", "x", share, 0.85, known, "", False, note),
        Row("the same, of what an oracle of step times gets", "x", share / known if known else 1.0, 0.9, 1.0),
        Row("online P99 gap over the SLO (5 %)", "x", kept, 1.0, None, "", True, gaps),
    ]


def _engine(spec: ModelSpec, runner: Runner[CudaDevice], core: EngineCore, keeper: Colocation | None = None) -> Engine:
    info = EngineInfo(core.config.max_model_len, spec.vocab_size, frozenset(), "", "", "", spec.num_parameters)
    return Engine(core, runner, info, colocation=keeper)


def _oracle(window: Workload, server: ReplayedServer) -> float:
    """Offline tokens a second (prompts, too) of the best flat budget for who knows what steps take on average."""

    def evaluate(budget: BudgetParams) -> dict[str, float]:
        return metrics_of(run_workload(window, server, budget, oracle=True), server.slo, window.seconds)

    steps = step_range(server.model, server.config)
    return search_budget(evaluate, server.slo, steps, "hygen", margin=1.0, max_evaluations=16).best.throughput


async def _phase(engine: Engine, sizes: Lengths, rate: float, offline: bool, seconds: float) -> Phase:
    """`rate` online requests/s by a Poisson process and, if asked for, more offline work than can run."""
    phase, rng, tasks = Phase(), random.Random(3), set[asyncio.Task[None]]()
    await engine.start()
    began = time.perf_counter()
    until = began + seconds
    backlog = [asyncio.create_task(_offline(engine, phase, sizes, i, until)) for i in range(256 if offline else 0)]
    while time.perf_counter() < until:
        await asyncio.sleep(min(rng.expovariate(rate), seconds) if rate else seconds)
        if rate:
            tasks.add(asyncio.create_task(_online(engine, phase, sizes, len(tasks))))
    phase.seconds = time.perf_counter() - began
    tokens, ended = phase.offline_tokens, phase.ended
    await engine.stop()
    await asyncio.gather(*tasks, *backlog, return_exceptions=True)
    phase.offline_tokens, phase.ended = tokens, ended
    return phase


def _request(name: str, sizes: Lengths, request_class: RequestClass, seed: int) -> EngineRequest:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(100) for _ in range(sizes.prompt))
    sampling = SamplingParams(max_tokens=sizes.output, temperature=0.0)
    return EngineRequest(name, prompt, sampling, request_class, final_only=request_class is RequestClass.OFFLINE)


async def _online(engine: Engine, phase: Phase, sizes: Lengths, index: int) -> None:
    last = arrival = time.perf_counter()
    (stream,) = await engine.submit([_request(f"online-{index}", sizes, RequestClass.ONLINE, index)])
    async for output in stream:
        if output.error is not None or not output.token_ids:
            return
        now = time.perf_counter()
        (phase.first if last == arrival else phase.gaps).append(now - last)
        last = now


async def _offline(engine: Engine, phase: Phase, sizes: Lengths, lane: int, until: float) -> None:
    turn = 0
    while time.perf_counter() < until:
        turn += 1
        request = _request(f"offline-{lane}-{turn}", sizes, RequestClass.OFFLINE, 1_000_000 + 1000 * lane + turn)
        (stream,) = await engine.submit([request])
        async for output in stream:
            if output.error is None and output.finish_reason is FinishReason.LENGTH:
                phase.offline_tokens += len(output.token_ids)
                phase.ended += 1


def _p99(values: list[float]) -> float:
    return _percentile(values, 99)


def _percentile(values: list[float], percentile: int) -> float:
    """Nearest rank; infinite without a value."""
    return nearest_rank(values, percentile) if values else math.inf
