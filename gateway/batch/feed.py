"""Order in which batches feed lines into the engine. Pure bookkeeping: no disk, no engine, no clock."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from engine.api import Lane
from gateway.batch.failures import Trials
from gateway.batch.lengths import AnswerLengths, LineLengths
from gateway.store.objects import BatchJob, LineRef, Usage

if TYPE_CHECKING:
    from gateway.batch.cluster import Leases


class FinishedLine(NamedTuple):
    """A line with its result row, which is not durable yet."""

    ref: LineRef
    succeeded: bool
    row: bytes
    usage: Usage


@dataclass(slots=True, eq=False)
class Job:
    """A batch in progress."""

    batch: BatchJob
    next_run: int = 0
    """Index of the next run of lines to feed (`gateway.batch.line_order`)."""
    exhausted: bool = False
    """No run is left beyond `ahead`."""
    retry: deque[LineRef] = field(default_factory=deque)
    """Lines to feed again."""
    ahead: list[int] = field(default_factory=list)
    """Ranks of the next lines in feeding order."""
    ordered: int = 0
    """Finished lines when `ahead` was last ordered by expected length; 0: never."""
    answers: AnswerLengths = field(default_factory=lambda: AnswerLengths(0))
    running: "set[asyncio.Task[None]]" = field(default_factory=set)
    """Lines in the engine."""
    unwritten: int = 0
    """Finished lines whose rows are not durable."""
    written: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while `unwritten` is 0."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Feed no more lines: all lines have ended, or the batch has."""
    last_turn: int = -1
    journal_end: int = 0
    """Byte offset of the next group of rows in the journal."""
    read_faults: int = 0
    """Consecutive failures to read input lines."""
    resting: bool = False
    """No turn until the pause after a fault is over."""
    at_risk: bool = False
    """The batch may miss its completion window."""
    lengths: LineLengths | None = None
    """Lengths of the batch's lines, once loaded."""
    trials: Trials = field(default_factory=Trials)
    write_faults: int = 0
    """Consecutive unexpected failures to store results."""
    place: tuple[bool, int] | None = None
    """Lane (`at_risk`) and number in the queue of `FeedOrder`; None while the job does not wait for a turn."""
    closing: bool = False
    """The batch accepts no more results."""
    leases: "Leases | None" = None
    """Runs of this server, if servers share the batch."""

    @property
    def lane(self) -> Lane:
        """The engine's offline lane for the job's lines."""
        return Lane.AT_RISK if self.at_risk else Lane.BATCH

    @property
    def num_held(self) -> int:
        """Number of the job's lines in the window."""
        return len(self.running) + self.unwritten

    @property
    def hungry(self) -> bool:
        """Whether the job has lines to feed."""
        return not (self.settled.is_set() or self.resting or self.write_faults) and (
            bool(self.retry or self.ahead) or not self.exhausted
        )


@dataclass(slots=True)
class Window:
    """Limit on the lines of all jobs in memory and their input bytes. A single line may have any size."""

    max_lines: int
    max_bytes: int
    lines: int = 0
    bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.lines >= self.max_lines or self.bytes >= self.max_bytes

    def fitting(self, refs: Iterable[LineRef]) -> list[LineRef]:
        """Return the longest prefix of `refs` that fits; at least one line if the window is empty."""
        taken: list[LineRef] = []
        size = self.bytes
        for ref in refs:
            size += ref.length
            if self.lines + len(taken) >= self.max_lines or (size > self.max_bytes and self.lines + len(taken) > 0):
                break
            taken.append(ref)
        return taken

    def take(self, refs: Iterable[LineRef]) -> None:
        for ref in refs:
            self.lines += 1
            self.bytes += ref.length

    def release(self, refs: Iterable[LineRef]) -> None:
        for ref in refs:
            self.lines -= 1
            self.bytes -= ref.length


class FeedOrder:
    """Choose the job that feeds next.

    Tenants share the window equally, and the jobs of a tenant share its part, as far as they have lines. Jobs at risk
    of missing their completion window go first until they hold three quarters of the window. One turn feeds a run of
    lines in key order, so that the engine receives lines with equal prefixes together.

    Call `offer` whenever a job may have lines to feed. `pick` costs O(tenants + jobs with lines in the window): jobs
    without a line in the window wait in a heap per tenant.
    """

    def __init__(self, window_lines: int) -> None:
        self.window_lines = window_lines
        self._turn = 0
        self._numbers = count()
        self._waiting: dict[tuple[bool, str], list[tuple[int, int, int, Job]]] = {}
        self._holding: set[Job] = set()
        self.elsewhere: Mapping[str, int] = {}
        """Lines that other servers feed, by tenant."""

    @property
    def quantum(self) -> int:
        """Maximum number of lines in a turn."""
        return max(1, self.window_lines // 4)

    def offer(self, job: Job) -> None:
        """Queue a job that may have lines to feed or whose `at_risk` has changed."""
        waits = job.place is not None and job.place[0] is job.at_risk
        if job not in self._holding and not waits and job.hungry:
            job.place = (job.at_risk, next(self._numbers))
            heap = self._waiting.setdefault((job.at_risk, job.batch.tenant), [])
            heappush(heap, (job.last_turn, job.batch.expires_at, job.place[1], job))

    def pick(self) -> Job | None:
        """Return the job that feeds next and count its turn; None if no job has lines to feed."""
        for job in [job for job in self._holding if not job.num_held]:
            self._holding.remove(job)
            self.offer(job)
        hungry = [job for job in self._holding if job.hungry]
        hungry += self._first_waiting()
        if not hungry:
            return None
        urgent = [job for job in hungry if job.at_risk]
        if urgent and len(urgent) < len(hungry):
            is_full = sum(job.num_held for job in self._holding if job.at_risk) >= self.window_lines - self.quantum
            hungry = [job for job in hungry if job.at_risk is not is_full]
        held: Counter[str] = Counter(self.elsewhere)
        for job in self._holding:
            held[job.batch.tenant] += job.num_held
        job = min(hungry, key=lambda job: (held[job.batch.tenant], job.num_held, job.last_turn, job.batch.expires_at))
        job.place = None
        self._holding.add(job)
        self._turn += 1
        job.last_turn = self._turn
        return job

    def _first_waiting(self) -> list[Job]:
        """Return the first waiting job of each tenant and lane, and drop stale heap entries."""
        found: list[Job] = []
        for (at_risk, tenant), heap in list(self._waiting.items()):
            while heap and not (heap[0][-1].place == (at_risk, heap[0][-2]) and heap[0][-1].hungry):
                *_, number, job = heappop(heap)
                if job.place == (at_risk, number):
                    job.place = None
            if heap:
                found.append(heap[0][-1])
            else:
                del self._waiting[at_risk, tenant]
        return found
