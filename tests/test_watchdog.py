"""An engine that stands still says so, is not ready, and recovers; defects are put into it by hand."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from driver import Driver, is_error, make_request, outputs_of, submit_one, until
from fake_engine import serve
from fakes.runner import FakeRunner, solo
from integrity import check_core

from engine.api import EngineRequest, FinishReason, RequestClass
from engine.build import plan_launch
from engine.client import EngineInfo, EngineState
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import EngineUnavailableError
from engine.limits import SchedulerConfig
from engine.loop.watchdog import ProgressWatchdog, clear_stall
from engine.request import RequestStatus
from engine.scheduling.waiting import WaitingQueue
from engine.text.tokenizer import Tokenizer

VOCAB, BLOCK = 50, 4
OFFLINE = RequestClass.OFFLINE


def make_engine(stall_seconds: float = 0.25, **changes: Any) -> Engine:
    """Its patience is longer than the loop's waits on a busy machine between two steps: that would be a stall."""
    settings: dict[str, Any] = {"num_units": 128, "max_model_len": 256, "block_size": BLOCK}
    core = EngineCore(SchedulerConfig(**{**settings, **changes}))
    info = EngineInfo(256, VOCAB, frozenset(), "fake", "none", "none", 0)
    return Engine(core, FakeRunner(block_size=BLOCK, vocab_size=VOCAB), info, stall_seconds=stall_seconds)


async def answer(engine: Engine, request: EngineRequest) -> list[int]:
    return [token async for output in outputs_of(engine, request) for token in output.token_ids]


def lose_the_queue(core: EngineCore) -> None:
    core.state.waiting_online = WaitingQueue()


def lose_the_rows(core: EngineCore) -> None:
    core.state.free_rows.clear()


