"""Looks for a better offline budget while the server runs: the search of `engine.search` in a process of its own.

At start for the load that the user expects, later once for the load that was really served. Until a search has ended,
and wherever one fails, the budget in force stays.
"""

import asyncio
import json
import logging
import os
from dataclasses import replace

from engine.child import python_module
from engine.colocation import Colocation
from engine.errors import ConfigError
from engine.replay import ReplayedServer, Workload
from engine.search import make_job
from predictor.budget import BudgetParams
from predictor.load import observed_rate

log = logging.getLogger("tidemill.colocation")

SEARCH_SECONDS = 60.0
MIN_RECORDED = 200
SEARCH_ARRIVALS = 300
"""In the window on which parameters are chosen; the one on which they are confirmed has all that the SLO needs."""
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


class BudgetTuner:
    """Runs the searches and hands their result to the co-location keeper.

    `server`: what the replays run, its model and noise those of the profile; live ones take their place.
    """

    def __init__(
        self, colocation: Colocation, server: ReplayedServer, load: tuple[float, int, int] | None = None
    ) -> None:
        self._colocation = colocation
        self._server = server
        self._load = load
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
        await self._search(*self._windows(), "the load served so far")

    def _windows(self) -> tuple[Workload, Workload]:
        """What was served, as two windows: parameters are chosen on one and confirmed on the other."""
        arrivals, offline = tuple(self._colocation.arrivals), self._colocation.offline_work()
        needed, rate = self._server.slo.arrivals_needed, observed_rate(arrivals)
        first, second = (
            Workload.recorded(arrivals, offline, rate, count, seed)
            for seed, count in ((1, min(needed, SEARCH_ARRIVALS)), (2, needed))
        )
        return first, second

    async def _search(self, first: Workload, second: Workload, what: str) -> None:
        model, server = self._colocation.model, self._server
        if model.num_observed >= MIN_STEPS:
            # What steps really took, neighbours and HTTP included: a search without it finds budgets on the very edge.
            server = replace(server, model=model.model.scaled(model.scale), noise=tuple(model.residuals()))
        job = make_job(first, second, server)
        try:
            params = await run_search(json.dumps(job).encode())
        except (OSError, ValueError, KeyError) as error:
            log.warning("the budget search for %s failed (%s); the budget in force stays", what, error)
            return
        if params.latency_budget > 0.0:
            log.info("offline budget for %s: %s", what, params)
        else:
            log.warning("no offline budget keeps the SLO under %s: nothing offline runs beside online work", what)
        self._colocation.set_budget(params, f"searched for {what}")


async def run_search(job: bytes) -> BudgetParams:
    """Search in a child process of low priority. Raises ValueError when it fails; cancelling kills it."""
    process = await asyncio.create_subprocess_exec(
        *python_module("engine.search"),
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
