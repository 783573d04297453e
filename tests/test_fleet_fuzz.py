"""Engines that die, hang, come back and are given up, in any order, under a fleet: every request ends once, and its
tokens are those that one engine would have given, each once."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fuzz import machine_test

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput, RequestTimes, SamplingParams
from engine.client import EngineInfo, EngineState, EngineStats, LoadReport
from engine.errors import EngineUnavailableError, QueueFullError, TidemillError
from engine.fleet.client import FleetClient
from engine.process.requests import OpenRequest, Requests
from engine.stream import RequestStream

ROOM = 4
LINES = 1


class FakeFleetEngine:
    """Gives request r the tokens 0, 1, 2 ..., one a step. A request in the steps of several deaths that has not got
    past its place does not leave it; `lost` counts requests that ended with an error."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.info = EngineInfo(512, 405, frozenset(), "fake", "none", "none", 0, cache_tokens=64, block_size=4)
        self.changed = changed
        self.open = Requests(lambda: self.clock())
        self.is_up = self.dead = self.hangs = False
        self.suspects = self.open.suspects
        self.report: LoadReport | None = None
        self.unreported: tuple[EngineRequest, ...] = ()
        self.lost = self.renewals = 0
        self.clock: Callable[[], float] = lambda: 0.0

    @property
    def state(self) -> EngineState:
        return EngineState.DEAD if self.dead else EngineState.READY if self.is_up else EngineState.DEGRADED

    @property
    def trouble(self) -> str | None:
        return None if self.is_up else "away"

    @property
    def num_offline(self) -> int:
        return self.open.num_offline

    @property
    def num_online(self) -> int:
        return len(self.open) - self.open.num_offline

    def holds(self, request_id: str) -> bool:
        return request_id in self.open

    async def start(self) -> None:
        self.is_up = True

    async def stop(self, drain_seconds: float = 0.0) -> None:
        for entry in self.open:
            self.abort(entry.request.request_id)

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        if not self.is_up:
            raise EngineUnavailableError("away", retry_after=1.0)
        if requests[0].request_class is RequestClass.ONLINE and self.is_full(len(requests)):
            raise QueueFullError("full")
        streams = []
        for request in requests:
            stream = RequestStream(lambda name=request.request_id: self.abort(name), final_only=False)  # type: ignore[misc]
            self.open.add(OpenRequest(request, stream, 0.0, accepted=True))
            streams.append(stream)
        return streams

    def is_full(self, more: int) -> bool:
        """Of chats."""
        return sum(entry.is_online for entry in self.open) + more > ROOM

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if (entry := self.open.pop(request_id)) is not None:
            self.suspects.forget(request_id)
            entry.end(reason, 0.0)
            self.changed()

    def set_lane(self, job: str, lane: Lane) -> None:
        self.open.set_lane(job, lane)

    def kill(self) -> None:
        self.is_up = False

    def take_movable(self) -> list[OpenRequest]:
        return [] if self.is_up else self.open.hand_over(given_up=self.dead)

    async def renew(self, *, anyway: bool = False) -> str:
        assert anyway
        if not self.is_up:
            return "the engine is being started anyway"
        self.renewals += 1
        self.die(0)
        self.come_back()
        return "another engine process runs"

    def adopt(self, entries: Sequence[OpenRequest]) -> None:
        assert self.is_up
        self.open.take_over(entries, self.abort)

    # What happens to it

    def step(self) -> None:
        if self.is_up and not self.hangs:
            for entry in list(self.open)[:4]:
                self._give_token(entry)
            online = [entry for entry in self.open if entry.is_online]
            waiting = sum(len(entry.request.prompt_token_ids) for entry in online if entry.last is None)
            self.report = LoadReport(queued_tokens=waiting, running=len(online), offline_waits=True)

    def _give_token(self, entry: OpenRequest) -> None:
        request, number = entry.request, len(entry.token_ids)
        finish = FinishReason.LENGTH if number + 1 == request.sampling.max_tokens else None
        prompt = len(request.prompt_token_ids)
        output = RequestOutput(request.request_id, (number,), None, RequestTimes(0.0), prompt, 0, number + 1, finish)
        entry.take(output)
        self.suspects.got_on(request.request_id, entry.num_computed)
        if finish is not None:
            self.open.pop(request.request_id)
            self.suspects.forget(request.request_id)
            self.changed()

    def die(self, in_step: int) -> None:
        self.is_up = self.hangs = False
        self.report = None
        in_flight = {entry.request.request_id: entry.num_computed + 1 for entry in list(self.open)[:in_step]}
        self.suspects.died("killed", in_flight, self.clock())
        self.changed()

    def come_back(self) -> None:
        if not self.dead:
            self.is_up = True
            self.suspects.after([], self.clock())
            self.changed()

    def give_up(self) -> None:
        self.is_up, self.dead = False, True
        self.changed()
        self.lost += len(self.open)
        self.open.end_all("gone")
        self.changed()


