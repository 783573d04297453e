"""The async engine over the checking fake runner: streams, aborts, slow readers, failures, stop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from functools import partial
from typing import Any

import pytest
from driver import is_error, make_request, outputs_of, submit_one, until
from fakes.runner import FakeRunner, solo
from integrity import check_core

from engine.api import EngineRequest, FinishReason, RequestClass, RequestOutput
from engine.client import EngineInfo, EngineState
from engine.colocation.keeper import Colocation
from engine.colocation.waits import initial_budget
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import EngineUnavailableError, InvalidRequestError, QueueFullError
from engine.limits import SchedulerConfig
from engine.loop.watchdog import StepLimits
from engine.scheduling.objective import StepObjective
from engine.scheduling.offline import OfflinePlan, PlannedChunk
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput
from engine.stream import STREAM_LIMIT
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.slo import SLO

VOCAB = 50


SHORT = LatencyModel(intercept=0.001)


def make_core(depth: int = 0, model: LatencyModel | OnlineModel | None = None, **changes: Any) -> EngineCore:
    settings: dict[str, Any] = {"num_units": 128, "max_model_len": 4096, "block_size": 64, "pipeline_depth": depth}
    return EngineCore(SchedulerConfig(**{**settings, **changes}), model=model)


def engine_of(core: EngineCore, runner: Any = None, **options: Any) -> Engine:
    info = EngineInfo(4096, VOCAB, frozenset(), "fake", "none", "none", 0)
    return Engine(core, runner or FakeRunner(block_size=64, vocab_size=VOCAB), info, **options)


def make_engine(depth: int = 0, runner: Any = None, model: LatencyModel | None = None, **changes: Any) -> Engine:
    return engine_of(make_core(depth, model, **changes), runner)


class GatedRunner:
    """A fake runner whose steps wait for a permit, so that a test decides what happens while one is running."""

    def __init__(self) -> None:
        self.inner = FakeRunner(block_size=64, vocab_size=VOCAB)
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.open = True

    def launch(self, output: SchedulerOutput) -> Collect:
        return partial(self._execute, output)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if not self.open:
            self.entered.release()
            assert self.permits.acquire(timeout=30)
        return self.inner.launch(output)()


@pytest.fixture(params=[0, 1, 0.02], ids=["depth0", "depth1", "short steps ahead"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    ahead = isinstance(request.param, float)
    engine = make_engine(1, model=SHORT, ahead_seconds=request.param) if ahead else make_engine(request.param)
    await engine.start()
    yield engine
    await engine.stop()
    assert not engine.core.state.in_flight
    check_core(engine.core)


async def collect(engine: Engine, request: EngineRequest) -> tuple[list[int], RequestOutput]:
    tokens: list[int] = []
    async for output in outputs_of(engine, request):
        tokens += output.token_ids
    return tokens, output


async def test_aclose_aborts_even_before_the_first_read(engine: Engine) -> None:
    stream = await submit_one(engine, make_request("a", range(9), 4000))
    await stream.aclose()
    await stream.aclose()
    outputs = [output async for output in stream]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert engine.stats().units_owned == 0 or engine.core.state.in_flight


async def test_abort_with_reason_from_outside(engine: Engine) -> None:
    stream = await submit_one(engine, make_request("a", range(9), 4000))
    await anext(stream)
    engine.abort("a", FinishReason.STOP)
    engine.abort("nobody")
    assert [o async for o in stream][-1].finish_reason is FinishReason.STOP


async def test_a_reader_that_does_not_read_is_ended_and_others_go_on(engine: Engine) -> None:
    lazy = await submit_one(engine, make_request("lazy", range(9), STREAM_LIMIT + 500))
    busy = make_request("busy", range(9), STREAM_LIMIT + 800)
    tokens, _ = await collect(engine, busy)
    assert tokens == solo(busy, VOCAB)
    outputs = [output async for output in lazy]
    assert len(outputs) <= STREAM_LIMIT + 1
    assert outputs[-1].finish_reason is FinishReason.ABORT


async def test_invalid_requests_are_refused_before_anything_is_queued(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError):
        await submit_one(engine, make_request("long", range(4000), 200))
    assert not engine._streams


@pytest.mark.parametrize("depth", [0, 1])
async def test_a_step_that_fails_once_costs_nobody_anything(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(depth, FakeRunner(block_size=64, vocab_size=VOCAB, fail_steps=frozenset({6})))
    await engine.start()
    job = make_request("job", range(5), 30, request_class=RequestClass.OFFLINE)
    chat = make_request("chat", range(5), 30)
    for (tokens, final), request in zip(
        await asyncio.gather(collect(engine, chat), collect(engine, job)), (chat, job), strict=True
    ):
        assert tokens == solo(request, VOCAB) and final.finish_reason is FinishReason.LENGTH
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert engine.state is EngineState.READY
    await engine.stop()


async def test_warm_up_failure_is_raised_by_start() -> None:
    engine = make_engine(0, FakeRunner(block_size=64, vocab_size=VOCAB, fail_steps=frozenset({0})))
    with pytest.raises(Exception, match="failed"):
        await engine.start()
    assert engine.state is not EngineState.READY


async def test_behind_a_short_step_of_its_own_cores_the_next_one_is_scheduled() -> None:
    runner = GatedRunner()
    engine = make_engine(1, runner, SHORT, ahead_seconds=0.02)
    await engine.start()
    runner.open = False
    first = make_request("first", range(5), 30)
    stream = await submit_one(engine, first)
    assert await asyncio.to_thread(runner.entered.acquire, timeout=30)
    await until(lambda: len(engine.core.state.in_flight) == 2)
    late = make_request("late", range(7), 3)
    others = await submit_one(engine, late)
    runner.permits.release(100)
    assert [token for o in [o async for o in stream] for token in o.token_ids] == solo(first, VOCAB)
    assert [token for o in [o async for o in others] for token in o.token_ids] == solo(late, VOCAB)
    await engine.stop()


async def test_a_step_ahead_begins_when_the_one_before_it_has_been_collected() -> None:
    """Where a launch is the step: what follows its threads must not see the next one before it has seen the end."""
    seen: list[tuple[str, int, int]] = []
    inner = FakeRunner(block_size=64, vocab_size=VOCAB)

    class Noting:
        def launch(self, output: SchedulerOutput) -> Collect:
            collect = inner.launch(output)
            seen.append(("launch", output.step_id, threading.get_ident()))

            def collected() -> ModelRunnerOutput:
                seen.append(("collect", output.step_id, threading.get_ident()))
                return collect()

            return collected

    engine = make_engine(1, Noting(), SHORT, ahead_seconds=0.02)
    await engine.start()
    request = make_request("a", range(5), 20)
    assert (await collect(engine, request))[0] == solo(request, VOCAB)
    await engine.stop()
    steps = [step for what, step, _ in seen if what == "launch"]
    assert [(what, step) for what, step, _ in seen] == [
        (what, step) for step in steps for what in ("launch", "collect")
    ]
    assert len({thread for *_, thread in seen}) == 1


async def test_a_step_that_hangs_ends_every_stream_and_the_engine() -> None:
    runner = GatedRunner()
    engine = engine_of(make_core(), runner, step_limits=StepLimits(unknown=0.2))
    deaths: list[str] = []
    engine.on_death = lambda cause, _why: deaths.append(cause)
    await engine.start()
    runner.open = False
    stream = await submit_one(engine, make_request("a", range(5), 1))
    final = [o async for o in stream][-1]
    assert is_error(final, EngineUnavailableError)
    assert engine.state is EngineState.DEAD
    with pytest.raises(EngineUnavailableError):
        await submit_one(engine, make_request("b", range(5), 1))
    assert deaths == ["hung"] and "made no progress" in (engine.trouble or "")
    runner.open = True
    runner.permits.release(5)
    await engine.stop()
    assert deaths == ["hung"], "the step that ended late changes nothing"


async def test_stop_does_not_wait_for_a_step_that_hangs() -> None:
    runner = GatedRunner()
    engine = make_engine(0, runner)
    await engine.start()
    runner.open = False
    await submit_one(engine, make_request("a", range(5), 1))
    assert await asyncio.to_thread(runner.entered.acquire, timeout=30)
    await engine.stop()
    assert engine.state is EngineState.DEAD
    runner.permits.release(5)


async def test_the_first_steps_may_take_longer_than_their_prediction_says() -> None:
    """On a starved machine one took two seconds, and the server did not start."""
    runner = GatedRunner()
    runner.open = False
    limits = StepLimits(floor=0.02)
    engine = engine_of(make_core(model=LatencyModel(intercept=1e-4)), runner, step_limits=limits)
    starting = asyncio.create_task(engine.start())
    assert await asyncio.to_thread(runner.entered.acquire, timeout=30)
    await asyncio.sleep(10 * limits.floor)
    runner.open = True
    runner.permits.release(5)
    await starting
    assert engine.state is EngineState.READY
    await engine.stop()


def test_a_step_should_take_twenty_times_its_prediction_at_most() -> None:
    limits = StepLimits()
    assert (limits.limit(None), limits.limit(0.01), limits.limit(0.5)) == (60.0, 2.0, 10.0)


async def test_a_broken_loop_ends_streams_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(0)
    await engine.start()

    def broken(*_: object) -> None:
        raise AssertionError("bug")

    monkeypatch.setattr(engine.core, "update", broken)
    outputs = [o async for o in outputs_of(engine, make_request("a", range(5), 5))]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert is_error(outputs[-1], EngineUnavailableError)
    assert engine.state is EngineState.DEAD
    with pytest.raises(EngineUnavailableError):
        await submit_one(engine, make_request("b", range(5), 5))
    await engine.stop()


async def test_a_lost_device_is_asked_for_and_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial runs on it: a request would be found guilty of what every other one would meet as well."""
    runner, launched = FakeRunner(block_size=64, vocab_size=VOCAB), 0
    engine = make_engine(0, runner)
    why: list[str | None] = [None, "an illegal memory access was encountered"]
    monkeypatch.setattr(engine, "_device_lost", lambda: why.pop(0))
    await engine.start()

    def failing(_output: SchedulerOutput) -> Collect:
        nonlocal launched
        launched += 1
        raise RuntimeError(f"failure {launched}")

    monkeypatch.setattr(runner, "launch", failing)
    outputs = [o async for o in outputs_of(engine, make_request("a", range(5), 5))]
    assert is_error(outputs[-1], EngineUnavailableError)
    assert launched == 2 and not why, "one step that failed, and one that the device did not survive"
    assert "device is lost: an illegal memory access" in (engine.trouble or "")
    await engine.stop()


