"""States of a batch: legal transitions, and the timestamp that each state sets."""

from collections.abc import Mapping
from enum import StrEnum


class BatchStatus(StrEnum):
    """Batch states of OpenAI's API.

    The batch worker ends every non-terminal state, unless the disk fails: `validating` after a few attempts,
    `cancelling` within about a minute, and the others at the latest after the completion window."""

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
    # to IN_PROGRESS: compute results again that were damaged on the disk
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.IN_PROGRESS}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}

TERMINAL = frozenset(status for status, after in TRANSITIONS.items() if not after)
UNFINISHED = frozenset(BatchStatus) - TERMINAL

# Terminal state, without result files, of a batch that fails repeatedly in the given state.
GIVEN_UP = {
    BatchStatus.VALIDATING: BatchStatus.FAILED,
    BatchStatus.IN_PROGRESS: BatchStatus.EXPIRED,
    BatchStatus.FINALIZING: BatchStatus.FAILED,
    BatchStatus.CANCELLING: BatchStatus.CANCELLED,
}

# Error code and message of a line without a result when its batch ends.
UNFINISHED_LINE = {
    BatchStatus.EXPIRED: ("batch_expired", "This request could not be executed before the completion window closed."),
    BatchStatus.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


class IllegalTransition(Exception):
    """The batch cannot move to the requested state from its current one; nothing was changed."""


def check_transition(before: BatchStatus, after: BatchStatus) -> None:
    """Raise IllegalTransition unless TRANSITIONS allows the change."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"{before} -> {after}")


def timestamp_field(status: BatchStatus) -> str | None:
    """Return the name of the timestamp field of a state; None for `validating`, which starts at `created_at`."""
    return None if status is BatchStatus.VALIDATING else f"{status.value}_at"
