"""The `tidemill` command. Each command imports its dependencies when it runs, so `--help` loads no library."""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from engine import __version__, openmp
from engine.config import EngineConfig
from engine.errors import ConfigError, TidemillError
from engine.machine.child import TextOutput, dropping_stdout, open_streams, say
from engine.machine.extras import install_command
from gateway.config import ServerConfig
from tidemill.commands.batch import add_batch, add_server, positive, server_of
from tidemill.flags import (
    SHELLS,
    Parser,
    RootParser,
    add_by_task,
    completion_script,
    flags_of,
    resolve_configs,
)
from tidemill.vllm_flags import translated

MEASURING = ("bench", "simulate", "worth")
"""Commands that parse their own flags."""
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
        if words and words[0] in MEASURING:
            return _main_of(words[0])(words[1:])
        if words[:1] == ["serve"]:
            behind, notes = translated(words[1:])
            words = ["serve", *behind]
            for note in notes:
                print(f"tidemill serve: {note}", file=sys.stderr)
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
    _add_use(commands)
    _add_operation(commands)
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


def _add_serve(commands: Any) -> None:
    description = "Serve a model. Flags override TIDEMILL_* variables; these override the file of --config."
    command = _add(commands, "serve", _serve, "serve a model over OpenAI's HTTP API", description)
    _config_flags(command, EngineConfig, ServerConfig)
    command.add_argument(
        "--dry-run", action="store_true", help="report the machine, every setting with its origin and the model; exit"
    )


def _add_use(commands: Any) -> None:
    """Add the commands that use a running server."""
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
    add_batch(commands, Parser)
    command = _add(commands, "try", _try, "chats alone, then beside a batch: half a minute with a running server")
    add_server(command)
    command.add_argument("--seconds", type=positive, default=30, metavar="N", help="length (default: 30)")
    command.add_argument("--rate", type=positive, default=1, metavar="N", help="chats a second (default: 1)")
    command = _add(commands, "report", _report, "show the chats, batch work and pauses of the last hours")
    add_server(command)
    command.add_argument("--hours", type=positive, default=12, metavar="N", help="length of the night (default: 12)")
    command.add_argument("--price-in", type=float, default=0.0, metavar="P", help="price of a million prompt tokens")
    command.add_argument("--price-out", type=float, default=0.0, metavar="P", help="price of a million output tokens")


def _add_operation(commands: Any) -> None:
    description = "Show the size of a model, then download it. HF_ENDPOINT sets a mirror, HF_HOME the folder."
    command = _add(commands, "pull", _pull, "download a model from the Hugging Face hub", description)
    command.add_argument("model", metavar="OWNER/NAME", help="id of the model on the hub")
    command.add_argument("--revision", metavar="REVISION", help="branch, tag or commit (default: main)")
    _config_flags(_add(commands, "profile", _profile, "measure step times and show the prediction error"), EngineConfig)
    command = _add(commands, "replay", _replay, "show the last steps before an engine died")
    command.add_argument("file", metavar="FILE", type=Path, help="recording, from the folder flights in --state-dir")
    restart = _on_state(lambda state, arguments: state.restart(arguments.state_dir))
    command = _add(commands, "fleet", restart, "restart the engines of a server one by one")
    command.add_argument(
        "action", choices=("restart",), help="restart: no request is refused, running requests continue"
    )
    command.add_argument("--state-dir", metavar="DIR", help="state folder of the server (default: as for serve)")
    migrate = _on_state(lambda state, arguments: state.migrate_state(arguments.state_dir, arguments.address))
    command = _add(commands, "migrate", migrate, "copy files and batches from a state folder to PostgreSQL")
    command.add_argument("address", metavar="ADDRESS", help="--state-dir of the new server: postgresql://HOST/NAME?...")
    command.add_argument(
        "--state-dir", metavar="DIR", help="state folder of the stopped server (default: as for serve)"
    )
    keys = _on_state(lambda state, arguments: state.put_key_file(arguments.file, arguments.address))
    command = _add(commands, "keys", keys, "put the keys of a file into the database that servers share")
    command.add_argument("file", metavar="FILE", help="key file, as for --api-key-file")
    command.add_argument("address", metavar="ADDRESS", help="--state-dir of the servers: postgresql://HOST/NAME?...")


def _on_state(act: Callable[[Any, argparse.Namespace], str]) -> Callable[[argparse.Namespace], int]:
    """Return the function of a command on the state of servers. `act` gets `commands.state`, and returns a message."""

    @dropping_stdout()
    def run(arguments: argparse.Namespace) -> int:
        from tidemill.commands import state

        say(act(state, arguments))
        return 0

    return run


def _replay(arguments: argparse.Namespace) -> int:
    from tidemill.commands.state import replay

    return replay(arguments.file)


@dropping_stdout()
def _pull(arguments: argparse.Namespace) -> int:
    from tidemill.commands.models import pull

    return pull(arguments.model, arguments.revision, say)


def _version(_arguments: argparse.Namespace) -> int:
    print(__version__)
    return 0


def _completions(arguments: argparse.Namespace) -> int:
    apart: dict[str, argparse.ArgumentParser] = {}
    with suppress(ImportError):  # the extra 'loadgen' may not be installed
        from loadgen import flags

        apart["bench"] = flags.parser()
        from tidemill import simulate

        apart |= {"simulate": simulate.parser(), "worth": simulate.worth_parser()}
    print(completion_script(_parser(), arguments.shell, apart), end="")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from tidemill.commands.chat import run_chat

    names = ("model", "system", "max_tokens", "temperature")
    chosen = {name: getattr(arguments, name) for name in names}
    return run_chat(dataclasses.replace(server_of(arguments), **chosen))


def _try(arguments: argparse.Namespace) -> int:
    from tidemill.client import ServerClient
    from tidemill.commands.trial import CHAT_TOKENS, Trial

    options = dataclasses.replace(server_of(arguments), max_tokens=CHAT_TOKENS)
    Trial(ServerClient(options), arguments.rate, arguments.seconds, say).run()
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from tidemill.client import ServerClient
    from tidemill.commands.report import report

    prices = arguments.price_in, arguments.price_out
    print(report(ServerClient(server_of(arguments)), arguments.hours, *prices))
    return 0


@dropping_stdout()
def _serve(arguments: argparse.Namespace) -> int:
    from tidemill.commands.serve import serve

    return serve(arguments)


def _profile(arguments: argparse.Namespace) -> int:
    from tidemill.commands.models import profile

    (engine_config,) = resolve_configs(arguments, [EngineConfig])
    openmp.announce(engine_config, say)
    return profile(engine_config, say)


def _main_of(command: str) -> Callable[[list[str]], int]:
    """Return the main function of a command of MEASURING. Raise ConfigError if a library is missing."""
    try:
        if command == "bench":
            from loadgen.cli import main

            return main
        from tidemill import simulate

        return simulate.main if command == "simulate" else simulate.worth_main
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; run {install_command('loadgen')}") from None
