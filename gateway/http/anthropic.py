"""Recognition of Anthropic's clients, and forms that its API has in common."""

from datetime import UTC, datetime

from starlette.types import Scope

MESSAGES_PATH = "/v1/messages"


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API, by its path or by the header that its clients send."""
    return scope["path"].startswith(MESSAGES_PATH) or any(name == b"anthropic-version" for name, _ in scope["headers"])


def timestamp(seconds: int) -> str:
    """Return Unix seconds as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
