"""The ASGI application: routes, middleware and error handlers around one engine client."""

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from engine import __version__
from engine.client import EngineClient, EngineStats
from engine.text.tokenizer import Tokenizer
from gateway import endpoints, health
from gateway.batch import files, message_batches
from gateway.batch import routes as batches
from gateway.batch.feeder import RunLine
from gateway.batch.files import MAX_OVERHEAD
from gateway.batch.line import LineRunner
from gateway.batch.metrics import BatchCollector
from gateway.batch.notices import Notifier, read_target
from gateway.batch.resources import BatchState
from gateway.batch.run import BatchLimits
from gateway.batch.tenants import TenantExchange
from gateway.batch.worker import BatchWorker
from gateway.config import ServerConfig
from gateway.context import GatewayContext, Lifecycle, ServerContext
from gateway.generate.answer_form import choose_format, find_marks
from gateway.http.errors import ErrorBoundary, handle_error
from gateway.http.keys import Admissions, KeyStore
from gateway.http.middleware import Authentication, BodyLimit, HostGuard, RequestIds, origin_pattern
from gateway.models import ModelNames
from gateway.store.disk import StorageError
from gateway.store.folder import StateFolder
from gateway.telemetry.metrics import GatewayMetrics, LoopLag
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.tenant_metrics import TenantCollector
from gateway.telemetry.tracing import TraceHeaders, Traces, find_endpoint
from gateway.upstream import Upstream
from gateway.web import routes as web

log = logging.getLogger("tidemill.gateway")

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Maximum size of a request body; larger bodies are refused with 413."""
MAX_HELD_BODIES = 64  # bodies of the largest size that may be in memory at once
OPEN_PATHS = frozenset({"/health", "/ready"}) | web.OPEN_PATHS
"""Paths that need no API key."""


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    folder: StateFolder | None = None,
    limits: BatchLimits | None = None,
    more: Sequence[APIRouter] = (),
) -> FastAPI:
    """Return the ASGI application, whose lifespan starts and stops `client`.

    With a state folder it also serves files and batches, and the routes of `more`, which use them, and closes the
    folder at the end. Raises ConfigError.
    """
    context = GatewayContext(
        **_shared(client, config, config.served_model_name or (client.info.architecture,)),
        tokenizer=tokenizer,
        tool_format=choose_format(config.tool_parser, tokenizer),
        thought_marks=find_marks(tokenizer),
    )
    traces = _open_traces(context.metrics, context.models.first)
    app = _make_app(context, folder, traces)
    app.include_router(endpoints.routes())
    if folder is not None:
        run_line = LineRunner(context).run
        _add_batches(app, context, folder, limits or BatchLimits(), run_line, lambda: context.metrics.stats)
        for router in (message_batches.router, *more):
            app.include_router(router)
    _add_middleware(app, context, (limits or BatchLimits()).file_bytes)
    _describe_bodies(app)
    return app


def create_front(
    upstream: Upstream, config: ServerConfig, folder: StateFolder, more: Sequence[APIRouter] = ()
) -> FastAPI:
    """Return the application that runs files and batches on another server; see `Upstream`. Raises ConfigError."""
    context = ServerContext(**_shared(upstream, config, upstream.models))
    limits = BatchLimits(window_lines=upstream.MAX_LINES, follows_engine=True)
    app = _make_app(context, folder, None)
    for router in (upstream.refusals(), *more):
        app.include_router(router)
    worker = _add_batches(app, context, folder, limits, upstream.run_line, lambda: upstream.figures)
    upstream.on_look = worker.cluster.resize
    _add_middleware(app, context, limits.file_bytes)
    return app


def _shared(client: EngineClient, config: ServerConfig, served: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a ServerContext."""
    models = ModelNames(served, client.info.adapters)
    metrics, keys = GatewayMetrics(client, models.first), KeyStore(config.api_key, config.api_key_file)
    admissions = Admissions(keys.quota)
    by_tenant = TenantCollector(admissions.refused, admissions.loads)
    metrics.registry.register(by_tenant)
    metrics.on_end.append(by_tenant.observe_end)
    return {
        "client": client,
        "config": config,
        "models": models,
        "metrics": metrics,
        "lifecycle": Lifecycle(client),
        "keys": keys,
        "admissions": admissions,
        "request_log": _open_request_log(config, metrics),
    }


