"""Looks for better offline budgets while the server runs: searches and base lines in processes of their own.

The load decides: its rate is looked up in the table of what was searched before, and where that knows nothing of it, or
is old, a search is made. The next higher rate, and the one that the calendar lets expect, are searched ahead. Until a
search has ended, and wherever one fails, a budget that needed none is in force. While one runs the load is followed all
the same, and a search that takes long gives way to that for the load of now. Wakes when requests end, no polling.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.colocation.baseline import workload_of
from engine.colocation.keeper import Colocation
from engine.colocation.load_store import LoadStore
from engine.colocation.refit import ModelRefit
from engine.colocation.replay import ReplayedServer, Workload
from engine.colocation.search import baseline_job, budget_job
from engine.colocation.search_child import IDLE_SECONDS, NICE_SECONDS, ChildError, Turn, run_child
from predictor.budget import BudgetParams, params_of
from predictor.budget_table import BudgetEntry, BudgetTable, Situation, cell_of, lowest_rate, upper_rate
from predictor.features import BatchFeatures

log = logging.getLogger("tidemill.colocation")

MIN_RECORDED = 32
"""Online requests that must be known before it can be said how they come."""
SEARCH_ARRIVALS = 300
"""In the window on which parameters are chosen; the one on which they are confirmed has all that the SLO needs."""
MIN_STEPS = 100
OFFLINE_SECONDS = 3600.0
"""Without offline work for that long nothing is searched."""
LOOK_SECONDS = 5.0
"""Between two looks at the load."""
CHECK_SECONDS = 3600.0
"""At least so often it is looked at, whoever comes."""
PAUSE_SECONDS = 600.0
"""After a search that failed, and before another one for the same load because the breaker opened."""
BASELINE_SECONDS = 30.0
BASELINE_TURNS = (Turn("idle", BASELINE_SECONDS), Turn("nice", NICE_SECONDS))
"""Nothing else says how a tolerance is kept."""
MIN_COMPARED = 8


@dataclass(slots=True)
class _Searched:
    """When a cell was searched last (engine clock), and how often the breaker had opened by then."""

    at: float
    openings: int


class BudgetTuner:
    """Decides on the budget in force, and on what is searched next.

    `server`: what the replays run, its model and noise those of the profile; live ones take their place. `store`: where
    the load and the budgets are kept, None for nowhere. `refit` runs as long as the tuner does.
    """

    def __init__(
        self,
        colocation: Colocation,
        server: ReplayedServer,
        table: BudgetTable | None = None,
        store: LoadStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        child: Callable[..., Any] = run_child,
        refit: ModelRefit | None = None,
    ) -> None:
        self.table = table or BudgetTable()
        self._colocation = colocation
        self._server = server
        self._store = store
        self._clock = clock
        self._child = child
        self._refit = refit
        self._is_relative = bool(server.slo.tolerances())
        self._cell: int | None = None
        self._in_force: tuple[BudgetParams, str] | None = None
        self._searched: dict[int, _Searched] = {}
        self._proven: dict[int, BudgetEntry] = {}
        self._failed_at = float("-inf")
        self._looked_at = float("-inf")
        self._compared_at = float("-inf")
        self._changed = asyncio.Event()
        self._compare = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._colocation.on_change = self._on_change
        self._tasks.append(asyncio.create_task(self._tune(), name="tidemill-budget"))
        if self._refit is not None:
            self._refit.start()
        if self._is_relative:
            self._tasks.append(asyncio.create_task(self._compare_on(), name="tidemill-baseline"))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._refit is not None:
            await self._refit.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
            await self._keep()

    def _on_change(self, now: float) -> None:
        """A request ended."""
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._changed.set()
            if now - self._compared_at >= BASELINE_SECONDS and self._colocation.recent.num_new >= MIN_COMPARED:
                self._compare.set()

    async def _tune(self) -> None:
        search: asyncio.Task[None] | None = None
        cell: int | None = None
        try:
            while True:
                self._changed.clear()
                if search is not None and search.done():
                    search = None
                    await self._keep()
                now = self._clock()
                self.follow_load(now)
                wanted = self._wanted(now)
                if search is not None and wanted not in (None, cell) and self._is_long(cell, now):
                    search.cancel()  # its callback wakes this loop
                elif search is None and wanted is not None:
                    cell, search = wanted, asyncio.create_task(self._search(wanted), name="tidemill-search")
                    search.add_done_callback(lambda _: self._changed.set())
                try:
                    await asyncio.wait_for(self._changed.wait(), CHECK_SECONDS)
                except TimeoutError:
                    await self._keep()
        finally:
            if search is not None:
                search.cancel()
                await asyncio.wait([search])

    def _is_long(self, cell: int | None, now: float) -> bool:
        """Whether the search for `cell` has had its time: another is wanted now, and the newest window wins."""
        last = None if cell is None else self._searched.get(cell)
        return last is not None and now - last.at >= IDLE_SECONDS

    def follow_load(self, now: float) -> None:
        """Put the budget in force that is known for the load of now."""
        situation = self._situation()
        rate = self._rate(now)
        if situation is None or rate <= 0.0:
            return
        self._cell = cell_of(rate, self._cell)
        found = self.table.look_up(self._cell, situation, self._is_relative)
        if found is None:
            chosen = self._colocation.initial, "as long as no search for this load has ended"
        else:
            params, cell = found
            chosen = params, f"searched for {upper_rate(cell):.3g} requests/s"
            if cell < self._cell or params != self.table.entries[cell].params:
                initial = self._colocation.initial
                lower = min(params, initial, key=lambda budget: budget.latency_budget)
                chosen = lower, f"{chosen[1]}, less of it until a search for this load has ended"
        if chosen != self._in_force:
            self._in_force = chosen
            log.info("%.3g online requests/s: offline budget %s, %s", rate, *chosen)
            entry = self.table.answers(self._cell, situation)
            new = entry is not None and entry is not self._proven.get(self._cell)
            if entry is not None:
                self._proven[self._cell] = entry
            self._colocation.set_budget(*chosen, replayed=new)

    def _rate(self, now: float) -> float:
        """Of late; before anybody came, what the calendar lets expect."""
        load, calendar = self._colocation.load, now + self._colocation.calendar
        rate = load.rate(calendar)
        forecast = load.forecast(calendar)
        return forecast if rate <= 0.0 and forecast > 0.0 else rate

    def _situation(self) -> Situation | None:
        """None until somebody came."""
        shape = self._colocation.load.shape(self._colocation.offline_work())
        return None if shape is None else Situation(shape, self._pace())

    def _pace(self) -> float:
        """Seconds of a step that stands for all others, by what they usually take: as the search has it. What they take
        just now changes within seconds where others share the machine, and would take every answer out of force."""
        model = self._colocation.model
        features = BatchFeatures(model.reach)
        features.add_decodes(8, 8 * model.reach.tokens(511, 1))
        features.add_chunk(0, 128)
        return model.usual(features)

    def _wanted(self, now: float) -> int | None:
        """The cell to search next, None for none."""
        keeper = self._colocation
        load, calendar, situation = keeper.load, now + keeper.calendar, self._situation()
        enough = len(load.arrivals) >= MIN_RECORDED and keeper.has_offline(now, OFFLINE_SECONDS)
        if self._cell is None or situation is None or not enough or now - self._failed_at < PAUSE_SECONDS:
            return None
        if self.table.needs(self._cell, situation, calendar) or self._is_suspect(now):
            return self._cell
        expected = load.forecast(calendar + OFFLINE_SECONDS)
        ahead = [self._cell + 1, *([cell_of(expected)] if expected > 0.0 else [])]
        return next((cell for cell in ahead if self.table.needs(cell, situation, calendar)), None)

    def _is_suspect(self, now: float) -> bool:
        """Whether the breaker opened again and again under the budget of the cell."""
        last = self._searched.get(self._cell if self._cell is not None else 0)
        openings = self._colocation.num_openings
        return last is not None and openings >= last.openings + 2 and now - last.at >= PAUSE_SECONDS

    async def _search(self, cell: int) -> None:
        """Search, and enter the answer into the table."""
        keeper, situation, rate = self._colocation, self._situation(), upper_rate(cell)
        assert situation is not None
        arrivals, offline = tuple(keeper.load.arrivals), keeper.offline_work()
        needed = self._server.slo.arrivals_needed
        self._searched[cell] = _Searched(self._clock(), keeper.num_openings)
        try:
            windows = [(rate, min(needed, SEARCH_ARRIVALS)), (rate, needed)]
            if self._is_relative:  # a limit that is kept at the upper edge of the cell is kept in all of it
                windows.append((lowest_rate(cell), min(needed, SEARCH_ARRIVALS)))
            first, *others = (
                Workload.recorded(arrivals, offline, each, count, seed)
                for seed, (each, count) in enumerate(windows, start=1)
            )
            answer = await self._child(budget_job(first, others, self._live_server()))
            params = params_of(answer["params"])
        except (ChildError, ValueError, KeyError, TypeError) as error:
            self._failed_at = self._clock()
            log.warning("the budget search for %.3g requests/s failed (%s)", rate, error)
            return
        if params.latency_budget > 0.0:
            log.info("offline budget for %.3g online requests/s: %s", rate, params)
        else:
            log.warning("no offline budget keeps the SLO at %.3g online requests/s", rate)
        self.table.put(cell, BudgetEntry(params, situation, self._clock() + keeper.calendar))

    def _live_server(self) -> ReplayedServer:
        """What steps really took, neighbours and HTTP included: a search without it finds budgets on the very edge."""
        model = self._colocation.model
        if model.num_observed < MIN_STEPS:
            return self._server
        return replace(self._server, model=model.as_fixed(), noise=tuple(model.residuals()))

    async def _compare_on(self) -> None:
        """Base lines, beside the searches: for a tolerance nothing else says how it goes."""
        while True:
            await self._compare.wait()
            self._compare.clear()
            self._compared_at = self._clock()
            window, counted = self._colocation.window(self._clock())
            try:
                job = baseline_job(workload_of(window), counted, self._live_server())
                answer = await self._child(job, BASELINE_TURNS)
                own = [None if pair is None else (pair[0], pair[1]) for pair in answer["own"]]
                self._colocation.set_baseline(answer["aggregates"], own, self._clock())
            except (ChildError, ValueError, KeyError, TypeError) as error:
                log.warning("the online-only run of the last requests failed (%s)", error)

    async def _keep(self) -> None:
        """Write down what was learned."""
        if self._store is None:
            return
        self._colocation.load.advance(self._clock() + self._colocation.calendar)
        content = self._store.encode(self._colocation.load, self.table)
        try:
            await asyncio.to_thread(self._store.write, content)
        except OSError as error:
            log.warning("what was learned of the load could not be kept (%s)", error.strerror)
