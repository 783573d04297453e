"""Measure how work grows with the size of an input, and answer requests in one thread.

Python is measured in executed lines, which are the same in every run. Work inside C calls (regular expressions, copies,
parsers) is measured in CPU seconds; growth counts if most of several measurements show it.
"""

import asyncio
import dataclasses
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import anyio.to_thread
import pytest
import tokenizer_folders
from fake_engine import MODEL, FakeEngine, Script
from test_tools import TEMPLATE as TOOLS_TEMPLATE

from engine.api import EngineRequest, FinishReason, RequestOutput, RequestTimes, TokenLogprobs
from engine.errors import InvalidRequestError
from engine.forms import EmbeddingSpec, Pooling
from engine.text.tokenizer import Tokenizer
from gateway.app import create_app
from gateway.batch.line import LineAnswer, LineOrigin, LineRunner
from gateway.config import ServerConfig
from gateway.generate.tool_formats import FORMATS
from gateway.http.errors import ApiError, to_api_error

Work = Callable[[], object]
Make = Callable[[int], Work]
"""`make(n)` returns work of size n; its own work is not measured."""

TEMPLATE = TOOLS_TEMPLATE + "{% if false %}</think>enable_thinking reasoning_effort{% endif %}"

MOST_GROWTH = 2.5
"""Per doubling of the size: linear work grows by 2, n log n by a little more, quadratic work by 4."""
LEAST_COUNT = 150
LEAST_SECONDS = 0.006
"""Work below these is never too much."""
LEAST_ROUNDS, ROUNDS = 3, 20
ENOUGH_SECONDS = 1.0
"""Work that takes longer than this is not measured again."""
LEAST_SIZE = 16
"""CPU seconds of smaller inputs tell nothing."""
WORK_LIMIT = 3_000_000
"""Executed lines after which work counts as endless; the largest passing test executes a tenth."""


class TooMuchWork(BaseException):
    """Derived from BaseException so that the measured code does not catch it."""


class Cost(NamedTuple):
    """Executed lines, and bytes made: the result of the work if it is a number."""

    lines: int
    made: int


