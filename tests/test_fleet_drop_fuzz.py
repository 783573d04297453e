"""Engines that die, hang, come back, become one pipeline and two again, in any order, under a fleet: the real cores and
stages over the checking fake runner, stepped by hand. Every request ends once, with the tokens of a run alone."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import patch

from fakes.runner import solo
from fakes.staged import LAYER_BYTES, LAYERS, UNIT_LAYER_BYTES, StagedFake
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from integrity import check_core
from support.fuzz import machine_test
from test_fleet_fuzz import FakeFleetEngine
from test_fleet_pipelines import MERGE, SPLIT, before_order

from engine.api import EngineRequest, FinishReason, RequestClass, SamplingParams
from engine.client import DroppableLayers, EngineInfo
from engine.core import EngineCore
from engine.errors import EngineUnavailableError, TidemillError
from engine.fleet.client import FleetClient
from engine.limits import SchedulerConfig
from engine.machine.child import LinkLostError
from engine.process import frames, stage
from engine.process.life import Calls, Regrouping
from engine.process.requests import OpenRequest
from engine.scheduling.moving import MovedRequest, Moves
from engine.scheduling.offline import whole
from engine.scheduling.output import SchedulerOutput
from engine.scheduling.report import report_load
from engine.stream import RequestStream

VOCAB, UNITS = 50, 24
CONFIG = SchedulerConfig(num_units=UNITS, max_model_len=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=16)


class Process:
    """What `Stage` asks of an engine, over a core whose steps a rule runs. `outputs` takes their results."""

    def __init__(self, outputs: Callable[[Any], None]) -> None:
        self.core = EngineCore(CONFIG)
        self.moves = Moves(self.core.state, self.core.recovery)
        self.runner = StagedFake(num_units=UNITS, block_size=CONFIG.block_size, vocab_size=VOCAB)
        self.on_parted: Callable[[], None] = lambda: None
        self.held = False
        self.now = 0.0
        self.sink = outputs
        self.open: set[str] = set()
        self.stage: Any = None

    async def hold(self) -> None:
        self.held = True

    def go(self) -> None:
        self.held = False

    def arrived(self, request_id: str) -> None:
        self.moves.arrived(request_id)

    async def aside(self, work: Callable[..., Any], *args: Any) -> Any:
        if work in (self.runner.hand_over, self.runner.fetch):
            self.step()  # requests that wait for no past run in between
        return await asyncio.to_thread(work, *args)

    def serves(self, request_id: str, _sink: Any) -> bool:
        return request_id in self.open

    def detach(self, request_id: str) -> MovedRequest:
        self.open.discard(request_id)
        return self.moves.detach(request_id)

    def attach(self, moved: MovedRequest, _sink: Any) -> bool:
        self.open.add(moved.spec.request_id)
        return self.moves.attach(moved)

    def drop(self, request_id: str) -> None:
        if request_id in self.open:
            self.open.discard(request_id)
            self.core.abort(request_id, self.now)

    async def prepare(self, _requests: Sequence[EngineRequest]) -> None:
        """None has a grammar."""

    def load(self) -> Any:
        return report_load(self.core.state, self.now)

    def add(self, request: EngineRequest) -> None:
        self.core.add_request(request, self.now)
        self.open.add(request.request_id)

    def step(self) -> None:
        self.now += 1.0
        output = None if self.held else self.core.schedule(self.now, whole(self.core.plan_offline(self.now)))
        if output is not None:
            for each in self.core.update(output, self._compute(output), self.now):
                if each.request_id in self.open:
                    self.open -= {each.request_id} if each.finish_reason is not None else set()
                    self.sink(each)

    def _compute(self, output: SchedulerOutput) -> Any:
        try:
            return self.runner.launch(output)()
        except LinkLostError:
            self.held = True
            self.on_parted()
            return None


class PipedEngine(FakeFleetEngine):
    """A client whose process is here, and answers its orders."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__(changed)
        droppable = DroppableLayers(LAYERS, LAYER_BYTES, UNIT_LAYER_BYTES, UNITS)
        self.info = EngineInfo(40, VOCAB, frozenset(), "fake", "none", "none", 0, droppable=droppable)
        self.process: Process | None = None
        self.one_is_dead: Callable[[], bool] = lambda: False
        self.parted_by_itself = False
        self.answers: list[asyncio.Future[None]] = []
        self.calls = Calls(self._send)
        self.regroup = Regrouping(self.calls, self.open, self.abort)

    async def start(self) -> None:
        self.come_back()

    def come_back(self) -> None:
        process = self.process = Process(self._take)
        process.stage = stage.PipelineStage(
            process, self._take, process.add, lambda name: name in process.open, lambda: self._part(process)  # type: ignore[arg-type]
        )  # fmt: skip
        self.is_up = True
        for entry in self.open.accepted():
            process.add(entry.resumed())
        self.changed()

    def die(self, in_step: int = 0) -> None:
        process, self.process, self.is_up, self.hangs = self.process, None, False, False
        if process is not None:
            process.stage.close()
            self.calls.end()
            self.regroup.lost()
            self.changed()

    kill = die  # type: ignore[assignment]

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        if self.process is None or self.process.stage.closed:
            raise EngineUnavailableError("away", retry_after=1.0)
        streams = []
        for request in requests:
            stream = RequestStream(lambda name=request.request_id: self.abort(name), final_only=False)  # type: ignore[misc]
            self.open.add(OpenRequest(request, stream, 0.0, accepted=True))
            self.process.add(request)
            streams.append(stream)
        self.report = self.process.load()
        return streams

    def adopt(self, entries: Sequence[OpenRequest]) -> None:
        super().adopt(entries)
        assert self.process is not None
        for entry in entries:
            self.process.add(entry.resumed())

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if self.process is not None and request_id in self.open:
            self.process.drop(request_id)
            self.process.stage.abort(request_id)
        super().abort(request_id, reason)

    def step(self) -> None:
        if self.process is not None and not self.hangs:
            self.process.step()
            check_core(self.process.core)
            self.report = self.process.load()

    def _take(self, output: Any) -> None:
        entry = self.open.get(output.request_id)
        assert entry is not None, "an answer without a request"
        entry.take(output)
        if output.finish_reason is not None:
            self.open.pop(output.request_id)
            self.changed()

    def _part(self, process: Process) -> None:
        if process is self.process:
            self.parted_by_itself |= not self.one_is_dead()
            self.regroup.parted = True
            self.changed()

    def _send(self, message: Any) -> None:
        assert isinstance(message, frames.Regroup)
        if self.process is not None:
            work = self.process.stage.take(message.order)
            self.answers.append(asyncio.ensure_future(self._answer(message.call, self.process, work)))

    async def _answer(self, call: int, process: Process, work: Awaitable[Any]) -> None:
        try:
            pasts = await work
        except TidemillError as error:
            if process is self.process:
                self.calls.settle(call, error)
        else:
            if process is self.process:
                self.calls.settle(call, pasts)


