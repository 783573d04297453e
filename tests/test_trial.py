"""`tidemill try` against the demo model: both parts, a batch that is deleted, chats that fail."""

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from batch_tools import FAST, keys_of, open_folder
from fake_engine import demo_engine, serve
from fixtures import StartServer

from tidemill.client import ChatError, server_options
from tidemill.commands.trial import ServerClient, Trial


@pytest.mark.cpu_limit(6)  # the demo model computes all the time
async def test_a_trial_shows_the_idle_share_and_what_fits_beside_the_chats(tmp_path: Path) -> None:
    engine, tokenizer = demo_engine(max_num_seqs=16)
    folder = await open_folder(tmp_path / "state")
    options = {"served_model_name": ("tidemill-demo",), "folder": folder, "batch_limits": FAST}
    shown: list[str] = []
    async with serve(engine, tokenizer, **options) as served:  # type: ignore[arg-type]
        trial = Trial(ServerClient(server_options(served.url, None)), rate=10.0, seconds=1.5, show=shown.append)
        await asyncio.to_thread(trial.run)
        async with httpx.AsyncClient() as client:
            for left in ("batches", "files"):
                assert (await client.get(f"{served.url}/v1/{left}")).json()["data"] == []
    assert not trial.failures
    alone, beside = shown
    assert re.fullmatch(r"chats alone: .*; the machine was idle \d+% of the time", alone), alone
    done = re.search(r"; ([\d,]+) lines done, [\d.]+ a second", beside)
    assert done, beside


async def test_chats_that_fail_are_counted_with_their_reason(start_server: StartServer, tmp_path: Path) -> None:
    folder = await open_folder(tmp_path / "state")
    served = await start_server("hello", folder=folder, batch_limits=FAST)
    shown: list[str] = []
    trial = Trial(ServerClient(server_options(served.url, None)), rate=10.0, seconds=0.6, show=shown.append)
    await asyncio.to_thread(trial._chat, "no-such-model", "Hello?")
    await asyncio.to_thread(trial.run)
    assert shown[-1].startswith("1 chats failed: ") and "does not exist" in shown[-1]


async def test_a_batch_that_fails_says_why(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.commands.trial.LINES", 20)
    folder = await open_folder(tmp_path / "state")
    keys = keys_of(tmp_path, "key acme metrics lines=10")
    served = await start_server("hello", folder=folder, batch_limits=FAST, api_key_file=keys)
    trial = Trial(ServerClient(server_options(served.url, "key")), rate=10.0, seconds=0.6, show=lambda _: None)
    with pytest.raises(ChatError, match=r"the batch failed: .*lines=10"):
        await asyncio.to_thread(trial.run)


@pytest.mark.parametrize("at", ["create", "chats", "delete"])
async def test_an_interrupted_trial_leaves_nothing_or_says_so(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder = await open_folder(tmp_path / "state")
    served = await start_server("hello", folder=folder, batch_limits=FAST)
    monkeypatch.setattr("tidemill.commands.trial.LINES", 20)
    shown: list[str] = []
    client = ServerClient(server_options(served.url, None))
    trial = Trial(client, rate=10.0, seconds=0.6, show=shown.append)
    call, part = client.call, trial._part

    def interrupted_call(method: str, path: str, *rest: object, **query: int) -> object:
        answer = call(method, path, *rest, **query)
        if (at == "create" and (method, path) == ("POST", "/v1/batches")) or (at == "delete" and method == "DELETE"):
            raise KeyboardInterrupt
        return answer

    def interrupted_part(model: str, seconds: float, batch: str | None) -> object:
        if at == "chats" and batch is not None:
            raise KeyboardInterrupt
        return part(model, seconds, batch)

    monkeypatch.setattr(ServerClient, "call", lambda _, *given, **query: interrupted_call(*given, **query))
    monkeypatch.setattr(Trial, "_part", lambda _, *given: interrupted_part(*given))

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            trial.run()

    await asyncio.to_thread(run)
    async with httpx.AsyncClient() as http:
        left = [(await http.get(f"{served.url}/v1/{kind}")).json()["data"] for kind in ("batches", "files")]
    assert "may remain" in shown[-1] if at == "delete" else left == [[], []]
