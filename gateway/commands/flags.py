"""Command-line flags, environment variables and file keys, all generated from the fields of the config dataclasses.

The field `max_num_seqs` is the flag `--max-num-seqs`, the variable `TIDEMILL_MAX_NUM_SEQS` and the key `max-num-seqs`;
the flag takes precedence over the variable, the variable over the key. A tuple is a repeatable flag, a comma-separated
variable and a list in the file. The dataclasses check the ranges of values; this module checks types and choices.
"""

import argparse
import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    metadata = field.metadata
    secret = not field.repr
    text, choices, joint = metadata["help"], metadata["choices"], metadata.get("joint", "")
    return Flag(field.name, kind, many, optional, field.default, text, choices, secret, joint)


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
            values[flag.field] = FlagValue(_from_words(flag, arguments[flag.field], f"--{key}", flag.parse), "flag")
        elif environment.get(flag.variable):
            text = environment[flag.variable]
            words = [word.strip() for word in text.split(",")] if flag.many else text
            values[flag.field] = FlagValue(_from_words(flag, words, flag.variable, flag.parse), flag.variable)
        elif key in file:
            values[flag.field] = FlagValue(flag.check(file[key], f"{file_name}: {key}"), file_name)
    return values


def _from_words(flag: Flag, words: Any, source: str, parse: Callable[[str, str], Any]) -> Any:
    if flag.many:
        return tuple(parse(word, source) for word in words)
    if flag.joint and isinstance(words, list):
        return flag.joint.join(words)
    return words if isinstance(words, bool) else parse(words, source)
