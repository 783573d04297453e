"""Names of an object's properties that a schema describes by patterns or leaves over, rewritten for generation.

Behind the last name that a pattern still admits, the grammar library allows a comma and then finds no name. A pattern
that admits only names of `properties` and `required` is therefore folded into these properties.
"""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

from engine.structured.dialect import ascii_space

MOST_NAMES = 256
"""Maximum number of names that are read from a pattern."""
_BEGIN, _END = "\ue000", "\ue001"
_IN_PLACE = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "dependentSchemas", "dependencies"}
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|(?P<around>\(\?<?[=!])|.", re.DOTALL)
_PARSER: Any = importlib.import_module("re._parser")


def looks_around(schema: Any) -> bool:
    """Return whether the `pattern` of a schema has a look-around."""
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and any(token["around"] for token in _TOKENS.finditer(pattern))


def simplify(schema: dict[str, Any]) -> None:
    """Rewrite the patterns and the left-over names of a schema without its subschemas."""
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = ascii_space(pattern)
    close_unevaluated(schema)
    fold_patterns(schema)


def close_unevaluated(schema: dict[str, Any]) -> None:
    """Replace `unevaluatedProperties` by `additionalProperties` where no other schema evaluates properties of the same
    value."""
    if "unevaluatedProperties" in schema and not schema.keys() & _IN_PLACE:
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
        schema.pop("unevaluatedProperties", None)


def fold_patterns(schema: dict[str, Any]) -> None:
    """Move patterns all of whose names are in `properties` or `required` into the properties."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    required = schema.get("required", ())
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or not isinstance(required, list | tuple):
        return
    known = {*properties, *(name for name in required if isinstance(name, str))}
    folded = {pattern: names for pattern in patterns if (names := names_of(pattern)) is not None and names <= known}
    if not folded:
        return
    parts: dict[str, list[Any]] = {name: [schema_] for name, schema_ in properties.items()}
    for pattern, names in folded.items():
        part = patterns.pop(pattern)
        for name in sorted(names):
            parts.setdefault(name, []).append(part)
    schema["properties"] = {name: each[0] if len(each) == 1 else {"allOf": each} for name, each in parts.items()}
    if not patterns:
        del schema["patternProperties"]


def names_of(pattern: str) -> set[str] | None:
    """Return all names that a pattern admits; None if they are many or the pattern is not understood."""
    try:
        parsed = _PARSER.parse(pattern, re.ASCII)
        found = list(islice(_texts(parsed), MOST_NAMES + 1))
    except (re.error, RecursionError, OverflowError, NotImplementedError):
        return None
    anchored = all(text[:1] == _BEGIN and text[-1:] == _END for text in found)
    names = {text.strip(_BEGIN + _END) for text in found}
    inside = any(_BEGIN in name or _END in name for name in names)
    plain = anchored and not inside and not parsed.state.flags & re.IGNORECASE
    return names if plain and len(found) <= MOST_NAMES else None


def _texts(parsed: Sequence[tuple[Any, Any]]) -> Iterator[str]:
    """Yield the texts of a parsed expression, anchors included. Raises NotImplementedError."""
    for parts in product(*(list(islice(_part(str(kind), value), MOST_NAMES + 1)) for kind, value in parsed)):
        yield "".join(parts)


def _part(kind: str, value: Any) -> Iterator[str]:
    if kind == "LITERAL":
        yield chr(value)
    elif kind == "AT" and str(value) in ("AT_BEGINNING", "AT_END"):
        yield _BEGIN if str(value) == "AT_BEGINNING" else _END
    elif kind == "IN":
        for inner, each in value:
            if str(inner) not in ("LITERAL", "RANGE"):
                raise NotImplementedError
            first, last = (each, each) if str(inner) == "LITERAL" else each
            yield from map(chr, range(first, last + 1))
    elif kind == "BRANCH":
        for branch in value[1]:
            yield from _texts(branch)
    elif kind == "SUBPATTERN" and not (value[1] or value[2]):
        yield from _texts(value[3])
    elif kind == "MAX_REPEAT" and value[1] <= MOST_NAMES:
        for count in range(value[0], value[1] + 1):
            yield from _texts(list(value[2]) * count)
    else:
        raise NotImplementedError
