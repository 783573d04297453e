"""What every resource of one application shares. No globals: two applications live side by side in one process."""

import asyncio
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import anyio
import anyio.to_thread
from starlette.requests import Request

from engine.api import EngineClient, EngineState
from engine.errors import EngineUnavailableError
from engine.text.thoughts import ThoughtMarks
from engine.text.tokenizer import Tokenizer
from gateway.config import ServerConfig
from gateway.generate.tool_formats import ToolFormat
from gateway.http.keys import DEFAULT_TENANT, KeyStore, Tier
from gateway.http.quotas import Admissions
from gateway.models import ModelNames
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.request_log import RequestLog

DISK_SECONDS = 1.0
"""After which a disk that does not answer is at fault."""


class BackgroundWork(Protocol):
    """What uses the engine beside the requests of clients."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass(slots=True)
class Lifecycle:
    """Whether the server takes new work, and the one place that starts and stops the engine and its background work.
    `ask_storage`: why nothing can be stored, None: it can; it asks the disk, in a thread. `ask_notice`: findings of the
    last start in the state folder, or None. `batch_trouble`: why lines of batches do not run, or None."""

    client: EngineClient
    draining: bool = False
    stopped: bool = False
    background: list[BackgroundWork] = field(default_factory=list)
    startup_error: Exception | None = None
    ask_storage: Callable[[], str | None] = lambda: None
    batch_trouble: Callable[[], str | None] = lambda: None
    ask_notice: Callable[[], str | None] = lambda: None
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
        """Refuse new work from now on, let running requests end for `drain_seconds`, end the rest. Idempotent."""
        self.draining = True
        if not self.stopped:
            self.stopped = True
            for work in self.background:  # what it has in the engine is not waited for: it goes on at the next start
                await work.stop()
            await self.client.stop(drain_seconds)

    def check_accepting(self) -> None:
        """Raises EngineUnavailableError before any work is done for a request that cannot be queued."""
        if self.draining:
            raise EngineUnavailableError("The server is shutting down.", retry_after=5.0)
        if self.client.state is EngineState.DEAD:
            raise EngineUnavailableError("The engine is not running.", retry_after=5.0)

    async def storage_fault(self) -> str | None:
        """Why nothing can be stored; None: it can. A disk that hangs holds up nobody who asks."""
        with anyio.move_on_after(DISK_SECONDS):
            return await anyio.to_thread.run_sync(self.ask_storage, limiter=self._disk_thread, abandon_on_cancel=True)
        return "the state folder does not answer"


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """`salt_secret` separates the prefix caches of tenants. `text_threads` bounds the prompts tokenized at once,
    so that a flood of long prompts cannot take every core; `is_offline`: no client waits for the answer, see `pace`.
    `parse_thread` parses large bodies, one at a time; `body_turn` allows one part of a body in a round of the loop.
    `admissions`: requests of clients that are in the engine, by tenant, within the limits that `keys` names.
    `on_new_keys`: called after the keys were read again.
    `tool_format`: how the model writes calls of functions, None where that is not known; `thought_marks`: between which
    it thinks, None: it does not."""

    client: EngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    models: ModelNames
    metrics: GatewayMetrics
    lifecycle: Lifecycle
    keys: KeyStore
    admissions: Admissions
    request_log: RequestLog | None = None
    tool_format: ToolFormat | None = None
    thought_marks: ThoughtMarks | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    salt_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    text_threads: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(max(2, (os.cpu_count() or 2) // 2))
    )
    parse_thread: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    body_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_offline: bool = False
    on_new_keys: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    async def reload_keys(self) -> None:
        """Read the key file again; running requests go on. After a ConfigError nothing has changed."""
        await anyio.to_thread.run_sync(self.keys.reload)
        self.admissions.recheck()
        for follow in self.on_new_keys:
            await follow()

    def cache_salt(self, tenant: str) -> bytes:
        """What separates this tenant's prefix cache from the others'."""
        return hmac.digest(self.salt_secret, tenant.encode(), hashlib.sha256)[:16]


def context_of(request: Request) -> GatewayContext:
    return cast(GatewayContext, request.app.state.context)


def tenant_of(request: Request) -> str:
    """Return the tenant of the request's key; the default tenant where no keys are configured."""
    return str(_state(request).get("tenant", DEFAULT_TENANT))


def tier_of(request: Request) -> Tier:
    """The service tier of requests that name none."""
    return cast(Tier, _state(request).get("service_tier", "default"))


def sees_all(request: Request) -> bool:
    """Whether the request may see figures of every tenant: with a key that may, or where no keys are configured."""
    return bool(_state(request).get("sees_all", not context_of(request).keys.ring))


def is_operator(request: Request) -> bool:
    """Whether the request may reach the files and batches of every tenant: with an operator's key, or where no keys are
    configured."""
    return bool(_state(request).get("is_operator", not context_of(request).keys.ring))


def _state(request: Request) -> dict[str, Any]:
    return cast(dict[str, Any], request.scope.get("state", {}))
