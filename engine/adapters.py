"""LoRA adapters as users name them: `NAME=PATH`. A request refers to one by its number, from 1 in the order given; 0 is
the model as it is. One that comes while the server runs has a number that no other one ever had, since caches know
adapters by their numbers. Torch-free."""

import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


class NamedFolder(NamedTuple):
    """An adapter, and where its files are."""

    name: str
    folder: Path


class AdapterFiles(NamedTuple):
    """One that comes while the server runs. `stamp`: of its files then (`stamp_of`); empty: they may be any."""

    number: int
    name: str
    folder: str
    stamp: str = ""


class AdapterLoader(Protocol):
    """How an engine that runs takes adapters, and gives them up."""

    def read(self, adapter: AdapterFiles) -> Any:
        """Its matrices, beside the steps. Raises ConfigError."""

    def put(self, number: int, matrices: Any) -> None:
        """Requests may have it from now on; between two steps. Raises ConfigError."""

    def drop(self, number: int) -> None:
        """No request has it any more; between two steps."""


def is_name(text: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(text) is not None


def stamps_of(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of what is stored there. Raises OSError."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def stamp_of(folder: Path) -> str:
    """What tells an adapter's files from others that lie there later. Raises OSError."""
    return blake2b(repr(stamps_of(folder)).encode(), digest_size=16).hexdigest()


def allowed_folder(root: str, path: str) -> Path:
    """The folder of an adapter at `path`, in `root` or absolute. Raises ConfigError if it is none, or elsewhere."""
    inside = Path(root).resolve()
    try:
        folder = (inside / path).resolve()
    except (OSError, ValueError, RuntimeError):  # a NUL in it, a loop of links
        raise ConfigError(f"{path!r} is no path in --allowed-lora-dir") from None
    if not folder.is_relative_to(inside):
        raise ConfigError("adapters are loaded from within --allowed-lora-dir only")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {path} in --allowed-lora-dir")
    return folder


def parse_adapters(words: Sequence[str]) -> tuple[NamedFolder, ...]:
    """What `--lora` says. Raises ConfigError for what is not NAME=PATH, or a name that is given twice."""
    found: dict[str, NamedFolder] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (equals and path and is_name(name)):
            raise ConfigError(
                f"--lora must be NAME=PATH, the name of letters, digits, '.', '_', '-', '/', not {word!r}"
            )
        if name in found:
            raise ConfigError(f"--lora {name} is given twice")
        found[name] = NamedFolder(name, Path(path).expanduser())
    return tuple(found.values())