def make_planned_engine(plan_offline: Any, depth: int = 0) -> Engine:
    engine = make_engine(depth)
    engine.core.plan_offline = lambda now: plan_offline(engine.core, now)  # type: ignore[method-assign]
    return engine


def dead(core: EngineCore, now: float) -> Generator[None, None, OfflinePlan]:
    raise RuntimeError("the planner is dead")
    yield


def endless(core: EngineCore, now: float) -> Generator[None, None, OfflinePlan]:
    while True:
        yield


def wrong(core: EngineCore, now: float) -> Generator[None, None, OfflinePlan]:
    yield
    chunks = [
        PlannedChunk(name, length, running)
        for name in ("nobody", "job", "chat")
        for length in (0, 9**9)
        for running in (True, False)
    ]
    return OfflinePlan(tuple(chunks))


@pytest.mark.parametrize("plan_offline", [dead, endless, wrong])
async def test_a_planner_that_fails_never_harms_an_online_request(plan_offline: Any) -> None:
    engine = make_planned_engine(plan_offline)
    await engine.start()
    job = await submit_one(engine, make_request("job", range(5), 50, request_class=RequestClass.OFFLINE))
    chat = make_request("chat", range(9), 10)
    tokens, final = await collect(engine, chat)
    assert tokens == solo(chat, VOCAB) and final.finish_reason is FinishReason.LENGTH
    await job.aclose()
    await engine.stop()
    check_core(engine.core)


