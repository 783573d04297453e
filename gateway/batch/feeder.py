"""Feed the lines of all batches in progress into the engine, and retry or end the lines that fail.

Every finished line has a result row. The table in `gateway.batch.failures` decides whether a failed line gets an error
row or runs again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

from engine.panics import CONTROL, as_error
from gateway.batch.cluster import Membership
from gateway.batch.failures import Cause, LineFailures, cause_of, kind_of, retry_after
from gateway.batch.finish import INPUT_LOST
from gateway.batch.line import LineAnswer, LineOrigin
from gateway.batch.results import ResultWriter, read_envelopes, response_row, unfinished_row
from gateway.batch.run import BatchRun, FinishedLine, Job, Runs, in_thread
from gateway.http.errors import log_unexpected, to_api_error
from gateway.store.disk import UnreadableError
from gateway.store.objects import InputError, LineRef, Usage

log = logging.getLogger("tidemill.gateway")

RunLine = Callable[[str, dict[str, Any], LineOrigin], Awaitable[LineAnswer]]
Envelope = dict[str, Any]
CONTROL_RANK = -1
"""Rank of a control: a line with a result row that runs again to test whether lines can succeed."""


MAX_ASKED = 4096
"""Maximum number of ranks in one query."""
PROBE_LINES = 8
"""Lines in a turn of a batch that pauses for a common cause: half have failed before, half have not run yet."""


class LineOrder:
    """Choose the next lines of jobs, in runs (`Runs`). `cluster`: leases of runs."""

    def __init__(self, run: BatchRun, cluster: Membership) -> None:
        self._run = run
        self._cluster = cluster

    async def take(self, job: Job, most: int) -> list[LineRef]:
        """Take up to `most` lines that fit into the window."""
        probes = job.trials.pauses > 0
        if job.leases is not None:  # lines beyond the window are for other servers
            most = max(1, min(most, self._run.window.max_lines - self._run.window.lines))
        most = PROBE_LINES if probes else most
        old = list(islice(job.retry, most // 2 if probes else most))
        new = await self._new(job, most - len(old)) if probes or not old else []
        control = job.trials.control if probes and not new else None
        refs = self._run.window.fitting([*old, *new, *([] if control is None else [control])])
        for _ in range(min(len(refs), len(old))):
            job.retry.popleft()
        del job.ahead[: min(len(new), max(0, len(refs) - len(old)))]  # the window may have no room for all old ones
        return refs

    async def _new(self, job: Job, most: int) -> list[LineRef]:
        """Return lines that have not run yet. Their ranks are the first ones in `job.ahead`."""
        asked = most
        while await self._look_ahead(job, asked):
            ranks = job.ahead[:asked]
            found = await self._run.store.lines_at(job.batch.id, ranks)
            job.ahead[:asked] = [ref.rank for ref in found]
            if job.leases is not None:
                job.leases.lines_ended(set(ranks).difference(job.ahead[: len(found)]))
            if found:
                return found[:most]
            asked = min(2 * asked, MAX_ASKED)  # a restarted job: most lines have results
        return []

    async def _look_ahead(self, job: Job, count: int) -> bool:
        """Extend `job.ahead` to at least `count` ranks by further runs; return whether it has any."""
        runs = Runs(job.batch.total)
        while len(job.ahead) < count and not job.exhausted:
            wanted = -(-(count - len(job.ahead)) // runs.size)
            if job.leases is None:
                found = list(range(job.next_run, min(job.next_run + wanted, runs.count)))
                job.next_run += len(found)
                job.exhausted = job.next_run >= runs.count
            else:
                found = await self._cluster.take_runs(job.batch, job.leases, wanted)
                job.exhausted = len(found) < wanted
            for index in found:
                job.ahead += runs.ranks(index)
        return bool(job.ahead)


class LineFeeder:
    """Feed lines from one task; each line in the engine has a task of its own. `ended` is called with each finished
    line."""

    def __init__(
        self,
        run: BatchRun,
        run_line: RunLine,
        results: ResultWriter,
        ended: Callable[[FinishedLine], None],
        cluster: Membership,
    ) -> None:
        self._run = run
        self._run_line = run_line
        self._results = results
        self._ended = ended
        self._lines = LineOrder(run, cluster)
        self._failures = LineFailures()
        self._paused = False
        self._system_pauses = 0
        self._system_fault = ""
        self._pausing: set[Job] = set()
        self.retries: Counter[Cause] = Counter()

    async def run(self) -> None:
        while True:
            await self._run.wake.wait()
            self._run.wake.clear()
            try:
                while self._run.retry.healthy and not self._paused and not self._run.window.is_full:
                    job = self._run.order.pick()
                    if job is None or not await self._feed(job):
                        break
            except BaseException as raised:  # a bug in FeedOrder; a bug in a job's turn only pauses that job
                log_unexpected(raised)
                await asyncio.sleep(self._run.limits.retry_seconds)
                self._run.wake.set()

    def forget(self, job: Job) -> None:
        """Forget a batch that is no longer in progress."""
        self._failures.forget(job.batch.id, job.trials)
        self._pausing.discard(job)

    @property
    def num_paused(self) -> int:
        """Number of batches that pause because their lines fail with a common cause."""
        return len(self._pausing)

    def trouble(self) -> str | None:
        """Return why batch lines do not run, or None; always None without a batch in progress."""
        if not self._run.jobs:
            return None
        if self._system_pauses:
            return f"batch lines pause after a system failure ({self._system_fault}) and are retried"
        if self._pausing:
            return f"the lines of {self.num_paused} batches fail with an unexpected error; they pause and are retried"
        return None

    # Turns

    async def _feed(self, job: Job) -> bool:
        """Feed the next lines of a job; return False if there was no room for its next line."""
        refs: list[LineRef] = []
        try:
            refs = await self._run.retry.run(lambda: self._lines.take(job, self._run.order.quantum))
            if not refs:
                return job.exhausted and not (job.retry or job.ahead)
            self._run.window.take(refs)
            envelopes = await self._run.retry.run(lambda: self._read(job, refs))
        except BaseException as raised:
            self._run.window.release(refs)
            job.retry.extendleft(ref for ref in reversed(refs) if ref.rank != CONTROL_RANK)
            error = as_error(raised)
            if self._run.retry.stopping:
                raise
            self._turn_failed(job, error)
            return True
        job.trials.turn_faults = 0
        if job.settled.is_set():
            self._run.window.release(refs)
            return True
        for ref, envelope in zip(refs, envelopes, strict=True):
            task = asyncio.create_task(self._execute(job, ref, envelope))
            job.running.add(task)
            task.add_done_callback(job.running.discard)
        return True

    def _turn_failed(self, job: Job, error: Exception) -> None:
        """Pause the job, or all jobs after a system failure, because its lines could not be found or read."""
        if cause_of(error) is Cause.SYSTEM:
            self._pause_for_system(error)
            return
        if isinstance(error, UnreadableError):
            job.read_faults += 1
        else:
            log_unexpected(error)
        job.trials.turn_faults += 1
        self._rest(job, job.trials.turn_faults)

    async def _read(self, job: Job, refs: list[LineRef]) -> list[Envelope | None]:
        """Return the lines' envelopes. Raise UnreadableError for the first `read_attempts` failures; after that return
        None for an unreadable line, so that the batch can end."""
        lenient, file_id = job.read_faults >= self._run.limits.read_attempts, job.batch.input_file_id
        most = self._run.limits.line_bytes
        found = await in_thread(
            lambda: read_envelopes(self._run.folder, file_id, refs, lenient=lenient, max_bytes=most)
        )
        lost = [ref for ref, envelope in zip(refs, found, strict=True) if envelope is None]
        if lost:
            text = "batch %s: %d lines of the input are damaged on the disk (the first: line %d); they get error rows"
            log.error(text, job.batch.id, len(lost), lost[0].number)
            await self._run.store.note_error(job.batch.id, InputError(*INPUT_LOST, lost[0].number))
        else:
            job.read_faults = 0
        return found

    def _rest(self, job: Job, faults: int) -> None:
        job.resting = True
        asyncio.get_running_loop().call_later(self._run.limits.back_off(faults), self._rested, job)

    def _rested(self, job: Job) -> None:
        job.resting = False
        self._run.offer(job)

    # Lines

    async def _execute(self, job: Job, ref: LineRef, envelope: Envelope | None) -> None:
        try:
            line = await self._finished(job, ref, envelope)
        except CONTROL:
            self._run.window.release([ref])
            self._run_again(job, ref)
            raise
        except BaseException as raised:  # `cause_of` classifies every failure
            self._failed(job, ref, envelope, as_error(raised))
        else:
            self._end(job, line)

    async def _finished(self, job: Job, ref: LineRef, envelope: Envelope | None) -> FinishedLine:
        batch = job.batch
        if envelope is None:
            code, message = INPUT_LOST
            return FinishedLine(ref, False, unfinished_row(None, code, f"{message} (line {ref.number})"), Usage())
        if isinstance(envelope["body"], Exception):
            raise envelope["body"]
        origin = LineOrigin(batch.tenant, batch.id, batch.expires_at, job.lane, ref.length)
        answer = await self._run_line(batch.endpoint, envelope["body"], origin)
        row = response_row(envelope["custom_id"], answer.status, answer.body)
        return FinishedLine(ref, answer.status == 200, row, answer.usage)

    def _end(self, job: Job, line: FinishedLine) -> None:
        """Pass the row of a finished line to the result writer; discard the row of a control."""
        self._failures.ended(job.batch.id, job.trials, line.ref.rank, line.succeeded)
        self._system_pauses = 0
        if line.succeeded:
            job.trials.control = line.ref._replace(rank=CONTROL_RANK)
            if job.trials.pauses:
                job.trials.pauses = 0
                self._pausing.discard(job)
                self._rested(job)
        if line.ref.rank == CONTROL_RANK:
            self._run.window.release([line.ref])
        else:
            self._results.put(job, line)
            self._ended(line)

    def _failed(self, job: Job, ref: LineRef, envelope: Envelope | None, error: Exception) -> None:
        cause = cause_of(error)
        if cause is Cause.REQUEST:
            self._end(job, _error_line(ref, envelope, error))
            return
        self.retries[cause] += 1
        if cause is Cause.UNKNOWN and self._is_proven(job, ref, error):
            self._end(job, _error_line(ref, envelope, error))
            return
        self._run.window.release([ref])
        if cause is Cause.BUSY:
            self._run_again(job, ref)
            self._pause(retry_after(error))
        elif cause is Cause.SYSTEM:
            self._pause_for_system(error)
            self._run_again(job, ref, self._failures.system_fault(job.trials, ref.rank))

    def _is_proven(self, job: Job, ref: LineRef, error: Exception) -> bool:
        """Return whether the line has used up its attempts. If not, run it again, and pause the batch if several lines
        share the cause."""
        kind = kind_of(error)
        is_new = self._failures.is_new(kind)
        line, is_common = self._failures.unknown(job.batch.id, job.trials, ref.rank, kind)
        is_proven = line.own >= self._run.limits.attempts
        if is_new or is_proven:
            log_unexpected(error)
        if not is_proven:
            self._run_again(job, ref, 0 if is_common else line.own)
            if is_common and not job.resting:
                self._pause_job(job, kind)
        return is_proven

    def _pause_job(self, job: Job, kind: str) -> None:
        job.trials.pauses += 1
        self._pausing.add(job)
        seconds = self._run.limits.back_off(job.trials.pauses)
        log.error("batch %s pauses for %g s: its lines fail with an unexpected %s", job.batch.id, seconds, kind)
        self._rest(job, job.trials.pauses)

    def _run_again(self, job: Job, ref: LineRef, faults: int = 0) -> None:
        """Return the line to its job: at once, or after the backoff of `faults` consecutive failures."""
        if ref.rank == CONTROL_RANK:
            return

        def again() -> None:
            job.retry.append(ref)
            self._run.offer(job)

        if faults:
            asyncio.get_running_loop().call_later(self._run.limits.back_off(faults), again)
        else:
            again()

    # Pauses of all lines

    def _pause_for_system(self, error: Exception) -> None:
        if not self._paused:
            self._system_pauses += 1
            self._system_fault = kind_of(error)
            seconds = self._run.limits.back_off(self._system_pauses)
            log.error("batch lines pause for %g s after a system failure: %s", seconds, self._system_fault)
            self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        if not self._paused:
            self._paused = True
            asyncio.get_running_loop().call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._paused = False
        self._run.wake.set()


def _error_line(ref: LineRef, envelope: Envelope | None, error: Exception) -> FinishedLine:
    answer = to_api_error(error)
    assert envelope is not None, "a line that cannot be read does not run"
    return FinishedLine(ref, False, response_row(envelope["custom_id"], answer.status, answer.envelope), Usage())
