"""The canary: check that the engine still gives the same answers to three short greedy prompts.

The answers are stored when an engine with these weights, code and settings first starts. Corrupt weights, a flipped bit
in memory or a wrong kernel fail no step but change the answers. Tokens are compared up to the first close choice,
because sums are added in another order if other requests share the step. The prompts run as offline work.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.api import EngineRequest, RequestClass, SamplingParams, TokenLogprobs
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import TidemillError
from engine.process.launcher import Source

log = logging.getLogger("tidemill.engine")

LENGTHS = (4, 11, 24)
TOKENS = 8
CLEAR = 0.5
"""Minimum gap between the log-probabilities of the best two tokens; reordered half-precision sums stay below it."""
TRIES = 3
HOUR = 3600.0


class Answer(msgspec.Struct, frozen=True):
    """The answer to one prompt."""

    token_ids: tuple[int, ...]
    clear: int  # number of tokens before the first close choice


_file = msgspec.json.Decoder(tuple[Answer, ...])


class Golden:
    """The canary of one engine. `file`: stores the answers."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine = engine
        self._path = file
        self._noted: tuple[Answer, ...] | None = None

    async def check(self) -> str | None:
        """Return the difference from the stored answers if it occurs three times in a row, else None.

        If no answers are stored, store these.
        """
        wrong = None
        for _ in range(TRIES):
            wrong = await self._try()
            if wrong is None:
                return None
            log.error("the canary: %s", wrong)
        return wrong

    async def _try(self) -> str | None:
        asked = [self._ask(number) for number in range(len(LENGTHS))]
        answers: list[Answer] = []
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, TidemillError):
                return found.message
            if isinstance(found, BaseException):
                raise found
            answers.append(found)
        self._noted = self._noted or self._load()
        if self._noted is None:
            self._note(answers)
        for number, (answer, noted) in enumerate(zip(answers, self._noted or (), strict=False)):
            if answer.token_ids[: noted.clear] != noted.token_ids[: noted.clear]:
                return f"prompt {number} is answered by {answer.token_ids}, which was {noted.token_ids}"
        return None

    async def _ask(self, number: int) -> Answer:
        info = self._engine.info
        length = max(1, min(LENGTHS[number], info.max_model_len - TOKENS - 1))
        prompt = tuple(
            (number + 5) * (3 + i % 3) % info.vocab_size for i in range(length)
        )  # repetition makes choices clear
        sampling = SamplingParams(max_tokens=min(TOKENS, info.max_model_len - length), temperature=0.0, logprobs=2)
        salt = secrets.token_bytes(8)  # bypasses the prefix cache
        request = EngineRequest(
            f"canary-{number}", prompt, sampling, RequestClass.OFFLINE, salt, final_only=True, probe=True
        )
        (stream,) = await self._engine.submit([request])
        async with contextlib.aclosing(stream):
            output = await anext(stream)
        if output.error is not None:
            raise output.error.to_error()
        return Answer(output.token_ids, _clear(output.logprobs or ()))

    def _load(self) -> tuple[Answer, ...] | None:
        try:
            return _file.decode(self._path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None

    def _note(self, answers: Sequence[Answer]) -> None:
        self._noted = tuple(answers)
        with contextlib.suppress(OSError):  # without the file the answers last as long as this process
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{secrets.token_hex(4)}")
            temporary.write_bytes(msgspec.json.encode(self._noted))
            temporary.replace(self._path)


def _clear(logprobs: Sequence[TokenLogprobs]) -> int:
    margins = (each.top[0][1] - each.top[1][1] if len(each.top) > 1 else math.inf for each in logprobs)
    return next((number for number, margin in enumerate(margins) if margin < CLEAR), len(logprobs))


def golden_file(profiles: Path, config: EngineConfig, model: Path, versions: Sequence[str]) -> Path:
    """Return the path of the answers for these settings, weights and code. Raise OSError.

    `versions`: versions of the other libraries that compute.
    """
    source = Source.of(model)
    facts = (replace(config, self_test=True), sorted(source.files.items()), sorted(source.texts.items()), *versions)
    return profiles / "canaries" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"
