"""Preparation of a run (wait for the server, read its model and version, calibrate words, send warm-up requests), and
execution of its plan.

Open loop: every request is sent at its absolute time, regardless of the server. Closed loop: a request starts when a
slot is free. Offline work runs concurrently, as batch jobs or flex requests. Ctrl-C stops the run and keeps its
records.
"""

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson
import uvloop

from loadgen import ServerError
from loadgen.client import Client, JobRun, describe_server, error_message, job_lines, wait_ready
from loadgen.plan import (
    ANCHOR,
    FIRST_OFFLINE,
    WORDS,
    Plan,
    WordCosts,
    output_fields,
    window_seconds,
)
from loadgen.records import Class, ClientSample, JobRecord, Records, RequestRecord
from loadgen.traces import Content, Trace

SAMPLE_EVERY = 1.0


class MonotonicClock:
    """Clock of a run: seconds since the epoch given to `start`, equal in all processes of a machine."""

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

    def __init__(self, plan: Plan, clock: MonotonicClock, client: Client) -> None:
        self.plan = plan
        self.clock = clock
        self.client = client
        self.records = Records()
        self.progress = Progress(scheduled=len(plan.online) if plan.online else 0, offline_lines=plan.offline_lines)
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
        has_online, horizon = self.plan.online is not None, self.plan.windows.horizon
        drained = horizon + self.plan.windows.drain if has_online and horizon is not None else None
        to_the_end = self.plan.wait_offline if has_online else horizon is None
        try:
            await self._wait(online, drained)
            if online.done():
                online.result()
            await self._wait(offline, None if to_the_end else horizon or 0.0)
            self._stop_offline.set()
            await offline
        finally:
            for task in (online, offline, sampler):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._take_sample()
        self.records.ended_at = max(0.0, self.clock.now())
        return self.records

    async def _wait(self, task: asyncio.Task[None], until: float | None) -> None:
        """Wait for the task, at most until a time of the clock, or until the run is stopped."""
        limits: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.wait())]
        if until is not None:
            limits.append(asyncio.create_task(self.clock.sleep_until(until)))
        await _first(task, *limits)

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
        self._open[record.service_class] += 1
        try:
            await self.client.send(body, record)
        finally:
            self._open[record.service_class] -= 1

    def _record(self, trace: Trace, row: int, index: int, service_class: Class) -> RequestRecord:
        return RequestRecord(
            index=index,
            service_class=service_class,
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
        rows = ((job.lines, row) for job in self.plan.jobs for row in range(len(job.lines)))
        await self.clock.sleep_until(0.0)
        work = asyncio.create_task(self._feed_all(enumerate(rows, FIRST_OFFLINE)))
        await _first(work, asyncio.create_task(self._stop_offline.wait()))
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _feed_all(self, lines: Iterator[tuple[int, tuple[Trace, int]]]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, self.plan.offline_concurrency)):
                group.create_task(self._feed(lines))

    async def _feed(self, lines: Iterator[tuple[int, tuple[Trace, int]]]) -> None:
        for index, (trace, row) in lines:
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
        record = JobRecord(number, len(job.lines), completion_window=window_seconds(job.completion_window))
        record.output_asked = int(job.lines.output_tokens.sum())
        self.records.jobs.append(record)
        await self.clock.sleep_until(0.0)
        run = JobRun(self.client, record, now=self.clock.now, poll_every=self.plan.poll_every, stop=self._stop_offline)
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


