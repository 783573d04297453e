"""Looks for a better offline budget while the server runs: the search of `engine.search` in a process of its own.

At start for the load that the user expects, later once for the load that was really served. Until a search has ended,
and wherever one fails, the budget in force stays.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence

from engine.colocation import Colocation, RecordedArrival
from engine.config import SchedulerConfig
from engine.errors import ConfigError
from engine.search import Workload, make_job, normal_noise
from predictor.budget import BudgetParams

log = logging.getLogger("tidemill.colocation")

SEARCH_SECONDS = 60.0
MIN_RECORDED = 200
MIN_WINDOW = 1.0
MIN_STEPS = 100
NICENESS = 10


def parse_load(text: str) -> tuple[float, int, int] | None:
    """'RATE:PROMPT:OUTPUT' → (requests a second, mean prompt tokens, mean output tokens); None when empty."""
    if not text:
        return None
    try:
        rate, prompt, output = text.split(":")
        load = float(rate), int(prompt), int(output)
    except ValueError:
        raise ConfigError(f"--expected-load must be RATE:PROMPT:OUTPUT, such as 2:512:128, not '{text}'") from None
    if not (0.0 < load[0] <= 1000.0 and load[1] >= 1 and load[2] >= 1):
        raise ConfigError(f"--expected-load '{text}': the rate must be in (0, 1000], the lengths at least 1")
    return load


def recorded_workloads(arrivals: Sequence[RecordedArrival]) -> tuple[Workload, Workload]:
    """What was served, in two halves: parameters are chosen on one and confirmed on the other."""
    middle = len(arrivals) // 2
    first, second = (
        Workload(
            tuple((a.at - half[0].at, a.prompt_tokens, a.output_tokens) for a in half),
            max(half[-1].at - half[0].at, MIN_WINDOW),
        )
        for half in (sorted(arrivals[:middle], key=_at), sorted(arrivals[middle:], key=_at))
    )
    return first, second


def _at(arrival: RecordedArrival) -> float:
    return arrival.at


class BudgetTuner:
    """Runs the searches and hands their result to the co-location keeper. `error`: the profile's held-out MAPE."""

    def __init__(
        self,
        colocation: Colocation,
        config: SchedulerConfig,
        policy: str,
        load: tuple[float, int, int] | None,
        error: float,
    ) -> None:
        self._colocation = colocation
        self._config = config
        self._policy = policy
        self._load = load
        self._error = error
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-budget")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        if self._load is not None:
            windows = [Workload.poisson(*self._load, SEARCH_SECONDS, seed) for seed in (1, 2)]
            await self._search(windows[0], windows[1], "the expected load")
        enough = asyncio.Event()
        self._colocation.on_recorded = lambda count: enough.set() if count >= MIN_RECORDED else None
        await enough.wait()
        first, second = recorded_workloads(tuple(self._colocation.arrivals))
        await self._search(first, second, "the load served so far")

    async def _search(self, first: Workload, second: Workload, what: str) -> None:
        model = self._colocation.model
        # What steps really took, neighbours and HTTP included: a search without it finds budgets on the very edge.
        noise = model.residuals() if model.num_observed >= MIN_STEPS else normal_noise(self._error)
        scaled = model.model.scaled(model.scale)
        job = make_job(first, second, scaled, self._colocation.slo, self._config, self._policy, noise)
        try:
            params = await run_search(json.dumps(job).encode())
        except (OSError, ValueError, KeyError) as error:
            log.warning("the budget search for %s failed (%s); the budget in force stays", what, error)
            return
        if params.latency_budget <= 0.0:
            log.warning("no offline budget keeps the SLO under %s; the budget in force stays", what)
            return
        log.info("offline budget for %s: %s", what, params)
        self._colocation.set_budget(params)


async def run_search(job: bytes) -> BudgetParams:
    """Search in a child process of low priority. Raises ValueError when it fails; cancelling kills it."""
    command = [sys.executable, "-m", "engine.search"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: os.nice(NICENESS) and None,
    )
    try:
        answer, errors = await process.communicate(job)
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ValueError(last[0][:200])
    return BudgetParams(**json.loads(answer)["params"])
