"""Fixtures of the tests, and the environment that they need."""

from pathlib import Path

import pytest
from cpu_limit import pytest_runtest_makereport, pytest_runtest_protocol
from fixtures import cache_folder, start_server, tokenizer

__all__ = [
    "cache_folder", "pytest_runtest_makereport", "pytest_runtest_protocol", "start_server", "tokenizer",
]  # fmt: skip
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes import `benchmarks`, which is not installed; PYTHONSAFEPATH of an earlier test hides it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
