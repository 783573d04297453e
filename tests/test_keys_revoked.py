"""Open event streams end when the key of their request is revoked or loses its rights."""

import asyncio
from pathlib import Path

import httpx
import pytest
from batch_tools import batch_server, client_of, digest, jsonl, key_file, line, submit

from engine.text.tokenizer import Tokenizer

KEYS = (f"{digest('a')} a metrics", f"{digest('b')} b")


@pytest.mark.parametrize("lines", [KEYS[1:], (f"{digest('a')} a", KEYS[1])], ids=["revoked", "fewer rights"])
@pytest.mark.parametrize("path", ["/dashboard/events", "/v1/batches/{}/events"])
async def test_open_event_streams_end_with_their_key(
    tokenizer: Tokenizer, tmp_path: Path, path: str, lines: tuple[str, ...]
) -> None:
    keys = key_file(tmp_path, *KEYS)
    async with batch_server(tokenizer, tmp_path / "state", hold_after=0, api_key_file=keys) as (served, _):
        async with client_of(served, api_key="a") as client:
            batch = await submit(client, jsonl([line(1)]))
        http = httpx.AsyncClient(base_url=served.url, headers={"authorization": "Bearer a"}, timeout=60)
        async with http, http.stream("GET", path.format(batch.id)) as stream:
            events = stream.aiter_lines()
            assert (await anext(events)).startswith("data:")
            key_file(tmp_path, *lines)
            await served.app.state.context.reload_keys()
            async with asyncio.timeout(30):
                async for _ in events:
                    pass
