"""Process each batch from creation to its terminal state: validate the input, run the lines, build the result files.

Each unfinished batch has a task that owns its state; one feeder divides the window between the batches. All durable
state is in the store, so recovery after a crash is the normal start. `run_line` executes the lines.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from engine.api import Lane
from engine.client import EngineStats
from gateway.batch.cluster import Membership
from gateway.batch.failures import Cause, cause_of
from gateway.batch.feeder import LineFeeder, RunLine
from gateway.batch.finish import Finisher
from gateway.batch.forecast import Forecast, LaneUpdater
from gateway.batch.line import read_head
from gateway.batch.results import ResultWriter
from gateway.batch.run import BatchLimits, BatchRun, FinishedLine, Job, Leases, LineSizes, Runs, in_thread
from gateway.http.errors import log_unexpected
from gateway.models import ModelNames
from gateway.store.batch_rows import Beat
from gateway.store.disk import StorageError
from gateway.store.folder import StateFolder
from gateway.store.objects import TERMINAL, BatchJob, BatchStatus, IllegalTransition
from gateway.store.row_store import StoreClock

EXPIRED_FILES = 1000


class BatchWorker:
    """Drives all unfinished batches.

    Args:
        clock: time of files and batches; deadlines outlive the process.
        max_lines: maximum number of lines in a tenant's unfinished batches (None: no limit).
        stats: current statistics of the engine.
        set_lane: moves the lines of a batch that are in the engine to another lane.
        models: names that a new batch may use (None: any).
    """

    def __init__(
        self,
        folder: StateFolder,
        limits: BatchLimits,
        run_line: RunLine,
        *,
        max_lines: Callable[[str], int | None],
        stats: Callable[[], EngineStats],
        set_lane: Callable[[str, Lane], None],
        models: ModelNames | None = None,
        clock: StoreClock | None = None,
    ) -> None:
        run = self._run = BatchRun(folder, limits, clock or StoreClock())
        self._folder, self._store, self._limits, self._retry = folder, run.store, limits, run.retry
        self.clock, self.jobs, self.window = run.clock, run.jobs, run.window
        self._look_at_clock = asyncio.Event()
        self._next_expiry = math.inf
        self.forecast = Forecast(stats)
        self.cluster = Membership(run, stats, lambda: self.forecast.pace.rate or 0.0)
        self._results = ResultWriter(run)
        self.feeder = LineFeeder(run, run_line, self._results, self._line_ended, self.cluster)
        self._finisher = Finisher(run, max_lines, models)
        self.lanes = LaneUpdater(run, self.forecast, set_lane)
        self._drives: dict[str, asyncio.Task[None]] = {}
        self._services: list[asyncio.Task[None]] = []
        self.states: dict[str, BatchStatus] = {}
        self.lines_ended: Counter[bool] = Counter()
        self.lines_resumed = 0
        self.on_end: Callable[[], None] = lambda: None

    # Life

    async def start(self) -> None:
        """Recover from the last process and resume its batches; if the state folder is unusable, retry later."""
        work = {
            "feed": self.feeder.run(),
            "results": self._results.run(),
            "ticks": self._tick_for_ever(),
            "forecast": self.lanes.run(),
            "cluster": self.cluster.run(self._beaten),
        }
        try:
            await self._resume()
        except StorageError:
            work["resume"] = self._resume_later()
        self._services = [asyncio.create_task(run, name=f"tidemill-batch-{name}") for name, run in work.items()]

    async def _resume(self) -> None:
        await self._folder.recover()
        if self.cluster.is_shared:
            self.clock.follow((await self.cluster.beat()).now)
        self.clock.begin(await self._store.newest_time())
        batches = await self._store.unfinished_batches()
        self.lines_resumed = sum(batch.remaining for batch in batches)
        for batch in batches:
            self.added(batch)

    async def _resume_later(self) -> None:
        with suppress(StorageError):  # stopping
            await self._retry.run(self._resume)

    async def stop(self) -> None:
        """Stop feeding, end the lines in the engine and store finished lines. Idempotent."""
        self._retry.stopping = True
        if not self._services:
            return
        feeder, *others = self._services
        await _cancel([feeder])
        await _cancel(self._drives.values())
        await _cancel(others)
        self._services = []
        if self.cluster.is_shared:
            with suppress(StorageError):
                await self._store.leave(self._store.server)

    def added(self, batch: BatchJob) -> None:
        """Start work on a batch that has become durable. Does nothing for a batch that is already running."""
        if batch.id not in self._drives and batch.status not in TERMINAL and not self._retry.stopping:
            self.states[batch.id] = batch.status
            self._drives[batch.id] = asyncio.create_task(self._guard(batch.id), name=f"tidemill-{batch.id}")

    def cancelled(self, batch: BatchJob) -> None:
        """Stop work on a batch that is being cancelled."""
        if batch.status is BatchStatus.CANCELLING:
            self._finisher.hurry(batch.id)
            if batch.id in self.jobs:
                self.jobs[batch.id].settled.set()

    @property
    def paused(self) -> bool:
        """Whether batches wait for the disk."""
        return not self._retry.healthy

    def storage_fault(self) -> str | None:
        """Return why nothing can be stored, or None. Checks the disk; callable from any thread."""
        if not self._store.is_in_place():
            return "the state folder was deleted or replaced; files and batches are refused until it is restored"
        cause = self._folder.disk.health.fault
        return cause and f"the state folder cannot be used ({cause}); uploads are refused and batches pause until then"

    def trouble(self) -> str | None:
        """Return why batch lines do not finish although the state folder works, or None."""
        return self.feeder.trouble() or self._results.trouble()

    # One batch

    async def _guard(self, batch_id: str) -> None:
        """Drive the batch until it reaches a terminal state. After an unexpected error, log it and retry with backoff.
        Failures of the system do not count as attempts."""
        faults: Counter[BatchStatus] = Counter()
        bugs: Counter[BatchStatus] = Counter()
        try:
            while True:
                try:
                    await self._drive(batch_id)
                    return
                except StorageError:
                    return  # stopping
                except BaseException as raised:
                    error = log_unexpected(raised)
                    is_bug = cause_of(error) is not Cause.SYSTEM
                status = self.states[batch_id]
                faults[status] += 1
                bugs[status] += is_bug
                if not (is_bug and await self._give_up_in_time(batch_id, status, bugs[status])):
                    await asyncio.sleep(self._limits.back_off(faults[status]))
        finally:
            self._drives.pop(batch_id, None)
            self.states.pop(batch_id, None)
            self.on_end()

    async def _give_up_in_time(self, batch_id: str, status: BatchStatus, faults: int) -> bool:
        """End a batch after `attempts` bugs, so that it does not keep its input file forever. A batch with results ends
        only after its completion window, because a restart may bring a version without the bug."""
        try:
            batch = await self._store.load_batch(batch_id)
            is_running = status in (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
            has_time = is_running and self.clock.expiry_now() < batch.expires_at
            deadline = batch.times.get("cancelling_at", math.inf) + self._limits.cancel_seconds
            late = status is BatchStatus.CANCELLING and self.clock.now() >= deadline
            if batch.status is not status or has_time or not (faults >= self._limits.attempts or late):
                return False
            await self._finisher.give_up(batch)
            return True
        except BaseException as raised:  # the caller must keep driving the batch
            log_unexpected(raised)
            return False

    async def _drive(self, batch_id: str) -> None:
        while True:
            batch = await self._retry.run(lambda: self._store.get_batch(None, batch_id))
            if batch is None:  # ended and deleted by another server
                return
            self.states[batch_id] = batch.status
            if batch.status in TERMINAL:
                is_owner = self.cluster.forget(batch_id)
                await in_thread(partial(self._finisher.forget, batch, is_owner=is_owner))
                return
            is_running = batch.total and batch.status is BatchStatus.IN_PROGRESS
            is_fed = is_running and self.clock.expiry_now() < batch.expires_at
            if not is_fed and not await self._retry.run(lambda: self.cluster.own(batch_id)):
                await self.cluster.wait()
                continue
            with suppress(IllegalTransition):  # cancelled meanwhile, or another server is the owner: load it again
                if not batch.total:
                    await self._finisher.validate(batch)
                elif batch.status is BatchStatus.IN_PROGRESS:
                    await self._process(batch)
                elif batch.status is BatchStatus.FINALIZING:
                    await self._finisher.finish(batch, BatchStatus.COMPLETED)
                else:
                    await self._finish(batch, BatchStatus.CANCELLED)

    async def _finish(self, batch: BatchJob, status: BatchStatus) -> None:
        """End a batch whose lines may be in the engines of other servers."""
        if await self._retry.run(lambda: self.cluster.own(batch.id)):
            seconds = self._limits.cancel_seconds
            await self._retry.run(lambda: self.cluster.others_end(batch.id, seconds))
            await self._finisher.finish(batch, status)

    async def _process(self, batch: BatchJob) -> None:
        """Feed lines until all lines have ended, or the batch has."""
        head = await self._head(batch)
        job = Job(batch, head or LineSizes(self.forecast.pace.bytes_per_line))
        if self.cluster.is_shared:
            job.leases = Leases(Runs(batch.total))
            await self._retry.run(lambda: self.cluster.begin(batch))
        else:
            job.journal_end = await self._finisher.check_results(batch)
        self.jobs[batch.id] = job
        try:
            job.batch = await self._retry.run(lambda: self._store.load_batch(batch.id))
            if job.batch.status is not BatchStatus.IN_PROGRESS or not job.batch.remaining:
                job.settled.set()
            self.lanes.changed()
            self._run.offer(job)
            if job.batch.expires_at < self._next_expiry:
                self._look_at_clock.set()
            await job.settled.wait()
        finally:
            del self.jobs[batch.id]
            await _cancel(job.running)
            self.feeder.forget(job)
            await self._results.close(job)
            await self.cluster.release(batch.id)
        if not job.batch.remaining:
            await self._retry.run(lambda: self._store.move_batch(batch.id, BatchStatus.FINALIZING, self.clock.now()))
        elif self.clock.expiry_now() >= batch.expires_at:
            await self._finish(job.batch, BatchStatus.EXPIRED)

    async def _beaten(self, beat: Beat) -> None:
        """Apply the state of the store at a heartbeat. Raises StorageError."""
        self.clock.follow(beat.now)
        self._run.order.elsewhere, self.forecast.elsewhere = beat.held, beat.rate
        self._run.order.window_lines = self.window.max_lines
        batches = {batch.id: batch for batch in beat.batches}
        for batch in beat.batches:
            self.added(batch)
            self.cancelled(batch)
        for job in self.jobs.values():  # before others change the leases
            if job.leases is not None and job.leases.compare(beat.runs.get(job.batch.id, frozenset())):
                job.exhausted = False
        for job in list(self.jobs.values()):
            batch_id = job.batch.id
            job.batch = batches.get(batch_id, job.batch)
            if batch_id not in batches or job.batch.status is not BatchStatus.IN_PROGRESS or not job.batch.remaining:
                job.settled.set()
                continue
            if batch_id not in self.cluster.mine and await self.cluster.own(batch_id):
                await self.cluster.begin(job.batch)
            job.exhausted = job.exhausted and batch_id not in beat.free
            self._run.offer(job)

    # Time

    async def _tick_for_ever(self) -> None:
        next_tick = time.monotonic() + self._limits.tick_seconds
        while True:
            self._expire_jobs()
            if time.monotonic() >= next_tick:
                try:
                    await self.tick()
                except BaseException as raised:
                    log_unexpected(raised)
                next_tick = time.monotonic() + self._limits.tick_seconds
            # bounded by `tick_seconds`, because the wall clock may jump
            seconds = min(next_tick - time.monotonic(), self._next_expiry - self.clock.expiry_now())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look_at_clock.wait(), max(0.0, seconds))
            self._look_at_clock.clear()

    def _expire_jobs(self) -> None:
        """Settle the jobs whose completion window has closed, and find the next deadline."""
        now, next_expiry = self.clock.expiry_now(), math.inf
        for job in self.jobs.values():
            if now >= job.batch.expires_at:
                job.settled.set()
            elif not job.settled.is_set():
                next_expiry = min(next_expiry, job.batch.expires_at)
        self._next_expiry = next_expiry

    async def tick(self) -> None:
        """Start batches without a task, and remove expired files."""
        self.lanes.changed()
        for job in list(self.jobs.values()):
            self._run.offer(job)
        with suppress(StorageError):
            await self._folder.check_recovery()
            await self._folder.settle()
            for batch in await self._store.unfinished_batches():
                self.added(batch)  # a batch whose creation was in doubt has no task yet
            await self._folder.remove_expired(self.clock.expiry_now(), EXPIRED_FILES)
            await self._folder.remove_copies()

    def _line_ended(self, line: FinishedLine) -> None:
        self.lines_ended[line.succeeded] += 1
        self.cluster.resize()
        self.forecast.line_ended(line.ref.length, line.usage)
        self.lanes.changed()

    def notes(self, batch: BatchJob) -> dict[str, str]:
        """Return metadata entries with the forecast of a batch."""
        outlook = self.forecast.outlooks.get(batch.id)
        return {} if outlook is None or batch.status is not BatchStatus.IN_PROGRESS else outlook.notes(batch)

    async def first_notes(self, batch: BatchJob, num_bytes: int, lines: Path | None = None) -> dict[str, str]:
        """Return metadata entries with the first forecast of a new batch, none before the pace is known.

        `num_bytes`: size of the input file; `lines`: its path, if it is not stored yet.
        """
        head = await self._head(batch, lines)
        outlook = self.forecast.first(batch, num_bytes, self.clock.now(), head)
        return outlook.notes(batch) if outlook.pace else {}

    async def _head(self, batch: BatchJob, lines: Path | None = None) -> LineSizes | None:
        try:
            return await in_thread(
                lambda: read_head(lines or self._folder.copy_body(batch.input_file_id), batch.endpoint)
            )
        except StorageError:  # an object store is away
            return None


async def _cancel(tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Cancel tasks and wait until they have ended."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
