"""Execution of a plan.

Open loop: every request is sent at its absolute time, regardless of the server. Closed loop: a request starts when a
slot is free. Offline work runs concurrently, as batch jobs or flex requests. Ctrl-C stops the
run and keeps its records. Tests may replace clock and sender.
"""

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from loadgen.client import Client, JobRun, job_lines
from loadgen.plan import FIRST_OFFLINE, Plan, joined, window_seconds
from loadgen.records import ClientSample, JobRecord, Records, RequestRecord
from loadgen.traces import Trace

SAMPLE_EVERY = 1.0


class Clock(Protocol):
    """Clock of a run."""

    def now(self) -> float:
        """Return seconds since the start; negative before it."""
        ...

    async def sleep_until(self, when: float) -> None:
        """Return at `when`, or at once if it has passed; never early."""
        ...


class MonotonicClock:
    """The machine's monotonic clock, zero at the epoch given to `start` and equal in all processes of a machine."""

    def __init__(self) -> None:
        self._epoch = time.monotonic()

    def start(self, epoch: float) -> None:
        """Set zero to `epoch`, a value of time.monotonic(), usually slightly in the future."""
        self._epoch = epoch

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.monotonic() - self._epoch

    async def sleep_until(self, when: float) -> None:
        """Return at `when`. Timers are accurate to 1 ms only, so the last 2 ms are polled."""
        while (left := when - self.now()) > 0:  # noqa: ASYNC110 - no event announces a time
            await asyncio.sleep(left - 0.001 if left > 0.002 else 0)


Send = Callable[[bytes, RequestRecord], Awaitable[None]]


@dataclass(slots=True)
class Progress:
    """Counters for the progress line."""

    at: float = 0.0
    scheduled: int = 0
    sent: int = 0
    finished: int = 0
    failed: int = 0
    offline_finished: int = 0
    offline_lines: int = 0


