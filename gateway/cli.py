"""The `tidemill` command. Each command imports its dependencies when it runs, so `--help` loads no library.

This module and engine/build are the composition root: no other gateway module imports the data plane.
"""

import argparse
import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from engine import __version__, openmp
from engine.config import EngineConfig, parse_adapters
from engine.errors import ConfigError, TidemillError
from engine.machine.extras import install_command
from engine.machine.folders import adopt
from engine.machine.output import TextOutput, dropping_stdout, open_streams, say
from gateway.commands.batch import add_batch, add_server, positive, server_of
from gateway.commands.flags import flags_of, given, resolve_configs, unknown_variables
from gateway.commands.help import SHELLS, Parser, RootParser, add_by_task, completion_script
from gateway.config import ServerConfig
from gateway.models import ModelNames

DEMO_NAME = "tidemill-demo"
_LOADGEN = {"bench": "loadgen.cli", "simulate": "loadgen.simulate", "worth": "loadgen.worth"}
_LOADGEN_FLAGS = {**_LOADGEN, "bench": "loadgen.flags"}
BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit code if the reader of the output has ended (`tidemill batch list | head`), as for a process ended by SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 2 for an invalid configuration, 1 for any other error."""
    open_streams()
    out, errors = TextOutput(sys.stdout, drops=False), TextOutput(sys.stderr, drops=True)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, errors)):
        try:
            try:
                return _run(list(sys.argv[1:] if argv is None else argv))
            finally:
                out.finish()
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                return BROKEN_PIPE
            if error is not out.error:
                raise
            print(f"tidemill: standard output cannot be written: {error.strerror}", file=sys.stderr)
            return 1
        finally:
            errors.finish()


def _run(words: list[str]) -> int:
    try:
        if words and words[0] in _LOADGEN:
            return _loadgen(*words)  # the load generator parses its own flags
        arguments = _parser().parse_args(words)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except ConfigError as error:
        print(f"tidemill: {_one_line(error.message)}", file=sys.stderr)
        return 2
    except TidemillError as error:
        print(f"tidemill: {_one_line(error.message)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _parser() -> argparse.ArgumentParser:
    parser = RootParser(
        prog="tidemill",
        allow_abbrev=False,
        description="State your latency SLO; everything the GPU has left goes to your batch jobs.",
    )
    parser.add_argument("--version", action="version", version=f"tidemill {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    _add_serve(commands)
    _add_chat(commands)
    add_batch(commands, Parser)
    _add_pull(commands)
    _config_flags(_add(commands, "profile", _profile, "measure step times and show the prediction error"), EngineConfig)
    _add_replay(commands)
    _add_fleet(commands)
    _add_migrate(commands)
    command = _add(commands, "keys", _keys, "put the keys of a file into the database that servers share")
    command.add_argument("file", metavar="FILE", help="key file, as for --api-key-file")
    command.add_argument("address", metavar="ADDRESS", help="--state-dir of the servers: postgresql://HOST/NAME?...")
    commands.add_parser("bench", help="measure a server with OpenAI's API", add_help=False)
    commands.add_parser("simulate", help="replay workloads and experiments on a virtual clock", add_help=False)
    commands.add_parser("worth", help="estimate the value of the batch work beside a GPU's chats", add_help=False)
    command = _add(commands, "completions", _completions, "print a shell completion script")
    command.add_argument("shell", choices=SHELLS)
    _add(commands, "version", _version, "print the version")
    return parser


def _config_flags(command: Parser, *types: type) -> None:
    """Add the model as a positional argument and the other settings as flags, grouped by task."""
    command.usage = f"{command.prog} [MODEL] [flags]"
    model, *others = (flag for config in types for flag in flags_of(config))
    assert model.field == "model"
    command.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=model.help)
    command.add_argument("--config", metavar="FILE.yaml", help="YAML file of settings; keys are flag names without --")
    add_by_task(command, others)


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, description: str | None = None
) -> Parser:
    command: Parser = commands.add_parser(name, help=text, description=description, allow_abbrev=False)
    command.set_defaults(run=run)
    return command


def _command(name: str) -> Any:
    """Import the module of a command."""
    return importlib.import_module(f"gateway.commands.{name}")


def _add_serve(commands: Any) -> None:
    description = "Serve a model. Flags override TIDEMILL_* variables; these override the file of --config."
    command = _add(commands, "serve", _serve, "serve a model over OpenAI's HTTP API", description)
    _config_flags(command, EngineConfig, ServerConfig)
    command.add_argument(
        "--dry-run", action="store_true", help="report the machine, every setting with its origin and the model; exit"
    )


def _add_chat(commands: Any) -> None:
    command = _add(commands, "chat", _chat, "chat with a running server")
    add_server(command)
    command.add_argument("--model", help="name of the model (default: the server's first)")
    command.add_argument("--system", metavar="TEXT", help="system message")
    command.add_argument(
        "--max-tokens", type=positive, metavar="N", help="longest answer, tokens (default: the server's)"
    )
    command.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature, 0 is greedy (default: the server's)"
    )


def _add_pull(commands: Any) -> None:
    description = "Show the size of a model, then download it. HF_ENDPOINT sets a mirror, HF_HOME the folder."
    command = _add(commands, "pull", _pull, "download a model from the Hugging Face hub", description)
    command.add_argument("model", metavar="OWNER/NAME", help="id of the model on the hub")
    command.add_argument("--revision", metavar="REVISION", help="branch, tag or commit (default: main)")


def _add_replay(commands: Any) -> None:
    text = "show the last steps before an engine died"
    command = _add(commands, "replay", lambda words: _command("engines").replay(words.file), text)
    command.add_argument("file", metavar="FILE", type=Path, help="recording, from the folder flights in --state-dir")


def _add_fleet(commands: Any) -> None:
    command = _add(commands, "fleet", _fleet, "restart the engines of a server one by one")
    command.add_argument(
        "action", choices=("restart",), help="restart: no request is refused, running requests continue"
    )
    command.add_argument("--state-dir", metavar="DIR", help="state folder of the server (default: as for serve)")


def _add_migrate(commands: Any) -> None:
    text = "copy files and batches from a state folder to PostgreSQL"
    command = _add(commands, "migrate", _migrate, text)
    command.add_argument("address", metavar="ADDRESS", help="--state-dir of the new server: postgresql://HOST/NAME?...")
    command.add_argument(
        "--state-dir", metavar="DIR", help="state folder of the stopped server (default: as for serve)"
    )


@dropping_stdout()
def _migrate(arguments: argparse.Namespace) -> int:
    say(_command("migrate").run(arguments.state_dir, arguments.address))
    return 0


@dropping_stdout()
def _keys(arguments: argparse.Namespace) -> int:
    say(_command("migrate").put_key_file(arguments.file, arguments.address))
    return 0


@dropping_stdout()
def _fleet(arguments: argparse.Namespace) -> int:
    say(_command("engines").restart(arguments.state_dir))
    return 0


@dropping_stdout()
def _pull(arguments: argparse.Namespace) -> int:
    return int(_command("pull").run(arguments.model, arguments.revision, say))


def _version(_arguments: argparse.Namespace) -> int:
    print(__version__)
    return 0


def _completions(arguments: argparse.Namespace) -> int:
    apart = {}
    for command, module in _LOADGEN_FLAGS.items():
        with suppress(ImportError):  # the extra 'loadgen' may not be installed
            apart[command] = importlib.import_module(module).parser()
    print(completion_script(_parser(), arguments.shell, apart), end="")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    names = ("model", "system", "max_tokens", "temperature")
    chosen = {name: getattr(arguments, name) for name in names}
    return int(_command("chat").run_chat(dataclasses.replace(server_of(arguments), **chosen)))


@dropping_stdout()
def _serve(arguments: argparse.Namespace) -> int:
    engine_config, server_config = resolve_configs(arguments, [EngineConfig, ServerConfig])
    for line in unknown_variables([*flags_of(EngineConfig), *flags_of(ServerConfig)], os.environ):
        say(line)
    served = server_config.served_model_name or (model_name(engine_config),)
    ModelNames(served, [each.name for each in parse_adapters(engine_config.lora)])  # raises if a name is taken
    state = importlib.import_module("gateway.store.opening").find_state(server_config.state_dir)
    cache = adopt(state.folder, os.environ)
    preflight = _command("preflight")
    if arguments.dry_run:
        origins = given(arguments, [EngineConfig, ServerConfig])
        return int(preflight.run(origins, engine_config, server_config, model_name(engine_config)))
    start = _Start()
    importlib.import_module("gateway.http.connection_limit").raise_descriptor_limit()  # the engine inherits it
    preflight.check_start(engine_config, server_config)  # loading takes minutes
    say(f"version {__version__}, starting {served[0]} ...")
    server = importlib.import_module("gateway.server")
    if not server_config.served_model_name:
        server_config = dataclasses.replace(server_config, served_model_name=(model_name(engine_config),))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # `fleet restart` would end a starting server
    # locked before the model loads, so that a second server on it fails at once
    folder = importlib.import_module("gateway.store.folder").open_state(state)
    if cache is not None:
        with suppress(OSError):  # the disk may be full
            cache.mkdir(mode=0o700, exist_ok=True)
    try:
        return _serve_with(folder, engine_config, server_config, server, start)
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


def _serve_with(
    folder: Any, engine_config: EngineConfig, server_config: ServerConfig, server: Any, start: _Start
) -> int:
    engine, tokenizer = _load(engine_config, server_config, folder, start.go_on)
    try:
        window = server_config.engines * engine.info.batch_lines
        limits = importlib.import_module("gateway.batch.run").BatchLimits(window_lines=window)
        app = importlib.import_module("gateway.app").create_app(engine, tokenizer, server_config, folder, limits)
        start.go_on()
        return int(server.run(app, server_config))
    finally:
        engine.discard()


def _load(
    engine_config: EngineConfig, server_config: ServerConfig, folder: Any, go_on: Callable[[], None]
) -> tuple[Any, Any]:
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


def _make_engine(engine_config: EngineConfig, server_config: ServerConfig, root: Path) -> Any:
    """Return the client of one engine process, or of a fleet."""
    from engine.flight import Flights

    log_level, pid_file = server_config.log_level, root / "engine.pid"
    flights = Flights(root / "flights", model_name(engine_config))
    if server_config.engines == 1 and not server_config.ray:
        process: Any = importlib.import_module("engine.process.client")
        options = process.ProcessOptions(log_level=log_level, pid_file=pid_file, flights=flights, spare=True)
        return process.EngineProcess(engine_config, options)
    make_fleet = importlib.import_module("engine.fleet.launch").make_fleet
    fleet = make_fleet(
        engine_config, server_config.engines, pid_file, log_level=log_level, flights=flights, ray=server_config.ray
    )
    for note in fleet.notes:
        say(note)
    return fleet.client


def _profile(arguments: argparse.Namespace) -> int:
    (engine_config,) = resolve_configs(arguments, [EngineConfig])
    openmp.announce(engine_config, say)
    return int(_command("profile").run(engine_config, say))


def _loadgen(command: str, *words: str) -> int:
    try:
        module = importlib.import_module(_LOADGEN[command])
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; run {install_command('loadgen')}") from None
    return int(module.main(list(words)))


def model_name(config: EngineConfig) -> str:
    """Return the default name of the model in the API: the hub id, or a folder's name without its path."""
    if not config.model:
        return DEMO_NAME
    folder = Path(config.model).expanduser()
    return os.fsencode(folder.resolve().name).decode(errors="replace") if folder.is_dir() else config.model
