"""The server process: one event loop, one socket, and signals.

The first SIGTERM drains the server, a second one exits at once. SIGHUP reloads the keys, reopens the request log and
renews the engine; SIGUSR1 restarts all engines one by one.
The server prints a text when it listens, drains and has stopped.
"""

import asyncio
import errno
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from engine import __version__
from engine.client import EngineInfo, SamplingDefaults
from engine.errors import ConfigError, TidemillError
from engine.machine import child
from gateway.config import ServerConfig
from gateway.context import GatewayContext, ServerContext
from gateway.http.connection import ProtocolLimits, connections_within, raise_descriptor_limit, with_limits
from predictor.slo import SLO, UNITS, Objective

status = logging.getLogger("tidemill.status")
"""Logger of the texts; the log level of the server does not apply to it."""

LABEL = 17
_METRICS = {"ttft": "first token", "tbt": "gap between tokens", "tpot": "time per token"}


def listening_text(context: ServerContext, url: str) -> str:
    """Return the block for a server that listens at `url`."""
    colocation = context.metrics.stats.colocation
    batches, lines = context.lifecycle.unfinished()
    info = context.client.info
    rows = {
        "chat and batches" if isinstance(context, GatewayContext) else "batches": f"{url}/v1",
        "page": url,
        "model": model_text(context.models.first, info),
        "room": _room_text(info),
        "sampling": _sampling_text(info.sampling),
        "promise": promise_text(SLO.parse(colocation.slo)) if colocation is not None and colocation.slo else "",
        "unfinished": f"{count_text(batches, 'batch', 'batches')}, {lines:,} lines left" if batches else "",
    }
    block = "".join(f"\n  {label:<{LABEL}} {text}" for label, text in rows.items() if text)
    return f"tidemill {__version__} is ready{block}\ntidemill: listening on {url}"


def draining_text(chats: int, seconds: float) -> str:
    """Return the line for a server that was asked to stop. `seconds`: maximum time for the running chats to end."""
    left = f"{count_text(chats, 'chat', 'chats')} may take up to {seconds:.0f} s" if chats else "no chat is running"
    return f"tidemill: draining: {left}; a second signal (Ctrl-C) exits at once"


def stopped_text(batches: int) -> str:
    """Return the line for a server that has stopped. `batches`: number of unfinished batches."""
    rest = f"; the next start continues {count_text(batches, 'batch', 'batches')}" if batches else ""
    return f"tidemill: stopped{rest}"


def model_text(name: str, info: EngineInfo) -> str:
    """Return the model's name, architecture, size, precision and device; for another server's model its address."""
    if not info.dtype:
        return f"{name} at {info.device}"
    return f"{name} ({info.architecture}, {info.num_parameters:,} parameters, {info.dtype} on {info.device})"


def promise_text(slo: SLO) -> str:
    """Return an SLO in words, e.g. "first token within 1 s, gap between tokens within 100 ms, for 99 % of chats"."""
    tolerances = set(slo.tolerances().values())
    if len(tolerances) == 1 and len(slo.tolerances()) == len(slo.objectives) > 1:
        return f"chats at most {tolerances.pop() * 100:g} % slower than without batch work"
    groups: dict[str, list[str]] = {}
    for each in slo.objectives:
        scope = f", for {each.percentile} % of chats" if each.per_request else ""
        groups.setdefault(scope, []).append(_objective_text(each))
    return "; ".join(", ".join(texts) + scope for scope, texts in groups.items())


def _objective_text(objective: Objective) -> str:
    name = _METRICS[objective.metric]
    if not objective.per_request:
        name = f"{'mean' if objective.percentile is None else f'P{objective.percentile}'} {name}"
    if objective.limit is not None:
        return f"{name} within {time_text(objective.limit)}"
    assert objective.tolerance is not None
    return f"{name} at most {objective.tolerance * 100:g} % longer than without batch work"


def time_text(seconds: float) -> str:
    """Format a duration with its unit, e.g. "100 ms"."""
    unit = next(unit for unit in ("s", "ms", "us") if seconds >= UNITS[unit] or unit == "us")
    return f"{seconds / UNITS[unit]:g} {unit}"


