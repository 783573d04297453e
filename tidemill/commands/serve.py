"""`tidemill serve`: check the settings, load the model in an engine process, and serve."""

import argparse
import dataclasses
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine import __version__
from engine.config import EngineConfig, parse_adapters
from engine.errors import ConfigError
from engine.machine.child import say
from engine.machine.folders import adopt
from gateway.config import ServerConfig
from gateway.models import ModelNames
from tidemill.flags import flags_of, given, resolve_configs, unknown_variables

if TYPE_CHECKING:
    from engine.fleet.client import FleetClient
    from engine.process.client import EngineProcess
    from engine.text.tokenizer import Tokenizer
    from gateway.store.folder import StateFolder

DEMO_NAME = "tidemill-demo"
_OF_THE_MODEL = ("served_model_name", "chat_template", "tool_parser", "engines", "ray", "request_log")
"""Settings of `ServerConfig` that have no effect in front of another server."""


def serve(arguments: argparse.Namespace) -> int:
    """Serve, or report what a start would do with --dry-run, and return the exit code."""
    from gateway.store.folder import find_state
    from tidemill.commands import preflight

    engine_config, server_config = resolve_configs(arguments, [EngineConfig, ServerConfig])
    for line in unknown_variables([*flags_of(EngineConfig), *flags_of(ServerConfig)], os.environ):
        say(line)
    if engine_config.model.startswith(("http://", "https://")):
        return _serve_front(arguments, engine_config.model, server_config)
    served = server_config.served_model_name or (model_name(engine_config),)
    ModelNames(served, [each.name for each in parse_adapters(engine_config.lora)])  # raises if a name is taken
    state = find_state(server_config.state_dir)
    cache = adopt(state.folder, os.environ)
    if arguments.dry_run:
        origins = given(arguments, [EngineConfig, ServerConfig])
        return preflight.run(origins, engine_config, server_config, model_name(engine_config))
    start = _Start()
    from gateway.http.connection import raise_descriptor_limit
    from gateway.store.folder import open_state

    raise_descriptor_limit()  # the engine inherits it
    preflight.check_start(engine_config, server_config)  # loading takes minutes
    say(f"version {__version__}, starting {served[0]} ...")
    if not server_config.served_model_name:
        server_config = dataclasses.replace(server_config, served_model_name=(model_name(engine_config),))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # `fleet restart` would end a starting server
    # locked before the model loads, so that a second server on it fails at once
    folder = open_state(state)
    if cache is not None:
        with suppress(OSError):  # the disk may be full
            cache.mkdir(mode=0o700, exist_ok=True)
    try:
        return _serve_with(folder, engine_config, server_config, start)
    finally:
        folder.close_now()


def _serve_front(arguments: argparse.Namespace, url: str, server_config: ServerConfig) -> int:
    """Serve files and batches whose lines the server at `url` runs."""
    from gateway import server
    from gateway.app import create_front
    from gateway.store.folder import find_state, open_state
    from gateway.upstream import Upstream
    from tidemill import page_tables
    from tidemill.commands import preflight

    named = given(arguments, [EngineConfig, ServerConfig]).keys()
    others = sorted(named & ({*(flag.field for flag in flags_of(EngineConfig)), *_OF_THE_MODEL} - {"model"}))
    if others or arguments.dry_run:
        flag = f"--{others[0].replace('_', '-')}" if others else "--dry-run"
        raise ConfigError(f"{flag} cannot be combined with a server's address: the model is that of {url}")
    preflight.check_server(server_config, [])
    start = _Start()
    say(f"version {__version__}, starting batches in front of {url} ...")
    folder = open_state(find_state(server_config.state_dir))
    try:
        upstream = Upstream(url, os.environ.get("VLLM_API_KEY"))
        upstream.await_server(say)
        app = create_front(upstream, server_config, folder, [page_tables.router])
        start.go_on()
        return server.run(app, server_config)
    finally:
        folder.close_now()


class _Start:
    """SIGTERM handler while the server starts: exit with 0 at once, because there is nothing to drain.

    Without a handler, the first process of a container ignores SIGTERM.
    """

    def __init__(self) -> None:
        self._ended = False
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, _number: int, _frame: Any) -> NoReturn:
        self._ended = True
        raise SystemExit(0)

    def go_on(self) -> None:
        """Exit if SIGTERM came before. Imports and C callbacks may have swallowed the SystemExit of the handler."""
        if self._ended:
            raise SystemExit(0)


def _serve_with(folder: "StateFolder", engine_config: EngineConfig, server_config: ServerConfig, start: _Start) -> int:
    from gateway import server
    from gateway.app import create_app
    from gateway.batch.run import BatchLimits
    from tidemill import page_tables

    engine, tokenizer = _load(engine_config, server_config, folder, start.go_on)
    try:
        window = server_config.engines * engine.info.batch_lines
        limits = BatchLimits(window_lines=window)
        app = create_app(engine, tokenizer, server_config, folder, limits, [page_tables.router])
        start.go_on()
        return server.run(app, server_config)
    finally:
        engine.discard()


def _load(
    engine_config: EngineConfig, server_config: ServerConfig, folder: "StateFolder", go_on: Callable[[], None]
) -> "tuple[EngineProcess | FleetClient, Tokenizer]":
    """Return an engine client and the model's tokenizer, which is loaded before the weights.

    The engine runs in another process, so this one never imports torch.
    """
    from engine.text.tokenizer import Tokenizer

    tokenizers: list[Tokenizer] = []

    def planned(plan: Any) -> None:
        tokenizers.append(Tokenizer.load(Path(plan.folder), server_config.chat_template))
        for note in plan.notes:
            say(note)
        go_on()  # all imports of this process are done; only waiting follows

    engine = _make_engine(engine_config, server_config, folder.root)
    engine.load(planned)
    return engine, tokenizers[0]


def _make_engine(engine_config: EngineConfig, server_config: ServerConfig, root: Path) -> "EngineProcess | FleetClient":
    """Return the client of one engine process, or of a fleet."""
    from engine.fleet.launch import make_fleet
    from engine.flight import Flights
    from engine.process.client import EngineProcess
    from engine.process.launcher import ProcessOptions

    log_level, pid_file = server_config.log_level, root / "engine.pid"
    flights = Flights(root / "flights", model_name(engine_config))
    if server_config.engines == 1 and not server_config.ray:
        options = ProcessOptions(log_level=log_level, pid_file=pid_file, flights=flights, spare=True)
        return EngineProcess(engine_config, options)
    return make_fleet(
        engine_config, server_config.engines, pid_file, log_level=log_level, flights=flights, ray=server_config.ray
    )


def model_name(config: EngineConfig) -> str:
    """Return the default name of the model in the API: the hub id, or a folder's name without its path."""
    if not config.model:
        return DEMO_NAME
    folder = Path(config.model).expanduser()
    return os.fsencode(folder.resolve().name).decode(errors="replace") if folder.is_dir() else config.model