@pytest.mark.parametrize("damage", [lose_the_queue, lose_the_rows])
async def test_queues_and_rows_are_built_anew(
    damage: Callable[[EngineCore], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    await engine.start()
    request = make_request("a", range(9), 6)
    add_request, seen = engine.core.add_request, []

    def add_and_damage(*given: Any, **named: Any) -> Any:
        """Damaged before a step can begin: a request that runs needs neither the queue nor a free row."""
        added = add_request(*given, **named)
        damage(engine.core)
        return added

    def look_and_clear(*given: Any, **named: Any) -> Any:
        seen.append((engine.state, engine.trouble))
        return clear_stall(*given, **named)

    monkeypatch.setattr(engine.core, "add_request", add_and_damage)
    monkeypatch.setattr("engine.engine.clear_stall", look_and_clear)
    stream = await submit_one(engine, request)
    assert [token async for output in stream for token in output.token_ids] == solo(request, VOCAB)
    ((state, trouble),) = seen
    assert state is EngineState.DEGRADED and trouble is not None
    assert engine.state is EngineState.READY and engine.trouble is None
    critical = [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(critical) == 1
    assert "stands still" in critical[0] and "units" in critical[0] and "waiting" in critical[0]
    assert engine.stats().stalls == 1
    await engine.stop()
    check_core(engine.core)


async def test_what_can_never_start_ends_with_an_error_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in the queue is poison: no request gets past it until it is taken out."""
    engine = make_engine()
    await engine.start()
    schedule = engine.core.schedule
    monkeypatch.setattr(
        engine.core, "schedule", lambda *given: None if "bad" in engine.core.state.requests else schedule(*given)
    )
    line = make_request("line", range(5), 5, request_class=OFFLINE)
    good = make_request("good", range(7), 5)
    streams = [await submit_one(engine, request) for request in (make_request("bad", range(9), 6), good, line)]
    outputs = [[output async for output in stream] for stream in streams]
    assert outputs[0][-1].finish_reason is FinishReason.ERROR
    assert is_error(outputs[0][-1], EngineUnavailableError)
    for request, given in zip((good, line), outputs[1:], strict=True):
        assert [token for output in given for token in output.token_ids] == solo(request, VOCAB)
    await engine.stop()


async def test_an_aborted_queue_ends_the_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    await engine.start()
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "schedule", lambda *_: None)
        stream = await submit_one(engine, make_request("line", range(5), 5, request_class=OFFLINE))
        await until(lambda: engine.trouble is not None)
        await stream.aclose()
    await until(lambda: engine.state is EngineState.READY)
    assert await answer(engine, make_request("b", range(4), 3)) == solo(make_request("b", range(4), 3), VOCAB)
    await engine.stop()


async def test_a_planner_that_never_ends_is_begun_anew() -> None:
    engine = make_engine()
    await engine.start()

    async def never() -> None:
        await asyncio.Event().wait()

    assert engine._planner._task is not None
    engine._planner._task.cancel()
    engine._planner._task = asyncio.create_task(never())
    line = make_request("line", range(9), 6, request_class=OFFLINE)
    assert await answer(engine, line) == solo(line, VOCAB)
    assert engine.stats().stalls == 1
    await engine.stop()


async def test_neither_an_idle_engine_nor_a_long_step_stands_still() -> None:
    now, recoveries = 0.0, []
    core = EngineCore(SchedulerConfig(num_units=128, max_model_len=256, block_size=BLOCK))
    watchdog = ProgressWatchdog(core, lambda: now, recoveries.append, seconds=0.01)
    watchdog.start()
    now = 100.0
    watchdog.on_work()
    core.add_request(make_request("a", range(5), 4), now)
    output = core.schedule(now)
    assert output is not None
    now = 200.0
    await asyncio.sleep(0.05)
    assert not recoveries and watchdog.trouble is None
    runner = FakeRunner(block_size=BLOCK, vocab_size=VOCAB)
    core.update(output, runner.launch(output)(), now)
    watchdog.on_step()
    now = 201.0
    await until(lambda: bool(recoveries))
    assert watchdog.trouble is not None
    core.abort("a", now)
    await until(lambda: watchdog.trouble is None)
    await watchdog.stop()


async def test_a_recovery_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    core = EngineCore(SchedulerConfig(num_units=128, max_model_len=256, block_size=BLOCK))
    attempts = []

    def recover(attempt: int) -> None:
        attempts.append(attempt)
        raise RuntimeError("broken")

    now = 0.0
    watchdog = ProgressWatchdog(core, lambda: now, recover, seconds=0.001)
    watchdog.start()
    watchdog.on_work()
    core.add_request(make_request("a", range(5), 4), now)
    while len(attempts) < 3:
        now += 1.0
        await asyncio.sleep(0.002)
    await watchdog.stop()
    assert attempts[:3] == [1, 2, 3]
    assert "the recovery failed" in caplog.text


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_recovery_in_the_middle_of_everything_changes_no_answer(attempt: int) -> None:
    config = SchedulerConfig(num_units=2 * 30, max_model_len=100, block_size=BLOCK, max_num_seqs=6)
    driver = Driver(FakeRunner(block_size=BLOCK, vocab_size=VOCAB), config)
    requests = [
        make_request(str(i), range(i, i + 12), 12, request_class=OFFLINE if i % 2 else RequestClass.ONLINE)
        for i in range(8)
    ]
    driver.add(*requests)
    for _ in range(5):
        driver.step()
    assert clear_stall(driver.core, driver.now, attempt) is None
    check_core(driver.core)
    scheduler = driver.core.state
    assert not scheduler.running[OFFLINE]
    assert bool(scheduler.running[RequestClass.ONLINE]) is (attempt == 1)
    assert {r.status for r in scheduler.waiting_offline} == {RequestStatus.PREEMPTED, RequestStatus.WAITING}
    driver.run()
    for request in requests:
        assert driver.outputs[request.request_id] == solo(request, VOCAB)


async def test_ready_says_why_it_is_not(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    tokenizer = Tokenizer.load(plan_launch(EngineConfig(device="cpu")).folder, probe=False)
    async with serve(engine, tokenizer, None) as served, httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        assert (await client.get("/ready")).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(engine.core, "schedule", lambda *_: None)
            stream = await submit_one(engine, make_request("line", range(5), 5, request_class=OFFLINE))
            await until(lambda: engine.trouble is not None)
            refused = await client.get("/ready")
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert "no step has been completed for" in refused.json()["error"]["message"]
            assert "tidemill_stalls_total 1.0" in (await client.get("/metrics")).text
            await stream.aclose()
        await until(lambda: engine.state is EngineState.READY)
        assert (await client.get("/ready")).status_code == 200
