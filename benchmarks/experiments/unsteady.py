"""The promise on a machine whose speed others change: a share of a host, a laptop, a GPU that throttles.

Steps take 0.6 to 1.7 times as long for a while, then another multiple: what was measured on shared CPUs. The whole loop
of the live engine runs on the virtual clock: the core, the latency model that learns from every step, the keeper with
its breaker. Chats alone and beside offline work that has no end, on a machine that has room to spare and on one that
has not: there the least chunk of a prompt takes longer than the TBT limit while the machine is slow.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.table import Result, mean
from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.colocation.keeper import Colocation
from engine.colocation.waits import initial_budget
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput
from engine.scheduling.policies import find_policy
from engine.virtual import (
    PLACEHOLDER_TOKEN,
    Arrival,
    VirtualDriver,
    VirtualRecord,
    VirtualRun,
)
from loadgen.stats import nearest_rank
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.slo import SLO

MODEL = LatencyModel(
    intercept=0.030,
    decodes=0.0015,
    decode_context=4e-6,
    prefill_chunks=0.002,
    attention=1e-6,
    knots=(0,),
    hinges=(0.0013,),
)
"""About what two cores make of a model of 134 M parameters."""
MODEL_ERROR = 0.1
NUM_BLOCKS, CONTEXT = 2000, 2048
OFFLINE_OPEN = 24


@dataclass(frozen=True, slots=True)
class Config:
    """`factors`: how many times as long as usual a step takes, log-uniform, for `phase` seconds on average; `noise`:
    spread of single steps. `window`: seconds in which chats come, Poisson, at `rate` a second or, in equal parts of the
    window, at each of `steps`. `machines`: multiples of `MODEL`. `profile`: what the server's profile says of a step,
    as a share of what it usually takes. `chat`, `line`: (prompt, output) tokens.
    """

    rate: float = 1.0
    steps: tuple[float, ...] = ()
    profile: float = 1.0
    window: float = 600.0
    ttft: float = 1.5
    tbt: float = 0.3
    factors: tuple[float, float] = (0.6, 1.7)
    phase: float = 2.0
    noise: float = 0.06
    machines: tuple[float, ...] = (1.0, 1.5)
    chat: tuple[int, int] = (128, 48)
    line: tuple[int, int] = (256, 64)


CONFIG = Config()
SHORT = Config(window=60.0)
STEPPED = Config(
    steps=(0.3, 1.0, 2.0, 0.3), window=400.0, profile=0.79, factors=(0.7, 2.5), phase=0.5, machines=(0.55,)
)
"""A rate in steps on a machine that carries each of them alone, with a profile of a faster hour and neighbours that
come and go within a step."""


class Speed:
    """How many times as long as usual work takes, by the clock."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        self._random = random.Random(seed)
        self._until = 0.0
        self._factor = 1.0

    def seconds(self, work: float, begin: float) -> float:
        """For `work` usual seconds from `begin` on, which never goes back."""
        now = begin
        while True:
            while now >= self._until:
                self._until += self._random.expovariate(1.0 / self._config.phase)
                self._factor = math.exp(self._random.uniform(*map(math.log, self._config.factors)))
            if now + work * self._factor <= self._until:
                return now + work * self._factor - begin
            work -= (self._until - now) / self._factor
            now = self._until


class UnsteadyRunner:
    """Steps take what `model` says, times the speed of the moment. `clock` is bound to the driver's."""

    def __init__(self, model: LatencyModel, config: Config, seed: int) -> None:
        self.clock: Callable[[], float] = lambda: 0.0
        self._model = model
        self._speed = Speed(config, seed)
        self._noise = config.noise
        self._random = random.Random(seed + 1)

    def launch(self, output: SchedulerOutput) -> Collect:
        """The step with its time."""
        work = self._model.predict(output.features) * math.exp(self._random.gauss(0.0, self._noise))
        num_sampled = sum(chunk.sample for chunk in output.chunks)
        latency = self._speed.seconds(work, self.clock())
        result = ModelRunnerOutput(output.step_id, [PLACEHOLDER_TOKEN] * num_sampled, None, latency)
        return lambda: result


