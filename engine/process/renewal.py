"""When another engine process may take over from one that runs: which files the two were made of.

The gateway has read the configuration of the model and its tokenizer, and answers that have begun depend on them: these
must be the same. Weights and the engine's own code may be others.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import engine

TEXT = (".json", ".jinja", ".model", ".txt")
INDEX = ".index.json"
"""Says which file holds which weight, and belongs to them."""


@dataclass(frozen=True, slots=True)
class Source:
    """`files`: size and time of what weights, adapters and code are in; `texts`: digests of what the gateway has read,
    too."""

    files: dict[str, tuple[int, int]]
    texts: dict[str, str]

    @classmethod
    def of(cls, folder: Path, adapters: Iterable[Path] = ()) -> "Source":
        """What is there now, in the folder of the model and in those of its adapters. Raises OSError."""
        code = Path(engine.__file__).parent
        found = [path for path in folder.iterdir() if path.is_file()]
        texts = [path for path in found if path.suffix in TEXT and not path.name.endswith(INDEX)]
        beside = [path for each in adapters for path in each.iterdir() if path.is_file()]
        files = [path for path in found if path not in texts] + beside + list(code.rglob("*.py"))
        return cls({str(path): _stamp(path) for path in files}, {path.name: _digest(path) for path in texts})

    def refusal(self, later: "Source") -> str | None:
        """Why what is there later may not take over; None if it may."""
        names = sorted(self.texts.keys() | later.texts.keys())
        other = [name for name in names if self.texts.get(name) != later.texts.get(name)]
        return f"{', '.join(other)} differ from what the server has read: it must be started again" if other else None


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
