"""One dialect of regular expressions and escapes for all forms of grammars, which the library reads differently.

`\\d` and `\\w` are ASCII and `\\D` and `\\W` everything else, as in JSON schemas (ECMA 262). `\\s` is ASCII white
space; `\\S` excludes all white space of Unicode. Torch-free.
"""

import re
from collections.abc import Mapping

_CLASSES = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]",
}  # fmt: skip
_SPACE = {"s": r"[\t-\r ]"}
_ESCAPE = re.compile(r"(\[\^\]?(?:\\.|[^\]\\])*\])|\\(.)", re.DOTALL)
_LARK_REGEX = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|(/(?:\\.|[^/\\\n])+/)')
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def ascii_classes(regex: str) -> str:
    """Return the expression with its class escapes written out."""
    return _written_out(regex, _CLASSES | _SPACE, _CLASSES)


def ascii_space(pattern: str) -> str:
    """Return the `pattern` of a schema without white space beyond ASCII; it admits no other text than before."""
    return _written_out(pattern, _SPACE, {})


def _written_out(regex: str, classes: Mapping[str, str], excluded: Mapping[str, str]) -> str:
    """Replace escapes by `classes`, and within a negated class by `excluded`."""

    def replace(found: re.Match[str]) -> str:
        if found[1]:
            return found[1][:2] + _written_out(found[1][2:], excluded, excluded)
        return classes.get(found[2], found[0])

    return _ESCAPE.sub(replace, regex)


def of_grammar(text: str) -> str:
    """Return a client's GBNF or Lark grammar in this dialect."""
    if "::=" in text:
        return _GBNF_ESCAPE.sub(_character, text)
    return _LARK_REGEX.sub(lambda found: ascii_classes(found[0]) if found[1] else found[0], text)


def _character(found: re.Match[str]) -> str:
    """Return an escape of GBNF as the character, which the conversion to Lark takes, or as two hexadecimal digits."""
    digits = found[1] or found[2]
    code = int(digits, 16) if digits else 0
    if code >= 0x110000 or 0xD800 <= code < 0xE000:
        raise ValueError(f"{found[0]} is no character")
    if code < 0x80:
        return f"\\x{code:02x}" if digits else found[0]
    return chr(code)
