"""Shared state of one application. There are no globals, so several applications can run in one process."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import anyio
import anyio.to_thread
from starlette.requests import Request

from engine.client import EngineClient, EngineInfo, EngineState
from engine.errors import EngineUnavailableError
from engine.forms import ThoughtMarks
from engine.machine.facts import read_processor
from engine.text.tokenizer import Tokenizer
from gateway.config import ServerConfig
from gateway.generate.tool_formats import ToolFormat
from gateway.http.keys import DEFAULT_TENANT, Admissions, Key, KeyStore, Tier
from gateway.models import ModelNames
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.request_log import RequestLog
from predictor.slo import parse_slo

log = logging.getLogger("tidemill.gateway")

DISK_SECONDS = 1.0
"""Timeout of a disk check."""


class BackgroundWork(Protocol):
    """A service that starts after the engine and stops before it."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass(slots=True)
class Lifecycle:
    """Start and stop of the engine and the background work, and the health of the state folder."""

    client: EngineClient
    draining: bool = False
    """New requests are refused."""
    stopped: bool = False
    background: list[BackgroundWork] = field(default_factory=list)
    startup_error: Exception | None = None
    ask_storage: Callable[[], str | None] = lambda: None
    """Return why nothing can be stored, or None. Blocking: checks the disk."""
    batch_trouble: Callable[[], str | None] = lambda: None
    """Return why batch lines do not run, or None."""
    ask_notice: Callable[[], str | None] = lambda: None
    """Return findings in the state folder at the last start, or None."""
    unfinished: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Return the number of unfinished batches, and of their lines that were left at the start."""
    _disk_thread: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))

    async def start(self) -> None:
        try:
            await self.client.start()
            for work in self.background:
                await work.start()
        except Exception as error:
            self.startup_error = error
            raise

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new work, wait up to `drain_seconds` for running requests, and end the rest. Idempotent."""
        self.draining = True
        if not self.stopped:
            self.stopped = True
            for work in self.background:  # batch lines in the engine are not awaited: they run again at the next start
                await work.stop()
            await self.client.stop(drain_seconds)

    def check_accepting(self) -> None:
        """Raise EngineUnavailableError if requests cannot be queued. Called before any work on a request."""
        if self.draining:
            raise EngineUnavailableError("The server is shutting down.", retry_after=5.0)
        if self.client.state is EngineState.DEAD:
            raise EngineUnavailableError("The engine is not running.", retry_after=5.0)

    async def storage_fault(self) -> str | None:
        """Return why nothing can be stored, or None. Waits at most DISK_SECONDS for the disk."""
        with anyio.move_on_after(DISK_SECONDS):
            return await anyio.to_thread.run_sync(self.ask_storage, limiter=self._disk_thread, abandon_on_cancel=True)
        return "the state folder does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """Shared state of the endpoints that need no tokenizer."""

    client: EngineClient
    config: ServerConfig
    models: ModelNames
    metrics: GatewayMetrics
    lifecycle: Lifecycle
    keys: KeyStore
    admissions: Admissions
    """Admission of requests within the tenants' quotas in `keys`."""
    request_log: RequestLog | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    parse_thread: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    """Parses large bodies one at a time."""
    body_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Limits large bodies to one piece per round of the event loop."""
    on_new_keys: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called after the keys were reloaded."""

    def check_room(self, tenant: str) -> None:
        """Refuse a request that cannot be queued, before its body is read. Its submission decides about the rest.

        Raises EngineUnavailableError, and ApiError 429 if the tenant has no room for the smallest request."""
        self.lifecycle.check_accepting()
        self.admissions.check(tenant)

    async def reload_keys(self) -> None:
        """Reload the key file; running requests are not affected. Raises ConfigError, keeping the old keys."""
        await anyio.to_thread.run_sync(self.keys.reload)
        await self.keys_changed()

    async def keys_changed(self) -> None:
        """Apply new limits, warn of unknown service classes, and call `on_new_keys`."""
        self.admissions.recheck()
        known = [name for name, _ in parse_slo(self.client.info.slo).by_class]
        for unknown in sorted(self.keys.ring.classes.difference(known)):
            log.warning("keys name an unknown service class '%s'; --slo has %s", unknown, ", ".join(known))
        for follow in self.on_new_keys:
            await follow()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext(ServerContext):
    """Shared state of the endpoints that run the model."""

    tokenizer: Tokenizer
    tool_format: ToolFormat | None = None
    """Tool call format of the model, if known."""
    thought_marks: ThoughtMarks | None = None
    """Tokens that delimit reasoning, if the model has reasoning."""
    salt_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Key from which the tenants' cache salts are derived."""
    text_threads: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(max(2, read_processor().threads // 2))
    )
    """Bounds concurrent tokenization, so that long prompts cannot occupy all cores."""
    is_offline: bool = False
    """No client waits for the answers, see `generate.answering`."""

    @property
    def info(self) -> EngineInfo:
        """The engine's info, with the end mark of the chat template among the end tokens."""
        info = self.client.info
        ends = self.tokenizer.ends_at(info.eos_token_ids)
        return info if ends == info.eos_token_ids else replace(info, eos_token_ids=ends)


def server_of(request: Request) -> ServerContext:
    return cast(ServerContext, request.app.state.context)


def context_of(request: Request) -> GatewayContext:
    return cast(GatewayContext, request.app.state.context)


def tenant_of(request: Request) -> str:
    """Return the tenant of the request's key, or the default tenant if no keys are configured."""
    key = key_of(request)
    return DEFAULT_TENANT if key is None else key.tenant


def key_of(request: Request) -> Key | None:
    """Return the request's key, or None if no keys are configured."""
    return cast(Key | None, request.scope.get("state", {}).get("key"))


def is_still_accepted(request: Request) -> bool:
    """Return whether the keys still give the request the same rights, for responses that last."""
    ring, key = server_of(request).keys.ring, key_of(request)
    return not ring if key is None else ring.holds(key) and ring.sees_all(key) == sees_all(request)


def tier_of(request: Request) -> Tier:
    """Return the service tier for requests without one."""
    key = key_of(request)
    return "default" if key is None else key.service_tier


def sees_all(request: Request) -> bool:
    """Return whether the request may read metrics of all tenants; always true if no keys are configured."""
    return bool(request.scope.get("state", {}).get("sees_all", not server_of(request).keys.ring))


def is_operator(request: Request) -> bool:
    """Return whether the request may access files and batches of all tenants; always true if no keys are configured."""
    key = key_of(request)
    return not server_of(request).keys.ring if key is None else key.is_operator
