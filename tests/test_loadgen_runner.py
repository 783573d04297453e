"""The runner on a fake clock, and the client against a scripted server."""

import asyncio
import contextlib
import heapq
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import orjson
import pytest
from driver import until
from loadgen_server import Script, serving

from loadgen import metrics
from loadgen.client import Client, StreamEvents
from loadgen.metrics import Slo
from loadgen.plan import FIRST_OFFLINE, Job, Plan, Target, TokenIds, Windows, window_seconds
from loadgen.records import Records, RequestRecord
from loadgen.runner import Run
from loadgen.traces import Trace
from loadgen.workloads import fixed

TARGET = Target("http://nowhere", model="m")


class FakeClock:
    """Virtual seconds: time jumps to the next sleeper when nobody else can run."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    async def sleep_until(self, when: float) -> None:
        if when <= self._now:
            return
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (when, self._count, future))
        await future

    async def drive(self, work: Awaitable[Records]) -> Records:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(30):
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                when, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    self._now = max(self._now, when)
                    future.set_result(None)
        return task.result()


def trace_at(times: list[float], tokens: int = 4) -> Trace:
    return fixed(1, 8, tokens).at(np.array(times))


def plan(online: Trace | None, **more) -> Plan:
    horizon = float(online.arrived_at[-1]) if online is not None and not more.get("closed_loop") else None
    fields = {"target": TARGET, "online": online, "source": TokenIds(), "windows": Windows(horizon=horizon)}
    return Plan(**(fields | more))


class Server:
    """Answers each request after `seconds`, or never (inf); with `in_turn` one at a time. Notes the bodies, and the
    most requests of a class that were open at once."""

    def __init__(self, clock: FakeClock, seconds: Callable[[RequestRecord], float], *, in_turn: bool = False) -> None:
        self.clock, self.seconds = clock, seconds
        self.turn = asyncio.Lock() if in_turn else contextlib.nullcontext()
        self.bodies: list[tuple[str, dict]] = []
        self.open, self.most = Counter[str](), Counter[str]()

    async def send(self, body: bytes, record: RequestRecord) -> None:
        kind = record.service_class
        self.bodies.append((kind, orjson.loads(body)))
        record.sent_at = self.clock.now()
        self.open[kind] += 1
        self.most |= self.open
        events = StreamEvents(record)
        async with self.turn:
            seconds = self.seconds(record)
            await (self.clock.sleep_until(self.clock.now() + seconds) if seconds < math.inf else asyncio.Event().wait())
            events.feed(b'data: {"choices":[{"text":"x","finish_reason":"stop"}]}\n\n', self.clock.now())
        events.close(self.clock.now())
        self.open[kind] -= 1


def stalling(clock: FakeClock) -> Server:
    """One at a time: the first request takes 8 s, each other one 0.25 s."""
    return Server(clock, lambda record: 0.25 if record.index else 8.0, in_turn=True)


async def test_a_stall_is_charged_to_every_request_that_was_due_meanwhile() -> None:
    clock = FakeClock()
    work = plan(trace_at([float(n) for n in range(10)]))
    records = await clock.drive(Run(work, clock, stalling(clock)).execute())
    ttft = [record.ttft for record in sorted(records.requests, key=lambda record: record.index)]
    # Request n waits from second n until the stall ends at 8 and those before it are served.
    assert ttft[:8] == pytest.approx([8.0 + 0.25 * n - n for n in range(8)])
    assert all(record.sent_at == record.scheduled_at and record.lag == 0.0 for record in records.requests)
    attained = metrics.online_metrics(records, (0.0, 10.0), Slo.parse(["ttft:1000"]))["slo_attainment"]
    assert attained < 0.5


async def test_a_limit_on_concurrency_does_not_hide_the_wait() -> None:
    clock = FakeClock()
    work = plan(trace_at([float(n) for n in range(10)]), max_concurrency=1)
    records = await clock.drive(Run(work, clock, stalling(clock)).execute())
    by_index = {record.index: record for record in records.requests}
    assert by_index[1].sent_at == 8.0 and by_index[1].ttft == pytest.approx(7.25)
    assert by_index[1].ttft_sent == pytest.approx(0.25), "the report of a closed-loop tool"
    assert by_index[1].lag == 0.0, "the wait for a slot is no fault of the client"


async def test_closed_loop_schedules_a_request_when_a_slot_is_free() -> None:
    clock = FakeClock()
    clock._now = -1.0
    server = Server(clock, lambda _: 1.0)
    work = plan(trace_at([0.0] * 7), closed_loop=True, max_concurrency=3)
    records = await clock.drive(Run(work, clock, server).execute())
    assert server.most["online"] == 3 and all(record.ttft == 1.0 for record in records.requests)
    assert sorted(record.scheduled_at for record in records.requests) == [0, 0, 0, 1, 1, 1, 2]
    assert records.last_event == 3.0


async def test_the_drain_ends_and_what_is_open_is_unfinished() -> None:
    clock = FakeClock()
    server = Server(clock, lambda record: math.inf if record.index == 1 else 0.5)
    work = plan(trace_at([0.0, 1.0, 2.0]), windows=Windows(horizon=2.0, drain=5.0))
    records = await clock.drive(Run(work, clock, server).execute())
    assert [record.outcome for record in records.requests] == ["ok", "unfinished", "ok"]
    assert records.ended_at == pytest.approx(7.0)
    found = metrics.online_metrics(records, work.windows.measured(records.ended_at), Slo())
    assert found["slo_attainment"] == pytest.approx(2 / 3)


async def test_stop_keeps_what_was_measured() -> None:
    clock = FakeClock()
    run = Run(plan(trace_at([0.0, 1.0, 2.0, 50.0])), clock, Server(clock, lambda _: 0.1))
    clock_stop = asyncio.get_running_loop().create_task(stop_at(clock, 10.0, run.stop))
    records = await clock.drive(run.execute())
    await clock_stop
    assert records.interrupted and len(records.requests) == 3 and records.ended_at == 10.0
    window = Windows(horizon=50.0).measured(records.ended_at)
    assert window == (0.0, 10.0)
    assert metrics.online_metrics(records, window, Slo())["slo_attainment"] == 1.0


async def stop_at(clock: FakeClock, when: float, stop: Callable[[], None]) -> None:
    await clock.sleep_until(when)
    stop()


async def test_flex_keeps_its_concurrency_and_ends_with_the_online_schedule() -> None:
    clock = FakeClock()
    server = Server(clock, lambda _: 1.0)
    jobs = (Job(fixed(500, 8, 4)), Job(fixed(500, 8, 4)))
    work = plan(trace_at([0.0, 4.5]), jobs=jobs, offline_mode="flex", offline_concurrency=5)
    records = await clock.drive(Run(work, clock, server).execute())
    tiers = {(kind, body.get("service_tier")) for kind, body in server.bodies}
    offline = [record for record in records.requests if record.service_class == "offline"]
    assert server.most["offline"] == 5 and tiers == {("online", None), ("offline", "flex")}
    assert len({record.index for record in offline}) == len(offline) and min(r.index for r in offline) >= FIRST_OFFLINE
    assert 25 <= len(offline) <= 35, "five at a time for about six seconds, then stopped"
    assert {record.outcome for record in offline[:20]} == {"ok"}


async def test_flex_alone_runs_to_its_last_line() -> None:
    clock = FakeClock()
    server = Server(clock, lambda _: 0.1)
    work = plan(None, jobs=(Job(fixed(12, 8, 4)),), offline_mode="flex", offline_concurrency=3, offline_tier=None)
    records = await clock.drive(Run(work, clock, server).execute())
    assert len(records.requests) == 12 and all(record.ok for record in records.requests)
    assert all("service_tier" not in body for _, body in server.bodies)


async def outcome_of(kind: str, limit: float = 30.0, tokens: int = 3) -> RequestRecord:
    """One real request whose answer the scripted server gives as `kind`."""
    script = Script(answer=lambda number, body: kind)
    async with serving(script) as url:
        target = Target(url, model="m", timeout=limit, api_key="secret-key")
        loop = asyncio.get_running_loop()
        async with Client(target, loop.time) as client:
            record = RequestRecord(0, "online", loop.time(), 4, tokens)
            body = {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": tokens, "stream": True}
            await client.send(orjson.dumps(body), record)
    assert script.headers[0]["Authorization"] == "Bearer secret-key" and "secret-key" not in repr(target)
    return record


async def test_a_streamed_answer() -> None:
    record = await outcome_of("ok")
    assert record.outcome == "ok" and record.chunk_tokens == [1, 1, 1] and record.input_tokens == 4
    assert record.cached_tokens == 0 and record.finish_reason == "length" and record.status == 200
    assert record.sent_at is not None and record.ttft_sent is not None and record.ttft_sent > 0
    assert record.ended_at is not None and record.ended_at >= record.chunk_at[-1]


async def test_a_hang_ends_as_a_timeout_with_what_arrived() -> None:
    record = await outcome_of("hang", limit=1.0)
    assert record.outcome == "timeout" and record.chunk_tokens == [1] and record.output_tokens == 1


async def test_nobody_listens() -> None:
    loop = asyncio.get_running_loop()
    async with Client(Target("http://127.0.0.1:9"), loop.time) as client:
        record = RequestRecord(0, "online", 0.0, 4, 3)
        await client.send(b"{}", record)
    assert record.outcome == "connection" and record.status == 0 and record.error


class QuickClock(FakeClock):
    """Real loop time from zero, so that polls of a scripted server need no virtual seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._start = asyncio.get_running_loop().time()

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self.now()))