def cost_of(work: Work, limit: int = WORK_LIMIT) -> Cost:
    """Run the work. Raises TooMuchWork after `limit` lines."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines > limit:
                raise TooMuchWork(f"more than {limit} lines")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        made = work()
    finally:
        sys.settrace(before)
    return Cost(lines, made if isinstance(made, int) else 0)


def cpu_seconds(work: Work) -> float:
    """Run the work and return the CPU seconds of all threads of this process."""
    gc.disable()
    try:
        start = time.process_time()
        work()
        return time.process_time() - start
    finally:
        gc.enable()


def exact_fault(make: Make, n: int, most: int | None = None) -> str | None:
    """Return a description if lines or bytes grow too fast over the sizes n, 2n and 4n, else None.

    The increments are compared, so constant parts cancel out. A threshold in the code shows once; growth counts only if
    it goes on at 8n. `most`: the largest size that is allowed; the sizes end at it."""
    n = n if most is None else max(1, min(n, most // 8))
    make(n)()  # fills caches
    sizes = [n, 2 * n, 4 * n]
    costs = [cost_of(make(size)) for size in sizes]
    if any(_grows(counts) for counts in zip(*costs, strict=True)):
        sizes.append(8 * n)
        costs.append(cost_of(make(8 * n)))
    for name, counts in zip(Cost._fields, zip(*costs, strict=True), strict=True):
        if _grows(counts[:3]) and _grows(counts[-3:]):
            return f"{name} {' '.join(map(str, counts))} at sizes {' '.join(map(str, sizes))}"
    return None


def _grows(counts: Sequence[int]) -> bool:
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    return second > LEAST_COUNT and second > MOST_GROWTH * max(first, 1)


def cpu_fault(make: Make, n: int, least_seconds: float = LEAST_SECONDS) -> str | None:
    """Return a description if CPU seconds grow too fast from 2n to 4n, else None.

    Two figures must: the seconds beyond those of a small input, and the increments. Each round compares its own
    seconds, because the speed of a machine changes within a second; a further round can only clear the work."""
    sizes = [max(1, n // 16), n, 2 * n, 4 * n]
    growths: list[float] = []
    make(sizes[0])()
    for _ in range(ROUNDS):
        seconds = base, first, middle, last = [cpu_seconds(make(size)) for size in sizes]
        growths.append(min((last - base) / max(middle - base, 1e-9), (last - middle) / max(middle - first, 1e-9)))
        if last < least_seconds or (len(growths) >= LEAST_ROUNDS and median(growths) <= MOST_GROWTH):
            return None
        if last > ENOUGH_SECONDS:
            break
    times = " ".join(f"{1e3 * each:.1f}" for each in seconds)
    return f"CPU ms {times} at sizes {' '.join(map(str, sizes))}, median growth {median(growths):.1f}"


def check(make: Make, exact: int, cpu: int, most: int | None = None, name: str = "") -> None:
    """Assert that the work grows at most linearly. `exact`, `cpu`: first sizes of the two measures, 0: not measured."""
    fault = exact_fault(make, exact, most) if exact else None
    if fault is None and cpu >= LEAST_SIZE:
        fault = cpu_fault(make, cpu)
    assert fault is None, f"{name} {fault} of {make}"


async def listed(output: RequestOutput) -> AsyncIterator[RequestOutput]:
    yield output


class ListedEngine(FakeEngine):
    """Answer with a token or a vector. `planned`: bytes of grammars and tokens of prompts received so far."""

    def __init__(self) -> None:
        spec = EmbeddingSpec(Pooling.LAST, 8, True, "test")
        super().__init__(lambda _: Script([]), embedding=spec)
        self.started = True
        self.planned = 0

    def add(self, request: EngineRequest) -> Any:
        grammar = request.sampling.grammar
        self.planned += len(request.prompt_token_ids) + (0 if grammar is None else len(grammar.text))
        if request.pooling is not None:
            return listed(self._output(request)._replace(token_ids=(), embedding=b"\0" * 32))
        return listed(self._output(request))

    def _output(self, request: EngineRequest) -> RequestOutput:
        times = RequestTimes(1.0, 1.0, 1.0, 1.0, 1.0)
        logprobs = None if request.sampling.logprobs is None else (TokenLogprobs(-1.0, ((70, -1.0),)),)
        size, reason = len(request.prompt_token_ids), FinishReason.LENGTH
        return RequestOutput(request.request_id, (70,), logprobs, times, size, 0, 1, reason, None, None)


class Gateway:
    """The application, called like uvicorn does; work for threads runs in the calling thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.engine = ListedEngine()
        self.app = create_app(self.engine, tokenizer, ServerConfig(served_model_name=(MODEL,), port=0))
        self.app.state.context = dataclasses.replace(self.app.state.context, tool_format=FORMATS["hermes"])
        self.loop = asyncio.new_event_loop()
        self.status, self.answer = 0, b""

    def set_context(self, max_model_len: int) -> None:
        self.engine.info = dataclasses.replace(self.engine.info, max_model_len=max_model_len)

    def line(self, endpoint: str, body: dict[str, Any]) -> LineAnswer:
        """Return the answer to a line of a batch."""
        origin = LineOrigin("", "job", 0.0, length=1)
        try:
            return self.loop.run_until_complete(LineRunner(self.app.state.context).run(endpoint, body, origin))
        except (InvalidRequestError, ApiError) as error:  # the feeder writes them as rows
            answer = to_api_error(error)
            return LineAnswer(answer.status, answer.envelope)

    def post(self, path: str, raw: bytes) -> int:
        """Return the bytes of the answer and of the requests to the engine; sets `status` and `answer`."""
        before = self.engine.planned
        self.loop.run_until_complete(self._post(path, raw))
        return len(self.answer) + self.engine.planned - before

    async def _post(self, path: str, raw: bytes) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "query_string": b"",
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "server": ("localhost", 80),
            "client": ("127.0.0.1", 1), "state": {},
        }  # fmt: skip
        bodies, said = iter([raw]), bytearray()

        async def receive() -> Any:
            for body in bodies:
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()
            return None

        async def send(message: Any) -> None:
            said.extend(message.get("body", b""))
            self.status = message.get("status", self.status)

        await self.app(scope, receive, send)
        self.answer = bytes(said)


@contextmanager
def open_gateway(folder: Path) -> Iterator[Gateway]:
    """Open a gateway for a model that takes tools and thinks; its tokenizer goes into `folder`."""
    tokenizer_folders.byte_level(folder, TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anyio.to_thread, "run_sync", run_inline)
        gateway = Gateway(Tokenizer.load(folder, probe=False))
        yield gateway
        gateway.loop.close()


async def run_inline(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """Replace `anyio.to_thread.run_sync`, so that every run executes the same lines."""
    return function(*args)
