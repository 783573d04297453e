"""`tidemill completions bash|zsh|fish`: scripts for shells, made of the parsers, so that they know every flag.

A script is static text: a TAB starts no Python. Where a word is expected that is no command, flag or choice, the shell
completes files.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")


class Option(NamedTuple):
    """`words`: its spellings. `takes_value`, `choices`: what may follow."""

    words: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


class Command(NamedTuple):
    """`path`: the words that lead to it, as ("tidemill", "batch", "submit"); `commands` with their help."""

    path: tuple[str, ...]
    options: tuple[Option, ...]
    commands: tuple[tuple[str, str], ...]
    choices: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(self.path)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of a shell of SHELLS."""
    commands = list(walk(parser, ("tidemill",)))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[Command]:
    """A command and all below it, depth first."""
    options: list[Option] = []
    below: dict[str, argparse.ArgumentParser] = {}
    texts: dict[str, str] = {}
    choices: tuple[str, ...] = ()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.option_strings:
            options.append(_option(action))
        elif action.choices:
            choices = tuple(map(str, action.choices))
    yield Command(path, tuple(options), tuple((name, texts.get(name, "")) for name in below), choices)
    for name, inner in below.items():
        yield from walk(inner, (*path, name))


def _option(action: argparse.Action) -> Option:
    takes = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    choices = tuple(map(str, action.choices or ()))
    if not choices and isinstance(action.metavar, str) and action.metavar.startswith("{"):
        choices = tuple(action.metavar.strip("{}").split(","))
    text = (action.help or "").replace("%%", "%")
    return Option(tuple(action.option_strings), text, takes, choices)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"'\''") + "'"


def _where(commands: list[Command], words: str) -> list[str]:
    """Shell lines (bash and zsh) that follow the words so far to the command they name."""
    known = "|".join(_quoted(command.name) for command in commands if len(command.path) > 1)
    return [
        "    local spot=tidemill word",
        f"    for word in {words}; do",
        '        case "$spot $word" in',
        f'            {known}) spot="$spot $word" ;;',
        "        esac",
        "    done",
    ]


def _values(commands: list[Command], offer: str) -> list[str]:
    """Shell lines (bash and zsh) for the word behind an option that takes one; `offer` completes the words in it."""
    lines = []
    for command in commands:
        for option in command.options:
            if option.takes_value:
                names = "|".join(_quoted(f"{command.name} {word}") for word in option.words)
                action = offer.format(" ".join(option.choices)) if option.choices else _NOTHING
                lines.append(f"        {names}) {action}; return ;;")
    return lines


_NOTHING = ":"


def _bash(commands: list[Command]) -> str:
    lines = [
        "_tidemill() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        "    COMPREPLY=()",
        *_where(commands, '"${COMP_WORDS[@]:1:COMP_CWORD-1}"'),
        '    case "$spot $previous" in',
        *_values(commands, 'COMPREPLY=($(compgen -W "{}" -- "$current"))'),
        "    esac",
        '    case "$spot" in',
    ]
    for command in commands:
        words = [*command.choices, *(name for name, _ in command.commands)]
        words = words or [word for option in command.options for word in option.words]
        flags = " ".join(word for option in command.options for word in option.words)
        lines += [
            f"        {_quoted(command.name)})",
            '            if [[ "$current" == -* ]]; then',
            f'                COMPREPLY=($(compgen -W "{flags}" -- "$current"))',
            *(
                ["            else", f'                COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current"))']
                if command.commands or command.choices
                else []
            ),
            "            fi ;;",
        ]
    return "\n".join([*lines, "    esac", "}", "complete -o default -F _tidemill tidemill", ""])


def _zsh(commands: list[Command]) -> str:
    lines = [
        "#compdef tidemill",
        "_tidemill() {",
        *_where(commands, '"${(@)words[2,CURRENT-1]}"'),
        '    case "$spot ${words[CURRENT-1]}" in',
        *(line.replace(f") {_NOTHING};", ") _files;") for line in _values(commands, "compadd -- {}")),
        "    esac",
        "    local -a offers",
        '    case "$spot" in',
    ]
    for command in commands:
        named = [_offer(name, text) for name, text in command.commands] + [_quoted(each) for each in command.choices]
        flags = [_offer(word, option.help) for option in command.options for word in option.words]
        lines += [
            f"        {_quoted(command.name)})",
            "            if [[ ${words[CURRENT]} == -* ]]; then",
            f"                offers=({' '.join(flags)})",
            "            else",
            f"                offers=({' '.join(named)})",
            "            fi ;;",
        ]
    return "\n".join([*lines, _ZSH_END])


_ZSH_END = """\
    esac
    if (( $#offers )); then
        _describe tidemill offers
    else
        _files
    fi
}
if [[ "$funcstack[1]" == _tidemill ]]; then
    _tidemill "$@"
else
    compdef _tidemill tidemill
fi
"""


def _offer(word: str, text: str) -> str:
    """A word with its description, as zsh's _describe takes it."""
    return _quoted(word.replace(":", r"\:") + (":" + text if text else ""))


def _fish(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        inner = command.path[1:]
        below = " ".join(name for name, _ in command.commands)
        seen = [f"__fish_seen_subcommand_from {word}" for word in inner]
        at = "; and ".join([*seen, *([f"not __fish_seen_subcommand_from {below}"] if below else [])]) or "true"
        start = f"complete -c tidemill -n {_quoted(at)}"
        lines += [f"{start} -f -a {name} -d {_quoted(text)}" for name, text in command.commands]
        if command.choices:
            lines.append(f"{start} -f -a {_quoted(' '.join(command.choices))}")
        for option in command.options:
            names = " ".join(f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" for word in option.words)
            value = f" -x -a {_quoted(' '.join(option.choices))}" if option.choices else " -r" * option.takes_value
            lines.append(f"{start} {names}{value} -d {_quoted(option.help)}")
    return "\n".join([*lines, ""])