class Changes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patches: list[Any] = [patch.object(stage, "RETIRE_LOOKS", 2), patch.object(stage, "LOOK_SECONDS", 0.0)]
        for each in self.patches:
            each.start()
        self.loop = asyncio.new_event_loop()
        self.engines: list[PipedEngine] = []
        self.asked: dict[str, EngineRequest] = {}
        self.got: dict[str, list[Any]] = {}
        self.readers: list[asyncio.Future[None]] = []
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        def make(_number: int, changed: Callable[[], None]) -> Any:
            self.engines.append(PipedEngine(changed))
            self.engines[-1].one_is_dead = lambda: any(engine.process is None for engine in self.engines)
            return self.engines[-1]

        self.fleet = FleetClient(make, 2, drop=True, lines=2, clock=lambda: 0.0)
        await self.fleet.start()
        assert self.fleet._overload is not None and self.fleet._overload._task is not None
        self.pipelines = self.fleet._overload.pipelines
        self.fleet._overload._task.cancel()  # rules say when

    def _settle(self, *calls: Callable[[], Any]) -> None:
        """Until no order is under way. The calls come first; one may return an awaitable."""

        async def run() -> None:
            for call in calls:
                if asyncio.iscoroutine(work := call()):
                    await work
            for _ in range(2000):
                await asyncio.sleep(0)
                if not self.pipelines._tasks and all(not e.calls._open for e in self.engines):
                    break
                await asyncio.sleep(0.001)
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(asyncio.wait_for(run(), 60.0))

    @property
    def pair(self) -> Any:
        return next((pair for pair in self.pipelines.pairs if pair.settled), None)

    @rule(offline=st.booleans(), prompt=st.integers(1, 14), tokens=st.integers(1, 12))
    @precondition(lambda self: any(engine.is_up for engine in self.engines))
    def ask(self, offline: bool, prompt: int, tokens: int) -> None:
        name, kind = f"r{len(self.asked)}", RequestClass.OFFLINE if offline else RequestClass.ONLINE
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        request = self.asked[name] = EngineRequest(name, (len(self.asked) % 3 + 3,) * prompt, sampling, kind)
        self.got[name] = []

        async def read() -> None:
            (stream,) = await self.fleet.submit([request])
            async for output in stream:
                self.got[name].append(output)

        self._settle(lambda: self.readers.append(asyncio.ensure_future(read())))

    @rule(engine=st.integers(0, 1), steps=st.integers(1, 4))
    def step(self, engine: int, steps: int) -> None:
        self._settle(*[self.engines[engine].step] * steps)

    @rule(engine=st.integers(0, 1))
    def die(self, engine: int) -> None:
        self._settle(self.engines[engine].die)

    @rule(engine=st.integers(0, 1))
    def hang(self, engine: int) -> None:
        self.engines[engine].hangs = self.engines[engine].is_up

    @rule(engine=st.integers(0, 1))
    def come_back(self, engine: int) -> None:
        if self.engines[engine].process is None:
            self._settle(self.engines[engine].come_back)

    @rule(name=st.integers(0, 50))
    def leave(self, name: int) -> None:
        self._settle(lambda: self.fleet.abort(f"r{name}"))

    @rule(leader=st.integers(0, 1), dies=st.none() | st.tuples(st.sampled_from(MERGE), st.integers(0, 1)))
    @precondition(lambda self: not self.pipelines.pairs and all(engine.is_up for engine in self.engines))
    def drop(self, leader: int, dies: tuple[str, int] | None) -> None:
        self._change(lambda: self.pipelines.merge(*(self.fleet._members[i] for i in (leader, 1 - leader))), dies)
        assert (dies is None) == (self.pair is not None)

    @rule(dies=st.none() | st.tuples(st.sampled_from(SPLIT), st.integers(0, 1)))
    @precondition(lambda self: self.pair is not None)
    def restore(self, dies: tuple[str, int] | None) -> None:
        self._change(lambda: self.pipelines.split(self.pair), dies)
        assert not self.pipelines.pairs

    def _change(self, change: Callable[[], Awaitable[Any]], dies: tuple[str, int] | None) -> None:
        name, number = dies or ("", 0)
        with before_order(name, lambda: self.engines[number].die()):
            self._settle(change)

    @invariant()
    def a_pipeline_ends_with_an_engine_alone(self) -> None:
        """Not because a stage finds that a past is not there."""
        assert not any(engine.parted_by_itself for engine in self.engines)

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        held = [entry.request.request_id for engine in self.engines for entry in engine.open]
        assert len(held) == len(set(held))
        for engine in self.engines:
            if engine.process is not None:
                assert engine.process.open == {entry.request.request_id for entry in engine.open}

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            self._settle(*[engine.die for engine in self.engines])
            self.loop.run_until_complete(self.fleet.stop())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            for each in self.patches:
                each.stop()

    def _end(self) -> None:
        for number, engine in enumerate(self.engines):
            engine.hangs = False
            self.come_back(number)
        for _ in range(300):
            if all(reader.done() for reader in self.readers):
                break
            self._settle(*[engine.step for engine in self.engines])
            self.a_pipeline_ends_with_an_engine_alone()
        for reader in self.readers:
            assert reader.done(), "a request has not ended"
            reader.result()
        for name, request in self.asked.items():
            tokens = [token for output in self.got[name] for token in output.token_ids]
            due = solo(request, VOCAB)
            assert [output.finish_reason is not None for output in self.got[name]].count(True) == 1, name
            ended = self.got[name][-1].finish_reason
            assert ended in (FinishReason.ABORT, FinishReason.LENGTH), self.got[name][-1].error
            assert tokens == (due if ended is FinishReason.LENGTH else due[: len(tokens)]), name


