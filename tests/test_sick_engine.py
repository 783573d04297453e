"""A server whose engine fails at anything: it says so and refuses chats at the door, and no batch line fails for it."""

from pathlib import Path
from typing import Any

import pytest
from batch_tools import FAST, client_of, eventually, jsonl, line, open_folder, submit, until
from fake_engine import MODEL, serve
from fakes.runner import FakeRunner
from faulty_runner import FaultyRunner
from fixtures import StartServer
from support.http import get
from support.lazy import openai

from engine.client import EngineInfo
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import EngineUnavailableError
from engine.limits import SchedulerConfig
from engine.text.tokenizer import Tokenizer
from gateway.batch.line import LineOrigin, LineRunner
from gateway.generate.validation import JsonPost

LINES = 2000
VOCAB = 405


def make_engine(runner: Any) -> Engine:
    config = SchedulerConfig(num_units=2 * 512, max_model_len=512, block_size=16, max_queue_time="none")
    return Engine(EngineCore(config), runner, EngineInfo(512, VOCAB, frozenset(), "fake", "none", "none", 0))


@pytest.mark.slow
async def test_no_line_of_two_thousand_fails_for_a_sick_engine(tokenizer: Tokenizer, tmp_path: Path) -> None:
    broken = False
    runner = FaultyRunner(FakeRunner(block_size=16, vocab_size=VOCAB), lambda *_: broken)
    folder = await open_folder(tmp_path)
    server = serve(make_engine(runner), tokenizer, None, folder=folder, batch_limits=FAST)  # type: ignore[arg-type]
    async with server as served, client_of(served, timeout=120) as api:
        assert (await get(served, "/ready")).status_code == 200
        broken = True
        batch = await submit(api, jsonl(line(i, prompt=[1 + i % 300, i // 300], max_tokens=1) for i in range(LINES)))
        await eventually(lambda: len(runner.failures) >= 4)
        ready = await get(served, "/ready")
        assert ready.status_code == 503 and "every model step has failed" in ready.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError) as refused:
            await api.completions.create(model=MODEL, prompt="hi", max_tokens=1)
        assert refused.value.status_code == 503 and "retry-after" in refused.value.response.headers
        waiting = await api.batches.retrieve(batch.id)
        assert waiting.status == "in_progress" and waiting.request_counts is not None
        assert (waiting.request_counts.completed, waiting.request_counts.failed) == (0, 0)
        broken = False
        ended = await until(api, batch.id)
        assert (ended.status, ended.error_file_id) == ("completed", None)
        assert (ended.request_counts.completed, ended.request_counts.failed) == (LINES, 0)
        assert (await get(served, "/ready")).status_code == 200


async def test_a_request_that_failed_by_itself_is_not_tried_again(start_server: StartServer) -> None:
    served = await start_server("hello", fail_after=1)
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=2) as api:
        with pytest.raises(openai.InternalServerError) as failed:
            await api.completions.create(model=MODEL, prompt="hi")
    error = failed.value
    assert error.status_code == 500 and error.code == "engine_error"
    assert error.response.headers["x-should-retry"] == "false"
    assert len(served.engine.requests) == 1


async def test_a_server_that_is_not_there_yet_is_tried_again(start_server: StartServer) -> None:
    served = await start_server("hello")
    served.engine.add_errors = [EngineUnavailableError("not yet", retry_after=0.01)]
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=2) as api:
        answer = await api.completions.with_raw_response.create(model=MODEL, prompt="hi")
    assert answer.parse().choices[0].text == "hello" and answer.retries_taken == 1
    assert not served.engine.add_errors


async def test_a_line_for_which_memory_is_short_runs_again(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await start_server("hello")
    runner = LineRunner(served.app.state.context)
    origin = LineOrigin("acme", "batch_1", 1e12)
    short = True

    def validate(*line: Any) -> Any:
        if short:
            raise MemoryError
        return kept(*line)

    kept = JsonPost.check
    monkeypatch.setattr(JsonPost, "check", validate)
    with pytest.raises(MemoryError):
        await runner.run("/v1/completions", {"model": MODEL, "prompt": "hi"}, origin)
    short = False
    assert (await runner.run("/v1/completions", {"model": MODEL, "prompt": "hi"}, origin)).status == 200
