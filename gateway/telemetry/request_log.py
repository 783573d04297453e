"""Request log: a JSON line per ended choice with token counts, latencies and the cause of a missed SLO.

Lines contain no prompt, answer or key. They are queued on the event loop and written in groups by a thread. The queue
is bounded: if the disk is full or hangs, lines are dropped and counted, and requests are not affected.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from engine.api import FinishReason, RequestClass, TokenCosts
from engine.client import EngineStats
from engine.errors import ConfigError
from engine.panics import as_error
from gateway.telemetry.account import Account
from predictor.slo import Objective, parse_slo

log = logging.getLogger("tidemill.gateway")

MAX_LINES = 10_000
RETRY_SECONDS = 1.0
_MISTAKES = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})
"""Errors of a wrong path, where a retry cannot help."""
STOP_SECONDS = 5.0
"""Maximum wait for the disk at shutdown."""


class RequestLog:
    """Write log lines while the async context is entered.

    Args:
        path: log file; a wrong path raises ConfigError. On a full or read-only disk lines are dropped.
        stats: returns the engine statistics with the SLO and the token costs for the verdicts.
        on_drop: called with the number of dropped lines.
    """

    def __init__(
        self,
        path: str,
        stats: Callable[[], EngineStats],
        on_drop: Callable[[int], None],
        *,
        max_lines: int = MAX_LINES,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = Path(path).expanduser()
        self._stats = stats
        self._on_drop = on_drop
        self._max_lines = max_lines
        self._os_write = write
        self._pending: list[dict[str, Any]] = []
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._reopen = False
        self._torn = False
        self._failing = False
        self._file: int | None = None
        try:
            self._file = self._open()
        except OSError as error:
            if error.errno in _MISTAKES:
                raise ConfigError(f"--request-log {path}: {error.strerror}") from None
            self._failing = True
            log.error("--request-log: %s; lines are dropped until it can be written", error.strerror)

    def add(self, account: Account) -> None:
        """Queue the line of an ended choice. Call it on the event loop; does not block."""
        if len(self._pending) >= self._max_lines:
            self._on_drop(1)
            return
        self._pending.append(line_of(account, self._stats()))
        self._wanted.set()

    def reopen(self) -> None:
        """Reopen the path before the next line, after log rotation."""
        self._reopen = True
        self._wanted.set()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-request-log")

    async def __aexit__(self, *_: object) -> None:
        """Write the queued lines and close the file."""
        self._stopping = True
        self._wanted.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_SECONDS)

    async def _run(self) -> None:
        while not self._stopping or self._pending:
            await self._wanted.wait()
            lines, self._pending = self._pending, []
            reopen, self._reopen = self._reopen, False
            self._wanted.clear()
            try:
                self._on_drop(await asyncio.to_thread(self._write, lines, reopen))
            except BaseException as raised:  # no thread, or a line that cannot be encoded
                as_error(raised)
                self._on_drop(len(lines))
                self._reopen = self._reopen or reopen
                await asyncio.sleep(RETRY_SECONDS)
            if self._stopping:
                self._wanted.set()
        with suppress(RuntimeError):
            await asyncio.to_thread(self._close)

    def _write(self, lines: list[dict[str, Any]], reopen: bool) -> int:
        """Write lines in a thread; return the number of lost lines."""
        left = len(lines)
        try:
            if reopen or self._file is None:
                self._close()
                self._file = self._open()
            for line in lines:
                self._write_line(self._file, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
                left -= 1
        except OSError as error:
            if not self._failing:
                log.error("--request-log: %s; lines are dropped until it can be written again", error.strerror)
            self._failing = True
            return left
        if lines and self._failing:
            self._failing = False
            log.info("--request-log: can be written again")
        return 0

    def _write_line(self, file: int, data: bytes) -> None:
        """Write a line, after a newline if the previous line was written only in part."""
        rest = b"\n" + data if self._torn else data
        while rest:
            done = self._os_write(file, rest)
            rest = rest[done:]
            self._torn = bool(rest)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _close(self) -> None:
        file, self._file, self._torn = self._file, None, False
        if file is not None:
            with suppress(OSError):
                os.close(file)


def check_path(path: str) -> None:
    """Raise ConfigError if a log could not be opened at the path. Creates no file."""
    file = Path(path).expanduser()
    there = file if file.exists() else file.parent
    if not there.exists() or not os.access(there, os.W_OK):
        reason = os.strerror(errno.EACCES if there.exists() else errno.ENOENT)
        raise ConfigError(f"--request-log {path}: {reason}")
    if file.is_dir():
        raise ConfigError(f"--request-log {path}: {os.strerror(errno.EISDIR)}")


def line_of(account: Account, stats: EngineStats) -> dict[str, Any]:
    """Return the line of an ended choice; times in seconds."""
    request, colocation = account.request, stats.colocation
    verdict = judge(account, colocation.slo if colocation is not None else "", stats.token_costs)
    assert account.finish is not None
    tier = "batch" if request.job else "flex" if request.request_class is RequestClass.OFFLINE else "default"
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": account.response_id,
        "choice": account.index,
        "tier": tier,
        "tenant": request.tenant,
        **({"batch": request.job} if request.job else {}),
        "prompt_tokens": account.num_prompt_tokens,
        "cached_tokens": account.num_cached_tokens,
        "output_tokens": account.num_tokens,
        "queue": _shown(account.queued),
        "ttft": _shown(account.ttft),
        "tbt_mean": _shown(account.mean_gap),
        "tbt_max": _shown(account.longest_gap),
        "seconds": _shown(account.seconds),
        "preemptions": account.num_preemptions,
        "beside_offline": account.beside_offline,
        "status": account.status,
        "finish": account.finish.value,
        "slo_met": verdict.met,
        "why": verdict.why,
        "missed": verdict.missed,
    }


def _shown(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)


ENGINE_FAULT = "engine_fault"
QUEUE = "queue"
PREEMPTION = "preemption"
PREFILL = "prefill"
OWN_PROMPT = "own_prompt"
BESIDE_OTHERS = "prefill_beside_others"
STEP_TIME = "step_time"


@dataclass(frozen=True, slots=True)
class SLOVerdict:
    """Verdict on one request."""

    met: bool | None = None
    """None if undefined: offline work, no limit on single requests, or the client disconnected before a miss."""
    why: str | None = None
    """First cause in `missed`, or ENGINE_FAULT."""
    missed: dict[str, str] = field(default_factory=dict)
    """Cause by missed objective."""


def judge(account: Account, slo_text: str, costs: TokenCosts | None) -> SLOVerdict:
    """Judge an ended choice. `costs`: seconds per token, or None without a latency model."""
    if account.request.request_class is not RequestClass.ONLINE:
        return SLOVerdict()
    slo, promise = parse_slo(slo_text), account.request.promise
    limits = [o for o in slo.of(promise).objectives if o.per_request]
    left = account.finish is FinishReason.ABORT
    served = _served(account, left)
    values = slo.values(*served, promise)
    missed = {str(o): _cause(o, account, costs) for o in limits if values[o.key] > (o.limit or 0.0)}
    if promise is not None and not missed and not left and not promise.kept(*served):
        missed = {str(promise): STEP_TIME}
    if account.finish is FinishReason.ERROR:
        return SLOVerdict(False, ENGINE_FAULT, {} if account.ttft is None else missed)
    if missed:
        return SLOVerdict(False, next(iter(missed.values())), missed)
    return SLOVerdict(True if (limits or promise) and not left else None)


def _served(account: Account, left: bool) -> tuple[float | None, list[float]]:
    """Return TTFT and gaps as the client saw them; if it disconnected, including its last wait."""
    gaps = list(account.gaps)
    if left and account.ttft is None:
        return account.seconds, gaps
    return account.ttft, [*gaps, account.quiet] if left else gaps


def _cause(objective: Objective, account: Account, costs: TokenCosts | None) -> str:
    limit = objective.limit or 0.0
    if account.request.promise is not None:
        limit = min(limit, account.request.promise.limit(objective.metric))
    if objective.metric == "ttft" or (objective.metric == "e2e" and (account.ttft is None or account.ttft > limit / 2)):
        return _late_start(account, costs)
    return _long_gap(account, limit if objective.metric != "e2e" else 0.0)


def _late_start(account: Account, costs: TokenCosts | None) -> str:
    """Return the longest part of the time to first token: queue, predicted time of its own prompt, or the rest, when
    its prompt shared steps with other requests."""
    if account.evicted_before_token:
        return PREEMPTION
    queued, ttft = account.queued, account.ttft
    if queued is None or (ttft is not None and queued >= ttft - queued):
        return QUEUE
    if costs is None or ttft is None:
        return PREFILL
    prefill = ttft - queued
    own = min(prefill, costs.prefill * (account.num_prompt_tokens - account.num_cached_tokens))
    parts = {QUEUE: queued, OWN_PROMPT: own, BESIDE_OTHERS: prefill - own}
    return max(parts, key=lambda name: parts[name])


def _long_gap(account: Account, limit: float) -> str:
    """Return the cause of most of the time in gaps above the limit."""
    evicted = set(account.evicted_gaps)
    lost, slow = 0.0, account.quiet if account.finish is FinishReason.ABORT else 0.0
    for number, gap in enumerate(account.gaps):
        if gap > limit and number in evicted:
            lost += gap
        elif gap > limit:
            slow += gap
    return PREEMPTION if lost > slow else STEP_TIME
