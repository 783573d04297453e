"""Servers under a short memory on the virtual clock, built as `tidemill serve` builds them."""

import pytest

from benchmarks import pressure, pressure_virtual
from predictor.slo import SLO

SHORT = ["--virtual", "--requests", "300", "--seeds", "1", "--prompt", "512", "--output", "512", "--lengths", "chat"]
PROMISE = SLO.parse("ttft_p99=1s,tbt_p99=100ms")


@pytest.mark.slow
def test_a_host_tier_does_not_delay_chats() -> None:
    """Chats that never come back: their prefixes are not worth a copy, and the cache of preempted ones is."""
    args = pressure.parse(SHORT)
    caches = {name: pressure_virtual.CACHES[name] for name in ("16 bits", "16 bits, host", "int8")}
    alone, host, int8 = (
        pressure_virtual.run_cell("demo", PROMISE, args, 4.0, "goodput-strict", flags).attained
        for flags in caches.values()
    )
    assert int8 > alone + 0.05, "memory is short"
    assert host >= alone - 0.05
