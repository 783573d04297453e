"""Programs of real clients, each unchanged against a live server: `make clients` runs all, CI those of `dev`."""

import shutil
from pathlib import Path

import pytest
from clients.environments import Client, Step, command, installed_command, load_clients, run_program
from clients.puppet import puppet_server
from clients.records import PAGE, SUITES, record, render

CLIENTS = load_clients()


async def run(client: Client, demo_url: str, folder: Path, installed: bool = False) -> tuple[str, list[Step]]:
    if missing := [word for word in client.needs if shutil.which(word) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    words = installed_command(client) if installed else await command(client)
    async with puppet_server(folder / "puppet") as puppet:
        return await run_program(words, {"DEMO_URL": demo_url, "PUPPET_URL": puppet.url}, folder)


def failures(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.result.startswith("failed")]


@pytest.mark.slow
@pytest.mark.parametrize("client", [client for client in CLIENTS.values() if client.installed], ids=lambda c: c.name)
async def test_installed_client(client: Client, demo_url: str, tmp_path: Path) -> None:
    _, steps = await run(client, demo_url, tmp_path, installed=True)
    assert steps and failures(steps) == []


@pytest.mark.clients
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("client", CLIENTS.values(), ids=lambda client: client.name)
async def test_client(client: Client, demo_url: str, tmp_path: Path) -> None:
    version, steps = await run(client, demo_url, tmp_path)
    for step in steps:
        record(client.name, version, step.what, step.result)
    assert failures(steps) == []


def test_the_page_shows_every_client_without_failures() -> None:
    page = PAGE.read_text()
    assert [name for name in CLIENTS if f"\n| {name} | " not in page] == []
    assert "FAILED" not in page


def test_the_page_keeps_rows_of_clients_that_did_not_run() -> None:
    suite = "| them | 1.0 | 110 | 85 | images |"
    ran = [("a", "1", "chat", "passed"), ("a", "1", "old", "refused: use | b"), ("b", "2", "x", "passed")]
    first = render(f"{SUITES}\n\n| suite |\n|---|\n{suite}\n", ran)
    second = render(first, [("b", "3", "y", "failed: because")])
    assert suite in second and "| a | 1 | chat | 1 of 1 |" in second and "| a | old | use / b |" in second
    assert "| b | 3 | y | FAILED y: failed: because |" in second and "| b | 2 |" not in second
    assert render(second, [("b", "2", "x", "passed")]) == first
