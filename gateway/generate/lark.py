"""Builder of grammars in Lark syntax, limited to the size that the engine accepts."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from engine.forms import MAX_GRAMMAR_BYTES


def quoted(text: str) -> str:
    return orjson.dumps(text).decode()


class Lark:
    """A grammar under construction of at most `most` bytes, because a grammar can be much longer than its request.
    `special`: ids of special tokens by text."""

    def __init__(self, special: Mapping[str, int], most: int = MAX_GRAMMAR_BYTES) -> None:
        self._special = special
        self._marks = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        self._lines: list[str] = []
        self._most = self._room = most

    def text(self, text: str) -> str:
        """Return an expression that matches exactly the text."""
        parts = self._marks.split(text) if self._special else [text]
        return " ".join(f"<[{self._special[p]}]>" if p in self._special else quoted(p) for p in parts if p)

    def is_special(self, text: str) -> bool:
        return text in self._special

    def reserve(self, kind: str = "r") -> str:
        """Return the name of a rule that is defined later."""
        self._lines.append("")
        return f"{kind}_{len(self._lines) - 1}"

    def define(self, name: str, body: str, flags: str = "") -> str:
        """Define a rule and return its name. Raises ValueError if the grammar becomes too long."""
        line = f"{name}{flags}: {body}"
        self._take_room(len(line.encode()) + 1)
        self._lines[int(name.rpartition("_")[2])] = line
        return name

    def rule(self, body: str, flags: str = "") -> str:
        return self.define(self.reserve(), body, flags)

    def terminal(self, body: str) -> str:
        return self.define(self.reserve("T"), body)

    def until(self, terminal: str, end: str) -> str:
        """Return an expression for the shortest text of a terminal that is followed by `end`."""
        if any(token in end for token in self._special):
            return f"{terminal} {self.text(end)}"
        return self.rule(f"{terminal} {quoted(end)}", "[lazy]")

    def json(self, schema: Any) -> str:
        return self.rule(f"%json {orjson.dumps(schema).decode()}")

    def whole(self, start: str) -> str:
        line = f"start: {start}"
        self._take_room(len(line.encode()))
        return "\n".join([line, *self._lines])

    def _take_room(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ValueError(
                f"the grammar is longer than {self._most // 1024} KiB; send smaller schemas or fewer tools"
            )
