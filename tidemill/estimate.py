"""What a run over a table would send: one request, and the amount of work."""

import re
from dataclasses import dataclass
from typing import Any

from gateway.commands.batch_client import BatchClient, duration_text
from gateway.commands.chat import ChatError
from tidemill.recipe import Request
from tidemill.rows import SourceRows

SAMPLE_ROWS = 20
CHARS_PER_TOKEN = 4.0
"""Of English text, for a server that does not count tokens."""
_SPEED = re.compile(r"^tidemill_batch_tokens_per_second(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Rows with a request, the first request, and expected tokens. None: unknown."""

    rows: int
    request: Request
    prompt_tokens: int
    output_tokens: int | None
    """Longest answers; None: the requests have no limit."""
    tokens_per_second: float | None

    def text(self, price_in: float | None = None, price_out: float | None = None) -> str:
        """Describe the work. Prices are those of a million tokens."""
        output = "" if self.output_tokens is None else f" and at most {self.output_tokens:,} output tokens"
        lines = [f"{self.rows:,} rows, about {self.prompt_tokens:,} prompt tokens{output}"]
        if self.tokens_per_second:
            seconds = (self.prompt_tokens + (self.output_tokens or 0)) / self.tokens_per_second
            lines.append(f"about {duration_text(seconds)} at the server's recent speed of batch work")
        if price_in is not None or price_out is not None:
            cost = self.prompt_tokens * (price_in or 0.0) + (self.output_tokens or 0) * (price_out or 0.0)
            lines.append(f"price: about {cost / 1e6:,.2f}")
        return "\n".join(lines)


def estimate(client: BatchClient, rows: SourceRows) -> Estimate:
    """Return the work of checked rows. A server is asked for its count of tokens and its speed if it is there."""
    assert rows.first is not None
    chars, count, limits = 0, 0, list[Any]()
    sample: list[Request] = []
    for _, _, request, _ in rows:
        if request is not None:
            count += 1
            chars += _size(request)
            limits.append(request.body.get("max_tokens") or request.body.get("max_completion_tokens"))
            if len(sample) < SAMPLE_ROWS:
                sample.append(request)
    try:
        tokens = sum(int(client.call("POST", "/tokenize", _asked(each))["count"]) for each in sample)
        found = _SPEED.search(client.metrics())
    except (ChatError, LookupError, TypeError, ValueError):
        tokens, found = 0, None
    ratio = sum(map(_size, sample)) / tokens if tokens else CHARS_PER_TOKEN
    outputs = sum(limits) if all(isinstance(each, int) for each in limits) else None
    return Estimate(count, rows.first, round(chars / ratio), outputs, float(found[1]) if found else None)


def _asked(request: Request) -> dict[str, Any]:
    return {name: request.body[name] for name in ("model", "messages", "prompt") if name in request.body}


def _size(request: Request) -> int:
    """Return the characters of a prompt."""
    texts = [each.get("content") for each in request.body.get("messages") or () if isinstance(each, dict)]
    return sum(len(str(text)) for text in (*texts, request.body.get("prompt") or request.body.get("input") or ""))
