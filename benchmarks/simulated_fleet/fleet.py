"""Several engines on one virtual clock behind a router: each the engine's own core over a simulated device.

As in the live fleet, the router sees the last report of each engine (ten a second), the prompts routed
since, and ended answers; between reports no prompt is assumed to be done (SAL §4.2). Deterministic for
equal arrivals and equally seeded runners. Knows nothing of how a run is judged.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from engine.api import RequestClass, RequestOutput
from engine.client import LoadReport
from engine.core import EngineCore
from engine.errors import RetryableError
from engine.fleet.routing import Loads, RoutedPrompt, sal
from engine.limits import UNITS_PER_BLOCK
from engine.scheduling.output import ModelRunner, ModelRunnerOutput, SchedulerOutput
from engine.scheduling.report import report_stats
from engine.virtual import Arrival, VirtualRecord, VirtualRun

REPORT_SECONDS = 0.1
RECENT = 1000
"""Requests over which mean lengths are taken, about."""


# --- routers: that of the live fleet, and the baselines of LARRY's evaluation


@dataclass(slots=True)
class Chance:
    """The state of a router."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    last: int = -1  # the engine that `round_robin` chose last


Router = Callable[[Loads, RoutedPrompt, Chance], int]
"""Returns the number of the chosen engine; the loads are not empty."""


def p2c(loads: Loads, _prompt: RoutedPrompt, chance: Chance) -> int:
    """Choose two random engines and return the one with fewer requests."""
    two = chance.rng.sample(list(loads), min(2, len(loads)))
    return min(two, key=lambda engine: loads[engine].num_requests)


def round_robin(loads: Loads, _prompt: RoutedPrompt, chance: Chance) -> int:
    """Choose the engines in turn. An absent engine is skipped."""
    numbers = sorted(loads)
    chance.last = next((number for number in numbers if number > chance.last), numbers[0])
    return chance.last


def at_random(loads: Loads, _prompt: RoutedPrompt, chance: Chance) -> int:
    return chance.rng.choice(list(loads))


ROUTERS: dict[str, Router] = {
    "sal": lambda loads, prompt, _chance: sal(loads, prompt),
    "p2c": p2c,
    "round-robin": round_robin,
    "random": at_random,
}


# --- engines


class Flight(NamedTuple):
    """A launched step. `free_at`: when the next one may be launched; `ends_at`: when all its tokens are there.
    `token_times`: by row, when that of the row is there, if not at the end."""

    result: ModelRunnerOutput
    free_at: float
    ends_at: float
    token_times: Mapping[int, float] = {}


Launch = Callable[[SchedulerOutput, float], Flight]
"""Starts a step at a time of the virtual clock; its times are known at once."""


def launcher_of(runner: ModelRunner) -> Launch:
    """Return the steps of a device that runs one after the other."""

    def launch(output: SchedulerOutput, now: float) -> Flight:
        result = runner.launch(output)()
        end = now + result.latency
        return Flight(result, end, end)

    return launch


class QueuedWork(NamedTuple):
    """Online prompts that wait or are not computed to their end (of preempted requests, with their answers so far): how
    many, their tokens still to be computed, and the units that they need beyond those they hold. `running`: online
    requests past their prompt. `waiting_units`: what requests without a row need."""

    requests: int
    tokens: int
    units: int
    running: int
    waiting_units: int


