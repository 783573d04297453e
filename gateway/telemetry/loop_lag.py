"""Lag of the event loop, which delays every stream."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram

INTERVAL = 0.1
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """Measure ten times per second by how much a timer fires late; see `BackgroundWork`.

    Lag while the thread waits for a CPU core means that the machine is overloaded. The rest is caused by the server
    itself: a slow callback, or another thread that holds the GIL. The kernel's scheduler statistics separate the two.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = _histogram(registry, "tidemill_loop_lag_seconds", "Lag of the server's event loop.")
        text = "Lag of the event loop without waits for a CPU core (all lag where the system does not report waits)."
        self._own = _histogram(registry, "tidemill_loop_own_lag_seconds", text)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-loop-lag")

    async def stop(self) -> None:
        """Stop measuring. Idempotent."""
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
    """Time that the creating thread has waited for a CPU core."""

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def seconds(self) -> float:
        """Return the total wait since the thread's start in seconds; 0 on systems other than Linux."""
        with suppress(OSError, ValueError, IndexError):
            return int(self._file.read_text().split()[1]) / 1e9
        return 0.0


def _histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(name, text, buckets=_SECONDS, registry=registry)
