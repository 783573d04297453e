"""A scripted EngineClient: the test decides its tokens, its waits and its failures. Time is a counter.

`serve` puts a real uvicorn with the real protocol around it, on a port of its own, in the test's event loop.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import uvicorn.server

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput, RequestTimes, TokenLogprobs
from engine.client import ColocationStats, EngineInfo, EngineState, EngineStats
from engine.engine import Engine
from engine.errors import EngineStepError, EngineUnavailableError, ErrorInfo, TidemillError
from engine.stream import RequestStream
from engine.text.tokenizer import Tokenizer
from gateway.app import create_app
from gateway.config import ServerConfig
from gateway.http.connection import ProtocolLimits
from gateway.server import bind, make_server
from predictor.slo import Standing
from tidemill import page_tables

MODEL = "fake-model"

# uvicorn looks every tenth of a second whether it has to end: 0.2 s of waiting for each server of a test.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 20)})


@dataclass
class Script:
    """One answer. It ends with STOP at one of the request's stop ids, with LENGTH at `max_tokens`, and is begun again
    from its first token if neither comes. `burst`: tokens per output. `hold_after`: tokens after which it waits for
    `FakeEngine.release`. `fail_after`: tokens after which it ends with `error`."""

    tokens: Sequence[int]
    burst: int = 1
    hold_after: int | None = None
    fail_after: int | None = None
    error: TidemillError = field(default_factory=lambda: EngineStepError("The model step failed under this request."))
    logprobs: Callable[[int, int], TokenLogprobs] | None = None


class FakeEngine:
    """`events` is the order in which things happened to it: ("add" | "token" | "abort" | "end", request id)."""

    def __init__(self, script: Callable[[EngineRequest], Script], **info: Any) -> None:
        facts: dict[str, Any] = {
            "max_model_len": 512,
            "vocab_size": 405,
            "eos_token_ids": frozenset(),
            "architecture": "fake",
            "dtype": "none",
            "device": "none",
            "num_parameters": 0,
            "block_size": 16,
            "cache_tokens": 800,
        }
        self.info = EngineInfo(**{**facts, **info})
        self.script = script
        self.dead = False
        self.trouble: str | None = None
        self.draining = False
        self.lanes: dict[str, Lane] = {}
        self.started = False
        self.add_errors: list[TidemillError] = []
        self.requests: list[EngineRequest] = []
        self.events: list[tuple[str, str]] = []
        self.aborts: list[tuple[str, FinishReason]] = []
        self.snapshot: EngineStats | None = None
        self._counts: Counter[str] = Counter()
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._released = asyncio.Event()
        self._death = asyncio.Event()
        self._streams: dict[str, tuple[RequestStream, EngineRequest, RequestTimes, list[int]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._now = 0.0

    @property
    def state(self) -> EngineState:
        if self.dead:
            return EngineState.DEAD
        if self.draining or not self.started:
            return EngineState.DRAINING if self.draining else EngineState.STARTING
        return EngineState.READY if self.trouble is None else EngineState.DEGRADED

    async def start(self) -> None:
        self.started = True

    async def stop(self, drain_seconds: float = 0.0) -> None:
        self.draining = True
        if drain_seconds > 0 and self._streams:
            try:
                await asyncio.wait_for(self.wait(lambda: not self._streams), drain_seconds)
            except TimeoutError:
                self._log("drain over", "")
        for request_id in list(self._streams):
            self.abort(request_id)

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        streams: list[RequestStream] = []
        try:
            for request in requests:
                streams.append(self.add(request))  # noqa: PERF401 - those before the one that is refused count
        except TidemillError:
            for request in requests[: len(streams)]:
                self.abort(request.request_id)
            raise
        return streams

    def add(self, request: EngineRequest) -> RequestStream:
        if self.add_errors:
            raise self.add_errors.pop(0)
        if self.draining or self.dead:
            raise EngineUnavailableError("The engine is not taking requests.", retry_after=3.5)
        stream = RequestStream(partial(self.abort, request.request_id), final_only=False)
        times = RequestTimes(arrival=self._tick())
        self._streams[request.request_id] = (stream, request, times, [])
        self.requests.append(request)
        self._log("add", request.request_id)
        task = asyncio.ensure_future(self._run(request, self.script(request)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if request_id in self._streams:
            self.aborts.append((request_id, reason))
            self._log("abort", request_id)
            self._push(request_id, [], None, reason)

    def set_lane(self, job: str, lane: Lane) -> None:
        self.lanes[job] = lane

    async def stats(self) -> EngineStats:
        running = dict.fromkeys(RequestClass, 0)
        for _, request, _, _ in self._streams.values():
            running[request.request_class] += 1
        return self.snapshot or EngineStats(running=running)

    async def renew(self, *, anyway: bool = False) -> str:
        return "nothing"

    async def wait_dead(self) -> str:
        await self._death.wait()
        return "the engine is dead"

    def die(self) -> None:
        """Stop for good, and wake the tasks that wait for it."""
        self.dead = True
        self._death.set()

    def kill(self) -> None:
        pass

    def release(self) -> None:
        """Let every held answer go on."""
        self._released.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; it is looked at whenever something happens here."""
        if not condition():
            reached = asyncio.get_running_loop().create_future()
            self._waiting.append((condition, reached))
            await reached

    async def wait_for_event(self, kind: str, count: int = 1) -> None:
        await self.wait(lambda: self._counts[kind] >= count)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def _run(self, request: EngineRequest, script: Script) -> None:
        done, tokens = 0, script.tokens
        limit = request.sampling.max_tokens
        while request.request_id in self._streams:
            if script.hold_after is not None and done >= script.hold_after:
                await self._released.wait()
            if script.fail_after is not None and done >= script.fail_after:
                self._push(request.request_id, [], None, FinishReason.ERROR, error=script.error)
                return
            batch: list[int] = []
            reason = None
            size = limit if request.final_only else script.burst
            while len(batch) < size and reason is None:
                token = tokens[done % len(tokens)]
                batch.append(token)
                done += 1
                if token in request.sampling.stop_token_ids and done >= request.sampling.min_tokens:
                    reason = FinishReason.STOP
                elif done >= limit:
                    reason = FinishReason.LENGTH
            stop_id = batch[-1] if reason is FinishReason.STOP else None
            self._push(request.request_id, batch, script, reason, stop_id)
            await asyncio.sleep(0)

    def _push(
        self,
        request_id: str,
        tokens: list[int],
        script: Script | None,
        reason: FinishReason | None,
        stop_id: int | None = None,
        error: TidemillError | None = None,
    ) -> None:
        if request_id not in self._streams:
            return
        stream, request, times, sent = self._streams[request_id]
        sent.extend(tokens)
        now = self._tick()
        if times.first_scheduled is None:
            times = times._replace(first_scheduled=now)
        if tokens:
            times = times._replace(first_token=now if times.first_token is None else times.first_token, last_token=now)
            self._log("token", request_id)
        logprobs = None
        if request.sampling.logprobs is not None and script is not None:
            make = script.logprobs or (lambda token, top: TokenLogprobs(-0.5, ((token, -0.5), (1, -math.inf))[:top]))
            logprobs = tuple(make(token, request.sampling.logprobs) for token in tokens)
        if reason is not None:
            times = times._replace(finished=now)
            del self._streams[request_id]
            self._log("end", request_id)
        else:
            self._streams[request_id] = (stream, request, times, sent)
        prompt_size = len(request.prompt_token_ids)
        output = RequestOutput(
            request_id,
            tuple(tokens),
            logprobs,
            times,
            prompt_size,
            prompt_size // 2,
            len(sent),
            reason,
            stop_id,
            None if error is None else ErrorInfo.of(error),
        )
        stream.push(output)

    def _tick(self) -> float:
        self._now += 0.01
        return self._now

    def _log(self, kind: str, request_id: str) -> None:
        self.events.append((kind, request_id))
        self._counts[kind] += 1
        for waiting in [waiting for waiting in self._waiting if waiting[0]()]:
            self._waiting.remove(waiting)
            if not waiting[1].done():
                waiting[1].set_result(None)