class Client:
    """One caller: its request and its answer."""

    def __init__(self, fleet: FleetClient, requests: Sequence[EngineRequest]) -> None:
        self.requests = requests
        self.outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        self.refusal: TidemillError | None = None
        self.streams: list[Any] = []
        self.task = asyncio.ensure_future(self._ask(fleet))

    async def _ask(self, fleet: FleetClient) -> None:
        try:
            self.streams = list(await fleet.submit(self.requests))
        except TidemillError as error:
            self.refusal = error
            return
        await asyncio.gather(*[self._read(stream) for stream in self.streams])

    async def _read(self, stream: Any) -> None:
        async for output in stream:
            self.outputs[output.request_id].append(output)

    def check(self, lost: int, aborted: bool) -> None:
        """It has ended, and as it should."""
        assert self.task.done()
        self.task.result()
        if self.refusal is not None:
            assert not any(self.outputs.values())
            return
        for request in self.requests:
            outputs = self.outputs[request.request_id]
            tokens = [token for output in outputs for token in output.token_ids]
            assert [output.finish_reason is not None for output in outputs].count(True) == 1
            reason = outputs[-1].finish_reason
            whole = list(range(request.sampling.max_tokens))
            assert tokens == (whole if reason is FinishReason.LENGTH else whole[: len(tokens)])
            assert reason is FinishReason.LENGTH or aborted or (lost and reason is FinishReason.ERROR)


