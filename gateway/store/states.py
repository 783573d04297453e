"""The states of a batch: one table of legal changes, and which timestamp each state sets. Knows nothing of storage."""

from collections.abc import Mapping
from enum import StrEnum


class BatchStatus(StrEnum):
    """OpenAI's words. Every state but the terminal ones is owned by the batch worker and ends: `validating` after a few
    tries, `cancelling` within a minute of them, the others when their window has closed, if nothing else ends them.
    Only a disk that takes no data stops the clock."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TRANSITIONS: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.FAILED, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.EXPIRED}
    ),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.EXPIRED}),
    # back to work: results that are damaged on the disk are computed again
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.IN_PROGRESS}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}

TERMINAL = frozenset(status for status, after in TRANSITIONS.items() if not after)
UNFINISHED = frozenset(BatchStatus) - TERMINAL

# How a batch ends that the server cannot carry on: without files.
GIVEN_UP = {
    BatchStatus.VALIDATING: BatchStatus.FAILED,
    BatchStatus.IN_PROGRESS: BatchStatus.EXPIRED,
    BatchStatus.FINALIZING: BatchStatus.FAILED,
    BatchStatus.CANCELLING: BatchStatus.CANCELLED,
}

# The error code of a line that had not ended when its batch did.
UNFINISHED_LINE = {
    BatchStatus.EXPIRED: ("batch_expired", "This request could not be executed before the completion window closed."),
    BatchStatus.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


class IllegalTransition(Exception):
    """The batch is no longer in a state from which it may go there; nothing was changed."""


def check_transition(before: BatchStatus, after: BatchStatus) -> None:
    """Raises IllegalTransition unless the table has it."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"{before} -> {after}")


def timestamp_field(status: BatchStatus) -> str | None:
    """The field that says when a batch came into a state; `validating` begins with `created_at`."""
    return None if status is BatchStatus.VALIDATING else f"{status.value}_at"