def say(tokenizer: Tokenizer, text: str, **options: Any) -> Callable[[EngineRequest], Script]:
    """A script for every request: this text, then the end of sequence."""
    eos = tokenizer.eos_token_id
    assert eos is not None
    return lambda _: Script([*tokenizer.encode(text), eos], **options)


def colocation_stats(**changes: Any) -> ColocationStats:
    """How some SLO is kept."""
    facts: dict[str, Any] = {
        "slo": "ttft_p99=1s",
        "attainment": 0.75,
        "good_requests": 30,
        "bad_requests": 10,
        "objectives": (Standing("ttft_p99=1s", 0.9, 1.0, 0.75), Standing("tbt_mean=5%", 0.05, math.nan, math.nan)),
        "online_rate": 1.5,
        "policy": "p",
        "rule": "r",
        "latency_budget": 0.05,
        "interference_weight": 0.5,
        "decode_value": 2.0,
        "breaker": "half_open",
        "breaker_cause": "ttft",
        "breaker_openings": 3,
        "predictor_mape": 0.04,
        "offline_tokens": 12345,
        "budget_origin": "searched for that load",
        "offline_share": 0.0,
        "held": "no offline budget keeps the SLO (searched for that load)",
    }
    return ColocationStats(**facts | changes)


def demo_engine(template: str | None = None, **fields: Any) -> tuple[Engine, Tokenizer]:
    """The packaged model on the CPU, in float32, so that answers do not depend on the neighbours in a batch; and its
    tokenizer. `fields` are those of `EngineConfig`."""
    from engine.build import build_engine, plan_launch  # imports torch
    from engine.config import EngineConfig

    usual: dict[str, Any] = {"num_gpu_blocks_override": 160, "max_num_seqs": 32, "max_num_batched_tokens": 256}
    usual |= {"device": "cpu", "dtype": "float32", "profile_seconds": 0.0, "slo": "ttft_p99=100s,tbt_p99=10s"}
    config = EngineConfig(**usual | fields)
    plan = plan_launch(config)
    return build_engine(config, plan), Tokenizer.load(plan.folder, template, probe=False)


