"""The identity benchmark: its requests, and what counts as an answer that differs."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import pytest

from benchmarks import identity
from benchmarks.identity import answer_of, engine_processes, lose_engines, make_bodies, report

FIELDS = {
    "top_p", "top_k", "min_p", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop",
    "logprobs", "n", "min_tokens", "response_format", "structured_outputs",
}  # fmt: skip


def test_requests_are_the_same_for_a_seed_and_use_all_fields() -> None:
    bodies = make_bodies(400, 1)
    assert bodies == make_bodies(400, 1) != make_bodies(400, 2)
    used = Counter(field for body in bodies for field in body)
    assert min(used[field] for field in FIELDS) >= 5
    assert 0.2 < sum(body["temperature"] == 0.0 for body in bodies) / 400 < 0.5


def completion(text: str = "a", logprob: float = -0.1, cached: int = 0) -> dict[str, object]:
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    content = [{"token": text, "logprob": logprob}]
    return {"id": str(cached), "choices": [{"message": {"content": text}, "logprobs": content}], "usage": usage}


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        (completion(cached=16), False),
        (completion("b"), True),
        (completion(logprob=-0.1 + 2**-55), True),
        (completion() | {"usage": {"completion_tokens": 2}}, True),
    ],
)
def test_an_answer_differs_by_its_text_its_tokens_and_any_bit(
    other: dict[str, object], differ: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [answer_of(completion()), answer_of(other)]
    assert report([{"n": 1}], texts[:1], texts[1:]) == differ
    assert f"{1 - differ} of 1 answers are equal" in capsys.readouterr().out


def test_an_error_is_no_answer_even_in_both() -> None:
    assert report([{}], ["status 500: null"], ["status 500: null"]) == 1


def test_only_engine_processes_of_the_gateway_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", "engine-of-a-test"]
    monkeypatch.setattr(identity, "ENGINE", b"engine-of-a-test")
    with subprocess.Popen(sleep) as engine, subprocess.Popen([*sleep[:-1], "other"]) as other:
        try:
            assert engine_processes(os.getpid()) == [engine.pid]
            assert engine_processes(engine.pid) == []
            with suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(lose_engines(os.getpid(), 0.05), 0.5))
            assert engine.wait(10) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            engine.kill()
            other.kill()


def test_a_refused_chat_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(503, None), (429, None), (200, completion()), (400, {"error": "no"})])

    class Scripted:
        async def call(self, *_: object, **__: object) -> tuple[int, object]:
            return next(answers)

    async def at_once(_: float) -> None: ...

    monkeypatch.setattr("benchmarks.identity.asyncio.sleep", at_once)
    assert json.loads(asyncio.run(identity.ask(Scripted(), {})))[1] == 1  # type: ignore[arg-type]
    assert asyncio.run(identity.ask(Scripted(), {})).startswith("status 400")  # type: ignore[arg-type]
