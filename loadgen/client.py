"""The HTTP client: one aiohttp session that streams answers into records.

Low CPU per chunk: a chunk is stamped once when its bytes are read and parsed by `loadgen.sse`. Nothing is retried - a
429 is a result. Knows nothing of schedules or metrics.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from loadgen.errors import ServerError
from loadgen.records import RequestRecord
from loadgen.sse import StreamEvents, whole_answer

KEEP_ALIVE = 2.0
"""Seconds an idle connection is kept: servers close theirs after 5 s, and a POST on a closed one would be an error."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. `endpoint` is the path of online requests; `timeout` is seconds for one request.
    `silent_tokens`: a chunk without text is a token event, too, where its usage grew."""

    base_url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    api_key: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 600.0
    silent_tokens: bool = False

    @property
    def chat(self) -> bool:
        """Whether the endpoint takes messages."""
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def url(self, path: str) -> str:
        """The address of a path that starts with /v1 (or / for a probe)."""
        return self.base_url.rstrip("/") + path


class Client:
    """One session to one server; use as an async context manager. `now` gives seconds since the run's start."""

    def __init__(self, target: Target, now: Callable[[], float]) -> None:
        self.target = target
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        headers = dict(self.target.headers)
        if self.target.api_key:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers=headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        if self._session is None:
            raise RuntimeError("the client is not open")
        return self._session

    async def send(self, body: bytes, record: RequestRecord) -> None:
        """Sends one request and fills its record. Raises nothing but CancelledError."""
        events = StreamEvents(record, silent_tokens=self.target.silent_tokens)
        record.sent_at = self._now()
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._exchange(body, record, events)
        except TimeoutError:
            events.close(self._now())
            record.outcome = "timeout"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            events.close(self._now())
            record.outcome = "cut" if record.status == 200 else "connection"
            record.error = record.error or f"{type(error).__name__}: {error}"[:300]
        except asyncio.CancelledError:
            events.close(self._now())
            record.outcome = "unfinished"
            raise

    async def _exchange(self, body: bytes, record: RequestRecord, events: StreamEvents) -> None:
        url = self.target.url(self.target.endpoint)
        async with self.session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            record.status = response.status
            if response.status != 200:
                record.error = error_message(await response.read())
                record.retry_after = seconds_of(response.headers.get("Retry-After", ""))
                record.ended_at = self._now()
                record.outcome = "http_error"
            elif response.content_type == "text/event-stream":
                content, now = response.content, self._now
                while data := await content.readany():
                    events.feed(data, now())
                events.close(now())
            else:
                answer = await response.read()
                whole_answer(record, orjson.loads(answer), self._now())

    async def call(self, method: str, path: str, **arguments: Any) -> tuple[int, Any]:
        """One plain JSON call: (status, parsed body or None). Raises ServerError when there is no connection."""
        status, data = await self.raw(method, path, **arguments)
        try:
            return status, orjson.loads(data)
        except orjson.JSONDecodeError:
            return status, None

    async def raw(self, method: str, path: str, **arguments: Any) -> tuple[int, bytes]:
        """One plain call: (status, body)."""
        try:
            async with (
                asyncio.timeout(self.target.timeout),
                self.session.request(method, self.target.url(path), **arguments) as response,
            ):
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise ServerError(f"{method} {path}: {type(error).__name__} {error}") from None


def seconds_of(text: str) -> float:
    """A Retry-After header in seconds; 0 without one (or with a date)."""
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def error_message(data: bytes) -> str:
    """The message of an error body, else the body's beginning."""
    try:
        body = orjson.loads(data)
        return str(body["error"]["message"])[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return data[:300].decode("utf-8", "replace")


async def wait_ready(client: Client, seconds: float, say: Callable[[str], None]) -> None:
    """Waits until the server lists its models, and says so once; raises ServerError after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    said = False
    while True:
        try:
            status, _ = await client.call("GET", "/v1/models")
            if status == 200:
                return
            problem = f"GET /v1/models answered {status}"
        except ServerError as error:
            problem = str(error)
        if asyncio.get_running_loop().time() >= deadline:
            raise ServerError(f"{client.target.base_url} is not ready: {problem}")
        if not said:
            say(f"waiting up to {seconds:g} s for {client.target.base_url}")
            said = True
        await asyncio.sleep(0.5)


async def describe_server(client: Client) -> dict[str, Any]:
    """Return the server's description: id and entry of the first model, and GET /version if available."""
    status, models = await client.call("GET", "/v1/models")
    listed = models.get("data", []) if status == 200 and isinstance(models, dict) else []
    status, version = await client.call("GET", "/version")
    return {
        "model": listed[0].get("id", "") if listed else "",
        "models": [entry.get("id") for entry in listed],
        "version": version if status == 200 else None,
    }
