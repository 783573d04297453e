"""Layout of the command-line help: commands and flags grouped by task, and examples; shell completion scripts.

A flag that is in no group is shown in a last group "more".
"""

import argparse
import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from gateway.commands.flags import Flag, add_flags

COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("serve", ("serve", "pull", "profile", "replay", "fleet", "migrate", "keys")),
    ("use a server", ("chat", "batch")),
    ("measure", ("bench", "simulate", "worth")),
    ("more", ("completions", "version")),
)
FLAGS = {
    "promises": "slo max_queue_time online_policy",
    "model": (
        "revision model_impl self_test device dtype max_model_len lora chat_template tool_parser served_model_name "
        "load_format generation_config"
    ),
    "memory": (
        "gpu_memory_utilization num_gpu_blocks_override offload_weights swap_space kv_cache_dtype enable_prefix_caching"
    ),
    "steps": "max_num_seqs max_num_batched_tokens threads kernels quantization speculation",
    "latency profile": "profile_dir profile_seconds",
    "network and access": "host port api_key api_key_file allowed_host allowed_origin",
    "files, batches and logs": "state_dir request_log log_level",
    "several engines or ranks": "engines ray overload tensor_parallel_size",
    "life and death": "shutdown_timeout",
}
"""Flags of `serve` by group, in the order of the help."""
SHORT = (
    "slo device served_model_name max_model_len gpu_memory_utilization swap_space kv_cache_dtype quantization host "
    "port api_key api_key_file state_dir engines tensor_parallel_size"
)
"""Flags that --help shows; --help-all shows every flag."""
EXAMPLES = {
    "tidemill": """\
tidemill serve                                        the packaged demo model, at http://127.0.0.1:8000
tidemill pull Qwen/Qwen3-0.6B && tidemill serve Qwen/Qwen3-0.6B
tidemill chat                                         chat with it
tidemill batch submit lines.jsonl --watch             run a batch with the remaining capacity""",
    "serve": """\
tidemill serve --slo "ttft_p99=1s,tbt_p99=100ms"      latency objectives for chats; batches use the rest
tidemill serve ./checkpoint --dry-run                 report machine, settings, model and cache; then exit
tidemill serve --host 0.0.0.0 --api-key-file keys     reachable from other machines, with API keys
tidemill serve --config tidemill.yaml --request-log requests.jsonl""",
    "pull": """\
tidemill pull Qwen/Qwen3-0.6B
HF_ENDPOINT=https://mirror.example tidemill pull Qwen/Qwen3-0.6B --revision main""",
    "chat": """\
tidemill chat
tidemill chat --url http://gpu:8000 --api-key KEY --system "Answer in one line." """,
    "batch": """\
tidemill batch submit lines.jsonl --window 8h --watch
tidemill batch list
tidemill batch results BATCH --output answers.jsonl --errors failed.jsonl""",
    "profile": "tidemill profile                                      measured and predicted step times",
    "completions": """\
source <(tidemill completions bash)                   for this shell; add it to ~/.bashrc for all
tidemill completions zsh > ~/.zfunc/_tidemill         a folder of $fpath
tidemill completions fish > ~/.config/fish/completions/tidemill.fish""",
}

SHELLS = ("bash", "zsh", "fish")
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)|argument \S+: invalid choice: '([^']+)'")


class HelpAll(argparse.Action):
    """Flag that prints the help with every flag."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.hidden = frozenset()
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without the usage, and shows examples as they are.

    `hidden`: names of flags that the help omits.
    """

    hidden: frozenset[str] = frozenset()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
        examples = EXAMPLES.get(str(self.prog).rpartition(" ")[2])
        if examples is not None:
            self.epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples.splitlines())

    def format_help(self) -> str:
        """Return the help without the hidden flags."""
        hidden = [(action, action.help) for action in self._actions if action.dest in self.hidden]
        try:
            for action, _ in hidden:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for action, text in hidden:
                action.help = text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Fail on unknown arguments here, so that the error names the subcommand and suggests its flags."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        unknown = _UNKNOWN.match(message)
        text = message if unknown is None else self._explain(message, unknown[1] or unknown[2])
        self.exit(2, f"{self.prog}: {text}\n")

    def _explain(self, message: str, word: str) -> str:
        """Return the message with the most similar word, or with a pointer to the help."""
        if word == "--model" and any(action.dest == "model" for action in self._actions):
            return f"--model: the model is the first argument; run {self.prog} MODEL"
        if message.startswith("argument COMMAND"):
            message = f"unknown command '{word}'"
        near = difflib.get_close_matches(word, self._words(), 1)
        return message + (f"; did you mean {near[0]}?" if near else f"; {self.prog} --help shows the usage")

    def _words(self) -> list[str]:
        return [word for action in self._actions for word in action.option_strings or action.choices or ()]


class RootParser(Parser):
    """Parser of `tidemill`; its help lists the commands by task."""

    def format_help(self) -> str:
        (commands,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        texts = {choice.dest: choice.help or "" for choice in commands._choices_actions}
        lines = ["usage: tidemill COMMAND ...", "", self.description or "", ""]
        for title, names in COMMANDS:
            shown = [name for name in names if name in texts]
            lines += [f"{title}:", *(f"    {name:<12} {texts[name]}" for name in shown), ""]
        lines += [
            "tidemill COMMAND --help shows its flags; tidemill --version prints the version.",
            "",
            self.epilog or "",
        ]
        return "\n".join(lines).rstrip() + "\n"


def add_by_task(command: Parser, flags: Sequence[Flag]) -> None:
    """Add the flags to a parser in groups; its help shows those of SHORT, unless --help-all is given."""
    command.hidden = frozenset(flag.field for flag in flags) - frozenset(SHORT.split())
    help_all = f"show all {len(flags)} settings and exit"
    command.add_argument("--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=help_all)
    for title, members in by_task(flags):
        add_flags(command.add_argument_group(title), members)  # type: ignore[arg-type]  # a group takes them as well


def by_task(flags: Iterable[Flag]) -> Iterator[tuple[str, list[Flag]]]:
    """Yield the flags by group; flags that are in no group come last."""
    left = {flag.field: flag for flag in flags}
    for title, fields in FLAGS.items():
        members = [left.pop(field) for field in fields.split() if field in left]
        if members:
            yield title, members
    if left:
        yield "more", list(left.values())


def completion_script(parser: argparse.ArgumentParser, shell: str, apart: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the completion script for a shell of SHELLS.

    `apart` has the parsers of commands that are only placeholders in `parser`.
    """
    shtab = importlib.import_module("shtab")
    _subcommands(parser).update(apart)
    for action in actions(parser):
        if action.nargs in (0, argparse.PARSER):
            continue
        if not action.choices and isinstance(action.metavar, str) and action.metavar.startswith("{"):
            action.choices = action.metavar.strip("{}").split(",")
        elif not action.choices:
            vars(action)["complete"] = shtab.FILE
    return str(shtab.complete(parser, shell)) + "\n"


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of all its subcommands."""
    yield from parser._actions
    for inner in _subcommands(parser).values():
        yield from actions(inner)


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action._name_parser_map for action in found), {})
