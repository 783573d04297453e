"""LoRA adapters as users name them: `NAME=PATH`. A request refers to one by its number, from 1 in the order given; 0 is
the model alone. Torch-free."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


class NamedFolder(NamedTuple):
    """An adapter and the folder of its files."""

    name: str
    folder: Path


def parse_adapters(words: Sequence[str]) -> tuple[NamedFolder, ...]:
    """What `--lora` says. Raises ConfigError for what is not NAME=PATH, or a name that is given twice."""
    found: dict[str, NamedFolder] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (equals and path and _NAME.fullmatch(name)):
            raise ConfigError(
                f"--lora must be NAME=PATH, the name of letters, digits, '.', '_', '-', '/', not {word!r}"
            )
        if name in found:
            raise ConfigError(f"--lora {name} is given twice")
        found[name] = NamedFolder(name, Path(path).expanduser())
    return tuple(found.values())
