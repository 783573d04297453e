"""`tidemill chat`: chat with a running server in the terminal; answers are streamed."""

import json
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

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


def server_options(url: str | None, api_key: str | None) -> ChatOptions:
    """Return the options for a server; None: $TIDEMILL_URL or the default address, and $TIDEMILL_API_KEY."""
    keys = os.environ.get("TIDEMILL_API_KEY", "").split(",")
    address = url or os.environ.get("TIDEMILL_URL") or "http://127.0.0.1:8000"
    return ChatOptions(address, api_key or keys[0].strip() or None)


class ChatClient:
    """Client of one server. Every call opens its own connection, so that closing it stops the answer."""

    answer_seconds: ClassVar[float] = 600.0
    """Read timeout, seconds."""

    def __init__(self, options: ChatOptions) -> None:
        """Raise ConfigError if the URL is not an http or https URL with a host, or the key no header value."""
        self._options = options
        try:
            url = httpx.URL(options.url)
        except (httpx.InvalidURL, ValueError):
            raise ConfigError(f"--url {options.url} is not a valid URL; use e.g. http://127.0.0.1:8000") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"--url must look like http://127.0.0.1:8000, not {options.url}")
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        try:
            self._http = httpx.Client(
                base_url=url.copy_with(path=url.path.rstrip("/").removesuffix("/v1")),
                headers=headers,
                timeout=httpx.Timeout(self.answer_seconds, connect=_CONNECT_SECONDS),
                trust_env=False,
            )
        except ValueError as error:  # the key contains characters that headers cannot hold
            raise ConfigError(f"--api-key: {error}") from None

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raise ChatError if there is none."""
        not_openai = f"{self._options.url} is not an OpenAI-compatible server; check --url"
        with self._open("GET", "/v1/models", not_openai) as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatError(not_openai) from None

    def stream(self, model: str, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """Yield the answer's text as it arrives. Closing the iterator ends the request. Raise ChatError on failure."""
        body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
        if self._options.temperature is not None:
            body["temperature"] = self._options.temperature
        broken = "the connection broke during the answer; send the message again"
        with self._open("POST", "/v1/chat/completions", broken, json=body) as response:
            for line in response.iter_lines():
                data = line.strip()
                if not data.startswith("data:"):
                    continue
                data = data.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                yield _delta_text(data)
        raise ChatError("the server ended the answer early; send the message again")

    @contextmanager
    def _open(self, method: str, path: str, broken: str, **arguments: Any) -> Iterator[httpx.Response]:
        """Send a request and yield the response before its body. Raise ChatError, with the text `broken` if the
        connection breaks within the body."""
        answered = False
        try:
            with self._http.stream(method, path, **arguments) as response:
                if response.status_code != 200:
                    raise RefusedError(_error_message(response), response.status_code)
                answered = True
                yield response
        except httpx.TransportError as error:
            if answered:
                raise ChatError(broken) from None
            reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
            raise ChatError(
                f"cannot reach {self._options.url}: {reason}; check --url or TIDEMILL_URL, and the server"
            ) from None


def _delta_text(data: str) -> str:
    try:
        event = json.loads(data)
        if "error" in event:
            raise ChatError(str(event["error"]["message"]))
        choices = event["choices"]
        return str(choices[0]["delta"].get("content") or "") if choices else ""
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ChatError("the response is not a chat completion; check --url") from None


def _error_message(response: httpx.Response) -> str:
    try:
        message = str(json.loads(response.read())["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server responded with status {response.status_code}"
    return f"{message} (--api-key or TIDEMILL_API_KEY)" if response.status_code == 401 else message


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
