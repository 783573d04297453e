"""The scheduler decides as it was recorded; see `golden_steps`."""

import json
from collections.abc import Sequence

import pytest
from golden_steps import COUNT, FILE, record


def check(numbers: Sequence[int]) -> None:
    recorded = json.loads(FILE.read_text())
    assert len(recorded) == COUNT
    expected = [recorded[number] for number in numbers]
    changed = [row["workload"] for row, now in zip(expected, record(numbers), strict=True) if row != now]
    assert not changed, "decisions changed; compare `python tests/golden_steps.py --show N` of both commits"


@pytest.mark.parametrize("stride", [
    pytest.param(16, marks=pytest.mark.cpu_limit(6)), pytest.param(1, marks=pytest.mark.slow),
])  # fmt: skip
def test_steps_are_as_recorded(stride: int) -> None:
    check(range(0, COUNT, stride))