class Fleet(RuleBasedStateMachine):
    """Two engines; the last one is never given up."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.restarts: list[asyncio.Future[str]] = []
        self.engines: list[FakeFleetEngine] = []
        self.clients: list[Client] = []
        self.aborted: set[int] = set()
        self.turn = 0
        self.now = 0.0
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        def make(_number: int, changed: Callable[[], None]) -> Any:
            self.engines.append(FakeFleetEngine(changed))
            self.engines[-1].clock = lambda: self.now
            return self.engines[-1]

        self.fleet = FleetClient(make, 2, lines=LINES, patience=5.0, clock=lambda: self.now)
        await self.fleet.start()

    def _run(self, call: Callable[[], Any] = lambda: None) -> Any:
        async def run() -> Any:
            found = call()
            for _ in range(8):
                await asyncio.sleep(0)
            return found

        return self.loop.run_until_complete(run())

    @rule(choices=st.integers(1, 2), offline=st.booleans(), prompt=st.integers(1, 12), tokens=st.integers(1, 5))
    def ask(self, choices: int, offline: bool, prompt: int, tokens: int) -> None:
        kind = RequestClass.OFFLINE if offline else RequestClass.ONLINE
        number = len(self.clients)
        requests = [
            EngineRequest(f"{number}.{i}", (number % 3,) * prompt, SamplingParams(max_tokens=tokens), kind, job="job")
            for i in range(choices)
        ]
        up = any(engine.is_up for engine in self.engines)
        one, other = self.fleet._members
        leaving = [m for m, beside in ((one, other), (other, one)) if m.leaves and beside.is_well]
        given = [member.routed for member in leaving]
        client = self._run(lambda: Client(self.fleet, requests))
        self.clients.append(client)
        assert [member.routed for member in leaving] == given, "an engine about to end gets nothing"
        if isinstance(client.refusal, EngineUnavailableError):
            assert not up, "a living engine takes it"
        if isinstance(client.refusal, QueueFullError):
            assert all(engine.is_full(choices) for engine in self.engines if engine.is_up)

    @rule(engine=st.integers(0, 1))
    def step(self, engine: int) -> None:
        self._run(self.engines[engine].step)

    @rule(engine=st.integers(0, 1), in_step=st.integers(0, 3))
    def die(self, engine: int, in_step: int) -> None:
        if self.engines[engine].is_up:
            self._run(lambda: self.engines[engine].die(in_step))

    @rule(engine=st.integers(0, 1))
    def hang(self, engine: int) -> None:
        self.engines[engine].hangs = self.engines[engine].is_up

    @rule(engine=st.integers(0, 1))
    def come_back(self, engine: int) -> None:
        if not self.engines[engine].is_up:
            self._run(self.engines[engine].come_back)

    @rule()
    def give_up(self) -> None:
        if not self.engines[0].is_up and not self.engines[0].dead:
            self._run(self.engines[0].give_up)

    @rule(data=st.data())
    @precondition(lambda self: self.clients)
    def leave(self, data: st.DataObject) -> None:
        """A client goes away, whether its request runs, waits or has ended."""
        number = data.draw(st.integers(0, len(self.clients) - 1))
        client = self.clients[number]
        self.aborted.add(number)
        if client.streams:
            self._run(lambda: [asyncio.ensure_future(stream.aclose()) for stream in client.streams])
        else:
            self._run(client.task.cancel)
        assert not any(engine.holds(name) for engine in self.engines for name in client.outputs)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._run(self.fleet._on_change)

    @rule(seconds=st.sampled_from([1, 5, 15]))
    def restart(self, seconds: int) -> None:
        """Start the engines again, one by one, unless a restart is under way; then let time pass."""
        if all(restart.done() for restart in self.restarts):
            self.restarts.append(self._run(lambda: asyncio.ensure_future(self.fleet.renew(anyway=True))))
        for _ in range(seconds):
            self.now += 1.0
            self._run(self.fleet._on_change)

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        held = [entry.request.request_id for engine in self.engines for entry in engine.open]
        assert len(held) == len(set(held))
        for client in self.clients:
            if client.streams:
                open_ids = {name for name, got in client.outputs.items() if not got or got[-1].finish_reason is None}
                assert open_ids <= set(held), "an engine has the open requests"

    @invariant()
    def nothing_that_could_run_elsewhere_waits_for_an_engine_that_is_away(self) -> None:
        if any(engine.is_up for engine in self.engines):
            assert not any(engine.take_movable() for engine in self.engines if not engine.is_up)

    def teardown(self) -> None:
        def recover() -> None:
            for engine in self.engines:
                engine.hangs = False
                if not engine.is_up:
                    engine.come_back()

        self._run(recover)
        for _ in range(400):
            if all(client.task.done() for client in self.clients):
                break
            self._run(lambda: [engine.step() for engine in self.engines])
        for restart in self.restarts:
            if not restart.done() or restart.exception() is not None:
                assert self.engines[0].dead, "only an engine that was given up keeps the engines from starting again"
        lost = sum(engine.lost for engine in self.engines)
        for number, client in enumerate(self.clients):
            if not client.task.cancelled():
                client.check(lost, number in self.aborted)
        assert not any(len(engine.open) for engine in self.engines)
        self.loop.run_until_complete(self.fleet.stop())
        self.loop.close()


TestFleet = machine_test(Fleet, 40, 40)
