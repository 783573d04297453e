"""Searches for better offline budgets while the server runs, in child processes; runs baselines likewise.

The online rate selects a cell of the table of searched budgets. If the cell has no answer or an old one, a search
starts. The next higher rate and the rate expected by the calendar are searched ahead. Until a search has ended, or if
it fails, the initial budget is used. The load is also followed during a search. A search is never abandoned for another
one, since under a changing load on a busy machine none would end. The tuner wakes when requests end; it does not poll.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.colocation.keeper import Colocation, replay_alone, workload_of
from engine.colocation.refit import ModelRefit
from engine.colocation.replay import ReplayedServer, ReplayWindow, find_budget
from engine.machine.child import ChildError, run_child
from engine.speculation.trace import DraftTraces, read_traces
from predictor.budget import BudgetParams
from predictor.budget_search import BudgetEntry, BudgetTable, SearchResult, Situation, cell_of, lowest_rate, upper_rate
from predictor.features import BatchFeatures
from predictor.load import LoadModel
from predictor.profile import ProfileKey, write_atomically

log = logging.getLogger("tidemill.colocation")

MIN_RECORDED = 32
"""Minimum number of known online requests before a search can resample arrivals."""
SEARCH_ARRIVALS = 300
"""Maximum arrivals in the search window; a confirmation window has at most as many as the SLO needs."""
SEARCH_STEPS, CONFIRM_STEPS = 2500, 7500
"""Maximum usual steps that a window lasts: a replay takes about 0.2 ms of CPU for each."""
IDLE_SECONDS = 2.0
"""Maximum seconds without a chat in a window: a replay of hours of offline work alone shows nothing."""
CPU_SECONDS = 20.0
"""CPU time of a search without its confirmation."""
MIN_STEPS = 100
OFFLINE_SECONDS = 3600.0
"""No search starts if there was no offline work for this long."""
LOOK_SECONDS = 5.0
"""Minimum seconds between two checks of the load."""
CHECK_SECONDS = 3600.0
"""Maximum seconds between two checks of the load, even without requests."""
PAUSE_SECONDS = 600.0
"""Pause after a failed search, and before a repeated search for the same load because the breaker opened."""
BASELINE_SECONDS = 30.0
"""Minimum seconds between two baselines."""
MIN_COMPARED = 8
STORE_SCHEMA = 1
STORE_BYTES = 4 * 2**20


@dataclass(slots=True)
class _Searched:
    """Time of the last search of a cell (engine clock), and the number of breaker openings by then."""

    at: float
    openings: int


class BudgetTuner:
    """Chooses the budget in force and the next search.

    Args:
        server: Server to replay, with the model and noise of the profile; live measurements replace these.
        store: Storage for the load and the budgets; None: not stored.
        refit: Refit task that runs as long as the tuner.
    """

    def __init__(
        self,
        colocation: Colocation,
        server: ReplayedServer,
        table: BudgetTable | None = None,
        store: "LoadStore | None" = None,
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
        """Handle the end of a request."""
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._changed.set()
            due = now - self._compared_at >= BASELINE_SECONDS and self._colocation.has_offline(now, OFFLINE_SECONDS)
            if due and self._colocation.recent.num_new(now) >= MIN_COMPARED:
                self._compare.set()

    async def _tune(self) -> None:
        search: asyncio.Task[None] | None = None
        try:
            while True:
                self._changed.clear()
                if search is not None and search.done():
                    search = None
                    await self._keep()
                now = self._clock()
                self.follow_load(now)
                if search is None and (wanted := self._wanted(now)) is not None:
                    search = asyncio.create_task(self._search(wanted), name="tidemill-search")
                    search.add_done_callback(lambda _: self._changed.set())
                try:
                    await asyncio.wait_for(self._changed.wait(), CHECK_SECONDS)
                except TimeoutError:
                    await self._keep()
        finally:
            if search is not None:
                search.cancel()
                await asyncio.wait([search])

    def follow_load(self, now: float) -> None:
        """Use the budget known for the current load."""
        situation = self._situation()
        rate = self._rate(now)
        if situation is None or rate <= 0.0:
            return
        self._cell = cell_of(rate, self._cell)
        found = self.table.look_up(self._cell, situation, self._is_relative)
        exact = False
        if found is None:
            chosen = self._colocation.initial, "as long as no search for this load has ended"
        else:
            params, cell = found
            chosen = params, f"searched for {upper_rate(cell):.3g} requests/s"
            exact = cell >= self._cell and params == self.table.entries[cell].params
            if not exact:
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
            self._colocation.set_budget(*chosen, replayed=new, searched=exact)

    def _rate(self, now: float) -> float:
        """Return the recent online rate, or the forecast by the calendar before the first arrival."""
        load, calendar = self._colocation.load, now + self._colocation.calendar
        rate = load.rate(calendar)
        forecast = load.forecast(calendar)
        return forecast if rate <= 0.0 and forecast > 0.0 else rate

    def _situation(self) -> Situation | None:
        """Return the current situation, or None before the first arrival."""
        shape = self._colocation.load.shape(self._colocation.offline_work())
        return None if shape is None else Situation(shape, self._pace())

    def _pace(self) -> float:
        """Return the usual seconds of a representative step.

        Usual times are used because current ones change within seconds on a shared machine and would invalidate every
        answer.
        """
        model = self._colocation.model
        features = BatchFeatures(model.reach)
        features.add_decodes(8, 8 * model.reach.tokens(511, 1))
        features.add_chunk(0, 128)
        return model.usual(features)

    def _wanted(self, now: float) -> int | None:
        """Return the cell to search next, or None."""
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
        """Return whether the breaker opened repeatedly under the budget of the current cell."""
        last = self._searched.get(self._cell if self._cell is not None else 0)
        openings = self._colocation.num_openings
        return last is not None and openings >= last.openings + 2 and now - last.at >= PAUSE_SECONDS

    async def _search(self, cell: int) -> None:
        """Search a cell and store the answer in the table."""
        keeper, situation, rate = self._colocation, self._situation(), upper_rate(cell)
        assert situation is not None
        arrivals, offline = tuple(keeper.load.arrivals), keeper.offline_work()
        needed, pace = self._server.slo.arrivals_needed, situation.pace
        idle = situation.shape.output * pace + IDLE_SECONDS
        self._searched[cell] = _Searched(self._clock(), keeper.num_openings)
        try:
            windows = [(rate, min(needed, SEARCH_ARRIVALS), SEARCH_STEPS), (rate, needed, CONFIRM_STEPS)]
            if self._is_relative:  # a limit kept at the cell's upper rate holds in the whole cell, a tolerance may not
                windows.append((lowest_rate(cell), min(needed, SEARCH_ARRIVALS), SEARCH_STEPS))
            if any(o.tolerance and o.percentile for o in self._server.slo.objectives):  # few values decide a percentile
                windows.append((rate, needed, CONFIRM_STEPS))
            first, *others = (
                ReplayWindow.recorded(arrivals, offline, each, count, seed, longest=steps * pace, idle=idle)
                for seed, (each, count, steps) in enumerate(windows, start=1)
            )
            limits: dict[str, Any] = {"start": keeper.budget, "cpu_seconds": CPU_SECONDS, "keeps_notes": True}
            found: SearchResult = await self._child(find_budget, first, others, self._live_server(), **limits)
        except (ChildError, ValueError) as error:
            self._failed_at = self._clock()
            keeper.learned["searches_failed"] += 1
            log.warning("the budget search for %.3g requests/s failed (%s)", rate, error)
            return
        finally:
            keeper.learned["search_seconds"] += self._clock() - self._searched[cell].at
        keeper.learned["searches_made"] += 1
        keeper.noise, params = found.noise, found.params
        if found.noise:
            told = ", ".join(f"{key} ± {share:.1%}" for key, share in found.noise.items())
            mape = f"{self._colocation.model.mape:.1%}"
            log.info("without batch work the replayed load varies by: %s; steps are predicted to ± %s", told, mape)
        if params.latency_budget > 0.0:
            log.info("offline budget for %.3g online requests/s: %s", rate, params)
        else:
            log.warning("no offline budget keeps the SLO at %.3g online requests/s%s", rate, keeper.doubt)
        self.table.put(cell, BudgetEntry(params, situation, self._clock() + keeper.calendar))

    def _live_server(self) -> ReplayedServer:
        """Return the server with measured step times, which include neighbours and HTTP work.

        Without these a search would find budgets that barely keep the SLO.
        """
        model = self._colocation.model
        if model.num_observed < MIN_STEPS:
            return self._server
        return replace(self._server, model=model.as_fixed(), noise=model.residuals())

    async def _compare_on(self) -> None:
        """Run baselines beside the searches, to measure how a tolerance is kept."""
        while True:
            await self._compare.wait()
            self._compare.clear()
            self._compared_at = self._clock()
            window, counted = self._colocation.window(self._clock())
            if not window:  # the requests became too old while the last baseline waited for a core
                continue
            try:
                aggregates, own = await self._child(replay_alone, workload_of(window), self._live_server(), counted)
                self._colocation.set_baseline(aggregates, own, self._clock())
                self._colocation.learned["baselines_made"] += 1
            except (ChildError, ValueError) as error:
                self._colocation.learned["baselines_failed"] += 1
                log.warning("the online-only run of the last requests failed (%s)", error)

    async def _keep(self) -> None:
        """Store the learned load, the budgets and the outcomes of drafts."""
        if self._store is None:
            return
        self._colocation.load.advance(self._clock() + self._colocation.calendar)
        content = self._store.encode(self._colocation.load, self.table, self._server.drafts)
        try:
            await asyncio.to_thread(self._store.write, content)
        except OSError as error:
            log.warning("the recorded load cannot be stored (%s)", error.strerror)


class LoadStore:
    """The learned load, the budgets found and the outcomes of drafts, stored beside the latency profile with `key`.

    One bounded JSON file, written atomically. A damaged file or one of another version is ignored with a log line.
    `promise`: text that identifies everything budgets depend on besides the load.
    """

    def __init__(self, folder: Path, key: ProfileKey, promise: str) -> None:
        self.path = folder / f"{key.filename().removesuffix('.json')}.load.json"
        self._promise = promise

    def read(self, start: float, say: Callable[[str], None]) -> tuple[LoadModel, BudgetTable]:
        """Return the load and the budgets known at `start` (calendar seconds); both are empty without a readable file.

        Budgets and promises for another SLO or configuration are dropped.
        """
        try:
            if not self.path.exists():
                return LoadModel(start), BudgetTable()
            if self.path.stat().st_size > STORE_BYTES:
                raise ValueError("it is far too large")
            document = json.loads(self.path.read_bytes())
            if document["schema"] != STORE_SCHEMA:
                raise ValueError(f"schema {document['schema']!r:.20}")
            load = LoadModel.from_document(document["load"], start)
            same = document["promise"] == self._promise
            if same:
                return load, BudgetTable.from_document(document["budgets"])
            load.arrivals = deque((a._replace(promise=None) for a in load.arrivals), load.arrivals.maxlen)
            return load, BudgetTable()
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:100] or type(error).__name__
            say(f"the recorded load in {self.path} cannot be used ({reason}); recording starts again")
            return LoadModel(start), BudgetTable()

    def read_drafts(self) -> DraftTraces:
        """Return the outcomes of drafts; empty ones without a readable file."""
        try:
            return read_traces(self.path)
        except (OSError, ValueError):
            return DraftTraces()

    def encode(self, load: LoadModel, budgets: BudgetTable, drafts: DraftTraces | None = None) -> bytes:
        """Return the content of the file. `drafts`: None for a server without drafts."""
        document: dict[str, Any] = {"schema": STORE_SCHEMA, "promise": self._promise}
        document |= {"load": load.to_document(), "budgets": budgets.to_document()}
        if drafts is not None:
            document["drafts"] = drafts.to_document()
        return json.dumps(document, allow_nan=False).encode()

    def write(self, content: bytes) -> None:
        """Write the file atomically. Raises OSError if the folder is not writable."""
        write_atomically(self.path, content)
