"""How late the event loop is, and how much of that is the server's own fault."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gateway.telemetry.metrics import CoreWaits, LoopLag

OWN, ALL = "tidemill_loop_own_lag_seconds", "tidemill_loop_lag_seconds"


async def kept_from(registry: CollectorRegistry) -> None:
    """Return the measurements until one was blocked for half a second."""
    lag = LoopLag(registry)
    await lag.start()
    await asyncio.sleep(0.01)  # it has begun to wait
    time.sleep(0.5)  # noqa: ASYNC251 - a server must not do this
    while not registry.get_sample_value(f"{ALL}_count"):  # noqa: ASYNC110 - nothing says when it has looked
        await asyncio.sleep(0)
    await lag.stop()


def late(registry: CollectorRegistry, name: str) -> bool:
    within, looks = (registry.get_sample_value(f"{name}_bucket", {"le": bound}) for bound in ("0.25", "+Inf"))
    assert looks
    return within != looks


async def test_a_loop_that_is_kept_is_late_by_its_own_fault() -> None:
    registry = CollectorRegistry()
    await kept_from(registry)
    assert late(registry, ALL) and late(registry, OWN)


async def test_a_loop_that_waits_for_a_core_is_late_by_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr(CoreWaits, "seconds", lambda self: time.monotonic() - began)
    registry = CollectorRegistry()
    await kept_from(registry)
    assert late(registry, ALL) and not late(registry, OWN)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux")
def test_the_kernel_says_what_a_thread_waits_for_a_core(tmp_path: Path) -> None:
    """It hardly grows while the thread sleeps, beside any computation."""
    waits = CoreWaits()
    before, stop = waits.seconds(), threading.Event()
    threading.Timer(0.2, stop.set).start()
    stop.wait()
    assert 0.0 <= before <= waits.seconds() < before + 60.0
    waits._file = tmp_path / "schedstat"
    assert waits.seconds() == 0.0
    waits._file.write_text("5000 7000000000 12\n")
    assert waits.seconds() == 7.0
    waits._file.write_text("nothing\n")
    assert waits.seconds() == 0.0
