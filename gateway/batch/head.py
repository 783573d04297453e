"""Estimate the line lengths and answer limits of an input file from its first lines. Blocking: call it in a thread."""

import math
from pathlib import Path
from typing import Any

from engine.errors import InvalidRequestError
from gateway.endpoints import ENDPOINTS
from gateway.generate.endpoint import ModelEndpoint
from gateway.http.json_text import load_json
from gateway.store.objects import LineLengths

HEAD_BYTES = 64 * 1024
HEAD_ANSWERS = 64
"""Maximum number of lines whose answer limits are kept, for as long as the batch is unfinished."""
ANSWER_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields of the validated bodies, the first that is set counts."""


def read_head(path: Path, endpoint: str) -> LineLengths | None:
    """Return the mean length and the answer limits of the first lines, or None if no whole line can be read.

    A line that `endpoint` would refuse gets an error row without any model work, so its answer limit is 0.
    """
    try:
        with path.open("rb") as file:
            data = file.read(HEAD_BYTES)
    except OSError:
        return None
    whole = data if len(data) < HEAD_BYTES else data[: data.rfind(b"\n") + 1]
    lines = [line for line in whole.split(b"\n") if line.strip()]
    evenly = lines[:: math.ceil(len(lines) / HEAD_ANSWERS) or 1]
    answers = tuple(_answer_limit(line, ENDPOINTS[endpoint]) for line in evenly)
    length = sum(len(line) + 1 for line in lines) / max(1, len(lines))
    return LineLengths(len(whole), length, answers) if lines else None


def _answer_limit(line: bytes, endpoint: ModelEndpoint[Any]) -> float:
    """Return the maximum number of tokens in the answer to a line: infinity without a limit, 0 for an invalid line."""
    try:
        body = endpoint.check(load_json(line)["body"])
    except (InvalidRequestError, ValueError, TypeError, KeyError, AttributeError):
        return 0.0
    limit = next((most for name in ANSWER_LIMITS if (most := getattr(body, name, None)) is not None), math.inf)
    return float(limit * (getattr(body, "n", None) or 1))
