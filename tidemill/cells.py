"""Values of tables as text: JSON lines and the cells of CSV files."""

import datetime
import json
import math
from typing import Any

from engine.errors import ConfigError
from gateway.http.json_text import escape_line_ends

Row = dict[str, Any]


def clean(text: str) -> str:
    """Return the text with U+FFFD in place of lone surrogates, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_line(value: Any) -> bytes:
    """Return a value as a line of JSON. Dates become ISO 8601, numbers that JSON lacks null, bytes text.

    Raises ConfigError for bytes that are not UTF-8.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=_text, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, default=_text)
    return escape_line_ends(clean(text).encode()) + b"\n"


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """Parse JSON as `json_line` would write it again: NaN is null, and a number beyond a double is text.

    unique: refuse a name that an object has twice. Raises ValueError, also for a text that is nested too deeply.
    """
    hook = _unique if unique else None
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_float, object_pairs_hook=hook)
        if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():  # type: ignore[operator]
            value = json.loads(clean(json.dumps(value, ensure_ascii=False)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def cell(value: Any) -> str:
    """Return a value as text: nothing for None, JSON for structures."""
    if isinstance(value, str):
        return clean(value)
    if value is None:
        return ""
    if isinstance(value, bool | dict | list | tuple):
        return json_line(value).decode().rstrip("\n")
    return str(_text(value))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _text(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has."""
    if type(value).__name__ in ("NaTType", "NAType"):  # of pandas
        return None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ConfigError("a cell holds bytes that are not text; write to a .parquet file") from None
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return value.tolist()
    return clean(str(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
