"""What files and batches ask of a database. Every method is one transaction: when it returns, what it did is durable.

All methods raise StorageError when the disk does not take it, in which case nothing was changed; with `in_doubt` set
the change may still appear after a crash, until `settle` or another change succeeds. What adds may be repeated:
the second time it does nothing; what moves a batch raises IllegalTransition then.
"""

from collections.abc import Sequence
from typing import Protocol

from gateway.batch_plan import Lengths
from gateway.batch_states import BatchStatus
from gateway.store.objects import BatchJob, FileObject, InputError, LineRecord, LineRef, LineResult, Page, Usage


class FileStore(Protocol):
    """Rows of files. A file that has expired or belongs to another tenant is a missing one."""

    async def add_file(self, file: FileObject, max_bytes: int | None = None) -> None:
        """`max_bytes`: what all files of its tenant may have together. Raises StorageQuota."""
        ...

    async def stored_bytes(self, tenant: str, now: int) -> int:
        """Of all files of a tenant."""
        ...

    async def get_file(self, tenant: str, file_id: str, now: int) -> FileObject | None: ...

    async def list_files(self, tenant: str, page: Page, purpose: str | None, now: int) -> tuple[list[FileObject], bool]:
        """One page, and whether there is more. Raises UnknownCursor."""
        ...

    async def delete_file(self, tenant: str, file_id: str, now: int) -> bool:
        """False if there is none. Raises FileInUse for the input of a batch that has not ended."""
        ...

    async def expire_files(self, now: int, limit: int) -> list[str]:
        """Take expired files out of the lists, but for inputs in use; returns the ids whose bodies may go."""
        ...

    async def known_files(self, file_ids: Sequence[str]) -> set[str]:
        """Those of the ids whose body must be kept, of whatever tenant."""
        ...


class BatchStore(Protocol):
    """Rows of batches and of their lines."""

    async def create_batch(
        self, batch: BatchJob, idempotency: tuple[str, str] | None = None, max_lines: int | None = None
    ) -> BatchJob:
        """Add a batch; `idempotency` is a key and a digest of the body: with a key seen before, the batch of then.
        `max_lines`: what the unfinished batches of its tenant may have together; one whose lines are not yet counted
        counts as one.

        Raises NoSuchFile, WrongPurpose, IdempotencyConflict or LineQuota.
        """
        ...

    async def get_batch(self, tenant: str, batch_id: str) -> BatchJob | None: ...

    async def load_batch(self, batch_id: str) -> BatchJob:
        """For the worker, which serves every tenant. The batch must exist."""
        ...

    async def list_batches(self, tenant: str, page: Page) -> tuple[list[BatchJob], bool]:
        """One page, newest first, and whether there is more. Raises UnknownCursor."""
        ...

    async def unfinished_batches(self) -> list[BatchJob]: ...

    async def move_batch(
        self, batch_id: str, status: BatchStatus, now: int, errors: Sequence[InputError] = ()
    ) -> BatchJob:
        """Change the state; a batch that has failed has no lines and counts none. Raises IllegalTransition."""
        ...

    async def note_error(self, batch_id: str, error: InputError) -> None:
        """Say in a running batch what is wrong with it; the first such note stays."""
        ...

    async def cancel_batch(self, tenant: str, batch_id: str, now: int) -> BatchJob | None:
        """Begin to cancel where that is still possible; the batch as it is then, None if there is none."""
        ...

    async def add_lines(self, batch_id: str, lines: Sequence[LineRef], *, first: bool) -> None:
        """Index lines of a batch under validation; `first`: forget those of an attempt that was cut off."""
        ...

    async def start_batch(
        self, batch_id: str, total: int, model: str | None, now: int, max_lines: int | None = None
    ) -> BatchJob:
        """The input is valid: from `validating` to `in_progress`; a batch being cancelled stays so. `max_lines`: see
        `create_batch`. Raises LineQuota."""
        ...

    async def pending_lines(self, batch_id: str, after_rank: int, limit: int) -> list[LineRef]:
        """Lines without a result, by rank."""
        ...

    async def line_lengths(self, batch_id: str) -> Lengths: ...

    async def add_results(
        self, batch_id: str, results: Sequence[LineResult], usage: Usage, journal_bytes: int
    ) -> BatchJob:
        """Record results whose rows are already durable in the journal. A line that has a result keeps it."""
        ...

    async def line_records(self, batch_id: str, after_rank: int, limit: int) -> list[LineRecord]:
        """All lines, by rank."""
        ...

    async def finish_batch(
        self,
        batch_id: str,
        status: BatchStatus,
        now: int,
        output: FileObject | None,
        errors: FileObject | None,
        lost: int = 0,
    ) -> BatchJob:
        """End a batch together with the rows of its files; lines without a result count as failed, as do `lost` ones
        whose result cannot be read any more, and the index of its lines goes. Raises IllegalTransition, but for the
        same end with the same files."""
        ...


class Store(FileStore, BatchStore, Protocol):
    """Everything. `close` waits for what was begun."""

    async def settle(self) -> None:
        """Commit something: what is not to be seen now of a commit in doubt cannot appear after a crash any more."""
        ...

    async def close(self) -> None: ...
