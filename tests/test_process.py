"""The engine in a process of its own: in every fault of the process, requests end as if nothing had happened."""

import asyncio
import gc
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import is_error, submit_one, until
from support.tables import mostly_slow

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput, SamplingParams
from engine.client import EngineState, OutputStream
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineStepError, EngineUnavailableError, InvalidRequestError
from engine.forms import Grammar
from engine.loop.watchdog import StepLimits
from engine.machine.child import framed
from engine.process import frames, launcher, life
from engine.process.client import EngineProcess
from engine.process.launcher import Child, ProcessOptions
from engine.process.requests import RestartPolicy

pytestmark = pytest.mark.cpu_limit(12)  # each engine process imports for a second
CHILD = Path(__file__).parent / "scripted_child.py"
CONFIG = EngineConfig(slo="ttft_p99=20s", max_queue_time="none")
POISON = 399
POINTS = ("before", "hang", "after", "loop", "frame", "device", "before", "hang")
"""Points at which a process dies; each three neighbours are met in a row."""


def request(name: str, prompt: int = 7, **sampling: Any) -> EngineRequest:
    """No two names share a prefix, so that nothing depends on the order of arrival."""
    params = SamplingParams(**{"max_tokens": 24, "temperature": 1.0, **sampling})
    return EngineRequest(name, (*name.encode()[:4].ljust(4), *range(prompt - 4)), params)


def mixture() -> list[EngineRequest]:
    """Everything whose state is more than the tokens: seeds, penalties, min_tokens, logprobs, ends, background work."""
    several = [request(f"n{index}", seed=5 + index) for index in range(3)]
    offline = {"request_class": RequestClass.OFFLINE, "final_only": True, "lane": Lane.BATCH}
    line = request("line", seed=11, logprobs=1)
    return [
        request("greedy", temperature=0.0),
        request("seeded", seed=3),
        request("penalties", repetition_penalty=1.3, presence_penalty=0.5),
        request("logprobs", logprobs=2),
        request("least", min_tokens=20, stop_token_ids=frozenset({402})),
        request("ends", max_tokens=200, stop_token_ids=frozenset({402})),
        request("long", prompt=90),
        *several,
        EngineRequest("line", line.prompt_token_ids, line.sampling, **offline),  # type: ignore[arg-type]
    ]


@asynccontextmanager
async def engine_process(
    folder: Path, faults: str = "", *, loaded: bool = False, **options: Any
) -> AsyncIterator[EngineProcess]:
    """Started; at the end no process, task or descriptor is left."""
    await asyncio.to_thread(folder.mkdir)
    before, descriptors = children(), num_descriptors()
    command = [sys.executable, "-P", str(CHILD), str(folder), faults]
    options = {"policy": RestartPolicy(max_delay=0.05), "config": CONFIG, **options}
    config, pid_file = options.pop("config"), folder.parent / "engine.pid"
    engine = EngineProcess(config, ProcessOptions(command=command, pid_file=pid_file, **options))
    if loaded:
        await asyncio.to_thread(engine.load, lambda _planned: None)
    await engine.start()
    tasks = asyncio.all_tasks()
    try:
        yield engine
    finally:
        await engine.stop()
    assert children() <= before, "a process is left"
    assert not [task for task in asyncio.all_tasks() - tasks if not task.done()], "a task is left"
    for _ in range(10):  # transports close their sockets in a later round
        await asyncio.sleep(0)
    gc.collect()  # those of errors that were told
    assert num_descriptors() <= descriptors, "a descriptor is left"
    assert "engine.pid" not in os.listdir(folder.parent)


async def collect(engine: EngineProcess, asked: EngineRequest) -> list[RequestOutput]:
    return [output async for output in await submit_one(engine, asked)]


def summed(outputs: list[RequestOutput]) -> tuple[Any, ...]:
    """The parts of an answer that a client sees."""
    last = outputs[-1]
    return (
        [token for output in outputs for token in output.token_ids],
        [logprob for output in outputs for logprob in output.logprobs or ()],
        last.finish_reason,
        last.stop_token_id,
        (last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens),
    )


