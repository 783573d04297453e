"""How late the event loop is: what every stream feels when something keeps it."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram

INTERVAL = 0.1
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """Asks to be woken ten times a second and observes by how much that was too late; see `BackgroundWork`.

    A loop that is late because its thread waits for a core shares the machine with too much; any other lateness is the
    server's own: a callback that takes long, or another thread that keeps the interpreter. The kernel tells them apart.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = _histogram(registry, "tidemill_loop_lag_seconds", "How late the server's event loop was.")
        text = "How late it was but for waiting for a core to run on (all of it where the system does not say)."
        self._own = _histogram(registry, "tidemill_loop_own_lag_seconds", text)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-loop-lag")

    async def stop(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        loop, core = asyncio.get_running_loop(), CoreWaits()
        while True:
            due, waited = loop.time() + INTERVAL, core.seconds()
            await asyncio.sleep(INTERVAL)
            lag = max(0.0, loop.time() - due)
            self._lag.observe(lag)
            self._own.observe(max(0.0, lag - (core.seconds() - waited)))


class CoreWaits:
    """What the thread that makes it waits for a core."""

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def seconds(self) -> float:
        """Since it began, while it could have run; 0 where the system does not say (only Linux does)."""
        with suppress(OSError, ValueError, IndexError):
            return int(self._file.read_text().split()[1]) / 1e9
        return 0.0


def _histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(name, text, buckets=_SECONDS, registry=registry)