@pytest.mark.parametrize("depth", [0, 1])
async def test_offline_requests_run_on_in_steps_that_are_shorter_than_a_plan(depth: int) -> None:
    """One plan is made, and never another: its requests go on in every step beside the chat."""
    plans = 0

    def once(core: EngineCore, now: float) -> Generator[None, None, OfflinePlan]:
        nonlocal plans
        plans += 1
        while plans > 1:
            yield
        return OfflinePlan((PlannedChunk("job", 5, running=False),))

    engine = make_planned_engine(once, depth)
    await engine.start()
    chat = asyncio.create_task(collect(engine, make_request("chat", range(9), 1000)))
    job = make_request("job", range(5), 50, request_class=RequestClass.OFFLINE)
    tokens, _ = await collect(engine, job)
    assert tokens == solo(job, VOCAB) and not chat.done()
    engine.abort("chat")
    await chat
    await engine.stop()
    check_core(engine.core)


async def test_a_refused_request_is_a_part_of_the_recorded_load() -> None:
    slo = SLO.parse("ttft_p99=1s")
    model = OnlineModel(LatencyModel(intercept=0.01))
    core = make_core(model=model, max_num_waiting=1)
    keeper = Colocation(core, model, slo, initial_budget(slo, model.model))
    engine = engine_of(core, colocation=keeper)
    await engine.start()
    stream = await submit_one(engine, make_request("a", range(30), 2))
    with pytest.raises(QueueFullError):
        await submit_one(engine, make_request("b", range(40), 9))
    async for _ in stream:
        pass
    await engine.stop()
    with pytest.raises(EngineUnavailableError):
        await submit_one(engine, make_request("c", range(50), 9))
    assert [arrival.lengths.prompt for arrival in keeper.load.arrivals] == [40, 30]