async def answers(engine: Any) -> dict[str, tuple[Any, ...]]:
    requests = mixture()
    found = await asyncio.gather(*[collect(engine, each) for each in requests])
    return {each.request_id: summed(outputs) for each, outputs in zip(requests, found, strict=True)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    async def run() -> dict[str, tuple[Any, ...]]:
        async with engine_process(tmp_path_factory.mktemp("calm") / "children") as engine:
            return await answers(engine)

    found = asyncio.run(run())
    assert {name: answer[2] for name, answer in found.items()}["greedy"] is FinishReason.LENGTH
    assert found["ends"][2] is FinishReason.STOP and len(found["least"][0]) >= 20
    return found


@pytest.mark.parametrize(
    "points",
    [pytest.param(POINTS[at : at + 3], marks=pytest.mark.slow if at else ()) for at in range(6)],
    ids=",".join,
)
async def test_every_request_ends_as_if_the_process_had_not_died(
    points: tuple[str, ...], tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    """Three processes die one after the other; each point is met in the first, the second and the seventh step."""
    faults = "{}:1:1-1,{}:2:2-2,{}:7:3-3".format(*points)
    async with engine_process(tmp_path / "children", faults) as engine:
        assert await answers(engine) == undisturbed
        stats = await engine.stats()
        assert sum(stats.restarts.values()) == 3 and stats.resumed_requests > 0
        assert stats.steps > 15, "the steps of all processes"
        await until_idle(engine)
        again = await collect(engine, request("seeded", seed=3))
        assert summed(again)[0] == undisturbed["seeded"][0], "and the next process serves new requests"


@pytest.mark.parametrize(
    "faults",
    [
        "short:1,token:2,oom:7,learner:1,planner:2",
        "oom:1,short:2,token:7,learner:2,planner:7",
        "token:1,oom:2,short:7,learner:7,planner:1",
    ],
)
async def test_what_goes_wrong_in_the_engine_needs_no_other_process(
    faults: str, tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    async with engine_process(tmp_path / "children", faults) as engine:
        assert await answers(engine) == undisturbed
        stats = await engine.stats()
        assert not stats.restarts and stats.failed_steps == 3, "of a short result, a wrong token, and no memory"
        await until_idle(engine)


async def test_only_the_first_start_tests_the_model(tmp_path: Path) -> None:
    """Streams wait for the others."""
    async with engine_process(tmp_path / "children") as engine:
        assert CONFIG.self_test and not engine.launcher.launch.config.self_test
        assert replace(engine.launcher.launch.config, self_test=True) == CONFIG


async def test_a_process_killed_from_outside(tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]) -> None:
    async with engine_process(tmp_path / "children") as engine:
        stream = await submit_one(engine, request("seeded", seed=3))
        outputs = [await anext(stream)]
        os.kill(int((tmp_path / "engine.pid").read_text()), signal.SIGKILL)
        outputs += [output async for output in stream]
        assert summed(outputs) == undisturbed["seeded"]
        assert outputs[-1].num_preemptions == 0, "that was no eviction"
        assert (await engine.stats()).restarts == {"killed": 1}
        times = [output.times for output in outputs]
        assert {t.arrival for t in times} == {times[0].arrival} and {t.first_token for t in times} == {
            times[0].first_token
        }
        assert int((tmp_path / "engine.pid").read_text()) == engine.child.process.pid  # type: ignore[union-attr]


async def test_a_request_that_came_during_a_restart_is_served_and_its_wait_counts(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    async with engine_process(tmp_path / "children") as engine:
        engine.kill()
        await until(lambda: engine.state is EngineState.DEGRADED)
        before = time.monotonic()
        waiting = asyncio.create_task(collect(engine, request("seeded", seed=3)))
        await until(lambda: len(engine._requests) == 1)
        after = time.monotonic()
        outputs = await waiting
        assert summed(outputs) == undisturbed["seeded"]
        assert before <= outputs[-1].times.arrival <= after


async def test_usage_goes_on_although_the_next_process_has_an_empty_cache(tmp_path: Path) -> None:
    async with engine_process(tmp_path / "children") as engine:
        await collect(engine, request("a", prompt=21))
        stream = await submit_one(engine, request("a", prompt=21))
        outputs = [await anext(stream)]
        engine.kill()
        outputs += [output async for output in stream]
        assert {output.num_cached_tokens for output in outputs} == {20}


@pytest.mark.parametrize("how", mostly_slow(["block", "stop"], ["stop"]))
async def test_a_process_that_says_nothing_is_killed(
    how: str, tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    faults = "block:3" if how == "block" else ""
    async with engine_process(tmp_path / "children", faults, silence=StepLimits(unknown=3.0)) as engine:
        if how == "stop":
            os.kill(int((tmp_path / "engine.pid").read_text()), signal.SIGSTOP)
        assert summed(await collect(engine, request("seeded", seed=3))) == undisturbed["seeded"]
        assert (await engine.stats()).restarts == {"silent": 1}


@pytest.mark.parametrize(
    ("slo", "queue", "seconds"),
    [("ttft_p99=1s", "10x", 10.0), ("ttft_p99=20s", "5s", 20.0), ("tbt_p99=1s", "2x", 20.0)],
)
async def test_a_new_request_waits_for_the_next_process_as_long_as_it_may(
    slo: str, queue: str, seconds: float, tmp_path: Path
) -> None:
    now = 0.0
    config = replace(CONFIG, slo=slo, max_queue_time=queue)
    async with engine_process(tmp_path / "children", "ready:1:2-9", clock=lambda: now, config=config) as engine:
        assert engine.child is not None
        engine.child.kill()
        await until(lambda: engine.state is EngineState.DEGRADED)
        assert engine.trouble is not None
        waiting = asyncio.create_task(collect(engine, request("waiting")))
        line = asyncio.create_task(collect(engine, mixture()[-1]))
        await until(lambda: len(engine._requests) == 2)
        now = seconds - 0.1
        engine.turned.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done() and engine.state is EngineState.DEGRADED
        now = seconds + 0.1
        engine.turned.set()
        with pytest.raises(EngineUnavailableError) as refused:
            await waiting
        assert refused.value.retry_after >= 1.0
        assert not line.done(), "the line of a batch waits"
        line.cancel()
        await asyncio.wait([line])
        assert not len(engine._requests)


async def test_a_process_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    async with engine_process(tmp_path / "children", "before:2,ready:1:2-9") as engine:
        outputs = await collect(engine, request("a"))
        assert is_error(outputs[-1], EngineUnavailableError)
        assert "too often" in await engine.wait_dead()
        assert engine.state is EngineState.DEAD
        with pytest.raises(EngineUnavailableError):
            await submit_one(engine, request("b"))
        assert sum((await engine.stats()).restarts.values()) == 6


@pytest.mark.parametrize("beside", mostly_slow([True, False], [True]), ids=["beside-others", "alone"])
async def test_requests_that_kill_every_process_end_and_nobody_else_does(
    beside: bool, tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    """More deaths than a server may have: those that are proven to be a request's fault do not count."""
    poisons = [EngineRequest(f"poison{i}", (POISON, i, 3), SamplingParams(max_tokens=9)) for i in range(2)]
    async with engine_process(tmp_path / "children", f"poison:{POISON}:1-99") as engine:
        ends = [asyncio.create_task(collect(engine, each)) for each in poisons]
        if beside:
            assert await answers(engine) == undisturbed
        for end in ends:
            outputs = await end
            assert is_error(outputs[-1], EngineStepError) and outputs[-1].num_output_tokens <= 3
        assert sum((await engine.stats()).restarts.values()) in range(7, 19)  # more where trials took longer
        assert len(engine.judge.policy._deaths) <= 2, "but for one of each that was proven while nothing else got on"
        assert summed(await collect(engine, request("seeded", seed=3)))[0] == undisturbed["seeded"][0]
        await until_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside-others"])
async def test_a_grammar_that_kills_every_process_ends_its_request_and_nobody_else(
    alone: bool, tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    """It never gets as far as a step; several answers of one request share it."""
    grammar = Grammar("regex", "poison")
    bad = [request("bad1", grammar=grammar), request("bad2", grammar=grammar)]
    line = EngineRequest("line2", (1, 2), bad[0].sampling, RequestClass.OFFLINE, final_only=True, lane=Lane.BATCH)
    async with engine_process(tmp_path / "children") as engine:
        streams = await engine.submit(bad)
        ends = [asyncio.create_task(_read(stream)) for stream in [*streams, *await engine.submit([line])]]
        if not alone:
            assert await answers(engine) == undisturbed
        for end in ends:
            outputs = await end
            assert is_error(outputs[-1], EngineStepError) and outputs[-1].num_output_tokens == 0
        assert len(engine.judge.policy._deaths) <= 1, "they are forgiven"
        good = await collect(engine, request("seeded", seed=3, grammar=Grammar("regex", "good")))
        assert summed(good)[0] == undisturbed["seeded"][0]
        await until_idle(engine)


async def test_a_request_that_is_cancelled_is_no_longer_prepared(tmp_path: Path) -> None:
    async with engine_process(tmp_path / "children") as engine:
        several = [request(f"n{index}", grammar=Grammar("regex", "endless")) for index in range(2)]
        submitted = asyncio.create_task(engine.submit(several))
        await collect(engine, request("meanwhile"))
        submitted.cancel()
        await asyncio.wait([submitted])
        await asyncio.to_thread(_wait_for, tmp_path / "cancelled")
        assert not engine.holds("n0") and await collect(engine, request("after"))


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


async def _read(stream: OutputStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def test_no_process_is_kept_back_while_each_that_is_killed_has_got_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_process(tmp_path / "children") as engine:
        real, kills = engine._deliver, 0

        def deliver(output: RequestOutput) -> None:
            """The first tokens of each process are its last, three times."""
            nonlocal kills
            real(output)
            if kills < 3 and engine._figures.restarts.total() == kills:
                kills += 1
                engine.kill()

        engine._deliver = deliver  # type: ignore[method-assign]
        assert len(summed(await collect(engine, request("long", max_tokens=400)))[0]) == 400
        assert re.findall(r"is started again (.*?),", caplog.text) == ["at once"] * 3


async def test_other_weights_are_taken_up_while_streams_wait(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    model = tmp_path / "model"
    await asyncio.to_thread(model.mkdir)
    weights, tokenizer = model / "model.safetensors", model / "tokenizer.json"
    for path in (weights, tokenizer):
        path.write_text("1")
    config = replace(CONFIG, model=str(model))
    async with engine_process(tmp_path / "children", config=config, loaded=True) as engine:
        first = (tmp_path / "engine.pid").read_text()
        streams = await engine.submit(mixture())
        ends = [asyncio.create_task(_read(stream)) for stream in streams]
        assert "have not changed" in await engine.renew()
        weights.write_text("22")
        (model / "broken").touch()
        with pytest.raises(ConfigError, match="broken"):
            await engine.renew()
        (model / "broken").unlink()
        tokenizer.write_text("2")
        with pytest.raises(ConfigError, match=r"tokenizer\.json changed"):
            await engine.renew()
        tokenizer.write_text("1")
        assert (tmp_path / "engine.pid").read_text() == first and engine.state is EngineState.READY
        assert "another engine process" in await engine.renew()
        found = {each.request_id: summed(await end) for each, end in zip(mixture(), ends, strict=True)}
        assert found == undisturbed
        assert "have not changed" in await engine.renew()
        assert (await engine.stats()).restarts == {"renewed": 1} and not engine.judge.policy._deaths
        assert (tmp_path / "engine.pid").read_text() != first


async def _spare(engine: EngineProcess) -> int:
    """The number of the next process, once it is there."""
    while (held := engine.launcher._held) is None or not held.has_spoken:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.01)
    return held.process.pid


async def test_a_spare_process_takes_over(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time; and where it is gone another one is started as ever."""
    monkeypatch.setattr(life, "SPARE_SECONDS", 0.0)
    number = tmp_path / "engine.pid"
    async with engine_process(tmp_path / "children", spare=True) as engine:
        for lost in (False, False, True):
            spare = await _spare(engine)
            assert int(number.read_text()) != spare
            if lost:
                os.kill(spare, signal.SIGKILL)
            streams = [await submit_one(engine, each) for each in mixture()]
            first = await anext(streams[0])
            engine.child.kill()  # type: ignore[union-attr]
            found = await asyncio.gather(*[_read(stream) for stream in streams])
            found[0].insert(0, first)
            assert (int(number.read_text()) == spare) is not lost
            expected = [undisturbed[each.request_id][:4] for each in mixture()]  # prompts may be in the prefix cache
            assert [summed(outputs)[:4] for outputs in found] == expected
        spare = await _spare(engine)
        monkeypatch.setattr(Child, "has_spoken", False)
        engine.child.kill()  # type: ignore[union-attr]
        assert len(await collect(engine, mixture()[0])) and int(number.read_text()) != spare, "it was not ready"


async def test_a_spare_process_is_of_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "SPARE_SECONDS", 0.0)
    model = tmp_path / "model"
    await asyncio.to_thread(model.mkdir)
    weights = model / "model.safetensors"
    weights.write_text("1")
    config = replace(CONFIG, model=str(model))
    async with engine_process(tmp_path / "children", config=config, loaded=True, spare=True) as engine:
        spare = await _spare(engine)
        weights.write_text("22")
        assert "another engine process" in await engine.renew()
        assert int((tmp_path / "engine.pid").read_text()) not in (spare, await _spare(engine))
        monkeypatch.setattr(launcher, "available_memory", lambda: 0)
        await engine.launcher.drop()
        await engine.launcher.keep_spare()
        assert engine.launcher._held is None, "there is no room for it"


@pytest.mark.parametrize("times", mostly_slow([1, 2, 7], [1]))
async def test_processes_that_die_before_they_are_ready_are_followed_by_others(
    times: int, tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    policy, faults = RestartPolicy(99, max_delay=0.05), f"after:4:1-1,ready:1:2-{times + 1}"
    async with engine_process(tmp_path / "children", faults, policy=policy) as engine:
        assert await answers(engine) == undisturbed
        assert (await engine.stats()).restarts == {"killed": 1 + times}
        await until_idle(engine)


async def test_what_the_process_refuses_is_raised_here(tmp_path: Path) -> None:
    async with engine_process(tmp_path / "children") as engine:
        with pytest.raises(InvalidRequestError):
            await engine.submit([request("a"), request("too long", prompt=500)])
        assert not len(engine._requests)
        stream = await submit_one(engine, request("a", max_tokens=400))
        with pytest.raises(InvalidRequestError):
            await submit_one(engine, request("a"))
        await anext(stream)
        engine.abort("a", FinishReason.STOP)
        engine.abort("nobody")
        assert [output async for output in stream][-1].finish_reason is FinishReason.STOP
        await until_idle(engine)


async def test_stop_drains_and_then_ends_the_rest(tmp_path: Path) -> None:
    async with engine_process(tmp_path / "children") as engine:
        short = await submit_one(engine, request("short", max_tokens=3))
        stopping = asyncio.create_task(engine.stop(30.0))
        assert [output async for output in short][-1].finish_reason is FinishReason.LENGTH
        await stopping
        with pytest.raises(EngineUnavailableError):
            await submit_one(engine, request("late"))


async def test_stop_does_not_wait_for_a_process_that_hangs(tmp_path: Path) -> None:
    async with engine_process(tmp_path / "children", "block:2") as engine:
        stream = await submit_one(engine, request("a"))
        await anext(stream)
        await engine.stop()
        assert [output async for output in stream][-1].finish_reason is FinishReason.ABORT


async def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    before = children()
    engine = EngineProcess(EngineConfig(model="/no/such/folder"), ProcessOptions(pid_file=tmp_path / "engine.pid"))
    with pytest.raises(ConfigError, match="/no/such/folder"):
        await asyncio.to_thread(engine.load, lambda _planned: None)
    assert not (tmp_path / "engine.pid").exists() and children() <= before


def test_when_a_process_is_started_again() -> None:
    policy = RestartPolicy()
    assert [policy.died(float(second)) for second in range(5)] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert policy.died(5.0) is None
    late = RestartPolicy(max_deaths=9)
    assert [late.died(float(second)) for second in range(8)][-2:] == [30.0, 30.0] or late.max_delay == 30.0
    many = RestartPolicy(max_deaths=5000, max_delay=0.0)
    assert {many.died(0.1 * number) for number in range(4000)} == {0.0}
    killed = RestartPolicy(max_deaths=9)
    assert [killed.died(float(second), worked=True) for second in range(3)] == [0.0] * 3, "it got on each time"
    assert [killed.died(float(second)) for second in range(3, 6)] == [0.0, 1.0, 2.0], "now it does not"
    assert [killed.died(7.0, worked=True), killed.died(8.0), killed.died(9.0)] == [0.0, 0.0, None]
    well = RestartPolicy()
    for minute in range(20):
        well.ready(100.0 * minute)
        assert well.died(100.0 * minute + 70.0) == 0.0, "a minute in health makes up for the deaths before"


@pytest.mark.parametrize("stuck", mostly_slow([False, True], [True]))
async def test_requests_go_on_behind_a_planned_restart(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]], stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams are not ended with the process that they are taken from; one that is stuck is not waited for."""
    if stuck:
        monkeypatch.setattr(life, "STOP_SECONDS", 0.1)
    await asyncio.to_thread((tmp_path / "model").mkdir)
    (tmp_path / "model" / "model.safetensors").write_text("1")
    config = replace(CONFIG, model=str(tmp_path / "model"))
    async with engine_process(tmp_path / "run", config=config, loaded=True) as engine:
        await collect(engine, request("chat", prompt=40))
        first = int((tmp_path / "engine.pid").read_text())
        streams = await engine.submit(mixture())
        ends = [asyncio.create_task(_read(stream)) for stream in streams]
        await until(lambda: any(entry.token_ids for entry in engine._requests))
        if stuck:
            os.kill(first, signal.SIGSTOP)
        renewal = asyncio.create_task(engine.renew(anyway=True))
        await asyncio.sleep(0)
        late = asyncio.create_task(collect(engine, request("late")))
        assert "another engine process" in await renewal
        found = {each.request_id: summed(await end)[:4] for each, end in zip(mixture(), ends, strict=True)}
        assert found == {name: expected[:4] for name, expected in undisturbed.items()}
        assert (await late)[-1].finish_reason is FinishReason.LENGTH
        assert (await engine.stats()).restarts == {"renewed": 1}
        assert int((tmp_path / "engine.pid").read_text()) != first
        await until_idle(engine)


def test_frames_come_out_as_they_went_in_however_they_are_cut() -> None:
    messages: list[frames.ToEngine] = [frames.Submit(1, tuple(mixture())), frames.Shutdown(), frames.AskStats(2)]
    data = b"".join(map(frames.encode, messages))
    for size in (1, 3, 100, len(data)):
        reader = frames.engine_reader()
        found = [m for start in range(0, len(data), size) for m in reader.feed(data[start : start + size])]
        assert found == messages
    for nonsense in (b"\xff" * 8, framed(b"\xc1"), frames.encode(frames.Started())):
        with pytest.raises(frames.FrameError):
            frames.engine_reader().feed(nonsense)


async def until_idle(engine: EngineProcess) -> None:
    """Blocks and rows are back."""
    while True:
        stats = await engine.stats()
        if not any(stats.running.values()) and not any(stats.waiting.values()) and stats.units_owned == 0:
            return
        await asyncio.sleep(0.01)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """Return the processes that this one started and that still run or are not reaped."""
    found = set()
    for entry in (each / "stat" for each in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(int(entry.parent.name))
    return found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_process_asks_for_huge_pages_unless_it_is_told(
    given: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    code = "import os, socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(os.environb[b'GLIBC_TUNABLES'])"
    child = Child.spawn([sys.executable, "-c", code], frames.Launch(EngineConfig()))
    try:
        assert child.sock.recv(100).decode() == told
    finally:
        child.kill()
        child.reap()
