"""Validate the input file of a batch and build its result files, one batch at a time to bound memory."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gateway.batch.input import InputReport, check_apart
from gateway.batch.results import JournalReader, ResultBuilder
from gateway.batch.run import BatchRun, in_thread, to_end
from gateway.generate.answering import at_half_speed
from gateway.http.errors import MESSAGES_PATH
from gateway.http.keys import TENANT_LIMIT
from gateway.models import ModelNames
from gateway.store.disk import StorageError, UnreadableError, read_errors
from gateway.store.objects import (
    GIVEN_UP,
    UNFINISHED_LINE,
    BatchJob,
    BatchStatus,
    FileObject,
    IllegalTransition,
    InputError,
    LineQuota,
    new_file_id,
)

log = logging.getLogger("tidemill.gateway")

INDEX_ROWS = 2000
CHECKED_ROWS = 1000
RECORD_ROWS = 100
INPUT_LOST = ("input_unavailable", "The input file can no longer be read.")
GIVEN_UP_ERROR = InputError("internal_error", "The server failed repeatedly while processing this batch.")
_NO_CODE = ("internal_error", "The request was not executed.")


class _CheckTimeout(Exception):
    """Reading an input file exceeded its time limit."""


class Finisher:
    """`max_lines`: maximum number of lines in a tenant's unfinished batches (None: no limit); `models`: names that a
    new batch may use (None: any)."""

    def __init__(self, run: BatchRun, max_lines: Callable[[str], int | None], models: ModelNames | None = None) -> None:
        self._run = run
        self._max_lines = max_lines
        self._models = models
        self._turn = asyncio.Semaphore(1)
        self._checks: dict[str, asyncio.Timeout] = {}
        self._hurried: set[str] = set()
        self._rounds: Counter[str] = Counter()

    async def validate(self, batch: BatchJob) -> None:
        """Read the input and move the batch from `validating` to `in_progress` or `failed`. A batch that is being
        cancelled is read too, because each of its lines gets a row. Raises IllegalTransition."""
        await self._while_readable(lambda lenient: self._validate(batch, lenient))

    def hurry(self, batch_id: str) -> None:
        """Shorten the time limit of reading the input to `cancel_seconds`: the batch is being cancelled."""
        self._hurried.add(batch_id)
        check = self._checks.get(batch_id)
        if check is not None:
            soon = asyncio.get_running_loop().time() + self._run.limits.cancel_seconds
            check.reschedule(min(soon, check.when() or soon))

    async def give_up(self, batch: BatchJob) -> None:
        """End a batch without result files and record the error. Raises IllegalTransition."""
        log.error("batch %s ends without results after repeated failures while %s", batch.id, batch.status)
        end = GIVEN_UP[batch.status]
        if end is BatchStatus.FAILED:
            await self._run.retry.run(
                lambda: self._run.store.move_batch(batch.id, end, self._run.clock.now(), [GIVEN_UP_ERROR])
            )
            return
        await self._run.retry.run(lambda: self._run.store.note_error(batch.id, GIVEN_UP_ERROR))
        await self._run.retry.run(
            lambda: self._run.store.finish_batch(batch.id, end, self._run.clock.now(), None, None, (0, batch.total))
        )

    async def check_results(self, batch: BatchJob) -> int:
        """Verify stored results and rerun lines whose result is damaged or missing. Return the journal offset of the
        next result. Raises IllegalTransition."""
        counted = await self._run.retry.run(lambda: self._run.store.count_lines(batch.id))
        if counted != (batch.total, 0, 0) or batch.completed or batch.failed:
            await self._while_readable(lambda lenient: self._run.retry.run(lambda: self._verify(batch, lenient)))
        return await self._run.retry.run(lambda: in_thread(lambda: self._end_of(batch.id)))

    def _end_of(self, batch_id: str) -> int:
        """Return the journal's size in bytes, and make its directory entry durable."""
        journal = self._run.folder.copy_journal(batch_id)
        with self._run.folder.disk.storing():
            try:
                end = journal.stat().st_size
            except FileNotFoundError:
                return 0
            self._run.folder.disk.sync_folder(journal.parent)
            return end

    async def _verify(self, batch: BatchJob, lenient: bool) -> None:
        journal = JournalReader(self._run.folder, batch.id, lenient)
        try:
            rank, num_lines = -1, 0
            while records := await self._run.store.line_records(batch.id, rank, CHECKED_ROWS):
                ended = [record for record in records if record.succeeded is not None]
                await in_thread(lambda: at_half_speed(lambda: [journal.read(record) for record in ended]))  # noqa: B023
                rank, num_lines = records[-1].ref.rank, num_lines + len(records)
        finally:
            journal.close()
        if num_lines != batch.total:
            log.error(
                "batch %s: %d of %d lines are in the database; the input is read again",
                batch.id,
                num_lines,
                batch.total,
            )
            await self._index_again(batch, lenient)
        if journal.damaged or journal.counts != [batch.failed, batch.completed]:
            await self._run_again(batch, journal)

    async def _run_again(self, batch: BatchJob, journal: JournalReader) -> None:
        log.error("batch %s: %d results are damaged on the disk; their lines run again", batch.id, len(journal.damaged))
        await to_end(self._run.store.run_again(batch.id, journal.damaged, journal.usage))

    async def _index_again(self, batch: BatchJob, lenient: bool) -> None:
        """Add lines that are missing in the database: the input file determines the offset of each."""
        report = await self._read_input(batch, lenient)
        if len(report.lines) == batch.total:
            for start in range(0, batch.total, INDEX_ROWS):
                await self._run.store.add_lines(batch.id, report.lines.rows(start, start + INDEX_ROWS), first=False)

    async def finish(self, batch: BatchJob, status: BatchStatus) -> None:
        """Build the result files and end the batch. Raises IllegalTransition, after removing the files."""
        await self._while_readable(lambda lenient: self._run.retry.run(lambda: self._build(batch, status, lenient)))

    async def _while_readable(self, work: Callable[[bool], Awaitable[None]]) -> None:
        """Run `work(lenient)`, one batch at a time, and retry it with backoff after UnreadableError. After
        `read_attempts` failures `lenient` is true: unreadable lines then count as damaged."""
        faults = 0
        while True:
            try:
                async with self._turn:
                    lenient = faults >= self._run.limits.read_attempts
                    if lenient:  # if the disk fails every read, pause instead of dropping lines
                        await self._run.retry.run(lambda: in_thread(self._run.folder.check_disk))
                    await work(lenient)
                return
            except UnreadableError as error:
                faults += 1
                log.warning("a batch's file cannot be read (%s)", type(error.__cause__).__name__)
                await asyncio.sleep(self._run.limits.back_off(faults))

    async def _validate(self, batch: BatchJob, lenient: bool) -> None:
        models = None if batch.endpoint == MESSAGES_PATH else self._models  # there each message has its own error
        report = await self._run.retry.run(lambda: self._read_input(batch, lenient, models))
        if report.errors:
            end = BatchStatus.CANCELLED if batch.status is BatchStatus.CANCELLING else BatchStatus.FAILED
            await self._run.retry.run(
                lambda: self._run.store.move_batch(batch.id, end, self._run.clock.now(), report.errors)
            )
            return
        for start in range(0, len(report.lines), INDEX_ROWS):
            rows = report.lines.rows(start, start + INDEX_ROWS)
            await self._run.retry.run(lambda: self._run.store.add_lines(batch.id, rows, first=start == 0))  # noqa: B023
        await self._run.retry.run(lambda: self._start(batch, len(report.lines), report.model))

    async def _start(self, batch: BatchJob, total: int, model: str | None) -> None:
        limit = self._max_lines(batch.tenant)
        try:
            await self._run.store.start_batch(batch.id, total, model, self._run.clock.now(), limit)
        except LineQuota as error:
            message = (
                f"The batch has {total} lines and unfinished batches have {error.used}: the limit is 'lines={limit}'."
            )
            refusal = InputError(TENANT_LIMIT, message)
            await self._run.store.move_batch(batch.id, BatchStatus.FAILED, self._run.clock.now(), [refusal])

    async def _read_input(self, batch: BatchJob, lenient: bool, models: ModelNames | None = None) -> InputReport:
        try:
            with read_errors(self._run.folder.file_path(batch.input_file_id)):
                return await self._check(batch, models)
        except UnreadableError as error:
            if error.gone or lenient:
                return InputReport(errors=[InputError(*INPUT_LOST)])
            raise

    async def _check(self, batch: BatchJob, models: ModelNames | None) -> InputReport:
        """Check the input. Raises _CheckTimeout after the time limit: an OSError would blame the file."""
        path, limits = await in_thread(lambda: self._run.folder.copy_body(batch.input_file_id)), self._run.limits
        cancelling = batch.status is BatchStatus.CANCELLING or batch.id in self._hurried
        try:
            async with asyncio.timeout(limits.cancel_seconds if cancelling else limits.check_seconds) as check:
                self._checks[batch.id] = check
                return await check_apart(str(path), batch.endpoint, limits.lines, limits.line_bytes, models)
        except TimeoutError as error:
            if check.expired():
                raise _CheckTimeout from error
            raise
        finally:
            self._checks.pop(batch.id, None)

    async def _build(self, batch: BatchJob, status: BatchStatus, lenient: bool) -> None:
        await self._run.folder.settle()
        if (await self._run.store.load_batch(batch.id)).status is status:
            return  # an earlier attempt ended the batch after all
        unfinished = UNFINISHED_LINE.get(status, _NO_CODE)
        builder = ResultBuilder(
            self._run.folder, batch.id, batch.input_file_id, unfinished, lenient, self._run.limits.line_bytes
        )
        try:
            rank = -1
            while records := await self._run.store.line_records(batch.id, rank, RECORD_ROWS):
                await in_thread(lambda: at_half_speed(lambda: builder.add(records)))
                rank = records[-1].ref.rank
            if builder.journal.damaged and status is BatchStatus.COMPLETED and self._has_rounds(batch):
                await self._run_again(batch, builder.journal)
                return
            await self._check_rows(batch, builder)
            await self._publish(batch, status, builder)
        finally:
            await in_thread(builder.close)

    def _has_rounds(self, batch: BatchJob) -> bool:
        """Return whether damaged results may be computed again. The limit lets a batch end on a disk that damages every
        row."""
        self._rounds[batch.id] += 1
        return self._rounds[batch.id] <= self._run.limits.attempts

    async def _check_rows(self, batch: BatchJob, builder: ResultBuilder) -> None:
        """Record an error on the batch unless its files have a row for each line."""
        rows = builder.output.rows + builder.errors.rows
        if rows != batch.total:
            log.error("batch %s: its files have %d rows for %d lines", batch.id, rows, batch.total)
            message = f"The result files have {rows} rows for {batch.total} lines; resend the lines that lack a row."
            await self._run.store.note_error(batch.id, InputError("results_incomplete", message))

    async def _publish(self, batch: BatchJob, status: BatchStatus, builder: ResultBuilder) -> None:
        ids = (new_file_id(), new_file_id())
        parts = zip(ids, (builder.output, builder.errors), strict=True)
        await self._run.store.announce_files([file_id for file_id, part in parts if part.rows])
        now = self._run.clock.now()
        completed, usage = builder.output.rows, builder.journal.usage
        # as in OpenAI's API, lines without a result are not failed: the batch expired or was cancelled before
        counts = completed, batch.total - completed - (builder.num_unfinished if status in UNFINISHED_LINE else 0)
        try:
            await in_thread(lambda: builder.publish(*ids))
            output = self._result_file(batch, ids[0], "output", builder.output.size, now)
            errors = self._result_file(batch, ids[1], "error", builder.errors.size, now)
            await to_end(self._run.store.finish_batch(batch.id, status, now, output, errors, counts, usage))
        except (StorageError, IllegalTransition) as error:
            await to_end(self._run.folder.withdraw(error, *ids))
            raise

    def _result_file(self, batch: BatchJob, file_id: str, kind: str, size: int, now: int) -> FileObject | None:
        if not size:
            return None
        expires_at = None if batch.output_expires_after is None else now + batch.output_expires_after
        return FileObject(file_id, batch.tenant, size, now, f"{batch.id}_{kind}.jsonl", "batch_output", expires_at)

    def forget(self, batch: BatchJob, *, is_owner: bool) -> None:
        """Remove the journal of a batch that has ended, or this server's copy; if that fails, the next start removes
        it. Blocking."""
        self._hurried.discard(batch.id)
        del self._rounds[batch.id]
        if not batch.is_damaged:  # the journal of a damaged batch holds its only results
            with suppress(StorageError):
                self._run.folder.remove_journal(batch.id, is_owner=is_owner)
