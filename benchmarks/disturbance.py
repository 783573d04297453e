"""How soon offline work returns after a disturbance, on the virtual clock, with the product's own control loop.

For SECONDS every step takes 1.5 to 5 times as long; before and after, steps take their usual time. The core, the
online latency model, the keeper and its breaker run as in the live engine, with a budget that a search has verified.
The same chats run alone for comparison: a chat that misses its limits there was missed because of the disturbance.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.experiments.unsteady import CONFIG, MODEL, Config, chats, misses, request
from benchmarks.frame import Table
from engine.api import RequestClass, RequestOutput
from engine.colocation.keeper import Colocation
from engine.colocation.waits import initial_budget
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput
from engine.scheduling.policies import find_policy
from engine.virtual import PLACEHOLDER_TOKEN, VirtualDriver, VirtualRun
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.slo import SLO

STEPS = MODEL.scaled(0.5)
BEGIN, SECONDS = 100.0, 20.0
FACTORS, SPELL = (1.5, 5.0), 0.1
"""Range of the factors on a step's time, and the seconds after which another factor applies."""
BIN = 5
"""Seconds per value of the offline rate."""
OPEN_LINES = 24
RATES = (0.2, 0.5, 1.0, 2.0, 3.0)
LIMITS = Config(rate=1.0, window=220.0, ttft=1.0, tbt=0.1, chat=CONFIG.chat, line=CONFIG.line)

TABLE = Table({
    "chats/s": "8", "before, tok/s": "8.0f", "during": "6.0f", "0-15 s after": "8.0f", "15-30 s": "8.0f",
    "30-100 s": "8.0f", "back": "6.0%", "missed after": "d", "share, end": "6.2f",
})  # fmt: skip


class DisturbedRunner:
    """Runner whose steps take the model's time, and a varying multiple of it during the disturbance.

    `clock` must be bound to the driver's clock. `noise`: standard deviation of the logarithm of single steps.
    """

    def __init__(self, model: LatencyModel, noise: float, seconds: float, seed: int) -> None:
        self.clock: Callable[[], float] = lambda: 0.0
        self._model = model
        self._noise = noise
        self._end = BEGIN + seconds
        self._random = random.Random(seed)
        self._spell, self._factor = -1, 1.0

    def launch(self, output: SchedulerOutput) -> Collect:
        now = self.clock()
        latency = self._model.predict(output.features) * self._random.lognormvariate(0.0, self._noise)
        if BEGIN <= now < self._end:
            if (spell := int(now / SPELL)) != self._spell:
                self._spell, self._factor = spell, self._random.uniform(*FACTORS)
            latency *= self._factor
        num_sampled = sum(chunk.sample for chunk in output.chunks)
        result = ModelRunnerOutput(output.step_id, [PLACEHOLDER_TOKEN] * num_sampled, None, latency)
        return lambda: result


class Tally(Colocation):
    """A keeper that counts offline tokens per second of the virtual clock."""

    def __init__(self, core: EngineCore, model: OnlineModel, slo: SLO, fitted: LatencyModel) -> None:
        budget = initial_budget(slo, fitted)
        super().__init__(core, model, slo, budget)
        self.tokens: Counter[int] = Counter()
        self.set_budget(budget, "verified", replayed=True)

    def on_step(
        self,
        output: SchedulerOutput,
        measured: float,
        outputs: list[RequestOutput],
        now: float,
        device: float | None = None,
        trial: bool = False,
    ) -> None:
        before = self.stats(now).offline_tokens
        super().on_step(output, measured, outputs, now, device, trial)
        self.tokens[int(now)] += self.stats(now).offline_tokens - before

    def rate(self, begin: float, end: float) -> float:
        """Return the offline tokens per second in [begin, end)."""
        return sum(self.tokens[second] for second in range(int(begin), int(end))) / (end - begin)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of one run; rates are offline tokens per second.

    Attributes:
        before: Rate in the minute before the disturbance.
        during: Rate in the disturbance.
        bins: Rates after its end, per BIN seconds.
        missed: Chats that arrived after its end and missed a limit, although they kept all limits when run alone.
        share: Granted share of the budget at the end of the run.
    """

    before: float
    during: float
    bins: tuple[float, ...]
    missed: int
    share: float

    def after(self, begin: float, end: float) -> float:
        """Return the mean rate between two times after the end of the disturbance, multiples of BIN seconds."""
        chosen = self.bins[int(begin) // BIN : int(end) // BIN]
        return sum(chosen) / len(chosen)


def replay(
    config: Config, seed: int, *, offline: bool = True, seconds: float = SECONDS, noise: float = 0.05
) -> tuple[VirtualRun, Tally]:
    """Run one server through a disturbance of `seconds`, with `OPEN_LINES` offline requests if `offline`."""
    believed = OnlineModel(STEPS, noise)
    slo = SLO.parse(f"ttft_p99={config.ttft}s,tbt_p99={config.tbt}s")
    limits = SchedulerConfig(num_units=4000, max_model_len=2048, max_num_seqs=64)
    core = EngineCore(limits, online_policy=find_policy("goodput"), offline_policy="fcfs", model=believed)
    keeper = Tally(core, believed, slo, STEPS)
    runner = DisturbedRunner(STEPS, noise, seconds, seed)
    lines = (request(f"f{i}", *config.line, RequestClass.OFFLINE) for i in itertools.count()) if offline else None
    driver = VirtualDriver(core, runner, chats(config, seed), lines, backlog=OPEN_LINES, keeper=keeper)
    runner.clock = lambda: driver.now
    return driver.run(config.window, drain=60.0), keeper


def measure(rate: float, seed: int = 1, *, seconds: float = SECONDS, window: float = LIMITS.window) -> Recovery:
    """Return the recovery at `rate` chats per second."""
    config, end = replace(LIMITS, rate=rate, window=window), BEGIN + seconds
    run, keeper = replay(config, seed, seconds=seconds)
    alone, _ = replay(config, seed, offline=False, seconds=seconds)
    missed = sum(
        beside.arrival.at >= end and any(misses(config, beside)) and not any(misses(config, by_itself))
        for beside, by_itself in zip(run.online, alone.online, strict=False)
    )
    times = range(int(end), int(window) - BIN + 1, BIN)
    bins = tuple(keeper.rate(at, at + BIN) for at in times)
    return Recovery(
        keeper.rate(BEGIN - 60.0, BEGIN), keeper.rate(BEGIN, end), bins, missed, keeper.stats(window).offline_share
    )


def main(rates: Sequence[float] = RATES) -> None:
    print(TABLE.heading)
    for rate in rates:
        found = measure(rate)
        spans = [found.after(*span) for span in ((0, 15), (15, 30), (30, 100))]
        back = spans[1] / found.before
        print(TABLE.line(f"{rate:g}", found.before, found.during, *spans, back, found.missed, found.share), flush=True)


if __name__ == "__main__":
    main()
