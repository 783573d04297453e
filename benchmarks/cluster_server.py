"""A tidemill server whose engine answers after a fixed time without computing: `python -m benchmarks.cluster_server`
STATE SLOTS SECONDS PORT."""

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import engine.models.demo
from engine.api import (
    EngineInfo,
    EngineRequest,
    EngineState,
    EngineStats,
    FinishReason,
    Lane,
    RequestClass,
    RequestOutput,
    RequestTimes,
)
from engine.stream import RequestStream
from engine.text.tokenizer import Tokenizer
from gateway.app import create_app
from gateway.batch.run import BatchLimits
from gateway.config import ServerConfig
from gateway.server import run
from gateway.store.folder import open_state
from gateway.store.opening import find_state

MODEL = "stub"


class StubEngine:
    """Answers `slots` requests at a time, each after `seconds`, with the tokens of `text` up to the request's limit."""

    def __init__(self, slots: int, seconds: float, text: Sequence[int]) -> None:
        self.info = EngineInfo(
            max_model_len=4096,
            vocab_size=100_000,
            eos_token_ids=frozenset(),
            architecture=MODEL,
            dtype="none",
            device="none",
            num_parameters=0,
            block_size=16,
            cache_tokens=1_000_000,
        )
        self.state = EngineState.STARTING
        self.trouble: str | None = None
        self._slots, self._seconds, self._text = slots, seconds, tuple(text)
        self._waiting: deque[EngineRequest] = deque()
        self._streams: dict[str, RequestStream] = {}
        self._running: dict[str, tuple[EngineRequest, asyncio.TimerHandle]] = {}

    async def start(self) -> None:
        self.state = EngineState.READY

    async def stop(self, drain_seconds: float = 0.0) -> None:  # noqa: ARG002 - nothing to drain
        self.state = EngineState.DRAINING
        for request_id in list(self._streams):
            self.abort(request_id)

    async def check_room(self, request_class: RequestClass, prompt_tokens: int, tenant: str) -> None:
        """Refuse nothing."""

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        streams = []
        for request in requests:
            stream = RequestStream.of(request, partial(self.abort, request.request_id))
            self._streams[request.request_id] = stream
            self._waiting.append(request)
            streams.append(stream)
        self._begin()
        return streams

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            if request.request_id in self._streams:
                timer = loop.call_later(self._seconds, self._end, request, FinishReason.LENGTH)
                self._running[request.request_id] = (request, timer)

    def _end(self, request: EngineRequest, reason: FinishReason) -> None:
        tokens = self._text[: request.sampling.max_tokens] if reason is FinishReason.LENGTH else ()
        now, prompt = asyncio.get_running_loop().time(), len(request.prompt_token_ids)
        times = RequestTimes(now - self._seconds, now - self._seconds, now, now, now)
        output = RequestOutput(request.request_id, tokens, None, times, prompt, 0, len(tokens), reason)
        self._running.pop(request.request_id, None)
        self._streams.pop(request.request_id).push(output)
        self._begin()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if request_id not in self._streams:
            return
        found = self._running.get(request_id)
        waiting = next((each for each in self._waiting if each.request_id == request_id), None)
        if found is not None:
            found[1].cancel()
        elif waiting is not None:
            self._waiting.remove(waiting)
        request = found[0] if found is not None else waiting
        assert request is not None
        self._end(request, reason)

    def set_lane(self, job: str, lane: Lane) -> None:
        """All requests are in one lane."""

    async def stats(self) -> EngineStats:
        return EngineStats(running={RequestClass.OFFLINE: len(self._running)})

    async def wait_dead(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def renew(self, *, anyway: bool = False) -> str:  # noqa: ARG002 - there are no weights
        return "nothing"

    def kill(self) -> None:
        """There is no other process."""


def main(state: str, slots: str, seconds: str, port: str) -> int:
    tokenizer = Tokenizer.load(str(Path(engine.models.demo.__file__).parent / "weights"), probe=False)
    stub = StubEngine(int(slots), float(seconds), tokenizer.encode("a fixed answer of some words"))
    config = ServerConfig(port=int(port), served_model_name=(MODEL,), shutdown_timeout=5.0)
    folder = open_state(find_state(state))
    return run(create_app(stub, tokenizer, config, folder, BatchLimits(window_lines=4 * int(slots))), config)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