@pytest.mark.parametrize("depth", [0, 1])
async def test_offline_work_takes_turns_with_rests_and_chats_do_not(depth: int) -> None:
    """A rest of 0.1 s behind every offline step that no chat is beside; a chat that comes meanwhile runs."""
    rests: list[float] = []
    engine = make_engine(depth, FakeRunner(block_size=64, vocab_size=VOCAB, latency=lambda _: 0.005))
    core = engine.core
    core.set_objective(StepObjective(wait=0.005 / 42))
    schedule = core.schedule

    def watched(now: float, plan: OfflinePlan | None = None) -> SchedulerOutput | None:
        output = schedule(now, plan)
        if output is None and core.retry_at is not None:
            rests.append(core.retry_at - now)
        return output

    core.schedule = watched  # type: ignore[method-assign]
    await engine.start()
    early = make_request("early", range(5), 3, request_class=RequestClass.OFFLINE)
    assert (await collect(engine, early))[0] == solo(early, VOCAB) and not rests, "no chat has come yet"
    await collect(engine, make_request("first", range(7), 2))
    job = make_request("job", range(5), 3, request_class=RequestClass.OFFLINE)
    ended = asyncio.create_task(collect(engine, job))
    await until(lambda: bool(rests))
    chat = make_request("chat", range(7), 20)
    tokens, _ = await collect(engine, chat)
    assert tokens == solo(chat, VOCAB)
    tokens, output = await ended
    assert tokens == solo(job, VOCAB) and output.finish_reason is FinishReason.LENGTH
    assert 0.0 < max(rests) <= 0.1 + 1e-6
    await engine.stop()