class Run:
    """A run. `execute` returns the records, also after `stop`."""

    def __init__(self, plan: Plan, clock: Clock, client: Client | None, send: Send | None = None) -> None:
        self.plan = plan
        self.clock = clock
        self.client = client
        self.records = Records()
        self.progress = Progress(scheduled=len(plan.online) if plan.online else 0, offline_lines=plan.offline_lines)
        self._send = send or (client.send if client else None)
        self._maker = plan.maker()
        # Input files are built before the clock starts, because building one could delay a request.
        self._files = self._job_files() if plan.offline_mode == "batch" else []
        self._stop = asyncio.Event()
        self._stop_offline = asyncio.Event()
        self._open = {"online": 0, "offline": 0}

    def stop(self) -> None:
        """End the run early: record open requests as unfinished and cancel jobs."""
        self.records.interrupted = True
        self._stop.set()

    async def execute(self) -> Records:
        """Run the plan and return the records."""
        sampler = asyncio.create_task(self._sample())
        online = asyncio.create_task(self._online())
        offline = asyncio.create_task(self._offline())
        try:
            await self._online_end(online)
            await self._offline_end(offline, wait=self.plan.wait_offline or self.plan.online is None)
        finally:
            for task in (online, offline, sampler):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._take_sample()
        self.records.ended_at = max(0.0, self.clock.now())
        return self.records

    async def _online_end(self, online: asyncio.Task[None]) -> None:
        """Wait for the online requests, until the drain is over or the run is stopped."""
        windows = self.plan.windows
        horizon = windows.horizon
        limits: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.wait())]
        if horizon is not None and self.plan.online is not None:
            limits.append(asyncio.create_task(self.clock.sleep_until(horizon + windows.drain)))
        await _first(online, *limits)
        if online.done():
            online.result()

    async def _offline_end(self, offline: asyncio.Task[None], *, wait: bool) -> None:
        limits: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.wait())]
        horizon = self.plan.windows.horizon
        if not wait or (self.plan.online is None and horizon is not None):
            limits.append(asyncio.create_task(self.clock.sleep_until(horizon or 0.0)))
        await _first(offline, *limits)
        self._stop_offline.set()
        await offline

    async def _online(self) -> None:
        trace = self.plan.online
        if trace is None:
            return
        slots = asyncio.Semaphore(self.plan.max_concurrency) if self.plan.max_concurrency else None
        if self.plan.closed_loop:
            await self.clock.sleep_until(0.0)
        async with asyncio.TaskGroup() as group:
            for row in range(len(trace)):
                record = self._record(trace, row, row, "online")
                body = self._encode(trace, row, row, None)
                if self.plan.closed_loop:
                    if slots:
                        await slots.acquire()
                    record.scheduled_at = self.clock.now()
                else:
                    await self.clock.sleep_until(record.scheduled_at)
                record.lag = self.clock.now() - record.scheduled_at
                self.records.requests.append(record)
                self.progress.sent += 1
                group.create_task(self._one(record, body, slots, held=self.plan.closed_loop))

    async def _one(self, record: RequestRecord, body: bytes, slots: asyncio.Semaphore | None, *, held: bool) -> None:
        if slots and not held:
            await slots.acquire()
        try:
            await self._deliver(record, body)
        finally:
            if slots:
                slots.release()
        self.progress.finished += 1
        self.progress.failed += not record.ok

    async def _deliver(self, record: RequestRecord, body: bytes) -> None:
        if self._send is None:
            raise RuntimeError("a run needs a client or a sender")
        self._open[record.service_class] += 1
        try:
            await self._send(body, record)
        finally:
            self._open[record.service_class] -= 1

    def _record(self, trace: Trace, row: int, index: int, service_class: str) -> RequestRecord:
        return RequestRecord(
            index=index,
            service_class="online" if service_class == "online" else "offline",
            scheduled_at=round(float(trace.arrived_at[row]), 6),
            input_asked=int(trace.input_tokens[row]),
            output_asked=int(trace.output_tokens[row]),
        )

    def _encode(self, trace: Trace, row: int, index: int, tier: str | None, **more: Any) -> bytes:
        body = self.plan.body(self._maker, trace, row, index) | self.plan.stream_fields() | more
        if tier:
            body["service_tier"] = tier
        return orjson.dumps(body)

    async def _offline(self) -> None:
        if self.plan.offline_mode == "flex":
            await self._flex()
            return
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._files)):
                group.create_task(self._job(number))

    async def _flex(self) -> None:
        """Keep a fixed number of offline requests open until the lines run out or offline work is stopped."""
        lines = joined(self.plan.jobs)
        order = iter(range(len(lines)))
        await self.clock.sleep_until(0.0)
        work = asyncio.create_task(self._feed_all(lines, order))
        await _first(work, asyncio.create_task(self._stop_offline.wait()))
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _feed_all(self, lines: list[tuple[Trace, int]], order: Iterator[int]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, self.plan.offline_concurrency)):
                group.create_task(self._feed(lines, order))

    async def _feed(self, lines: list[tuple[Trace, int]], order: Iterator[int]) -> None:
        for number in order:
            trace, row = lines[number]
            index = FIRST_OFFLINE + number
            record = self._record(trace, row, index, "offline")
            body = self._encode(trace, row, index, self.plan.offline_tier, **self.plan.offline_body)
            record.scheduled_at = self.clock.now()
            self.records.requests.append(record)
            await self._deliver(record, body)
            self.progress.offline_finished += 1
            if not record.ok:
                # A closed loop would flood a server that refuses at once; wait for its Retry-After.
                await asyncio.sleep(max(0.05, record.retry_after))

    def _job_files(self) -> list[bytes]:
        files, first = [], FIRST_OFFLINE
        for number, job in enumerate(self.plan.jobs):
            rows = range(len(job.lines))
            bodies = (self.plan.body(self._maker, job.lines, row, first + row) for row in rows)
            files.append(job_lines(bodies, self.plan.target.endpoint, number))
            first += len(job.lines)
        return files

    async def _job(self, number: int) -> None:
        job = self.plan.jobs[number]
        client = self.client
        if client is None:
            raise RuntimeError("batch jobs need a client")
        record = JobRecord(number, len(job.lines), completion_window=window_seconds(job.completion_window))
        record.output_asked = int(job.lines.output_tokens.sum())
        self.records.jobs.append(record)
        await self.clock.sleep_until(job.submit_at)
        run = JobRun(client, record, now=self.clock.now, poll_every=self.plan.poll_every, stop=self._stop_offline)
        await run.run(self._files[number], self.plan.target.endpoint, job.completion_window)

    async def _sample(self) -> None:
        due = 0.0
        while True:
            await self.clock.sleep_until(due)
            self._take_sample()
            due += SAMPLE_EVERY

    def _take_sample(self) -> None:
        now = self.clock.now()
        sample = ClientSample(now, time.process_time(), self._open["online"], self._open["offline"])
        self.records.samples.append(sample)
        self.progress.at = now
        if self.records.jobs:
            polls = [job.polls[-1] for job in self.records.jobs if job.polls]
            self.progress.offline_finished = sum(poll.completed + poll.failed for poll in polls)


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one of `tasks` is done, then cancel all but the first argument."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks[1:]:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


LEAD = 0.3
"""Delay between the end of the preparation and time 0, seconds."""
SHOW_EVERY = 0.5

Show = Callable[[Progress], None]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's event loop factory if it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def execute(plan: Plan, show: Show) -> Records:
    """Run the plan and return the records. `show` is called about twice per second."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run_plan(plan, show, lambda: time.monotonic() + LEAD))


async def run_plan(plan: Plan, show: Show, epoch: Callable[[], float]) -> Records:
    """Run the plan in the running event loop. `epoch` returns time 0, a value of time.monotonic()."""
    clock = MonotonicClock()
    async with Client(plan.target, clock.now) as client:
        run = Run(plan, clock, client)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, run.stop)
        # Existing objects live until the end of the run; collecting them would only delay requests.
        gc.collect()
        gc.freeze()
        clock.start(epoch())
        reporter = asyncio.create_task(_report(run, show))
        try:
            return await run.execute()
        finally:
            reporter.cancel()
            gc.unfreeze()


async def _report(run: Run, show: Show) -> None:
    while True:
        await asyncio.sleep(SHOW_EVERY)
        run.progress.at = run.clock.now()
        show(run.progress)
