"""HTTP client of a running server: chats, files and batches."""

import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from urllib.parse import quote

import httpx

from engine.errors import ConfigError, TidemillError

_CONNECT_SECONDS = 10.0
NOT_OPENAI = "the server is not OpenAI-compatible; check --url"
NOT_FOUND = 404
PIECE_BYTES = 256 * 1024
TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
"""States of a batch that has ended."""
POLL_SECONDS = 1.0
"""Time between two looks at a batch of a server without an event stream."""
MAX_SEARCHED = 1000
"""Number of newest batches among which an id is completed."""
ID_LENGTH = len("batch_") + 32


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


class ServerClient:
    """Client of one server. Every call opens its own connection, so that closing it stops the answer.

    Every method raises ChatError if the server cannot be reached or refuses the request.
    """

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
        try:
            return str(self.call("GET", "/v1/models")["data"][0]["id"])
        except (LookupError, TypeError):
            raise ChatError(NOT_OPENAI) from None

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

    def call(self, method: str, path: str, body: Any = None, **query: str | int) -> dict[str, Any]:
        """Send a JSON request and return the JSON object of the response."""
        return self._ask(method, path, NOT_OPENAI, params=query, **({} if body is None else {"json": body}))

    def _ask(self, method: str, path: str, broken: str, **arguments: Any) -> dict[str, Any]:
        with self._open(method, path, broken, **arguments) as response, suppress(ValueError):
            answer = json.loads(response.read())
            if isinstance(answer, dict):
                return answer
        raise ChatError(NOT_OPENAI)

    def batch(self, batch_id: str) -> dict[str, Any]:
        batch = self.call("GET", f"/v1/batches/{quote(batch_id, safe='')}")
        if not isinstance(batch.get("status"), str):
            raise ChatError(NOT_OPENAI)
        return batch

    def changes(self, batch_id: str) -> Iterator[dict[str, Any]]:
        """Yield the batch object at once and after its changes, the last time in its final state.

        Changes come from the server's event stream. Without a stream, or after it breaks, the server is polled.
        """
        streams = True
        while True:
            yield (batch := self.batch(batch_id))
            if streams and batch["status"] not in TERMINAL:
                try:
                    for batch in self._events(batch_id):
                        yield batch
                except RefusedError:
                    streams = False  # OpenAI's API has none
                except ChatError:
                    pass  # the next look tells whether the server is there
            if batch["status"] in TERMINAL:
                return
            time.sleep(POLL_SECONDS)

    def _events(self, batch_id: str) -> Iterator[dict[str, Any]]:
        with self._open("GET", f"/v1/batches/{quote(batch_id, safe='')}/events", NOT_OPENAI) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise RefusedError(NOT_OPENAI, response.status_code)
            for line in response.iter_lines():
                if line.startswith("data:"):
                    try:
                        yield json.loads(line.removeprefix("data:"))
                    except ValueError:
                        raise ChatError(NOT_OPENAI) from None

    def find(self, prefix: str) -> str:
        """Return the id of the batch that begins with `prefix`. Raise ChatError if there is no single one."""
        if len(prefix) >= ID_LENGTH:
            return prefix
        found = [batch["id"] for batch in self.batches(MAX_SEARCHED) if str(batch["id"]).startswith(prefix)]
        if len(found) != 1:
            how_many = f"{len(found)} batches begin with" if found else "there is no batch"
            raise ChatError(f"{how_many} {prefix}; tidemill batch list shows them")
        return str(found[0])

    def file_name(self, file_id: str) -> str:
        """Return the name of a file, or "" if the file is deleted."""
        try:
            return str(self.call("GET", f"/v1/files/{quote(file_id, safe='')}").get("filename") or "")
        except RefusedError as error:
            if error.status != NOT_FOUND:
                raise
            return ""

    def causes(self, file_id: str) -> Counter[str]:
        """Return the number of lines of an error file for each error message and code."""
        causes: Counter[str] = Counter()
        with tempfile.TemporaryFile() as file:
            self.download(file_id, file)
            file.seek(0)
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    causes["the line is damaged (result_damaged)"] += 1
                    continue
                error = row.get("error") or ((row.get("response") or {}).get("body") or {}).get("error") or {}
                causes[f"{error.get('message')} ({error.get('code')})"] += 1
        return causes

    def upload(self, path: Path) -> str:
        """Upload an input file as a stream and return its id. Raise ConfigError if the file cannot be read."""
        broken = "the upload failed; run the command again"
        name = path.name.encode("utf-8", "replace").decode().replace("\\", "_").replace('"', "_")
        try:
            with path.open("rb") as file:
                files = {"file": (name, file, "application/jsonl")}
                return str(self._ask("POST", "/v1/files", broken, data={"purpose": "batch"}, files=files)["id"])
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except LookupError:
            raise ChatError(NOT_OPENAI) from None

    def download(self, file_id: str, target: BinaryIO) -> None:
        """Stream the content of a file into `target`."""
        broken = "the connection broke during the download; run the command again"
        with self._open("GET", f"/v1/files/{quote(file_id, safe='')}/content", broken) as response:
            target.writelines(response.iter_bytes(PIECE_BYTES))

    def metrics(self) -> str:
        """Return the text of the server's metrics."""
        with self._open("GET", "/metrics", NOT_OPENAI) as response:
            return response.read().decode("utf-8", "replace")

    def batches(self, limit: int, tenant: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield up to `limit` batches, newest first. `tenant`: a name, `*` for all, None for the API key's tenant."""
        query: dict[str, str | int] = {} if tenant is None else {"tenant": tenant}
        while limit > 0:
            page = self.call("GET", "/v1/batches", limit=min(limit, 100), **query)
            yield from page["data"]
            limit -= len(page["data"])
            if not page["has_more"]:
                return
            query["after"] = page["last_id"]


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