def execute(plan: Plan, show: Show) -> Records:
    """Run the plan and return the records. `show` is called about twice per second."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
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


REPEATS = 8
"""Number of repetitions of the word in the first probe."""
PromptMode = Literal["auto", "ids", "text"]
Probe = Callable[[str], Awaitable[int]]
"""Send a text and return `usage.prompt_tokens`."""


def prepare(
    plan: Plan, mode: PromptMode, ready_within: float, num_warmups: int, say: Callable[[str], None]
) -> tuple[Plan, dict[str, Any]]:
    """Wait for the server, complete the plan's model and source of prompts, and send warm-up requests.

    Return the plan and the `server` section of a summary. Raise ServerError if the server cannot be measured. Text
    prompts need probes, unless the trace has the text of every prompt.
    """

    async def work() -> tuple[Plan, dict[str, Any]]:
        async with Client(plan.target, time.monotonic) as client:
            await wait_ready(client, ready_within, say)
            about = await describe_server(client)
            client.target = target = replace(plan.target, model=plan.target.model or about["model"])
            if not target.model:
                raise ServerError("the server lists no model; set --model")
            source = plan.source
            if plan.draws_prompts and (mode == "text" or (mode == "auto" and target.chat)):
                source = await word_costs(probe(client))
            made = replace(plan, target=target, source=source)
            await warm_up(client, made, num_warmups, about["models"])
        return made, {"base_url": target.base_url, "endpoint": target.endpoint, **about, "model": target.model}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def probe(client: Client) -> Probe:
    """Return a function that sends a text and returns its prompt tokens as counted by the server."""

    async def ask(text: str) -> int:
        prompt: dict[str, Any] = {"prompt": text}
        if client.target.chat:
            prompt = {"messages": [{"role": "user", "content": text}]}
        body = orjson.dumps({"model": client.target.model, "max_tokens": 1, "temperature": 0.0, **prompt})
        headers = {"Content-Type": "application/json"}
        status, data = await client.raw("POST", client.target.endpoint, data=body, headers=headers)
        if status != 200:
            raise ServerError(f"the server refused a calibration request: {status} {error_message(data)}")
        try:
            return int(orjson.loads(data)["usage"]["prompt_tokens"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ServerError("the server reports no usage.prompt_tokens; use --prompt-mode ids") from None

    return ask


async def word_costs(probe: Probe) -> WordCosts:
    """Measure the tokens of each word. Raise ServerError if a constant cost per word does not explain the counts.

    A text with a word n times has overhead + n · cost tokens. One probe with all words shows whether each costs one
    token; otherwise groups are bisected.
    """
    first = WORDS[0]
    overhead, long = await probe(_text([])), await probe(_text([first] * REPEATS))
    cost, rest = divmod(long - overhead, REPEATS)
    if rest or cost < 1:
        raise ServerError(
            f"prompt tokens do not grow linearly with words ({overhead}, then {long}); use --prompt-mode ids"
        )
    costs = {first: cost}
    await _measure(probe, [word for word in WORDS if word != first], overhead, costs)
    return WordCosts(tuple(costs), tuple(costs.values()), overhead)


async def _measure(probe: Probe, words: list[str], overhead: int, costs: dict[str, int]) -> None:
    """Bisect groups until each is a single word or has words of cost 1 only, the minimum. Fill `costs`."""
    groups = [words] if words else []
    while groups:
        group = groups.pop()
        total = await probe(_text(group)) - overhead
        if total == len(group) or len(group) == 1:
            costs.update(dict.fromkeys(group, 1) if total == len(group) else {group[0]: max(1, total)})
        else:
            half = len(group) // 2
            groups += [group[half:], group[:half]]


def _text(words: Sequence[str]) -> str:
    return ANCHOR + "".join(f" {word}" for word in words)


async def warm_up(client: Client, plan: Plan, count: int, listed: Sequence[str]) -> None:
    """Send `count` small requests of the plan's kind, one after another. Raise ServerError if one fails.

    `listed` has the models of the server, for the error message if the plan's model is unknown.
    """
    maker = plan.maker()
    for number in range(count):
        # Warm-up requests have indices of their own, so that no measured prompt is in the prefix cache.
        prompt = maker.fields((1 << 30) + number, 32, Content())
        length = output_fields(4, ignore_eos=plan.ignore_eos)  # as in the run, to detect refused fields
        body = {"model": client.target.model, **prompt, **length, "temperature": 0.0, **plan.extra_body}
        record = RequestRecord(number, "online", 0.0, 32, 4)
        await client.send(orjson.dumps(body | plan.stream_fields()), record)
        if record.outcome not in ("ok", "empty"):
            hint = _hint(record, client.target.model, listed)
            raise ServerError(f"a warm-up request failed ({record.outcome}): {record.status} {record.error}{hint}")


def _hint(record: RequestRecord, model: str, listed: Sequence[str]) -> str:
    if "ignore_eos" in record.error:
        return "; --no-ignore-eos omits min_tokens and ignore_eos"
    if record.status in (400, 404) and listed and model not in listed:
        return f"; the server has no model {model}, set --model to one of {', '.join(map(str, listed))}"
    return ""
