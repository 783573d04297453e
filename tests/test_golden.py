"""The canary: answers that are noted once and asked for again, by itself and in a process."""

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_process import answers, engine_process, undisturbed  # noqa: F401 - a fixture

from engine.api import EngineInfo, EngineRequest, FinishReason, RequestClass, RequestOutput, RequestTimes, TokenLogprobs
from engine.config import EngineConfig
from engine.errors import EngineStepError, ErrorInfo
from engine.process.golden import TOKENS, TRIES, Golden, golden_file
from engine.stream import RequestStream


class Answering:
    """An engine that says at once what it is told to: a token and how clear the choice was, for each position."""

    def __init__(self, say: Callable[[int], tuple[int, float]]) -> None:
        self.info = EngineInfo(64, 50, frozenset(), "fake", "float32", "cpu", 0)
        self.say = say
        self.asked: list[EngineRequest] = []
        self.error: ErrorInfo | None = None

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: EngineRequest) -> RequestStream:
        self.asked.append(request)
        stream, name, times = RequestStream.of(request, lambda: None), request.request_id, RequestTimes(0.0)
        for number in range(TOKENS):
            token, margin = self.say(number)
            logprobs = (TokenLogprobs(-0.1, ((token, -0.1), (token + 1, -0.1 - margin))),)
            end = FinishReason.LENGTH if number == TOKENS - 1 else None
            stream.push(RequestOutput(name, (token,), logprobs, times, 4, 0, number + 1, end))
            if self.error is not None:
                stream.push(RequestOutput(name, (), None, times, 4, 0, 0, FinishReason.ERROR, error=self.error))
                break
        return stream


def golden_of(engine: Answering, file: Path) -> Golden:
    asked: Any = engine
    return Golden(asked, file)


async def test_other_answers_are_noticed_also_by_a_later_process(tmp_path: Path) -> None:
    engine, file = Answering(lambda number: (number, 3.0)), tmp_path / "canaries" / "x.json"
    golden = golden_of(engine, file)
    assert await golden.check() is None and await golden.check() is None
    assert {request.request_class for request in engine.asked} == {RequestClass.OFFLINE}
    assert len({request.prompt_token_ids for request in engine.asked}) == 3
    assert len({request.cache_salt for request in engine.asked}) == len(engine.asked), "the prefix cache knows none"
    engine.say = lambda number: (number + (number == TOKENS - 1), 0.0)
    engine.asked.clear()
    for each in (golden, golden_of(engine, file)):
        assert "answered by" in (await each.check() or "")
    assert len(engine.asked) == 2 * TRIES * 3
    assert await golden_of(engine, tmp_path / "other").check() is None


async def test_close_calls_may_go_either_way(tmp_path: Path) -> None:
    engine = Answering(lambda number: (number, 3.0 if number < 4 else 0.1))
    golden = golden_of(engine, tmp_path / "x.json")
    assert await golden.check() is None
    engine.say = lambda number: (number if number < 4 else 40, math.inf)
    assert await golden.check() is None
    engine.say = lambda number: (number if number < 3 else 40, math.inf)
    assert await golden.check() is not None


async def test_one_wrong_answer_is_none_and_an_error_is_one(tmp_path: Path) -> None:
    engine = Answering(lambda number: (number, 3.0))
    golden = golden_of(engine, tmp_path / "x.json")
    assert await golden.check() is None
    wrong = iter([True] * 3 * (TRIES - 1) * TOKENS)
    engine.say = lambda number: (number + next(wrong, False), 3.0)
    assert await golden.check() is None
    engine.error = ErrorInfo.of(EngineStepError("it failed"))
    assert await golden.check() == "it failed"


def test_the_name_is_of_weights_settings_and_code(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_text("1")
    config = EngineConfig(model=str(model))

    def name(config: EngineConfig = config, versions: Sequence[str] = ("2",)) -> Path:
        return golden_file(tmp_path, config, model, versions)

    first = name()
    assert first == name() == name(EngineConfig(model=str(model), self_test=False))
    assert len({first, name(versions=("3",)), name(EngineConfig(model=str(model), dtype="bfloat16"))}) == 3
    (model / "model.safetensors").write_text("22")
    assert name() != first


async def test_an_engine_that_answered_otherwise_before_does_not_start(tmp_path: Path) -> None:
    async with engine_process(tmp_path / "children", "canary:99"):
        pass
    os.rename(tmp_path / "children.golden", tmp_path / "more.golden")
    with pytest.raises(EngineStepError, match="answers have changed"):
        async with engine_process(tmp_path / "more", "canary:1"):
            pass


async def test_after_a_failed_step_a_wrong_engine_ends_and_streams_go_on(
    tmp_path: Path,
    undisturbed: dict[str, tuple[Any, ...]],  # noqa: F811
) -> None:
    async with engine_process(tmp_path / "children", "oom:2,canary:2") as engine:
        found = await answers(engine)
        while (await engine.stats()).restarts != {"canary": 1}:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)
    assert found == undisturbed
