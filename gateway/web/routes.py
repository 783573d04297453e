"""The dashboard page at `/`, its files under `/web/`, and its data at `/dashboard/history` and `/dashboard/events`.

The static files need no API key; the data endpoints are protected like /metrics. The content security policy allows
resources of this server only. The data are snapshots of the engine's statistics, taken every second while a page is
open and every ten seconds otherwise; the last 900 are in memory, so that a new page has a history. A snapshot is
encoded once for all pages. Counters are cumulative; the page computes differences. `/dashboard/timeline` has seven days
by minute.
"""

import asyncio
import hashlib
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import orjson
from anyio import to_thread
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api import RequestClass
from engine.client import ColocationStats, EngineState, EngineStats
from gateway.context import Lifecycle, is_still_accepted
from gateway.health import check_sees_all
from gateway.http.errors import ApiError, log_unexpected
from gateway.http.sse import EventStream, event
from gateway.telemetry.engine_metrics import class_targets, shown
from gateway.telemetry.metrics import EndedAnswer, GatewayMetrics
from gateway.telemetry.timeline import FILE, Timeline
from predictor.slo import SLO

FOLLOWED_SECONDS = 1.0
UNFOLLOWED_SECONDS = 10.0
KEPT_SNAPSHOTS = 900
_FIGURES = ("attainment", "latency_budget")


class Recorder:
    """Take snapshots; see `BackgroundWork`. `clock` is the wall clock, `engine_clock` the clock of request times."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        lifecycle: Lifecycle,
        clock: Callable[[], float] = time.time,
        engine_clock: Callable[[], float] = time.monotonic,
        folder: Path | None = None,
    ) -> None:
        self.timeline = Timeline(None if folder is None else folder / FILE, clock)
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._clock = clock
        self._engine_clock = engine_clock
        self._snapshots: deque[bytes] = deque(maxlen=KEPT_SNAPSHOTS)
        self._recorded_at = -math.inf
        self._followers = 0
        self._followed = asyncio.Event()
        self._next: asyncio.Future[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._metrics.take_snapshot()  # statistics must exist before the first request
        self._task = asyncio.create_task(self._run(), name="tidemill-recorder")

    async def stop(self) -> None:
        """Stop recording, end all event streams, and store the minute in progress. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self.timeline.end_minute():
            await to_thread.run_sync(self.timeline.write)

    async def history(self) -> bytes:
        """Return all snapshots as a JSON document, after taking a new one if the last is older than a second."""
        if self._clock() - self._recorded_at >= FOLLOWED_SECONDS:
            await self.record()
        return b'{"snapshots":[' + b",".join(self._snapshots) + b"]}"

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Yield a server-sent event per snapshot until the recorder stops."""
        self._followers += 1
        self._followed.set()
        try:
            while self._task is not None:
                if self._next is None:
                    self._next = asyncio.get_running_loop().create_future()
                yield await asyncio.shield(self._next)
        except asyncio.CancelledError:
            if self._task is not None:
                raise  # the client disconnected; otherwise the recorder has stopped and the stream ends normally
        finally:
            self._followers -= 1

    async def record(self) -> bytes:
        """Take a snapshot, send it to all event streams, and return it encoded."""
        await self._metrics.take_snapshot()
        answers = self._metrics.by_class[RequestClass.ONLINE].answers
        now = self._recorded_at = self._clock()
        shift = now - self._engine_clock()
        chats = [_chat(answer, answer.ended + shift) for answer in answers]
        snapshot = take(self._metrics.stats, chats, now) | self._readiness()
        offline = snapshot["batch"] = self._metrics.by_class[RequestClass.OFFLINE].totals
        if self.timeline.look(self._metrics.stats, offline):
            await to_thread.run_sync(self.timeline.write)
        answers.clear()
        encoded = orjson.dumps(snapshot)
        self._snapshots.append(encoded)
        if self._next is not None:
            self._next.set_result(event(orjson.Fragment(encoded)))
            self._next = None
        return encoded

    async def _run(self) -> None:
        while True:
            try:
                await self.record()
            except BaseException as raised:
                log_unexpected(raised)
            if self._followers:
                await asyncio.sleep(FOLLOWED_SECONDS)
                continue
            self._followed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(UNFOLLOWED_SECONDS):
                    await self._followed.wait()

    def _readiness(self) -> dict[str, Any]:
        client = self._lifecycle.client
        if self._lifecycle.draining:
            return {"ready": False, "reason": "shutting down"}
        if client.state is EngineState.READY:
            return {"ready": True, "reason": None}
        return {"ready": False, "reason": client.trouble or "the engine is not ready"}


def take(stats: EngineStats, chats: list[dict[str, Any]], now: float) -> dict[str, Any]:
    """Return a snapshot. `chats`: chats ended since the last snapshot; `now`: Unix time; all times in seconds."""
    return {
        "time": round(now, 3),
        "running": {c.value: stats.running.get(c, 0) for c in RequestClass},
        "waiting": {c.value: stats.waiting.get(c, 0) for c in RequestClass},
        "steps": stats.steps,
        "step_seconds": round(stats.step_seconds, 4),
        "predicted_seconds": round(stats.predicted_seconds, 4),
        "leftover_seconds": round(stats.leftover_seconds, 4),
        "leftover_used_seconds": round(stats.leftover_used_seconds, 4),
        "computed_tokens": stats.prefill_tokens + stats.decode_tokens,
        "offline_tokens": stats.offline_tokens,
        "units": {
            "total": stats.units_total,
            "owned": stats.units_owned,
            "cached": stats.units_cached,
            "free": stats.units_free,
            "hidden_blocks": stats.hidden_blocks,
            "host_total": stats.host_units_total,
            "host_used": stats.host_units_used,
        },
        "refused": stats.refused_requests,
        "mechanisms": _mechanisms(stats),
        "engines": shown(stats.engines),
        "chats": chats,
        **_promise(stats.colocation),
    }


def _mechanisms(stats: EngineStats) -> dict[str, dict[str, float]]:
    """Return counters of the methods that ran; a method that did not run has none."""
    found: dict[str, Mapping[str, float]] = {"plans": stats.plans, "knapsack": stats.knapsack}
    if stats.drafted_tokens:
        found["drafts"] = {"verified": stats.drafted_tokens, "right": stats.accepted_tokens}
    if stats.colocation is not None:
        learned = stats.colocation.learned
        found["searches"] = {name: learned.get(f"searches_{name}", 0) for name in ("made", "failed")}
        found["refits"] = {"adopted": stats.colocation.model_refits, "refused": stats.colocation.model_refits_refused}
    if (pairs := stats.pipelines) is not None:
        found["drops"] = {"drops": pairs.drops, "restores": pairs.restores, "failed": pairs.failures}
    return {name: dict(counts) for name, counts in found.items() if any(counts.values())}


def _promise(stats: ColocationStats | None) -> dict[str, Any]:
    if stats is None:
        return {
            **dict.fromkeys((*_FIGURES, "mape", "slo", "attainment_target", "breaker")),
            "objectives": [],
            "classes": [],
        }
    goals = class_targets(stats)
    return {
        **{name: _finite(getattr(stats, name)) for name in _FIGURES},
        "offline_share": _finite(stats.offline_share),
        "mape": _finite(stats.predictor_mape),
        "slo": stats.slo,
        "attainment_target": SLO.parse(stats.slo).attainment_target if stats.slo else None,
        "breaker": stats.breaker,
        "breaker_cause": stats.breaker_cause,
        "held": stats.held,
        "noise": max(stats.baseline_noise.values(), default=None),
        "classes": [
            {
                "name": each.name,
                "promise": each.promise,
                "attainment": _finite(each.attainment),
                "target": goals.get(each.name),
            }
            for each in stats.classes
        ],
        "objectives": [
            {
                "objective": each.objective,
                **{name: _finite(getattr(each, name)) for name in ("value", "bound", "attainment")},
            }
            for each in stats.objectives
        ],
    }


def _chat(answer: EndedAnswer, ended: float) -> dict[str, Any]:
    gap = None if answer.gap is None else round(answer.gap, 5)
    return {"time": round(ended, 1), "ttft": round(answer.ttft, 5), "gap": gap}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


router = APIRouter(include_in_schema=False)

HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A static file with its headers."""

    content: bytes
    media_type: str
    etag: str


