"""Which job's lines go into the engine next, and how many. Pure bookkeeping: no disk, no engine, no clock."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from engine.api import Lane
from gateway.batch.failures import Trials
from gateway.store.objects import BatchJob, Lengths, LineRef, Usage


class FinishedLine(NamedTuple):
    """A line's row, not yet durable."""

    ref: LineRef
    succeeded: bool
    row: bytes
    usage: Usage


@dataclass(slots=True, eq=False)
class Job:
    """A batch in progress. `cursor` is the highest rank that was taken; `retry` lines that the engine did not take.
    `running` lines are in the engine, `unwritten` ones have ended and wait for the disk; `settled` says that no more of
    its lines are to be fed: all have ended, or the batch has. `journal_end` is where the next group of results goes:
    after all that was ever written. After a fault in its turn the job is `resting`; `at_risk`: it may miss its
    completion window. `lengths`: of its lines, once they were asked for. `trials`: its lines that fail.
    `write_faults`: how often in a row its results could not be stored for an unexpected reason; `closing`: the batch
    takes no more results; `place`: its
    lane and number in the feed order's queue, None while it does not wait for a turn."""

    batch: BatchJob
    cursor: int = -1
    exhausted: bool = False
    retry: deque[LineRef] = field(default_factory=deque)
    running: "set[asyncio.Task[None]]" = field(default_factory=set)
    unwritten: int = 0
    written: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    last_turn: int = -1
    journal_end: int = 0
    read_faults: int = 0
    resting: bool = False
    at_risk: bool = False
    lengths: Lengths | None = None
    trials: Trials = field(default_factory=Trials)
    write_faults: int = 0
    place: tuple[bool, int] | None = None
    closing: bool = False

    @property
    def lane(self) -> Lane:
        """Which offline work its lines go with."""
        return Lane.AT_RISK if self.at_risk else Lane.BATCH

    @property
    def num_held(self) -> int:
        """Its lines in the window."""
        return len(self.running) + self.unwritten

    @property
    def hungry(self) -> bool:
        """Whether it has lines to feed."""
        return not (self.settled.is_set() or self.resting or self.write_faults) and (
            bool(self.retry) or not self.exhausted
        )


@dataclass(slots=True)
class Window:
    """What of all jobs is in memory: lines, and bytes of their input. A line that is alone may have any size."""

    max_lines: int
    max_bytes: int
    lines: int = 0
    bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.lines >= self.max_lines or self.bytes >= self.max_bytes

    def fitting(self, refs: Iterable[LineRef]) -> list[LineRef]:
        """As many of the first of them as there is room for; at least one when nothing else is there."""
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
    """Decides whose turn it is. Tenants hold equal parts of the window, and so do the jobs of a tenant, as far as they
    have lines. Jobs at risk of missing their completion window may hold three quarters of it before the others. A turn
    is a run of lines in key order, so that the engine sees groups of equal prefixes.

    `offer` a job whenever it may have lines to feed. A pick costs O(tenants + jobs that hold lines), however many jobs
    wait: those that hold no line wait in a heap of their tenant.
    """

    def __init__(self, window_lines: int) -> None:
        self.quantum = max(1, window_lines // 4)
        self._urgent_lines = window_lines - self.quantum
        self._turn = 0
        self._numbers = count()
        self._waiting: dict[tuple[bool, str], list[tuple[int, int, int, Job]]] = {}
        self._holding: set[Job] = set()

    def offer(self, job: Job) -> None:
        """The job may have lines to feed, or its `at_risk` has changed."""
        waits = job.place is not None and job.place[0] is job.at_risk
        if job not in self._holding and not waits and job.hungry:
            job.place = (job.at_risk, next(self._numbers))
            heap = self._waiting.setdefault((job.at_risk, job.batch.tenant), [])
            heappush(heap, (job.last_turn, job.batch.expires_at, job.place[1], job))

    def pick(self) -> Job | None:
        """Return the job whose turn it is, None if no job has lines to feed; counts as the job's turn."""
        for job in [job for job in self._holding if not job.num_held]:
            self._holding.remove(job)
            self.offer(job)
        hungry = [job for job in self._holding if job.hungry]
        hungry += self._first_waiting()
        if not hungry:
            return None
        urgent = [job for job in hungry if job.at_risk]
        if urgent and len(urgent) < len(hungry):
            is_full = sum(job.num_held for job in self._holding if job.at_risk) >= self._urgent_lines
            hungry = [job for job in hungry if job.at_risk is not is_full]
        held: Counter[str] = Counter()
        for job in self._holding:
            held[job.batch.tenant] += job.num_held
        job = min(hungry, key=lambda job: (held[job.batch.tenant], job.num_held, job.last_turn, job.batch.expires_at))
        job.place = None
        self._holding.add(job)
        self._turn += 1
        job.last_turn = self._turn
        return job

    def _first_waiting(self) -> list[Job]:
        """The first job of each tenant and lane that holds no line; entries that no longer hold true are dropped."""
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
