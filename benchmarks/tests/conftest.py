"""Fixtures of the tests, and the environment that they need."""

from pathlib import Path

import pytest
from fixtures import cache_folder, start_server, tokenizer

__all__ = ["cache_folder", "start_server", "tokenizer"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes import `benchmarks`, which is not installed; PYTHONSAFEPATH of an earlier test hides it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
