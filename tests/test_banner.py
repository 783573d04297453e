"""The texts of a server that listens, drains and has stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
from batch_tools import batch_server, jsonl, line, submit
from fake_engine import MODEL, colocation_stats

from engine import __version__
from engine.client import SamplingDefaults
from engine.text.tokenizer import Tokenizer
from gateway.server import draining_text, listening_text, promise_text, stopped_text
from predictor.slo import SLO


@pytest.mark.parametrize(
    ("slo", "text"),
    [
        (
            "ttft_p99=1s,tbt_p99=100ms",
            "first token within 1 s, gap between tokens within 100 ms, for 99 % of chats",
        ),
        (
            "ttft_p95=1.5s,tpot_p50=500us",
            "first token within 1.5 s, for 95 % of chats; time per token within 500 us, for 50 % of chats",
        ),
        ("tbt_mean=50ms", "mean gap between tokens within 50 ms"),
        ("tbt_p99=5%", "P99 gap between tokens at most 5 % longer than without batch work"),
        ("5%", "chats at most 5 % slower than without batch work"),
    ],
)
def test_an_slo_in_words(slo: str, text: str) -> None:
    assert promise_text(SLO.parse(slo)) == text


async def test_the_block_of_a_server_that_listens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path / "state", "x", hold_after=0) as (served, client):
        batch = await submit(client, jsonl([line(1), line(2)]))
        await served.engine.wait_for_event("add")
    async with batch_server(tokenizer, tmp_path / "state", "x") as (served, client):
        context = served.app.state.context
        context.metrics.stats = replace(context.metrics.stats, colocation=colocation_stats(slo="ttft_p99=1s"))
        served.engine.info = replace(served.engine.info, sampling=SamplingDefaults(temperature=0.6, top_k=20))
        first, *rows, last = listening_text(context, served.url).splitlines()
        assert await client.batches.retrieve(batch.id)
    assert (first, last) == (f"tidemill {__version__} is ready", f"tidemill: listening on {served.url}")
    shown = {row[:18].strip(): row[18:].strip() for row in rows}
    assert shown.pop("model").startswith(f"{MODEL} (") and shown.pop("room").startswith("cache ")
    assert shown == {
        "chat and batches": f"{served.url}/v1",
        "page": served.url,
        "sampling": "temperature 0.6, top_k 20 (generation_config.json)",
        "promise": "first token within 1 s, for 99 % of chats",
        "unfinished": "1 batch, 2 lines left",
    }


def test_the_lines_of_a_server_that_stops() -> None:
    assert draining_text(0, 30.0).startswith("tidemill: draining: no chat is running; ")
    assert draining_text(1, 30.0).startswith("tidemill: draining: 1 chat may take up to 30 s; ")
    assert stopped_text(0) == "tidemill: stopped"
    assert stopped_text(2) == "tidemill: stopped; the next start continues 2 batches"