TestChanges = machine_test(Changes, 20, 25)


def test_requests_of_both_engines_go_through_a_drop_and_a_restore() -> None:
    """A state that the machine seldom reaches by chance: both have pasts, and steps follow at once."""
    machine = Changes()
    for _ in range(4):
        machine.ask(False, 10, 8)
    for engine in (0, 1):
        machine.step(engine, 2)
        assert len(machine.engines[engine].open) == 2
    machine.drop(0, None)
    machine.step(0, 2)
    machine.a_pipeline_ends_with_an_engine_alone()
    machine.restore(None)
    assert [machine.pipelines.drops, machine.pipelines.restores, machine.pipelines.failures] == [1, 1, 0]
    machine.teardown()


def test_requests_without_a_past_run_while_the_pasts_of_others_move() -> None:
    """The fake engine runs a step before each past that moves."""
    machine = Changes()
    for _ in range(4):
        machine.ask(False, 10, 12)
    for engine in (0, 1):
        machine.step(engine, 2)
    for _ in range(2):
        machine.ask(False, 6, 12)
    before = {name: len(found) for name, found in machine.got.items()}
    machine.drop(0, None)
    more = {name: len(found) - before[name] for name, found in machine.got.items()}
    assert machine.pipelines.drops == 1
    assert min(more["r4"], more["r5"]) > 0 == min(more[f"r{number}"] for number in range(4))
    machine.teardown()
