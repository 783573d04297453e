"""Values that the parts of the batch worker share: the jobs in progress, the window, the order in which batches feed
lines into the engine, limits, and the retry of work on the disk."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

from anyio import to_thread

from engine.api import Lane
from gateway.batch.failures import Trials
from gateway.store.disk import StorageError, StorageHealth
from gateway.store.folder import StateFolder
from gateway.store.objects import BatchJob, LineRef, Usage
from gateway.store.row_store import RowStore, StoreClock

NUM_RUNS = 128
"""Least number of runs of a batch, as far as runs have RUN_LINES lines."""
RUN_LINES = (8, 64)
"""Minimum and maximum number of lines in a run."""
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def by_deadline(batch: BatchJob) -> tuple[int, int, str]:
    """Return the sort key of a tenant's batches: the earliest deadline first, then the first that was created."""
    return batch.expires_at, batch.created_at, batch.id


@dataclass(frozen=True, slots=True)
class LineSizes:
    """Sizes of a batch's first lines."""

    line_bytes: float
    """Mean bytes of a line."""
    answers: tuple[float, ...] = ()
    """Maximum output tokens of some of the lines; infinity for a line without a limit."""


class Runs:
    """Runs of ranks of a batch of `num_lines` lines in feeding order.

    Lines are ranked by prefix. Runs of neighbours, which share prefixes, follow each other in golden-ratio steps
    through the ranks. So at any time the finished lines are a fair sample of the batch: long prompts and long answers
    mix in the engine, and the tokens of a line so far hold for the rest.
    """

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines
        least, most = RUN_LINES
        self.size = min(max(num_lines // NUM_RUNS, least), most)
        self.count = -(-num_lines // self.size)
        self._step = max(1, round(GOLDEN * self.count))
        while math.gcd(self._step, self.count) > 1:
            self._step += 1
        self._inverse = pow(self._step, -1, self.count) if self.count > 1 else 0

    def ranks(self, index: int) -> range:
        """Return the ranks of a run by its index in feeding order."""
        start = index * self._step % self.count * self.size
        return range(start, min(start + self.size, self._num_lines))

    def index(self, rank: int) -> int:
        """Return the index of the run with a rank."""
        return rank // self.size * self._inverse % self.count


class Leases:
    """Runs of one batch that this server feeds. `ended`: runs whose lines all have results."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._left: dict[int, int] = {}
        self.ended: list[int] = []
        self.found: list[int] = []
        """Runs of this server that `begin` does not know yet."""

    def begin(self, run: int) -> None:
        self._left[run] = len(self._runs.ranks(run))

    def lines_ended(self, ranks: Iterable[int]) -> None:
        """Count lines whose results are stored."""
        for rank in ranks:
            run = self._runs.index(rank)
            if run in self._left:
                self._left[run] -= 1
                if not self._left[run]:
                    del self._left[run]
                    self.ended.append(run)

    def compare(self, runs: frozenset[int]) -> bool:
        """Forget runs that are not in `runs`, which is the store's view; return whether some of `runs` were not known,
        because the answer to their lease was lost."""
        known = {*self._left, *self.ended, *self.found}
        for run in known - runs:
            self._left.pop(run, None)
        self.ended, self.found = ([run for run in some if run in runs] for some in (self.ended, self.found))
        self.found += sorted(runs - known)
        return bool(self.found)


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
    sizes: LineSizes
    next_run: int = 0
    """Index of the next run of lines to feed (`Runs`)."""
    exhausted: bool = False
    """No run is left beyond `ahead`."""
    retry: deque[LineRef] = field(default_factory=deque)
    """Lines to feed again."""
    ahead: list[int] = field(default_factory=list)
    """Ranks of the next lines in feeding order."""
    running: "set[asyncio.Task[None]]" = field(default_factory=set)
    """Lines in the engine."""
    unwritten: int = 0
    """Finished lines whose rows are not durable."""
    written: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while `unwritten` is 0."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Feed no more lines: all lines have ended, or the batch has."""
    journal_end: int = 0
    """Byte offset of the next group of rows in the journal."""
    read_faults: int = 0
    """Consecutive failures to read input lines."""
    resting: bool = False
    """No turn until the pause after a fault is over."""
    at_risk: bool = False
    """The batch may miss its completion window."""
    trials: Trials = field(default_factory=Trials)
    write_faults: int = 0
    """Consecutive unexpected failures to store results."""
    place: tuple[bool, int] | None = None
    """Lane (`at_risk`) and number in the queue of `FeedOrder`; None while the job does not wait for a turn."""
    closing: bool = False
    """The batch accepts no more results."""
    leases: Leases | None = None
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

    Tenants share the window equally, as far as they have lines. Among the jobs of a tenant, the earliest deadline goes
    first. Jobs at risk of missing their completion window precede others until they hold three quarters of the window.
    One turn feeds a run of lines in key order, so that the engine receives lines with equal prefixes together.

    Call `offer` whenever a job may have lines to feed. `pick` costs O(tenants + jobs with lines in the window): jobs
    without a line in the window wait in a heap per tenant.
    """

    def __init__(self, window_lines: int) -> None:
        self.window_lines = window_lines
        self._numbers = count()
        self._waiting: dict[tuple[bool, str], list[tuple[tuple[int, int, str], int, Job]]] = {}
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
            heappush(heap, (by_deadline(job.batch), job.place[1], job))

    def pick(self) -> Job | None:
        """Return the job that feeds next; None if no job has lines to feed."""
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
        job = min(hungry, key=lambda job: (held[job.batch.tenant], by_deadline(job.batch)))
        job.place = None
        self._holding.add(job)
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


ResultT = TypeVar("ResultT")

MAX_BACK_OFF = 60.0
"""Maximum pause in seconds."""
MAX_DOUBLINGS = 30
MAX_PAUSE = 10.0
"""Maximum seconds between two attempts, and so the maximum delay after the folder is repaired."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of files and batches. Sizes in bytes, times in seconds."""

    file_bytes: int = 8 * 1024 * 1024 * 1024
    lines: int = 1_000_000
    """Maximum lines per batch."""
    line_bytes: int = 4 * 1024 * 1024
    window_lines: int = 256
    """Maximum lines of all batches in memory."""
    window_bytes: int = 32 * 1024 * 1024
    """Maximum input bytes of all batches in memory."""
    retry_seconds: float = 1.0
    """First pause after a failure; it doubles with each further one."""
    read_attempts: int = 5
    """Attempts to read an unreadable file before its unreadable lines count as lost."""
    attempts: int = 5
    """Attempts after unexpected errors."""
    check_seconds: float = 600.0
    """Time limit for validating an input file."""
    cancel_seconds: float = 60.0
    """The same, once the batch is being cancelled."""
    tick_seconds: float = 30.0
    beat_seconds: float = 2.0
    """Time between two heartbeats of servers that share batches."""
    follows_engine: bool = False
    """The window follows the number of lines that the engine runs; always so for servers that share batches."""

    def back_off(self, faults: int) -> float:
        """Return the pause in seconds after `faults` consecutive failures: exponential, at most MAX_BACK_OFF."""
        return min(MAX_BACK_OFF, self.retry_seconds * float(1 << min(faults - 1, MAX_DOUBLINGS)))


async def to_end(work: Awaitable[ResultT]) -> ResultT:
    """Await work that must not be interrupted: a cancellation is raised after the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # mark as retrieved: the cancellation takes precedence
        raise


async def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run blocking work to its end in a thread."""
    return await to_end(to_thread.run_sync(work))


class StorageRetry:
    """Retry work on the state folder with backoff for as long as it raises StorageError.

    `healthy` is false while any work waits for a retry; `changed` is called when the last wait ends. While `stopping`,
    the StorageError is raised instead.
    """

    def __init__(self, retry_seconds: float, changed: Callable[[], None], health: StorageHealth) -> None:
        self.stopping = False
        self._retry_seconds = retry_seconds
        self._changed = changed
        self._health = health
        self._waiting = 0

    @property
    def healthy(self) -> bool:
        return not self._waiting

    async def run(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Run `work`, which must be repeatable. Raises StorageError only while stopping."""
        waits, pause = False, self._retry_seconds
        try:
            while True:
                try:
                    return await work()
                except StorageError as error:
                    if self.stopping:
                        raise
                    self._health.failed("jobs", error)
                self._waiting += not waits
                waits = True
                await asyncio.sleep(pause)
                pause = min(MAX_PAUSE, 2 * pause)
        finally:
            if waits:
                self._waiting -= 1
                if self.healthy:
                    self._health.worked("jobs")
                    self._changed()


class BatchRun:
    """The batches in progress of one worker; made once, and shared by its parts.

    Attributes:
        clock: Time of files and batches; deadlines outlive the process.
        jobs: Batches in progress by id.
        wake: Set when lines may be fed.
    """

    def __init__(self, folder: StateFolder, limits: BatchLimits, clock: StoreClock) -> None:
        self.folder = folder
        self.limits = limits
        self.clock = clock
        self.jobs: dict[str, Job] = {}
        self.window = Window(limits.window_lines, limits.window_bytes)
        self.order = FeedOrder(limits.window_lines)
        self.wake = asyncio.Event()
        self.retry = StorageRetry(limits.retry_seconds, self.wake.set, folder.disk.health)

    @property
    def store(self) -> RowStore:
        return self.folder.store

    def offer(self, job: Job) -> None:
        """Queue a job that may have lines to feed or whose lane has changed."""
        self.order.offer(job)
        self.wake.set()
