"""Fixtures of the tests, and the environment that they need."""

import signal
import sys

import pytest
from cpu_limit import pytest_runtest_makereport, pytest_runtest_protocol
from fixtures import cache_folder, depth, postgres, postgres_server, start_server, tokenizer
from support.fuzz import mark_random_tests

__all__ = [
    "cache_folder", "depth", "postgres", "postgres_server", "pytest_runtest_makereport", "pytest_runtest_protocol",
    "start_server", "tokenizer",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_random_tests(items)


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell ignores SIGINT in its background jobs, and the processes that tests interrupt inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def a_plain_path_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sets this variable for the processes that check its inputs; scripts of later tests import each other."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)


@pytest.fixture(autouse=True)
def no_library_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for a GPU depend on humming-kernels (extra `gpu`); its own tests put a stand-in there."""
    monkeypatch.setitem(sys.modules, "humming", None)
