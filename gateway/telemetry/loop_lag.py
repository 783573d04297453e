"""How late the event loop is: what every stream feels when something keeps it."""

import asyncio

from prometheus_client import CollectorRegistry, Histogram

INTERVAL = 0.1
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """Asks to be woken ten times a second and observes by how much that was too late; see `BackgroundWork`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "tidemill_loop_lag_seconds", "How late the server's event loop was.", buckets=_SECONDS, registry=registry
        )
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
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self._lag.observe(max(0.0, loop.time() - due))
