"""Processor time of tests: with TEST_CPU_SECONDS set, a default test that takes more fails.

Setup and teardown are included. Processor time (own, and of children that ended) depends less than wall time on other
programs of the machine.
"""

import os
import sys
from collections.abc import Generator

import pytest

LIMIT = float(os.environ.get("TEST_CPU_SECONDS", "inf"))
UNLIMITED = ("slow", "manual", "gpu", "clients") + (("fuzz",) if os.environ.get("TEST_ALL") else ())
IMPORTS = 50
"""A test during which more modules than this were loaded is not judged: imports are paid by the first test."""
_start = pytest.StashKey[tuple[float, int]]()


def cpu_seconds() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_start] = cpu_seconds(), len(sys.modules)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    start, modules = item.stash[_start]
    seconds, own = cpu_seconds() - start, item.get_closest_marker("cpu_limit")
    limit = max(LIMIT, own.args[0]) if own else LIMIT
    judged = call.when == "teardown" and report.passed and not any(map(item.get_closest_marker, UNLIMITED))
    if judged and seconds > limit and len(sys.modules) - modules <= IMPORTS:
        report.outcome = "failed"
        report.longrepr = f"{seconds:.1f} s of processor time, limit {limit:g} s: mark it slow or make it cheaper"
    return report
