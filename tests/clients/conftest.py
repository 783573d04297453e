"""Servers for the programs of clients, and the page of results."""

import os
from collections.abc import Iterator

import pytest
from clients.records import write_page

from benchmarks.live import demo_server


@pytest.fixture(scope="session")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `tidemill serve` with the packaged model, state folder and prefix cache."""
    folder = tmp_path_factory.mktemp("demo")
    with demo_server(str(folder), "--profile-seconds", "0", "--slo", "ttft_p99=100s,tbt_p99=10s") as served:
        yield served.url


def pytest_sessionfinish() -> None:
    if os.environ.get("CLIENTS_PAGE"):
        write_page()
