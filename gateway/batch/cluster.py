"""Servers that share batches: heartbeats, ownership of batches, leases of runs, and the size of the window.

Without a shared store, this server owns each batch and feeds all of its runs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from engine.api import RequestClass
from engine.client import EngineStats
from gateway.batch.run import BatchRun, Leases, Runs
from gateway.http.errors import log_unexpected
from gateway.store.batch_rows import DEAD_SECONDS, Beat
from gateway.store.disk import StorageError
from gateway.store.objects import BatchJob, IllegalTransition

LEAST_WINDOW, WAITING_SHARE, RESIZE_SECONDS = 32, 1.0, 0.5
"""Lines and share of the running lines that wait in the engine: enough to admit more, so few that no other server
lacks lines at the end of a batch. Minimum seconds between two changes of the window."""


class Membership:
    """The part of this server. `stats`: current statistics of the engine; `rate`: own work per second."""

    def __init__(self, run: BatchRun, stats: Callable[[], EngineStats], rate: Callable[[], float]) -> None:
        self._run = run
        self._stats = stats
        self._rate = rate
        self._beaten = asyncio.Event()
        self._steady_since: float | None = None
        self._last_beat = self._resized_at = 0.0
        self._owned: frozenset[str] = frozenset()
        self.mine: set[str] = set()
        """Ids of the batches that this server owns."""
        self.resize()

    @property
    def is_shared(self) -> bool:
        return self._run.store.is_shared

    async def run(self, apply: Callable[[Beat], Awaitable[None]]) -> None:
        """Pass each heartbeat to `apply`."""
        while self.is_shared:
            try:
                await apply(await self.beat())
            except (StorageError, IllegalTransition):
                pass  # the next heartbeat
            except BaseException as raised:
                log_unexpected(raised)
            await asyncio.sleep(self._run.limits.beat_seconds)

    async def beat(self) -> Beat:
        """Record a heartbeat. Raises StorageError."""
        beat = await self._run.store.beat(self._rate(), self._takes_over)
        now = time.monotonic()
        if self._steady_since is None or now - self._last_beat > DEAD_SECONDS / 2:
            self._steady_since = now
        self._last_beat, self._owned = now, beat.owned
        self.mine -= beat.owned
        self._beaten.set()
        self._beaten = asyncio.Event()
        self.resize()
        return beat

    async def wait(self) -> None:
        """Wait for the next heartbeat."""
        await self._beaten.wait()

    @property
    def _takes_over(self) -> bool:
        """Whether leases of servers without a heartbeat are free. After the store was away, no server had one."""
        return self._steady_since is not None and time.monotonic() - self._steady_since >= DEAD_SECONDS

    async def own(self, batch_id: str) -> bool:
        """Return whether this server owns a batch, after an attempt to take it. Raises StorageError."""
        if not self.is_shared:
            return True
        if batch_id in self._owned or not await self._run.store.take_batch(batch_id, self._takes_over):
            self.mine.discard(batch_id)
            return False
        self.mine.add(batch_id)
        return True

    async def begin(self, batch: BatchJob) -> None:
        """Make the runs of a batch available, if this server owns it. Raises StorageError and IllegalTransition."""
        if batch.id in self.mine or await self.own(batch.id):
            runs = Runs(batch.total)
            blocks = [runs.ranks(index).start // runs.size for index in range(runs.count)]
            await self._run.store.add_runs(batch.id, runs.size, blocks)

    async def take_runs(self, batch: BatchJob, leases: Leases, most: int) -> list[int]:
        """Lease up to `most` runs. Raises StorageError."""
        ended = leases.ended
        taken = await self._run.store.take_runs(batch.id, ended, most, self._takes_over)
        leases.ended = [run for run in leases.ended if run not in ended]
        taken += leases.found
        leases.found = []
        for run in taken:
            leases.begin(run)
        return taken

    async def release(self, batch_id: str) -> None:
        """Free this server's runs of a batch; if the store is away, they become free later."""
        if self.is_shared:
            with suppress(StorageError):
                await self._run.store.release_runs(batch_id)

    async def others_end(self, batch_id: str, seconds: float) -> None:
        """Wait until no other server feeds lines of a batch, at most for `seconds`. Raises StorageError."""
        until = time.monotonic() + seconds
        while self.is_shared and await self._run.store.has_other_feeders(batch_id):
            if time.monotonic() >= until:
                return
            await asyncio.sleep(self._run.limits.beat_seconds / 4)

    def resize(self) -> None:
        """Set the window to the lines that the engine runs, and some that wait."""
        now = time.monotonic()
        if (self.is_shared or self._run.limits.follows_engine) and now - self._resized_at >= RESIZE_SECONDS:
            self._resized_at = now
            running = self._stats().running.get(RequestClass.OFFLINE, 0)
            wanted = running + max(LEAST_WINDOW, round(WAITING_SHARE * running))
            self._run.window.max_lines = min(self._run.limits.window_lines, wanted)
            self._run.wake.set()

    def forget(self, batch_id: str) -> bool:
        """Forget a batch that has ended; return whether this server owned it."""
        is_owner = batch_id in self.mine or not self.is_shared
        self.mine.discard(batch_id)
        return is_owner