def _room_text(info: EngineInfo) -> str:
    cache = f"cache {info.cache_tokens:,} tokens, " if info.cache_tokens else ""
    return f"{cache}context {info.max_model_len:,} tokens" if info.max_model_len else ""


def _sampling_text(sampling: SamplingDefaults) -> str:
    values = ", ".join(f"{name} {value}" for name, value in sampling._asdict().items() if value is not None)
    return f"{values} (generation_config.json)" if values else ""


def count_text(number: int, one: str, many: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many}"


log = logging.getLogger("tidemill.gateway")

KEEP_ALIVE_SECONDS = 180
"""Idle time before a connection is closed: longer than proxies keep theirs (nginx, ALB 60 s; Azure 120 s), so that no
proxy sends a request into a closing connection."""
CLOSE_SECONDS = 2  # time for connections to send their last bytes after the engine has stopped
LAST_SECONDS = 5.0  # forced exit this long after the drain
TIDY_SECONDS = 1.0
DEAD_ENGINE = 70
"""Exit code of a server whose engine is dead; supervisors may restart it."""


class ForcedExit:
    """Watchdog thread that ends a hanging process by calling `end` with the exit code.

    It starts with the process, because later no thread may be available or the event loop may hang."""

    def __init__(self, end: Callable[[int], None]) -> None:
        self._end = end
        self._asked: queue.SimpleQueue[tuple[float, int] | None] = queue.SimpleQueue()  # may be used by signal handlers
        threading.Thread(target=self._wait, name="tidemill-last-resort", daemon=True).start()

    def within(self, seconds: float, exit_code: int) -> None:
        """End the process after `seconds`, unless it has ended by itself."""
        self._asked.put((time.monotonic() + seconds, exit_code))

    def cancel(self) -> None:
        """Cancel the deadline."""
        self._asked.put(None)

    def _wait(self) -> None:
        asked = self._asked.get()
        while asked is not None:
            try:
                sooner = self._asked.get(timeout=max(0.0, asked[0] - time.monotonic()))
            except queue.Empty:
                self._end(asked[1])
                return
            asked = sooner and min(asked, sooner)