def load_files() -> dict[str, StaticFile]:
    """Return the static files by name."""
    files = {}
    for item in resources.files("gateway.web").joinpath("static").iterdir():
        media_type = _TYPES.get(item.name.rpartition(".")[2])
        if media_type is not None:
            content = item.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[item.name] = StaticFile(content, media_type, etag)
    return files


FILES = load_files()
OPEN_PATHS = frozenset({"/", *(f"/web/{name}" for name in FILES)})


@router.get("/")
async def page(request: Request) -> Response:
    return _send(request, "index.html")


@router.get("/web/{name}")
async def page_file(request: Request, name: str) -> Response:
    return _send(request, name)


@router.get("/dashboard/history")
async def history(request: Request) -> Response:
    check_sees_all(request)
    known = await _recorder(request).history()
    return Response(known, media_type="application/json", headers={"cache-control": "no-store"})


@router.get("/dashboard/timeline")
async def timeline(request: Request) -> Response:
    """Return the minutes of the last `hours` (default: 24)."""
    check_sees_all(request)
    try:
        hours = float(request.query_params.get("hours", 24.0))
    except ValueError:
        raise ApiError(400, "hours must be a number.", param="hours") from None
    minutes = _recorder(request).timeline.since(time.time() - hours * 3600)
    return Response(
        orjson.dumps({"minutes": minutes}), media_type="application/json", headers={"cache-control": "no-store"}
    )


@router.get("/dashboard/events")
async def live(request: Request) -> Response:
    check_sees_all(request)
    return EventStream(_while_accepted(request), lambda: None)


async def _while_accepted(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the events until the keys no longer accept that of the request."""
    async with aclosing(_recorder(request).follow()) as events:
        async for each in events:
            if not is_still_accepted(request):
                return
            yield each


def _recorder(request: Request) -> Recorder:
    return cast(Recorder, request.app.state.recorder)


def _send(request: Request, name: str) -> Response:
    file = FILES.get(name)
    if file is None:
        raise ApiError(404)
    headers = HEADERS | {"etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
