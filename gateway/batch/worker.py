"""Carries every batch from its creation to its end: validation, lines through the engine, result files.

Each unfinished batch has a task that owns its state; one feeder shares the engine's room between them. All that must
survive is in the store, so a start after a crash is the same as any start. Knows nothing of HTTP; lines are executed by
`run_line`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from engine.api import Lane, TokenCosts
from gateway.batch.feed import FeedOrder, FinishedLine, Job, Window
from gateway.batch.finish import INPUT_LOST, Finisher
from gateway.batch.forecast import Forecast
from gateway.batch.head import read_head
from gateway.batch.limits import BatchLimits
from gateway.batch.line import LineAnswer, LineOrigin, LineRetry
from gateway.batch.output import read_envelopes
from gateway.batch.result_rows import response_row, unfinished_row
from gateway.batch.results import ResultWriter, StorageRetry, in_thread
from gateway.http.errors import log_unexpected
from gateway.store.disk import StorageError, UnreadableError
from gateway.store.folder import StateFolder
from gateway.store.objects import BatchJob, InputError, Lengths, LineRef, Usage
from gateway.store.states import TERMINAL, BatchStatus, IllegalTransition

RunLine = Callable[[str, dict[str, Any], LineOrigin], Awaitable[LineAnswer]]
EXPIRED_FILES = 1000
MAX_BACK_OFF = 60.0
JUDGE_SECONDS = 1.0


def _no_limit(_tenant: str) -> int | None:
    return None


def _no_costs() -> TokenCosts | None:
    return None


def _no_tokens() -> tuple[float, float]:
    return 0.0, 0.0


def _no_lanes(_batch_id: str, _lane: Lane) -> None:
    pass


class BatchWorker:
    """Implements JobListener. `clock` is the wall clock: deadlines outlive the process. `max_lines`: what a tenant's
    unfinished batches may have together; `costs`: what tokens cost the engine, as of now; `online_tokens`: what it has
    computed of online requests; `set_lane`: tells the engine that the lines of a batch which it holds are at risk, or
    not any more."""

    def __init__(
        self,
        folder: StateFolder,
        limits: BatchLimits,
        run_line: RunLine,
        clock: Callable[[], float] = time.time,
        max_lines: Callable[[str], int | None] = _no_limit,
        costs: Callable[[], TokenCosts | None] = _no_costs,
        online_tokens: Callable[[], tuple[float, float]] = _no_tokens,
        set_lane: Callable[[str, Lane], None] = _no_lanes,
    ) -> None:
        self._folder = folder
        self._store = folder.store
        self._limits = limits
        self._run_line = run_line
        self._clock = clock
        self._set_lane = set_lane
        self._wake = asyncio.Event()
        self._tick_now = asyncio.Event()
        self._window = Window(limits.window_lines, limits.window_bytes)
        self._order = FeedOrder(limits.window_lines)
        self._retry = StorageRetry(limits.retry_seconds, self._wake.set, folder.disk.health)
        self._results = ResultWriter(folder, self._retry, self._window, self._wake.set)
        self._finisher = Finisher(folder, limits, self._retry, self._now, max_lines)
        self._judged = 0.0
        self.forecast = Forecast(costs, online_tokens)
        self._jobs: dict[str, Job] = {}
        self._drives: dict[str, asyncio.Task[None]] = {}
        self._services: list[asyncio.Task[None]] = []
        self._engine_paused = False
        self.states: dict[str, BatchStatus] = {}
        self.lines_ended: Counter[bool] = Counter()

    # Life

    async def start(self) -> None:
        """Tidy up after the last process and go on where it stopped."""
        await self._folder.recover()
        for batch in await self._store.unfinished_batches():
            self.added(batch)
        work = {"feed": self._feed(), "results": self._results.run(), "ticks": self._tick_for_ever()}
        self._services = [asyncio.create_task(run, name=f"tidemill-batch-{name}") for name, run in work.items()]

    async def stop(self) -> None:
        """Stop feeding, end the lines in the engine, make durable what has ended. Idempotent."""
        self._retry.stopping = True
        if not self._services:
            return
        feeder, *others = self._services
        await _cancel([feeder])
        await _cancel(self._drives.values())
        await _cancel(others)
        self._services = []

    def added(self, batch: BatchJob) -> None:
        """See JobListener. A batch that is known already is left alone."""
        if batch.id not in self._drives and batch.status not in TERMINAL and not self._retry.stopping:
            self.states[batch.id] = batch.status
            self._drives[batch.id] = asyncio.create_task(self._guard(batch.id), name=f"tidemill-{batch.id}")

    def cancelled(self, batch: BatchJob) -> None:
        """See JobListener."""
        if batch.status is BatchStatus.CANCELLING:
            self._finisher.hurry(batch.id)
            if batch.id in self._jobs:
                self._jobs[batch.id].settled.set()

    @property
    def paused(self) -> bool:
        """Whether jobs wait for the disk."""
        return not self._retry.healthy

    def storage_fault(self) -> str | None:
        """Return why nothing can be stored, None if data can be. Asks the disk; call it from any thread."""
        if not self._store.is_in_place():
            return "the state folder has been deleted or replaced: files and batches are refused until it is back"
        cause = self._folder.disk.health.fault
        return (
            cause and f"the state folder cannot be used ({cause}): uploads are refused and batches pause until it can"
        )

    def _now(self) -> int:
        return int(self._clock())

    # One batch

    async def _guard(self, batch_id: str) -> None:
        """Nothing but an end lets go of a batch: a bug is logged and met again, ever less often, until it ends that."""
        faults: Counter[BatchStatus] = Counter()
        try:
            while True:
                try:
                    await self._drive(batch_id)
                    return
                except StorageError:
                    return  # stopping
                except Exception as error:
                    log_unexpected(error)
                status = self.states[batch_id]
                faults[status] += 1
                if not await self._give_up_in_time(batch_id, status, faults[status]):
                    await asyncio.sleep(min(MAX_BACK_OFF, self._limits.retry_seconds * 2.0 ** (faults[status] - 1)))
        finally:
            self._drives.pop(batch_id, None)
            self.states.pop(batch_id, None)

    async def _give_up_in_time(self, batch_id: str, status: BatchStatus, faults: int) -> bool:
        """End a batch that meets the same bug again and again, or it would hold its input for ever. What its results
        are in is only given up when its window has closed: the bug may be gone by then."""
        try:
            batch = await self._store.load_batch(batch_id)
            has_time = status in (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING) and self._now() < batch.expires_at
            late = status is BatchStatus.CANCELLING and self._now() >= self._cancel_deadline(batch)
            if batch.status is not status or has_time or not (faults >= self._limits.attempts or late):
                return False
            await self._finisher.give_up(batch)
            return True
        except Exception as error:  # even this must not let go of the batch
            log_unexpected(error)
            return False

    def _cancel_deadline(self, batch: BatchJob) -> float:
        return batch.times["cancelling_at"] + self._limits.cancel_seconds

    async def _drive(self, batch_id: str) -> None:
        while True:
            batch = await self._retry.run(lambda: self._store.load_batch(batch_id))
            self.states[batch_id] = batch.status
            if batch.status in TERMINAL:
                await in_thread(partial(self._finisher.forget, batch))
                return
            with suppress(IllegalTransition):  # it was cancelled meanwhile: look again
                if not batch.total:
                    await self._finisher.validate(batch)
                elif batch.status is BatchStatus.IN_PROGRESS:
                    await self._process(batch)
                elif batch.status is BatchStatus.FINALIZING:
                    await self._finisher.finish(batch, BatchStatus.COMPLETED)
                else:
                    await self._finisher.finish(batch, BatchStatus.CANCELLED)

    async def _process(self, batch: BatchJob) -> None:
        """Feed lines until all have ended, or the batch has."""
        job = Job(batch, journal_end=await self._finisher.check_results(batch))
        self._jobs[batch.id] = job
        try:
            job.batch = await self._retry.run(lambda: self._store.load_batch(batch.id))
            if job.batch.status is not BatchStatus.IN_PROGRESS or not job.batch.remaining:
                job.settled.set()
            lengths = await self._retry.run(lambda: self._store.line_lengths(batch.id))
            head = await self._head(batch)
            job.lengths = lengths if head is None else replace(lengths, answers=head.answers)
            self._judge()
            self._wake.set()
            self._tick_now.set()
            await job.settled.wait()
        finally:
            del self._jobs[batch.id]
            await _cancel(job.running)
            if job.unwritten:
                await job.written.wait()
        if not job.batch.remaining:
            await self._retry.run(lambda: self._store.move_batch(batch.id, BatchStatus.FINALIZING, self._now()))
        elif self._now() >= batch.expires_at:
            await self._finisher.finish(job.batch, BatchStatus.EXPIRED)

    # Time

    async def _tick_for_ever(self) -> None:
        while True:
            deadlines = [
                job.batch.expires_at - self._clock() for job in self._jobs.values() if not job.settled.is_set()
            ]
            with suppress(TimeoutError):
                # never long: the wall clock may jump
                await asyncio.wait_for(self._tick_now.wait(), max(0.0, min([self._limits.tick_seconds, *deadlines])))
            self._tick_now.clear()
            try:
                await self.tick()
            except Exception as error:
                log_unexpected(error)

    async def tick(self) -> None:
        """Look at the clock: batches and files that have expired."""
        now = self._now()
        for job in self._jobs.values():
            if now >= job.batch.expires_at:
                job.settled.set()
        self._judge()
        with suppress(StorageError):
            await self._folder.check_recovery()
            await self._folder.settle()
            for batch in await self._store.unfinished_batches():
                self.added(batch)  # one whose creation was in doubt has no owner yet
            expired = await self._store.expire_files(now, EXPIRED_FILES)
            for file_id in expired:
                await in_thread(lambda file_id=file_id: self._folder.remove_body(file_id))  # type: ignore[misc]

    def _judge(self) -> None:
        """Who will be done when; a job's lines, those in the engine too, go with those at risk, or not."""
        self._judged = self._clock()
        jobs = [job for job in self._jobs.values() if job.lengths is not None and not job.settled.is_set()]
        self.forecast.update([(job.batch, job.lengths) for job in jobs if job.lengths is not None], self._judged)
        for job in jobs:
            at_risk = self.forecast.outlooks[job.batch.id].at_risk
            if at_risk is not job.at_risk:
                job.at_risk = at_risk
                self._set_lane(job.batch.id, job.lane)

    def notes(self, batch: BatchJob) -> dict[str, str]:
        """See JobListener."""
        outlook = self.forecast.outlooks.get(batch.id)
        return {} if outlook is None or batch.status is not BatchStatus.IN_PROGRESS else outlook.notes(batch)

    async def first_notes(self, batch: BatchJob, num_bytes: int) -> dict[str, str]:
        """See JobListener."""
        head = await self._head(batch)
        outlook = self.forecast.first(batch, num_bytes, self._clock(), head)
        return outlook.notes(batch) if outlook.misses else {}

    async def _head(self, batch: BatchJob) -> Lengths | None:
        return await in_thread(lambda: read_head(self._folder.file_path(batch.input_file_id), batch.endpoint))

    # Feeding

    async def _feed(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self._retry.healthy and not self._engine_paused and not self._window.is_full:
                    job = self._order.pick(self._jobs.values())
                    if job is None or not await self._feed_one(job):
                        break
            except Exception as error:
                log_unexpected(error)
                await asyncio.sleep(self._limits.retry_seconds)
                self._wake.set()

    async def _feed_one(self, job: Job) -> bool:
        """Give a job its turn; False when there was no room for its next line."""
        refs = await self._retry.run(lambda: self._next_lines(job))
        if not refs:
            return job.exhausted
        self._window.take(refs)
        try:
            envelopes = await self._retry.run(lambda: self._read(job, refs))
        except BaseException as error:
            self._window.release(refs)
            job.retry.extendleft(reversed(refs))
            if isinstance(error, UnreadableError):
                self._rest(job)
                return True
            raise
        if job.settled.is_set():
            self._window.release(refs)
            return True
        for ref, envelope in zip(refs, envelopes, strict=True):
            task = asyncio.create_task(self._execute(job, ref, envelope))
            job.running.add(task)
            task.add_done_callback(job.running.discard)
        return True

    async def _next_lines(self, job: Job) -> list[LineRef]:
        """The next lines of a job for which there is room."""
        if job.retry:
            refs = self._window.fitting(list(job.retry)[: self._order.quantum])
            for _ in refs:
                job.retry.popleft()
            return refs
        found = await self._store.pending_lines(job.batch.id, job.cursor, self._order.quantum)
        refs = self._window.fitting(found)
        job.exhausted = len(refs) == len(found) < self._order.quantum
        job.cursor = refs[-1].rank if refs else job.cursor
        return refs

    async def _read(self, job: Job, refs: list[LineRef]) -> list[dict[str, Any] | None]:
        """None for what cannot be read any more: a batch must end all the same. Raises UnreadableError a few times."""
        lenient, file_id = job.read_faults >= self._limits.read_attempts, job.batch.input_file_id
        found = await in_thread(lambda: read_envelopes(self._folder, file_id, refs, lenient=lenient))
        lost = [ref for ref, envelope in zip(refs, found, strict=True) if envelope is None]
        if lost:
            await self._store.note_error(job.batch.id, InputError(*INPUT_LOST, lost[0].number))
        else:
            job.read_faults = 0
        return found

    def _rest(self, job: Job) -> None:
        """Let the other jobs go on while the input of this one cannot be read."""
        job.read_faults += 1
        job.resting = True
        asyncio.get_running_loop().call_later(self._limits.read_pause(job.read_faults), self._rested, job)

    def _rested(self, job: Job) -> None:
        job.resting = False
        self._wake.set()

    async def _execute(self, job: Job, ref: LineRef, envelope: dict[str, Any] | None) -> None:
        try:
            line = await self._finished(job, ref, envelope)
        except BaseException as error:
            self._window.release([ref])
            job.retry.append(ref)
            if isinstance(error, asyncio.CancelledError):
                raise
            if not isinstance(error, LineRetry):
                log_unexpected(error)
            self._pause_engine(error.retry_after if isinstance(error, LineRetry) else self._limits.retry_seconds)
        else:
            self.lines_ended[line.succeeded] += 1
            self.forecast.line_ended(ref.length, line.usage)
            self._results.put(job, line)
            if not 0.0 <= self._clock() - self._judged < JUDGE_SECONDS:
                self._judge()

    async def _finished(self, job: Job, ref: LineRef, envelope: dict[str, Any] | None) -> FinishedLine:
        batch = job.batch
        if envelope is None:
            code, message = INPUT_LOST
            return FinishedLine(ref, False, unfinished_row(None, code, f"{message} (line {ref.number})"), Usage())
        origin = LineOrigin(batch.tenant, batch.id, batch.expires_at, job.lane, ref.length)
        answer = await self._run_line(batch.endpoint, envelope["body"], origin)
        row = response_row(envelope["custom_id"], answer.status, answer.body)
        return FinishedLine(ref, answer.status == 200, row, answer.usage)

    def _pause_engine(self, seconds: float) -> None:
        if not self._engine_paused:
            self._engine_paused = True
            asyncio.get_running_loop().call_later(seconds, self._resume_engine)

    def _resume_engine(self) -> None:
        self._engine_paused = False
        self._wake.set()


async def _cancel(tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Cancel tasks and wait for their ends."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
