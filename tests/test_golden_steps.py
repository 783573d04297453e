"""The scheduler decides as it was recorded; see `golden_steps`."""

import json

import pytest
from golden_steps import COUNT, FILE, record


@pytest.mark.cpu_limit(60)
def test_every_step_is_as_recorded() -> None:
    recorded = json.loads(FILE.read_text())
    assert len(recorded) == COUNT
    changed = [row["workload"] for row, now in zip(recorded, record(), strict=True) if row != now]
    assert not changed, "decisions changed; compare `python tests/golden_steps.py --show N` of both commits"