def replay(config: Config, machine: float, seed: int, *, offline: bool) -> tuple[VirtualRun, Colocation]:
    """One server under the load of `config`, started without a search."""
    model = MODEL.scaled(machine)
    profile = model.scaled(config.profile)
    believed = OnlineModel(profile, MODEL_ERROR)
    slo = SLO.parse(f"ttft_p99={config.ttft}s,tbt_p99={config.tbt}s")
    limits = SchedulerConfig(num_units=2 * NUM_BLOCKS, max_model_len=CONTEXT, max_num_seqs=64)
    core = EngineCore(limits, online_policy=find_policy("goodput"), offline_policy="fcfs", model=believed)
    keeper = Colocation(core, believed, slo, initial_budget(slo, profile))
    runner = UnsteadyRunner(model, config, seed)
    lines = (request(f"f{i}", *config.line, RequestClass.OFFLINE) for i in itertools.count()) if offline else None
    driver = VirtualDriver(core, runner, chats(config, seed), lines, backlog=OFFLINE_OPEN, keeper=keeper)
    runner.clock = lambda: driver.now
    return driver.run(config.window, drain=60.0), keeper


def chats(config: Config, seed: int) -> list[Arrival]:
    arrivals: list[Arrival] = []
    generator, rates = random.Random(seed), config.steps or (config.rate,)
    length = config.window / len(rates)
    for index, rate in enumerate(rates):
        at = index * length
        while (at := at + generator.expovariate(rate)) < (index + 1) * length:
            arrivals.append(Arrival(at, request(f"n{len(arrivals)}", *config.chat, RequestClass.ONLINE)))
    return arrivals


def request(name: str, prompt: int, output: int, request_class: RequestClass) -> EngineRequest:
    tokens = (int(name[1:]) % 1000 + 1,) * prompt
    return EngineRequest(name, tokens, SamplingParams(max_tokens=output), request_class=request_class)


def misses(config: Config, record: VirtualRecord) -> tuple[bool, bool]:
    """Whether its TTFT and its P99 gap broke their limits; one that never ended broke both."""
    if record.ended is None or record.ttft is None:
        return True, True
    return record.ttft > config.ttft, nearest_rank(sorted(record.gaps), 99) > config.tbt


def run_seed(config: Config, _data: Path | None, seed: int, _workers: int, say: Callable[[str], None]) -> list[Result]:
    """Every machine, alone and beside offline work."""
    results = []
    for machine, offline in itertools.product(config.machines, (False, True)):
        run, keeper = replay(config, machine, seed, offline=offline)
        found = [misses(config, record) for record in run.online]
        metrics = {
            "requests": float(len(found)),
            "slo_attainment": sum(not any(each) for each in found) / max(1, len(found)),
            "ttft_missed": float(sum(ttft for ttft, _ in found)),
            "tbt_missed": float(sum(tbt for _, tbt in found)),
            "offline_throughput": run.offline_tokens / run.end,
            "openings": float(keeper.num_openings),
        }
        arm = "beside offline work" if offline else "alone"
        results.append(Result("unsteady", arm, {"machine": machine}, seed, metrics))
        say(f"seed {seed}: {machine:g} x as slow, {arm}: {metrics['slo_attainment']:.1%} kept")
    return results


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Sums and means over the seeds."""
    header = ["slower", "arm", "chats", "kept, %", "TTFT missed", "TBT missed", "offline tok/s", "openings"]
    rows: list[list[Any]] = []
    for machine, arm in dict.fromkeys((r.setting["machine"], r.policy) for r in results):
        chosen = [r for r in results if r.setting["machine"] == machine and r.policy == arm]
        counts = [sum(int(r.metrics[key] or 0) for r in chosen) for key in ("requests", "ttft_missed", "tbt_missed")]
        kept = sum((r.metrics["slo_attainment"] or 0.0) * (r.metrics["requests"] or 0.0) for r in chosen)
        offline, openings = mean(chosen, "offline_throughput"), sum(int(r.metrics["openings"] or 0) for r in chosen)
        rows.append([machine, arm, counts[0], 100.0 * kept / max(1, counts[0]), *counts[1:], offline, openings])
    return header, rows


def figures(_results: Sequence[Result]) -> dict[str, str]:
    """None: the table says it."""
    return {}