async def run_jobs(script: Script, *, stop: bool = False, **more) -> Records:
    async with serving(script) as url:
        clock = QuickClock()
        target = replace(TARGET, base_url=url)
        async with Client(target, clock.now) as client:
            work = plan(None, jobs=(Job(fixed(6, 5, 3)),), offline_mode="batch", poll_every=0.01, **more)
            run = Run(replace(work, target=target), clock, client)
            if stop:
                stopper = asyncio.create_task(stop_when(script, run))
            records = await run.execute()
            if stop:
                await stopper
    return records


async def stop_when(script: Script, run: Run) -> None:
    await until(lambda: any(job["polls"] >= 2 for job in script.jobs.values()))
    run.stop()


async def test_a_batch_job_from_upload_to_results() -> None:
    script = Script(fail_every=3)
    job = (await run_jobs(script)).jobs[0]
    assert (job.status, job.output_lines, job.error_lines, job.missing, job.duplicated) == ("completed", 4, 2, 0, 0)
    assert (job.input_tokens, job.output_tokens) == (20, 12) and job.error == ""
    assert job.first("in_progress") is not None and job.polls[0].status == "validating"
    lines = [orjson.loads(line) for line in script.files["file-0"].splitlines()]
    assert [line["custom_id"] for line in lines] == [f"0-{n}" for n in range(6)]
    assert all("stream" not in line["body"] and line["body"]["min_tokens"] == 3 for line in lines)
    assert len({tuple(line["body"]["prompt"]) for line in lines}) == 6


async def test_a_stopped_job_is_cancelled_and_its_finished_lines_are_kept() -> None:
    job = (await run_jobs(Script(polls_until_done=1_000_000), stop=True)).jobs[0]
    assert job.status == "cancelled" and job.missing == 0 and job.output_lines == job.polls[-1].completed
    assert job.error_lines == 0 and job.unexecuted == 6 - job.output_lines > 0, "no line failed"


async def test_a_server_without_batches_is_an_error_of_the_job() -> None:
    async with serving(Script()) as url:
        clock = QuickClock()
        target = Target(url + "/missing", model="m")
        async with Client(target, clock.now) as client:
            work = plan(None, jobs=(Job(fixed(2, 5, 3)),), offline_mode="batch", target=target)
            records = await Run(work, clock, client).execute()
    assert "404" in records.jobs[0].error and records.jobs[0].status == "not created"


def test_completion_windows() -> None:
    assert [window_seconds(text) for text in ("24h", "90s", "1.5m", "7d")] == [86400, 90, 90, 604800]
