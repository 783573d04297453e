"""The server under test, without the HTTP client, which simulations do not need."""

from dataclasses import dataclass, field

from loadgen import ServerError


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test."""

    base_url: str
    endpoint: str = "/v1/completions"  # path of online requests
    model: str = ""
    api_key: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 600.0  # of a request, seconds
    silent_tokens: bool = False  # a chunk without text counts as a token event if its usage grew

    @property
    def chat(self) -> bool:
        """Whether the endpoint is chat completions."""
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def url(self, path: str) -> str:
        """Return the URL of a path, which starts with /."""
        return self.base_url.rstrip("/") + path


def window_seconds(text: str) -> float:
    """Parse a completion window such as "24h", "30m", "90s" or "7d"; return seconds. Raise ServerError if invalid."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    if text[-1:] not in units or not text[:-1].replace(".", "", 1).isdigit():
        raise ServerError(f"invalid completion window {text!r}; use e.g. 90m, 24h or 7d")
    return float(text[:-1]) * units[text[-1]]
