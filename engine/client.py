"""`EngineClient`: all that the gateway knows of an engine, whether it lives in this process or elsewhere."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from engine.request import EngineRequest, FinishReason, RequestClass, RequestOutput
from engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of the loaded model. `vocab_size` is the logits' width: any token id below it may be sent."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    architecture: str
    dtype: str
    device: str
    num_parameters: int


class OutputStream(Protocol):
    """The outputs of one request, ending after the terminal one. `aclose` before that aborts the request, at once
    and also when nothing has been read yet; it is idempotent."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...


class EngineClient(Protocol):
    """Every accepted request ends in exactly one terminal `RequestOutput`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """False when the engine loop is dead or a step has been running beyond the watchdog time."""
        ...

    @property
    def ready(self) -> bool:
        """True when the model is loaded, a warm-up step is done, and the engine is alive and not draining."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why a started engine that is alive is not ready, in words for an operator; None without any such reason."""
        ...

    async def start(self) -> None:
        """Start stepping and run one warm-up step; returns when ready."""
        ...

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new work, let running requests end for at most `drain_seconds`, abort the rest, stop."""
        ...

    def check_room(self, request_class: RequestClass, prompt_tokens: int) -> None:
        """Look at the queue before any work is done for a request: raises what `add` would raise now whatever is asked
        for, QueueFullError or EngineUnavailableError. `prompt_tokens`: about how many, for the record of the load."""
        ...

    def add(self, request: EngineRequest) -> OutputStream:
        """Queue a request.

        Raises InvalidRequestError, QueueFullError or EngineUnavailableError, in which case nothing was queued.
        """
        ...

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now; its iterator yields the terminal output with `reason`. Unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...