class GatewayServer(uvicorn.Server):
    """uvicorn's server with a drain before shutdown, during which it keeps listening so that /ready can return 503.

    `owns_process`: the process runs only this server, so its garbage collector may be tuned.
    """

    def __init__(
        self, config: uvicorn.Config, context: ServerContext, drain_seconds: float, owns_process: bool
    ) -> None:
        super().__init__(config)
        self._context = context
        self._lifecycle = context.lifecycle
        self._drain_seconds = drain_seconds
        self._last_resort = ForcedExit(self._end_now) if owns_process else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._reload_task: asyncio.Task[None] | None = None
        self._engine_watch: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._has_terminal = has_terminal()
        self._unfinished: tuple[int, int] | None = None
        self._num_signals = 0
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._last_resort is not None:
            child.settle()
            self._tidying = asyncio.create_task(self._tidy(), name="tidemill-garbage")
        self._loop = asyncio.get_running_loop()
        self._engine_watch = asyncio.create_task(self._watch_engine(), name="tidemill-engine-watch")
        if self._last_resort is not None and threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
            self._loop.add_signal_handler(signal.SIGUSR1, self._restart_engines)
        for listener in sockets or []:
            status.info(listening_text(self._context, _url(listener)))
        notify("READY=1")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Start the drain. Unlike uvicorn's, do not raise the signal again: a drained server exits normally."""
        self._num_signals += 1
        if self._num_signals > 1:
            os._exit(128 + sig)  # also during a model step
        self._lifecycle.draining = True
        self._end_within(self._drain_seconds + LAST_SECONDS, 1)
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [task for task in (self._engine_watch, self._tidying) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        batches, _lines = self._unfinished or self._lifecycle.unfinished()
        await super().shutdown(sockets)
        status.info(stopped_text(batches))

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            child.collect_due(at_rest=not self.server_state.tasks)

    async def _watch_engine(self) -> None:
        """End the server once its engine is dead for good, instead of answering 503 forever."""
        why = await self._lifecycle.client.wait_dead()
        log.critical("the server ends: %s", why)
        notify("STOPPING=1")
        self.exit_code = DEAD_ENGINE
        self._lifecycle.draining = True
        self._end_within(LAST_SECONDS, DEAD_ENGINE)
        self.should_exit = True

    def _end_within(self, seconds: float, exit_code: int) -> None:
        if self._last_resort is not None:
            self._last_resort.within(seconds, exit_code)

    def _end_now(self, exit_code: int) -> None:
        try:
            self._lifecycle.client.kill()
        finally:
            os._exit(exit_code)

    def _hang_up(self) -> None:
        """Handle SIGHUP: reload, or exit if the controlling terminal was closed."""
        if self._has_terminal and not has_terminal():
            self.handle_exit(signal.SIGHUP, None)
        else:
            self._reload_task = asyncio.ensure_future(self._reload())

    def _restart_engines(self) -> None:
        """Handle SIGUSR1, which `tidemill fleet restart` sends."""
        self._reload_task = asyncio.ensure_future(self._renew("SIGUSR1", anyway=True))

    async def _reload(self) -> None:
        if self._context.request_log is not None:
            self._context.request_log.reopen()
        await self._reload_keys()
        await self._renew("SIGHUP")

    async def _renew(self, asked_by: str, *, anyway: bool = False) -> None:
        try:
            log.info("%s: %s", asked_by, await self._lifecycle.client.renew(anyway=anyway))
        except TidemillError as error:
            log.error("%s: the engine is unchanged: %s", asked_by, error.message)

    async def _reload_keys(self) -> None:
        keys = self._context.keys
        if keys.file is None:
            log.info("SIGHUP: no --api-key-file to reload")
            return
        try:
            await self._context.reload_keys()
        except ConfigError as error:
            log.error("SIGHUP: the keys are unchanged: %s", error.message)
        else:
            log.info("SIGHUP: %s", keys.ring)

    def _begin_drain(self) -> None:
        self._unfinished = self._lifecycle.unfinished()
        status.info(draining_text(self._context.admissions.num_running, self._drain_seconds))
        notify("STOPPING=1")
        self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            await self._lifecycle.stop(self._drain_seconds)
        finally:
            self.should_exit = True


def make_server(
    app: FastAPI,
    config: ServerConfig,
    limits: ProtocolLimits | None = None,
    *,
    close_seconds: int = CLOSE_SECONDS,
    owns_process: bool = False,
) -> GatewayServer:
    """Return a server for the application that is not listening yet."""
    context: ServerContext = app.state.context
    if limits is None:
        limits = ProtocolLimits(max_connections=connections_within(raise_descriptor_limit()))
    settings = uvicorn.Config(
        app,
        http=with_limits(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=config.log_level == "debug",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=close_seconds,
    )
    return GatewayServer(settings, context, config.shutdown_timeout, owns_process)


def run(app: FastAPI, config: ServerConfig) -> int:
    """Serve until a signal or until the engine is dead, and return the exit code.

    Raises ConfigError if the address cannot be bound, and the engine's error if it does not start.
    """
    _set_up_logging(config.log_level)
    listener = bind(config.host, config.port)
    server = make_server(app, config, owns_process=True)
    try:
        server.run(sockets=[listener])
    except SystemExit:  # raised by uvicorn if the lifespan does not start
        error = app.state.context.lifecycle.startup_error
        if error is None:
            raise  # SIGTERM arrived before uvicorn handled it
        if isinstance(error, TidemillError):
            raise error from None
        raise ConfigError(f"the engine did not start: {type(error).__name__}") from error
    finally:
        listener.close()
    return server.exit_code


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address cannot be bound."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}") from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            by = child.listener_on(port)
            raise ConfigError(f"--port {port} is in use{by and f' by {by}'}; use another port") from None
        raise ConfigError(f"--host {host} --port {port}: {(error.strerror or 'cannot be bound').lower()}") from None
    return listener


def notify(state: str) -> None:
    """Notify systemd of `READY=1` or `STOPPING=1`, for services of `Type=notify` (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] in {"/", "@"}:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)
            manager.sendto(state.encode(), ("\0" if address[0] == "@" else "/") + address[1:])


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _set_up_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    plain = logging.StreamHandler()
    plain.setFormatter(logging.Formatter("%(message)s"))
    status.handlers, status.propagate = [plain], False
    status.setLevel(logging.INFO)
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings concern invalid client requests
