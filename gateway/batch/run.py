"""Values that the parts of the batch worker share: limits, the jobs in progress, and the retry of work on the disk."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from anyio import to_thread

from gateway.batch.feed import FeedOrder, Job, Window
from gateway.store.disk import StorageError, StorageHealth
from gateway.store.folder import StateFolder
from gateway.store.row_store import RowStore, StoreClock

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
        try:
            return await work()
        except StorageError as error:
            if self.stopping:
                raise
            self._health.failed("jobs", error)
        self._waiting += 1
        try:
            return await self._repeat(work)
        finally:
            self._waiting -= 1
            if self.healthy:
                self._health.worked("jobs")
                self._changed()

    async def _repeat(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        pause = self._retry_seconds
        while True:
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE, 2 * pause)
            try:
                return await work()
            except StorageError as error:
                if self.stopping:
                    raise
                self._health.failed("jobs", error)


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