@dataclass
class Served:
    engine: FakeEngine
    app: Any
    server: Any
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class LocalEngine:
    """An `EngineClient` over an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def stop(self, _drain_seconds: float = 0.0) -> None:
        await self._engine.stop()

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def wait_dead(self) -> str:
        return await asyncio.Future()


@asynccontextmanager
async def serve(
    engine: Any, tokenizer: Tokenizer, limits: ProtocolLimits | None = None, **config: Any
) -> AsyncIterator[Served]:
    """The whole server, as `tidemill serve` builds it, but for signals; with `folder` it has files and batches."""
    folder, batch_limits = config.pop("folder", None), config.pop("batch_limits", None)
    owns_process = config.pop("owns_process", False)
    settings = ServerConfig(**{"served_model_name": (MODEL, "alias"), "port": 0, **config})
    client = LocalEngine(engine) if isinstance(engine, Engine) else engine
    app = await asyncio.to_thread(create_app, client, tokenizer, settings, folder, batch_limits, [page_tables.router])
    async with running(app, settings, limits, owns_process) as (server, port):
        yield Served(engine, app, server, port)


@asynccontextmanager
async def running(
    app: Any, settings: ServerConfig, limits: ProtocolLimits | None = None, owns_process: bool = False
) -> AsyncIterator[tuple[Any, int]]:
    """A server of the application on a free port, and the port."""
    listener = await asyncio.to_thread(bind, settings.host, settings.port)
    server = make_server(app, settings, limits, close_seconds=1, owns_process=owns_process)
    task = asyncio.ensure_future(server._serve([listener]))  # `serve` would take over the test runner's signals
    while not server.started:
        await asyncio.sleep(0.005)
        if task.done():
            task.result()
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        if server._last_resort is not None:
            server._last_resort.cancel()
        listener.close()
