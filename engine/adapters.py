"""Parsing of `--lora NAME=PATH`. Requests refer to an adapter by its number, from 1 in the order given; 0 is none.

The module does not import torch.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


class NamedFolder(NamedTuple):
    """An adapter and the folder with its files."""

    name: str
    folder: Path


def parse_adapters(words: Sequence[str]) -> tuple[NamedFolder, ...]:
    """Parse the values of `--lora`. Raise ConfigError if a value is not NAME=PATH or a name occurs twice."""
    found: dict[str, NamedFolder] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (equals and path and _NAME.fullmatch(name)):
            raise ConfigError(
                f"--lora must be NAME=PATH with a name of letters, digits, '.', '_', '-' and '/', not {word!r}"
            )
        if name in found:
            raise ConfigError(f"--lora {name} is given twice; use another name")
        found[name] = NamedFolder(name, Path(path).expanduser())
    return tuple(found.values())
