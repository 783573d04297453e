"""Unexpected failures of batch lines: does the error belong to the line, to its batch, or to the server?

A line fails in the same way whenever it is the cause. So one line may fail alone, but `COMMON` lines that fail in the
same way while no line succeeds have a common cause, and none of them is to blame. The server forgets all of this at a
restart: a line then has all of its attempts again.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from gateway.store.objects import LineRef

COMMON = 3
"""Lines that fail in the same way, without any success since, before a common cause is assumed."""


@dataclass(slots=True)
class Scope:
    """Failing lines and successes of one batch, or of all batches. Lines are keyed by batch and rank."""

    successes: int = 0
    lines: defaultdict[str, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))

    def add(self, kind: str, line: tuple[str, int]) -> None:
        self.lines[kind].add(line)

    def discard(self, kind: str, line: tuple[str, int]) -> None:
        self.lines[kind].discard(line)
        if not self.lines[kind]:
            del self.lines[kind]

    def is_common(self, kind: str, since: int) -> bool:
        """Whether enough lines fail in this way and none has succeeded since there were `since` successes."""
        return self.successes == since and len(self.lines.get(kind, ())) >= COMMON


@dataclass(slots=True)
class FailingLine:
    """`faults`: failures of the system; `own`: unexpected failures that only the line itself explains. `kind`: the last
    unexpected failure (None: there was none); the numbers of successes are as of then."""

    faults: int = 0
    own: int = 0
    kind: str | None = None
    batch_successes: int = 0
    successes: int = 0


@dataclass(slots=True)
class Trials:
    """The failing lines of one batch, by rank. `pauses`: how often in a row the batch has paused for a common cause;
    `turn_faults`: how often in a row its lines could not be fed. `control`: a line that has succeeded. It runs again
    beside failing lines if there is no other line that could succeed."""

    scope: Scope = field(default_factory=Scope)
    lines: dict[int, FailingLine] = field(default_factory=dict)
    pauses: int = 0
    turn_faults: int = 0
    control: LineRef | None = None


class Failures:
    """The judge of failing lines, over all batches."""

    def __init__(self) -> None:
        self._all = Scope()

    def system_fault(self, trials: Trials, rank: int) -> int:
        """Count a failure that says nothing about the line; return how many there were."""
        line = trials.lines.setdefault(rank, FailingLine())
        line.faults += 1
        return line.faults

    def unknown(self, batch_id: str, trials: Trials, rank: int, kind: str) -> tuple[FailingLine, bool]:
        """Count an unexpected failure; return the line and whether the cause is common to several lines."""
        line, key = trials.lines.setdefault(rank, FailingLine()), (batch_id, rank)
        if line.kind is None:
            line.batch_successes, line.successes = trials.scope.successes, self._all.successes
        self._drop(trials, key, line)
        line.kind = kind
        trials.scope.add(kind, key)
        self._all.add(kind, key)
        batch, server = trials.scope, self._all
        is_common = batch.is_common(kind, line.batch_successes) or server.is_common(kind, line.successes)
        line.own += not is_common
        line.batch_successes, line.successes = batch.successes, server.successes
        return line, is_common

    def is_new(self, kind: str) -> bool:
        """Whether no line fails in this way at present."""
        return kind not in self._all.lines

    def ended(self, batch_id: str, trials: Trials, rank: int, succeeded: bool) -> None:
        """The line has a row."""
        if (line := trials.lines.pop(rank, None)) is not None:
            self._drop(trials, (batch_id, rank), line)
        trials.scope.successes += succeeded
        self._all.successes += succeeded

    def forget(self, batch_id: str, trials: Trials) -> None:
        """The batch is no longer in progress."""
        for rank, line in trials.lines.items():
            self._drop(trials, (batch_id, rank), line)
        trials.lines.clear()

    def _drop(self, trials: Trials, key: tuple[str, int], line: FailingLine) -> None:
        if line.kind is not None:
            trials.scope.discard(line.kind, key)
            self._all.discard(line.kind, key)
