"""Shared fixtures: a tokenizer, and servers around a scripted engine."""

import functools
import os
import threading

# Tests run side by side on models so small that a second thread only waits for the first. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import httpx
import httpx2
import hypothesis
import pytest
import tokenizer_folders
from blockbuster import BlockBuster
from fake_engine import FakeEngine, Script, Served, say, serve
from postgres_server import PostgresServer, start_postgres
from support.fuzz import examples

from engine.api import EngineRequest
from engine.text.tokenizer import Tokenizer

StartServer = Callable[..., Awaitable[Served]]
_numbers = count()

# The same examples in every run, so that a change is judged by its effects. FUZZ=1 draws new ones: the search for
# faults is a run of its own, and its findings become tests.
hypothesis.settings.register_profile("repeatable", derandomize=not os.environ.get("FUZZ"), max_examples=examples(100))
hypothesis.settings.load_profile("repeatable")

# Each client would read the certificates of the system anew, which takes 30 ms of CPU time.
for _transport in (httpx._transports.default, httpx2._transports.default):
    _transport.create_ssl_context = functools.cache(_transport.create_ssl_context)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the latency profiles of a test apart from those of the user and of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with ChatML; <|im_end|> ends a sequence."""
    return Tokenizer.load(tokenizer_folders.byte_level(tmp_path_factory.mktemp("tokenizer")), probe=False)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = start_postgres()
    yield server
    server.remove()


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> PostgresServer:
    """Return a server without rows."""
    postgres_server.clear()
    return postgres_server


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request: pytest.FixtureRequest) -> int:
    """Run a test with steps one by one, and with one scheduled ahead."""
    return int(request.param)


@contextmanager
def refuse_blocking() -> Iterator[None]:
    """Blocking calls made by our own code on an event loop raise."""
    blockbuster = BlockBuster(scanned_modules=["gateway", "engine"])
    blockbuster.activate()
    try:
        yield
    finally:
        blockbuster.deactivate()


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve without a log, in a thread of its own; gives the address."""
    quiet = type(handler.__name__, (handler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
async def start_server(tokenizer: Tokenizer) -> AsyncIterator[StartServer]:
    """`await start_server("text to say" or a script, **ServerConfig fields)`; the servers stop with the test."""
    async with AsyncExitStack() as stack:
        stack.enter_context(refuse_blocking())

        async def start(
            script: str | Callable[[EngineRequest], Script] = "hello world", *, limits: Any = None, **config: Any
        ) -> Served:
            info = {name: config.pop(name) for name in ("max_model_len", "vocab_size") if name in config}
            options = {name: config.pop(name) for name in ("burst", "hold_after", "fail_after") if name in config}
            chosen = say(tokenizer, script, **options) if isinstance(script, str) else script
            assert tokenizer.eos_token_id is not None
            engine = FakeEngine(chosen, eos_token_ids=frozenset({tokenizer.eos_token_id}), **info)
            return await stack.enter_async_context(serve(engine, tokenizer, limits, **config))

        yield start
