"""`tidemill completions bash|zsh|fish`: generate completion scripts from the parsers of all commands with shtab."""

import argparse
import importlib
from collections.abc import Iterator, Mapping

SHELLS = ("bash", "zsh", "fish")


def script(parser: argparse.ArgumentParser, shell: str, apart: Mapping[str, argparse.ArgumentParser]) -> str:
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
