"""Co-location through the engine, without HTTP: saturation, online alone, then both under the online run's SLO."""

import asyncio
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.api import EngineInfo, EngineRequest, FinishReason, RequestClass, SamplingParams
from engine.colocation.keeper import Colocation, initial_budget
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.engine import Engine
from engine.execution.cuda.device import CudaDevice
from engine.execution.runner import Runner
from engine.models.spec import ModelSpec
from engine.profiling.calibration import measure_profile
from loadgen.bench.gpu.loop import BLOCK, make_runner, scheduler_config
from loadgen.bench.gpu.setup import Setup
from loadgen.bench.gpu.table import Row
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.profile import ProfileKey
from predictor.slo import SLO, nearest_rank

_MODEL = "Qwen3-0.6B"
_LOAD = 0.3  # online requests, as a share of the rate that saturates the engine
_TOLERANCE = 1.05  # on the P99 gap between tokens of the online run
_PROMPT, _OUTPUT = 256, 128


@dataclass(slots=True)
class Phase:
    """One phase: gaps between tokens of online requests and times to the first, seconds; offline tokens and seconds."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    offline_tokens: int = 0
    ended: int = 0
    seconds: float = 0.0


def check_colocation(setup: Setup) -> Iterator[Row]:
    yield from asyncio.run(_check(setup))


async def _check(setup: Setup) -> list[Row]:
    spec, seqs = setup.spec(_MODEL), setup.size(64, 4)
    prompt, output = setup.size(_PROMPT, 12), setup.size(_OUTPUT, 4)
    context = prompt + output + 1
    config = scheduler_config(seqs, setup.size(1024, 32), context, 2 * seqs * -(-context // BLOCK))
    runner = make_runner(setup, spec, setup.weights(spec), config)
    key = ProfileKey(_MODEL, setup.device.type, str(setup.dtype), "gpu-check")
    model = measure_profile(runner, config.limits, spec.vocab_size, key, setup.size(15, 1)).profile.model
    seconds = float(setup.size(15, 1))
    arguments = (spec, runner, config, model)
    full = await _phase(_engine(*arguments, None), (prompt, output), 0.0, True, seconds)
    rate = _LOAD * full.ended / full.seconds
    alone = await _phase(_engine(*arguments, None), (prompt, output), rate, False, seconds)
    slo = SLO.parse(f"ttft_p99=1s,tbt_p99={max(1.0, _TOLERANCE * _p99(alone.gaps) * 1e3):.2f}ms")
    both = await _phase(_engine(*arguments, slo), (prompt, output), rate, True, seconds)
    share = both.offline_tokens / both.seconds / ((1 - _LOAD) * full.offline_tokens / full.seconds)
    note = f"{full.offline_tokens / full.seconds / 1e3:.3g} k tok/s saturated, online {rate:.3g} requests/s, {_MODEL}"
    kept = _p99(both.gaps) / (_TOLERANCE * _p99(alone.gaps))
    gaps = f"P99 gap alone {_p99(alone.gaps) * 1e3:.3g} ms, beside offline work {_p99(both.gaps) * 1e3:.3g} ms"
    return [
        Row("co-location at 30 % online load: offline, of what is left", "x", share, 0.85, 1.0, "", False, note),
        Row("online P99 gap over the SLO (5 %)", "x", kept, 1.0, None, "", True, gaps),
    ]


def _engine(
    spec: ModelSpec, runner: Runner[CudaDevice], config: SchedulerConfig, model: LatencyModel, slo: SLO | None
) -> Engine:
    info = EngineInfo(config.max_model_len, spec.vocab_size, frozenset(), "gpu-check", "", "", spec.num_parameters)
    if slo is None:
        return Engine(EngineCore(config), runner, info)
    online = OnlineModel(model)
    core = EngineCore(config, model=online)
    return Engine(core, runner, info, colocation=Colocation(core, online, slo, initial_budget(slo, model, "tidemill")))


async def _phase(engine: Engine, sizes: tuple[int, int], rate: float, offline: bool, seconds: float) -> Phase:
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


def _request(name: str, sizes: tuple[int, int], request_class: RequestClass, seed: int) -> EngineRequest:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(100) for _ in range(sizes[0]))
    sampling = SamplingParams(max_tokens=sizes[1], temperature=0.0)
    return EngineRequest(name, prompt, sampling, request_class, final_only=request_class is RequestClass.OFFLINE)


async def _online(engine: Engine, phase: Phase, sizes: tuple[int, int], index: int) -> None:
    last = arrival = time.perf_counter()
    (stream,) = await engine.submit([_request(f"online-{index}", sizes, RequestClass.ONLINE, index)])
    async for output in stream:
        if output.error is not None or not output.token_ids:
            return
        now = time.perf_counter()
        (phase.first if last == arrival else phase.gaps).append(now - last)
        last = now


async def _offline(engine: Engine, phase: Phase, sizes: tuple[int, int], lane: int, until: float) -> None:
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
    """Nearest rank; infinite without a value."""
    return nearest_rank(values, 99) if values else math.inf
