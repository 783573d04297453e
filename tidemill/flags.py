"""Command-line flags, environment variables and file keys, all generated from the fields of the config dataclasses.

The field `max_num_seqs` is the flag `--max-num-seqs`, the variable `TIDEMILL_MAX_NUM_SEQS` and the key `max-num-seqs`;
the flag takes precedence over the variable, the variable over the key. A tuple is a repeatable flag, a comma-separated
variable and a list in the file. The dataclasses check the ranges of values; this module checks types and choices.

The help shows commands and flags grouped by task, with examples. A flag in no group is shown in a last group "more".
"""

import argparse
import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from engine.errors import ConfigError

ENVIRONMENT_PREFIX = "TIDEMILL_"
OTHER_VARIABLES = ("CONFIG", "URL", "ON_BATCH_END", "WEBHOOK_SECRET", "HOST_ENGINES", "BENCH_VLLM")
"""Names, without the prefix, that are no settings of `serve`."""
_LINK = re.compile(r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?")
_LINK_URL = re.compile(r"(tcp|udp|sctp)://")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A config field as a flag."""

    field: str
    kind: type  # of a single value
    many: bool  # the flag is repeatable
    optional: bool  # None is a value
    default: Any
    help: str
    choices: tuple[str, ...]  # empty: any value
    secret: bool = False  # reports hide the value
    joint: str = ""  # text between the values of a repeated flag, which are one text; empty: the last value counts

    @property
    def key(self) -> str:
        return self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.field.upper()

    def parse(self, text: str, source: str) -> Any:
        """Return the value of a word. Raise ConfigError, one line that begins with `source`, if it is invalid."""
        word = text.strip()
        if self.kind is bool and word.lower() in _TRUE + _FALSE:
            return word.lower() in _TRUE
        if self.kind is str:
            return self._chosen(text, source)
        try:
            return self.kind(word) if self.kind is not bool else self._refuse(text, source)
        except ValueError:
            return self._refuse(text, source)

    def check(self, value: Any, source: str) -> Any:
        """Check the type of a YAML value and return it as the field's type. Raise ConfigError if it is invalid."""
        if value is None and self.optional:
            return None
        if (self.many or self.joint) and isinstance(value, list):
            values = tuple(self._check_one(item, source) for item in value)
            return values if self.many else self.joint.join(values)
        single = self._check_one(value, source)
        return (single,) if self.many else single

    def _check_one(self, value: Any, source: str) -> Any:
        if self.kind is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind:
            return self._refuse(value, source)
        return self._chosen(value, source) if isinstance(value, str) else value

    def _chosen(self, value: str, source: str) -> str:
        if self.choices and value not in self.choices:
            raise ConfigError(f"{source} must be one of {', '.join(self.choices)}, not {value!r}")
        return value

    def _refuse(self, value: Any, source: str) -> typing.NoReturn:
        raise ConfigError(f"{source} must be {_NOUNS[self.kind]}, not {value!r}")


class FlagValue(NamedTuple):
    """A value that the user set."""

    value: Any
    origin: str  # "flag", the name of a variable, or the name of the file


def flags_of(config: type) -> tuple[Flag, ...]:
    """Return the flags of a config dataclass, in the order of its fields."""
    hints = typing.get_type_hints(config)
    return tuple(_flag_of(field, hints[field.name]) for field in dataclasses.fields(config))


def _flag_of(field: "dataclasses.Field[Any]", hint: Any) -> Flag:
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    many = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if many else hint
    assert kind in _NOUNS, f"{field.name}: no flag for {hint}"
    text, choices, joint = (field.metadata[name] for name in ("help", "choices", "joint"))
    return Flag(field.name, kind, many, optional, field.default, text, choices, not field.repr, joint)


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Add the flags to a parser. The parsed arguments contain only flags that the user set, with unparsed words."""
    for flag in flags:
        text = flag.help if flag.default in (None, (), "") else f"{flag.help} (default: {_shown(flag.default)})"
        common: dict[str, Any] = {"dest": flag.field, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if flag.kind is bool:
            parser.add_argument(f"--{flag.key}", action=argparse.BooleanOptionalAction, **common)
            continue
        metavar = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.key.rpartition("-")[2].upper()
        action = "append" if flag.many or flag.joint else "store"
        parser.add_argument(f"--{flag.key}", action=action, metavar=metavar, **common)


def _shown(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def read_file(path: str) -> dict[str, Any]:
    """Return the keys and values of a YAML file. Raise ConfigError if it cannot be read."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: not a UTF-8 text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(f"--config {path}: not valid YAML{place}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold 'flag-name: value' lines")
    return {str(key): value for key, value in content.items()}


def resolve_configs(
    arguments: argparse.Namespace, types: Sequence[type], environment: Mapping[str, str] | None = None
) -> list[Any]:
    """Return one instance per config type, from flags, environment and file. Raise ConfigError for invalid values."""
    found = given(arguments, types, environment)
    return [kind(**{f.field: found[f.field].value for f in flags_of(kind) if f.field in found}) for kind in types]


def given(
    arguments: argparse.Namespace, types: Sequence[type], environment: Mapping[str, str] | None = None
) -> dict[str, FlagValue]:
    """Return the values that the user set for fields of the given types. Raise ConfigError, see `find_given`."""
    variables = without_links(os.environ if environment is None else environment)
    path = arguments.config or variables.get(f"{ENVIRONMENT_PREFIX}CONFIG") or ""
    every = [flag for kind in types for flag in flags_of(kind)]
    return find_given(every, vars(arguments), variables, read_file(path) if path else {}, path)


def without_links(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that Kubernetes adds for Services, such as that named tidemill."""
    hosts = [name.removesuffix("SERVICE_HOST") for name in environment if name.endswith("_SERVICE_HOST")]

    def is_link(name: str, value: str) -> bool:
        rests = [name.removeprefix(service) for service in hosts if name.startswith(service)]
        return any(_LINK.fullmatch(rest) or (rest == "PORT" and _LINK_URL.match(value)) for rest in rests)

    return {name: value for name, value in environment.items() if not is_link(name, value)}


def unknown_variables(flags: Iterable[Flag], environment: Mapping[str, str]) -> list[str]:
    """Return a line for each TIDEMILL_* variable that no setting reads."""
    known = [flag.field.upper() for flag in flags] + [*OTHER_VARIABLES]
    lines = []
    for name in sorted(without_links(environment)):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        if rest != name and rest not in known:
            meant = [ENVIRONMENT_PREFIX + each for each in difflib.get_close_matches(rest, known, 1)]
            lines.append(f"{name} is unknown and has no effect" + (f"; did you mean {meant[0]}?" if meant else ""))
    return lines


def command_line(config: object) -> list[str]:
    """Return a flag, as command-line words, for every field that differs from its default."""
    words = []
    for flag in flags_of(type(config)):
        value = getattr(config, flag.field)
        if value == flag.default:
            continue
        if flag.kind is bool:
            words.append(f"--{flag.key}" if value else f"--no-{flag.key}")
            continue
        for single in value if flag.many else (value,):
            words += [f"--{flag.key}", str(single)]
    return words


def find_given(
    flags: Iterable[Flag],
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any],
    file_name: str = "",
) -> dict[str, FlagValue]:
    """Return the values that the user set, by field. The command line overrides the environment, it the file.

    `arguments` are the parsed arguments of a parser with `add_flags`. An empty variable counts as not set. Raise
    ConfigError for a value of the wrong type or an unknown key in the file.
    """
    by_key = {flag.key: flag for flag in flags}
    unknown = sorted(file.keys() - by_key.keys())
    if unknown:
        meant = difflib.get_close_matches(unknown[0].replace("_", "-"), by_key, 1)
        hint = f" (did you mean {meant[0]!r}?)" if meant else ""
        raise ConfigError(f"--config {file_name}: unknown key {unknown[0]!r}{hint}")
    values: dict[str, FlagValue] = {}
    for key, flag in by_key.items():
        if flag.field in arguments:
            values[flag.field] = FlagValue(_from_words(flag, arguments[flag.field], f"--{key}"), "flag")
        elif environment.get(flag.variable):
            text = environment[flag.variable]
            words = [word.strip() for word in text.split(",")] if flag.many else text
            values[flag.field] = FlagValue(_from_words(flag, words, flag.variable), flag.variable)
        elif key in file:
            values[flag.field] = FlagValue(flag.check(file[key], f"{file_name}: {key}"), file_name)
    return values


def _from_words(flag: Flag, words: Any, source: str) -> Any:
    if flag.many:
        return tuple(flag.parse(word, source) for word in words)
    if flag.joint and isinstance(words, list):
        return flag.joint.join(words)
    return words if isinstance(words, bool) else flag.parse(words, source)


COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("serve", ("serve", "pull", "profile", "replay", "fleet", "migrate", "keys")),
    ("use a server", ("try", "chat", "batch", "report")),
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
    "several engines": "engines ray overload",
    "life and death": "shutdown_timeout",
}
"""Flags of `serve` by group, in the order of the help."""
SHORT = (
    "slo device served_model_name max_model_len gpu_memory_utilization swap_space kv_cache_dtype quantization host "
    "port api_key api_key_file state_dir engines"
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

OLLAMA = {
    "list": "tidemill serve MODEL serves one model; GET /v1/models names it",
    "ps": "tidemill batch list shows the batches, the server's page everything",
    "run": "tidemill serve MODEL, then tidemill chat in another terminal",
    "show": "tidemill serve MODEL --dry-run",
    "stop": "Ctrl-C or SIGTERM ends a server",
}
"""Commands of Ollama, with the command that does the same here."""
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
        if message.startswith("argument COMMAND") and word in OLLAMA:
            return f"unknown command '{word}': {OLLAMA[word]}"
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
    import shtab

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
