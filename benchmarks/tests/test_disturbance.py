"""Offline work returns soon after a disturbance, on the virtual clock (`colocation --disturb`)."""

import pytest

from benchmarks.disturbance import measure


@pytest.mark.parametrize("rate", [0.2, 1.0, 2.0])
def test_offline_work_returns_within_seconds_of_a_disturbance(rate: float) -> None:
    """Before the margins and the share were bounded in time, 37 to 76 % of the rate came back within a minute."""
    found = measure(rate, window=180.0)
    assert found.before > 400.0 and found.during < 0.2 * found.before, "the disturbance is felt"
    assert found.after(15, 60) >= 0.8 * found.before
    assert found.missed == 0
