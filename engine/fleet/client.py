"""The client of several engines, each in its own process. A router selects an engine for each request.

If an engine dies, its requests move to the others. Each engine has its own client (`engine.process`), which restarts
its process and resumes its remaining requests. This module only assigns requests to engines. See docs/guides/fleet.md
and docs/develop/process.md.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

from engine.api import EngineRequest, FinishReason, Lane, RequestClass
from engine.client import EngineInfo, EngineState, EngineStats, OutputStream, info_of_all, total
from engine.errors import EngineUnavailableError, InvalidRequestError, QueueFullError, TidemillError
from engine.fleet.overload import Overload
from engine.fleet.routing import (
    Loads,
    Member,
    RoutedPrompt,
    hits_of,
    offline_load,
    online_load,
    prefix,
    prefix_chain,
    sal,
    shares,
    windows,
)
from engine.process import frames
from engine.process.client import PATIENCE, EngineProcess, longest_wait

log = logging.getLogger("tidemill.fleet")

LEAVE_SECONDS = 10.0
"""Maximum time in seconds for which an engine finishes its chats before it is renewed; the rest then moves."""

MakeEngine = Callable[[int, Callable[[], None]], EngineProcess]
"""Makes the engine with a number. The engine calls the callback when its process starts or ends or a request ends."""


class FleetClient:
    """Several engines as one. Implements `engine.client.EngineClient`.

    Args:
        make: Makes the engine with a number.
        engines: Number of engines.
        drop: Whether engines drop layers if memory is short (`engine.fleet.overload`).
        lines: Maximum open offline requests per engine on average; None: `batch_lines` of the engine. Further ones wait
            in `submit`.
        patience: Maximum wait in seconds of a chat while no engine is up.
    """

    def __init__(
        self,
        make: MakeEngine,
        engines: int,
        *,
        drop: bool = False,
        lines: int | None = None,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = [Member(number, make(number, self._on_change)) for number in range(engines)]
        self._lines = lines
        self._patience = patience
        self._clock = clock
        self._change = asyncio.Event()
        self._renewing = asyncio.Lock()
        self._num_refused = 0
        self._overload = Overload(self._members, self._on_change, clock) if drop else None
        self._started = self._draining = False

    # Calls of the gateway

    @property
    def info(self) -> EngineInfo:
        return info_of_all([member.engine.info for member in self._members])

    @property
    def state(self) -> EngineState:
        """READY if any engine is ready, DEAD if all are dead."""
        states = [member.engine.state for member in self._members]
        if all(state is EngineState.DEAD for state in states):
            return EngineState.DEAD
        if self._draining:
            return EngineState.DRAINING
        if not self._started:
            return EngineState.STARTING
        return EngineState.READY if EngineState.READY in states else EngineState.DEGRADED

    @property
    def trouble(self) -> str | None:
        """See EngineClient.trouble."""
        troubles = [(member.number, member.engine.trouble) for member in self._members]
        if self.state is EngineState.READY or not any(why for _, why in troubles):
            return None
        return "; ".join(f"engine {number}: {why or 'not ready'}" for number, why in troubles)

    async def submit(self, requests: Sequence[EngineRequest]) -> Sequence[OutputStream]:
        """See EngineClient.submit. All requests go to one engine because they share a prompt.

        If an engine refuses them, the next one is asked. While no engine is up, they wait as for a single engine.
        """
        self._check_accepting()
        for request in requests:
            if any(member.engine.holds(request.request_id) for member in self._members):
                raise InvalidRequestError(f"A request '{request.request_id}' is already running.", param="request_id")
        arrived, waits = self._clock(), not self._living()
        until = arrived + longest_wait(requests, self._patience)
        refusals: dict[int, TidemillError] = {}
        while True:
            member = await self._find_engine(requests, refusals, until)
            if waits:  # the wait counts in the TTFT
                requests = [replace(request, arrived=arrived) for request in requests]
            try:
                return await member.engine.submit(requests)
            except (EngineUnavailableError, QueueFullError) as error:
                if member.engine.is_up:
                    refusals[member.number] = error

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See EngineClient.abort."""
        for member in self._members:
            member.engine.abort(request_id, reason)

    def set_lane(self, job: str, lane: Lane) -> None:
        """See EngineClient.set_lane."""
        for member in self._members:
            member.engine.set_lane(job, lane)

    async def stats(self) -> EngineStats:
        """See EngineClient.stats. Return the total of all engines, with each engine in `engines`."""
        found = await asyncio.gather(*[member.engine.stats() for member in self._members])
        for member in self._members:
            member.harvest.hear(member.engine.report)
        pipelines = None if self._overload is None else self._overload.stats()
        pairs = () if pipelines is None else pipelines.pairs
        partners = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
        views = [
            member.view(stats, partners.get(member.number)) for member, stats in zip(self._members, found, strict=True)
        ]
        return replace(total(views), refused_requests=self._num_refused, pipelines=pipelines)

    async def wait_dead(self) -> str:
        """See EngineClient.wait_dead. Wait until all engines are dead."""
        reasons = await asyncio.gather(*[member.engine.wait_dead() for member in self._members])
        return "; ".join(f"engine {member.number}: {why}" for member, why in zip(self._members, reasons, strict=True))

    async def renew(self, *, anyway: bool = False) -> str:
        """See EngineClient.renew. Renew one engine after another, and stop at the first one that does not come back.

        With `anyway`, an engine gets no new requests until it is renewed. Its chats have `LEAVE_SECONDS` to finish;
        the remaining requests move to the other engines.
        """
        if self._renewing.locked():
            return "the engines are being renewed already"
        async with self._renewing:
            said = [f"engine {member.number}: {await self._renew(member, anyway)}" for member in self._members]
        return "; ".join(said)

    async def _renew(self, member: Member, anyway: bool) -> str:
        engine = member.engine
        member.leaves = anyway
        try:
            if self._overload is not None:
                await self._overload.part(member)
            if anyway and engine.is_up:
                with contextlib.suppress(EngineUnavailableError):
                    until = self._clock() + LEAVE_SECONDS
                    others = [other for other in self._members if other is not member]
                    while engine.is_up and engine.num_online and any(other.is_well for other in others):
                        await self._wait_for_change(until)
            done = await engine.renew(anyway=anyway)
        finally:
            member.leaves = False
            self._on_change()
        if engine.state is EngineState.DEAD:
            raise EngineUnavailableError(f"engine {member.number} did not come back: {engine.trouble}")
        return done

    def kill(self) -> None:
        """See EngineClient.kill."""
        for member in self._members:
            member.engine.kill()

    # Life

    def load(self, planned: Callable[[frames.Planned], None]) -> None:
        """Start the processes and wait until all models are loaded.

        The first process starts alone, because the others use its measurements. If a start fails, end all processes and
        raise its error.
        """
        first, *others = [member.engine for member in self._members]
        try:
            first.load(planned)
            with ThreadPoolExecutor(max(1, len(others))) as threads:
                try:
                    loads = [threads.submit(engine.load, lambda _planned: None) for engine in others]
                    for load in as_completed(loads):
                        load.result()
                except BaseException:
                    self.discard()  # inside the pool's block: its threads wait for the processes
                    raise
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """End the loaded processes, which will not be used."""
        for member in self._members:
            member.engine.discard()

    async def start(self) -> None:
        """See EngineClient.start. All engines must start; later each may die and restart."""
        ended = await asyncio.gather(*[member.engine.start() for member in self._members], return_exceptions=True)
        faults = [error for error in ended if error is not None]
        if faults:
            await asyncio.gather(*[member.engine.stop() for member in self._members])
            raise faults[0]
        self._started = True
        if self._overload is not None:
            self._overload.start()

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """See EngineClient.stop."""
        self._draining = True
        self._on_change()
        if self._overload is not None:
            await self._overload.stop()
        await asyncio.gather(*[member.engine.stop(drain_seconds) for member in self._members])

    # Routing

    def _check_accepting(self) -> None:
        if self._draining:
            raise EngineUnavailableError("The server is shutting down.", retry_after=5.0)
        if self.state is EngineState.DEAD:
            raise EngineUnavailableError("No engine is running.", retry_after=5.0)

    def _living(self) -> list[Member]:
        """Return the ready engines that are not leaving; if there are none, all engines that are up."""
        here = [member for member in self._members if not member.away]
        well = [member for member in here if member.is_well and not member.leaves]
        return well or [member for member in here if member.engine.is_up]

    async def _find_engine(
        self, requests: Sequence[EngineRequest], refusals: dict[int, TidemillError], until: float
    ) -> Member:
        """Wait for an engine with room and return it. If all engines have refused, raise the mildest refusal."""
        while True:
            self._check_accepting()
            living = self._living()
            asked = [member for member in living if member.number not in refusals]
            if living and not asked:
                error = _mildest(refusals)
                online = requests[0].request_class is RequestClass.ONLINE
                self._num_refused += online and isinstance(error, QueueFullError)
                raise error
            if asked and (member := self._route(requests, asked)) is not None:
                return member
            await self._wait_for_change(math.inf if asked else until)

    def _route(
        self, requests: Sequence[EngineRequest], members: Sequence[Member], *, bounded: bool = True
    ) -> Member | None:
        """Choose an engine and record the requests there.

        Return None for a batch line if every engine holds its share of lines (`bounded`).
        """
        request = requests[0]
        root = request.prefix_root(is_long=request.is_long(self.info.short_context))
        chain = prefix_chain(request.prompt_token_ids, root, members[0].block_size)
        hits = hits_of(members, chain)
        if request.request_class is RequestClass.ONLINE:
            prompt = RoutedPrompt(len(request.prompt_token_ids), hits)
            number = sal(self._online_loads(members), prompt)
        else:
            loads = self._offline_loads(members, bounded=bounded and request.lane is not Lane.FLEX)
            if not loads:
                return None
            number = prefix(loads, RoutedPrompt(1, hits))
        member = self._members[number]
        member.give(requests, chain)
        return member

    def _online_loads(self, members: Sequence[Member]) -> Loads:
        loads = {each.number: online_load(each.engine.report, each.engine.unreported) for each in members}
        if all(load.step_seconds > 0.0 for load in loads.values()):
            return loads
        return {number: load._replace(step_seconds=1.0) for number, load in loads.items()}  # times are not comparable

    def _offline_loads(self, members: Sequence[Member], *, bounded: bool) -> Loads:
        """Return the offline loads, by each engine's rate. `bounded`: leave out engines that hold their share."""
        for member in members:
            member.harvest.hear(member.engine.report)
        part = shares({member.number: member.harvest.rate for member in members})
        lines = self.info.batch_lines if self._lines is None else self._lines
        room = windows(part, lines * len(members))
        held = {member.number: member.engine.num_offline for member in members}
        return {
            number: offline_load(held[number], share)
            for number, share in part.items()
            if not bounded or held[number] < room[number]
        }

    async def _wait_for_change(self, until: float) -> None:
        """Wait for a change of any engine. Raise EngineUnavailableError at the time `until`."""
        left = until - self._clock()
        if left <= 0.0:
            raise EngineUnavailableError("The engines are being started again.", retry_after=5.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._change.wait(), None if math.isinf(left) else left)

    def _on_change(self) -> None:
        """Handle the start or end of an engine, or the end of a request."""
        self._change.set()
        self._change = asyncio.Event()
        if self._started:
            if self._overload is not None:
                self._overload.pipelines.look()
            self._move()

    def _move(self) -> None:
        """Move requests from engines without a process to the others. The next process resumes the remaining ones."""
        for member in self._members:
            if member.engine.is_up:
                continue
            member.lose_cache()
            living = self._living()
            entries = member.engine.take_movable() if living else []
            for entry in entries:
                other = self._route([entry.request], living, bounded=False)
                assert other is not None
                other.engine.adopt([entry])
                member.moved += 1
            if entries:
                log.warning("engine %d is gone: %d requests go to the others", member.number, len(entries))


def _mildest(refusals: dict[int, TidemillError]) -> TidemillError:
    """Return the refusal with the earliest retry. A full queue takes precedence over an unavailable engine."""
    full = [error for error in refusals.values() if isinstance(error, QueueFullError)]
    return min(full, key=lambda error: error.retry_after) if full else next(iter(refusals.values()))
