"""`tidemill chat`: chat with a running server in the terminal; answers are streamed.

The HTTP client is built on the standard library.
"""

import http.client
import json
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from engine.errors import ConfigError, TidemillError

_HELP = "/reset starts a new conversation, /exit leaves, Ctrl-C stops an answer."
_CONNECT_SECONDS = 10.0


class ChatError(TidemillError):
    """The server cannot be reached or reported an error."""


class RefusedError(ChatError):
    """The server responded with a status other than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Server and sampling options; None leaves the choice to the server."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class ChatClient:
    """Client of one server. Every call opens its own connection, so that closing it stops the answer."""

    answer_seconds: ClassVar[float] = 600.0
    """Read timeout, seconds."""

    def __init__(self, options: ChatOptions) -> None:
        """Raise ConfigError if the URL is not an http or https URL with a host."""
        self._options = options
        try:
            parts = urlsplit(options.url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            raise ConfigError(f"--url {options.url} is not a valid URL; use e.g. http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"--url must look like http://127.0.0.1:8000, not {options.url}")
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raise ChatError if there is none."""
        with closing(self._connect()) as connection:
            response = self._request(connection, "GET", "/v1/models", None)
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatError(f"{self._options.url} is not an OpenAI-compatible server; check --url") from None

    def stream(self, model: str, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """Yield the answer's text as it arrives. Closing the iterator ends the request. Raise ChatError on failure."""
        body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
        if self._options.temperature is not None:
            body["temperature"] = self._options.temperature
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", "/v1/chat/completions", json.dumps(body).encode())
            yield from _read_events(response)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=_CONNECT_SECONDS)

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        headers: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        headers = dict(headers or ({"Content-Type": "application/json"} if body is not None else {}))
        if self._options.api_key:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        try:
            connection.connect()
            connection.sock.settimeout(self.answer_seconds)
            with suppress(BrokenPipeError, ConnectionResetError):  # an early refusal may already be readable
                connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            raise RefusedError(_error_message(response.read(65536), response.status), response.status)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ChatError(f"cannot reach {self._options.url}: {reason}; check --url and the server") from None
        except ValueError as error:  # the key contains characters that headers cannot hold
            raise ConfigError(f"--api-key: {error}") from None


def _read_events(response: http.client.HTTPResponse) -> Iterator[str]:
    try:
        for line in iter(response.readline, b""):
            data = line.strip()
            if not data.startswith(b"data:"):
                continue
            data = data.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield _delta_text(data)
    except (OSError, http.client.HTTPException):
        raise ChatError("the connection broke during the answer; send the message again") from None
    raise ChatError("the server ended the answer early; send the message again")


def _delta_text(data: bytes) -> str:
    try:
        event = json.loads(data)
        if "error" in event:
            raise ChatError(str(event["error"]["message"]))
        choices = event["choices"]
        return str(choices[0]["delta"].get("content") or "") if choices else ""
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ChatError("the response is not a chat completion; check --url") from None


def _error_message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server responded with status {status}"


def run_chat(options: ChatOptions) -> int:
    """Chat until /exit or the end of the input and return the exit code. Raise ChatError if there is no server."""
    client = ChatClient(options)
    model = options.model or client.first_model()
    start = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(start)
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
        print(f"{model} at {options.url}. {_HELP}")
    while (line := _read_line("> " if interactive else "")) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                messages = list(start)
                print("(a new conversation)")
            case "/help":
                print(_HELP)
            case _:
                messages = _exchange(client, model, [*messages, {"role": "user", "content": line}])
    return 0


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  # importing it gives `input` arrow keys and history
    except ImportError:
        return


def _read_line(prompt: str) -> str | None:
    """Read a line; return None at the end of the input. Ctrl-C discards the typed text."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print(f"\n{_HELP}")


def _exchange(client: ChatClient, model: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Print the answer to the last message and return the updated conversation.

    A stopped answer is kept as far as it arrived; a message whose request failed is removed.
    """
    pieces: list[str] = []
    with closing(client.stream(model, messages)) as stream:
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" (stopped)")
        except ChatError as error:
            print(f"\ntidemill: {error.message}" if pieces else f"tidemill: {error.message}", file=sys.stderr)
            return messages[:-1]
    return [*messages, {"role": "assistant", "content": "".join(pieces)}] if pieces else messages[:-1]