def queued_work(core: EngineCore) -> QueuedWork:
    """The online work of an engine now."""
    state = core.state
    size = state.config.block_size
    requests = tokens = units = waiting_units = 0
    for request in state.waiting_online:
        missing = request.num_missing_tokens
        requests, tokens = requests + 1, tokens + missing
        waiting_units += UNITS_PER_BLOCK * min(missing // size + 1, request.most_blocks)
    running = state.running[RequestClass.ONLINE]
    prompts = state.running_prompts()
    for request in prompts:
        requests, tokens = requests + 1, tokens + len(request.token_ids) - request.num_computed_tokens
        units += UNITS_PER_BLOCK * max(0, request.num_blocks(size) - request.cache_map.num_live)
    return QueuedWork(requests, tokens, units + waiting_units, len(running) - len(prompts), waiting_units)


@dataclass(slots=True, eq=False)
class Server:
    """An engine, or several as one pipeline: what requests are routed to. `step_seconds`: a full step by its latency
    model. A `closed` one starts no more steps and gets no more requests."""

    number: int
    core: EngineCore
    launch: Launch
    step_seconds: float = 1.0
    closed: bool = False
    free_at: float = 0.0
    rows: dict[int, str] = field(default_factory=dict)
    flights: deque[tuple[SchedulerOutput, Flight]] = field(default_factory=deque)


class FleetDriver:
    """Replays arrivals (ascending) on `servers`. `on_report`: called with the time after every round of reports;
    `on_idle`: with a server whose last step has ended, before the next one starts. While no server is open, requests
    wait outside."""

    def __init__(
        self,
        servers: Iterable[Server],
        router: Router,
        arrivals: Iterable[Arrival],
        *,
        seed: int = 0,
        on_report: Callable[[float], None] | None = None,
    ) -> None:
        self.servers = {server.number: server for server in servers}
        self.now = 0.0
        self.run_data = VirtualRun()
        self.records: dict[str, VirtualRecord] = {}
        self._router = router
        self._chance = Chance(random.Random(seed))
        self._on_report = on_report
        self.on_idle: Callable[[Server], None] | None = None
        self._held: list[Arrival] = []
        self._arrivals = deque(arrivals)
        self._loads: dict[int, LoadReport] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._means = (1.0, 1.0)
        self._num_ended = 0

    def at(self, time: float, what: Callable[[], None]) -> None:
        """Call `what` at `time`, behind all calls that are due then."""
        heapq.heappush(self._events, (time, next(self._order), what))

    def run(self, until: float = math.inf) -> VirtualRun:
        """Until every request has ended, or the virtual clock would pass `until`."""
        self.report()
        self.at(REPORT_SECONDS, self._tick)
        if self._arrivals:
            self.at(self._arrivals[0].at, self._arrive)
        while self._events and (self._arrivals or self._held or self.records):
            time, _, what = heapq.heappop(self._events)
            if time > until:
                break
            self.now = time
            what()
        self.run_data.end = self.now
        return self.run_data

    def report(self) -> None:
        """Every open server says how it stands."""
        self._loads = {number: self._load(server) for number, server in self.servers.items() if not server.closed}

    def add(self, server: Server) -> None:
        """Another server from now on."""
        self.servers[server.number] = server
        self._loads[server.number] = self._load(server)
        held, self._held = self._held, []
        for arrival in held:
            self._route(arrival)
        self.at(server.free_at, lambda: self.pump(server))

    def close(self, server: Server) -> None:
        """No more steps and no more requests for this server."""
        server.closed = True
        self._loads.pop(server.number, None)

    def remove(self, server: Server) -> None:
        """A server that is gone; it must have no step in flight."""
        assert not server.flights, "a step is in flight"
        self.close(server)
        del self.servers[server.number]

    def pump(self, server: Server) -> None:
        """Start what steps the server can start now."""
        core = server.core
        while not server.closed and self.now >= server.free_at and len(server.flights) <= core.config.pipeline_depth:
            output = core.schedule(self.now)
            if output is None:
                return
            for row in output.released_rows:
                server.rows.pop(row, None)
            server.rows.update((new.row, new.request_id) for new in output.new_requests)
            flight = server.launch(output, self.now)
            server.flights.append((output, flight))
            server.free_at = flight.free_at
            self.run_data.steps += 1
            self.at(flight.ends_at, lambda: self._end(server))
            if flight.free_at < flight.ends_at:
                self.at(flight.free_at, lambda: self.pump(server))

    def _end(self, server: Server) -> None:
        output, flight = server.flights.popleft()
        times = {server.rows[row]: at for row, at in flight.token_times.items() if row in server.rows}
        for found in server.core.update(output, flight.result, self.now):
            self._take(server, found, times.get(found.request_id, self.now))
        if not server.flights and self.on_idle is not None:
            self.on_idle(server)
        self.pump(server)

    def _take(self, server: Server, output: RequestOutput, at: float) -> None:
        record = self.records[output.request_id]
        record.token_times.extend([at] * len(output.token_ids))
        if output.finish_reason is None:
            return
        record.ended = at
        del self.records[output.request_id]
        self._num_ended += 1
        weight, (inputs, outputs) = 1.0 / min(self._num_ended, RECENT), self._means
        inputs += weight * (len(record.arrival.request.prompt_token_ids) - inputs)
        self._means = inputs, outputs + weight * (len(record.token_times) - outputs)
        load = self._loads.get(server.number)
        if load is not None:
            self._loads[server.number] = load._replace(running=max(0, load.running - 1))

    def _tick(self) -> None:
        self.report()
        if self._on_report is not None:
            self._on_report(self.now)
        self.at(self.now + REPORT_SECONDS, self._tick)

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0].at <= self.now:
            self._route(self._arrivals.popleft())
        if self._arrivals:
            self.at(self._arrivals[0].at, self._arrive)

    def _route(self, arrival: Arrival) -> None:
        request = arrival.request
        if not self._loads:
            self._held.append(arrival)
            return
        prompt = RoutedPrompt(len(request.prompt_token_ids))
        number = self._router(self._loads, prompt, self._chance)
        record = VirtualRecord(arrival)
        self.run_data.online.append(record)
        server, load = self.servers[number], self._loads[number]
        try:
            server.core.add_request(request, arrival.at)
        except RetryableError as error:
            record.rejected, record.retry_after = True, error.retry_after
            return
        self.records[request.request_id] = record
        tokens = prompt.new_tokens(number)
        self._loads[number] = load._replace(
            queued_tokens=load.queued_tokens + tokens,
            queued_units=load.queued_units + math.ceil(tokens / load.tokens_per_unit),
            queued_requests=load.queued_requests + 1,
        )
        self.pump(server)

    def _load(self, server: Server) -> LoadReport:
        core = server.core
        queued, pool = queued_work(core), report_stats(core.state)
        return LoadReport(
            queued_tokens=queued.tokens,
            queued_units=queued.units,
            queued_requests=queued.requests,
            running=queued.running,
            available_units=pool.units_free + pool.units_cached,
            num_units=pool.units_total,
            tokens_per_unit=core.config.block_size / UNITS_PER_BLOCK,
            tokens_per_step=core.config.max_num_batched_tokens,
            mean_input=self._means[0],
            mean_output=self._means[1],
            step_seconds=server.step_seconds,
        )