def _make_app(context: ServerContext, folder: StateFolder | None, traces: Traces | None) -> FastAPI:
    """Return an application with the routes that every server has."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # closed after the engine, which ends its last requests when it stops
        async with context.request_log or nullcontext(), traces or nullcontext():
            await context.lifecycle.start()
            yield
            await context.lifecycle.stop()
            if folder is not None:
                with suppress(StorageError):  # usage of the last requests
                    await app.state.batches.tenants.exchange()
                await folder.close()

    app = FastAPI(title="tidemill", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.state.context = context
    _add_routes(app, context, None if folder is None else folder.root)
    return app


def _add_routes(app: FastAPI, context: ServerContext, folder: Path | None) -> None:
    app.state.recorder = web.Recorder(context.metrics, context.lifecycle, folder=folder)
    context.lifecycle.background += [app.state.recorder, LoopLag(context.metrics.registry)]
    for router in (health.router, web.router):
        app.include_router(router)
    app.add_exception_handler(HTTPException, handle_error)


def _open_request_log(config: ServerConfig, metrics: GatewayMetrics) -> RequestLog | None:
    if config.request_log is None:
        return None
    request_log = RequestLog(config.request_log, lambda: metrics.stats, metrics.log_dropped.inc)
    metrics.on_end.append(request_log.add)
    return request_log


def _open_traces(metrics: GatewayMetrics, model: str) -> Traces | None:
    endpoint = find_endpoint(os.environ)
    if endpoint is None:
        return None
    traces = Traces(endpoint, model, __version__, lambda: metrics.stats)
    metrics.on_end.append(traces.add)
    return traces


def _add_middleware(app: FastAPI, context: ServerContext, max_file_bytes: int) -> None:
    config = context.config
    # the middleware added last is the outermost
    held_bytes = MAX_HELD_BODIES * MAX_BODY_BYTES
    streamed = {"/v1/files": max_file_bytes + MAX_OVERHEAD}
    larger = {message_batches.PATH: message_batches.MAX_BODY_BYTES}
    app.add_middleware(
        BodyLimit, max_body_bytes=MAX_BODY_BYTES, max_held_bytes=held_bytes, streamed=streamed, larger=larger
    )
    app.add_middleware(Authentication, keys=context.keys, open_paths=OPEN_PATHS)
    app.add_middleware(ErrorBoundary)
    origins = origin_pattern(config.allowed_origin)
    if origins:
        anything = ["*"]
        app.add_middleware(
            CORSMiddleware,
            allow_origin_regex=origins,
            allow_methods=anything,
            allow_headers=anything,
            expose_headers=anything,
        )
    app.add_middleware(HostGuard, bound=config.host, allowed=config.allowed_host, origins=origins)
    app.add_middleware(RequestIds, metrics=context.metrics)
    if find_endpoint(os.environ) is not None:
        app.add_middleware(TraceHeaders)


def _add_batches(
    app: FastAPI,
    context: ServerContext,
    folder: StateFolder,
    limits: BatchLimits,
    run_line: RunLine,
    stats: Callable[[], EngineStats],
) -> BatchWorker:
    """Add files and batches, whose lines `run_line` executes, and return their worker."""
    keys = context.keys
    worker = BatchWorker(
        folder,
        limits,
        run_line,
        max_lines=lambda tenant: keys.quota(tenant).lines,
        stats=stats,
        set_lane=context.client.set_lane,
        models=context.models,
    )
    notifier = Notifier(folder.store, read_target(os.environ))
    worker.on_end, worker.lanes.on_risk = notifier.wake, notifier.warn
    tenants = TenantExchange(
        folder, keys, context.admissions, context.config.host, limits.beat_seconds, context.keys_changed
    )
    context.lifecycle.background += [tenants, worker, notifier]
    context.on_new_keys.append(tenants.report)
    context.lifecycle.ask_storage = worker.storage_fault
    context.lifecycle.batch_trouble = worker.trouble
    context.lifecycle.ask_notice = lambda: folder.notice
    context.lifecycle.unfinished = lambda: (len(worker.states), worker.lines_resumed)
    context.metrics.registry.register(BatchCollector(worker, tenants, notifier))
    app.state.batches = BatchState(folder, limits, worker, tenants)
    context.metrics.on_end.append(partial(batches.count_request, tenants, context.metrics.engine_time))
    for resource in (files, batches):
        app.include_router(resource.router)
    return worker


def _describe_bodies(app: FastAPI) -> None:
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            endpoints.describe(make())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
