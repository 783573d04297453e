"""Conversion of tool calls in Python syntax, `[name(key=value, ...), ...]`, to JSON. Values are literals; nothing is
executed, and numbers keep their digits.

Linear in the text: Python's own parser takes more than linear time for hostile text.
"""

import ast
import json
import keyword
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

MAX_DEPTH = 100  # nested lists and dictionaries
_TOKEN = re.compile(
    r"""\s*+(?:
    (?P<text>[rRuU]?(?:'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"))
    |(?P<number>[-+]?\s*+(?:0[xXoObB]\w++|(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?|\.[0-9][0-9_]*+)(?:[eE][-+]?[0-9][0-9_]*+)?))
    |(?P<name>[^\W\d]\w*+)
    |(?P<mark>[][(){}=,:.])
    |(?P<end>\Z))""",
    re.DOTALL | re.VERBOSE,
)
_DECIMAL = re.compile(r"(-?)([0-9]*)(?:(\.)([0-9]*))?([eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_Item = TypeVar("_Item")


def read_calls(text: str) -> list[tuple[str, str]]:
    """Return names and arguments of the calls, the arguments as JSON. Raises ValueError for any other text."""
    reader = _Reader(text)
    reader.expect("[")
    calls = reader.items("]", reader.call)
    if reader.kind != "end":
        raise ValueError("text after the calls")
    return calls


class _Reader:
    """Recursive descent parser with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 0
        self.kind: str | None = ""
        self.token = ""
        self._next()

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._end)
        if found is None:
            raise ValueError("not a Python literal")
        self.kind, self._end = found.lastgroup, found.end()
        self.token = found[self.kind or 0]

    def _take(self, kind: str) -> str:
        if self.kind != kind:
            raise ValueError(f"expected a {kind}")
        token = self.token
        self._next()
        return token

    def _is(self, mark: str) -> bool:
        return self.kind == "mark" and self.token == mark

    def expect(self, mark: str) -> None:
        if not self._is(mark):
            raise ValueError(f"expected {mark}")
        self._next()

    def items(self, closing: str, item: Callable[[], _Item]) -> list[_Item]:
        """Parse items separated by commas, with an optional trailing comma."""
        found: list[_Item] = []
        while not self._is(closing):
            found.append(item())
            if not self._is(closing):
                self.expect(",")
        self._next()
        return found

    def call(self) -> tuple[str, str]:
        parts = [self._name()]
        while self._is("."):
            self._next()
            parts.append(self._name())
        self.expect("(")
        return ".".join(parts), _object(self.items(")", self._argument))

    def _name(self) -> str:
        name = self._take("name")
        if keyword.iskeyword(name):
            raise ValueError("a Python keyword as a name")
        return name

    def _argument(self) -> tuple[str, str]:
        name = self._name()
        self.expect("=")
        return json.dumps(name, ensure_ascii=False), self._value(MAX_DEPTH)

    def _value(self, depth: int) -> str:
        """Parse a value; return it as JSON."""
        if self.kind == "text":
            return self._texts()
        if self.kind == "number":
            return _number(self._take("number"))
        if self.kind == "name" and self.token in _WORDS:
            return _WORDS[self._take("name")]
        if self.kind != "mark" or self.token not in "[({" or depth == 0:
            raise ValueError("expected a value")
        return self._container(self._take("mark"), depth - 1)

    def _container(self, opening: str, depth: int) -> str:
        if opening == "[":
            return _list(self.items("]", lambda: self._value(depth)))
        if opening == "{":
            return _object(self.items("}", lambda: self._pair(depth)))
        if self._is(")"):
            return _list(self.items(")", lambda: self._value(depth)))
        first = self._value(depth)
        if self._is(")"):  # parentheses around a value
            self._next()
            return first
        self.expect(",")
        return _list([first, *self.items(")", lambda: self._value(depth))])

    def _pair(self, depth: int) -> tuple[str, str]:
        name = self._texts()
        self.expect(":")
        return name, self._value(depth)

    def _texts(self) -> str:
        """Parse a string; adjacent string literals are concatenated."""
        parts = [_text(self._take("text"))]
        while self.kind == "text":
            parts.append(_text(self._take("text")))
        return json.dumps("".join(parts), ensure_ascii=False)


def _text(token: str) -> str:
    if token[0] in "'\"" and "\\" not in token:
        return token[1:-1]
    try:
        value: str = ast.literal_eval(token)
    except SyntaxError as error:
        raise ValueError("invalid string") from error
    return value


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(values)}]"


def _object(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a JSON object; of equal names the last one counts."""
    return f"{{{', '.join(f'{name}: {value}' for name, value in dict(pairs).items())}}}"


def _number(token: str) -> str:
    """Return a number as JSON with all its digits."""
    digits = "".join(token.split()).removeprefix("+").replace("_", "")
    found = _DECIMAL.fullmatch(digits)
    if found is None:
        return str(int(digits, 0))
    sign, whole, point, fraction, exponent = found.groups("")
    return sign + (whole.lstrip("0") or "0") + (f".{fraction or 0}" if point else "") + exponent
