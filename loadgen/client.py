"""The HTTP client: an aiohttp session that streams answers into records, and the parser of streamed answers.

To save CPU, a chunk is timestamped once, when its bytes are read, and parsed afterwards. Requests are not retried,
because a 429 is a result.

A token event is a chunk whose delta has content, reasoning or tool calls. Chunks with only a role, a finish reason or
usage are ignored; with `silent_tokens`, a chunk without text counts if its usage grew. If the server sends usage with
each chunk, the tokens of an event are the growth of `completion_tokens` since the last event, else 1.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import aiohttp
import orjson

from loadgen import ServerError
from loadgen.plan import Target
from loadgen.records import JobPoll, JobRecord, Outcome, RequestRecord

KEEP_ALIVE = 2.0
"""Keep-alive of idle connections, seconds. Servers close theirs after 5 s; a POST on a closed connection would fail."""
DATA = b"data:"
DONE = b"[DONE]"
MAX_LINE = 16 * 1024 * 1024


class Client:
    """An HTTP session to a server, used as an async context manager. `now` returns seconds since the run's start."""

    def __init__(self, target: Target, now: Callable[[], float]) -> None:
        self.target = target
        self._now = now
        self.session: aiohttp.ClientSession  # while it is open

    async def __aenter__(self) -> "Client":
        headers = dict(self.target.headers)
        if self.target.api_key:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers=headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def send(self, body: bytes, record: RequestRecord) -> None:
        """Send a request and fill its record. Raise no exception but CancelledError."""
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

    async def _exchange(self, body: bytes, record: RequestRecord, events: "StreamEvents") -> None:
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
        """Send a request and return (status, parsed JSON or None). Raise ServerError without a connection."""
        status, data = await self.raw(method, path, **arguments)
        try:
            return status, orjson.loads(data)
        except orjson.JSONDecodeError:
            return status, None

    async def raw(self, method: str, path: str, **arguments: Any) -> tuple[int, bytes]:
        """Send a request and return (status, body). Raise ServerError without a connection."""
        try:
            async with (
                asyncio.timeout(self.target.timeout),
                self.session.request(method, self.target.url(path), **arguments) as response,
            ):
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise ServerError(f"{method} {path}: {type(error).__name__} {error}") from None


def seconds_of(text: str) -> float:
    """Parse a Retry-After header, seconds; return 0 if it is empty or a date."""
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def error_message(data: bytes) -> str:
    """Return the message of an OpenAI error body, else the first 300 bytes of the body."""
    try:
        body = orjson.loads(data)
        return str(body["error"]["message"])[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return data[:300].decode("utf-8", "replace")


async def wait_ready(client: Client, seconds: float, say: Callable[[str], None]) -> None:
    """Wait until the server lists its models, with one status line. Raise ServerError after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    said = False
    while True:
        try:
            status, _ = await client.call("GET", "/v1/models")
            if status == 200:
                return
            problem = f"GET /v1/models returned {status}"
        except ServerError as error:
            problem = str(error)
        if asyncio.get_running_loop().time() >= deadline:
            raise ServerError(f"{client.target.base_url} is not ready after {seconds:g} s: {problem}")
        if not said:
            say(f"waiting up to {seconds:g} s for {client.target.base_url}")
            said = True
        await asyncio.sleep(0.5)


async def describe_server(client: Client) -> dict[str, Any]:
    """Return `{"model", "models", "version"}`: the first model's id, all ids, and the body of GET /version or None."""
    status, models = await client.call("GET", "/v1/models")
    listed = models.get("data", []) if status == 200 and isinstance(models, dict) else []
    status, version = await client.call("GET", "/version")
    return {
        "model": listed[0].get("id", "") if listed else "",
        "models": [entry.get("id") for entry in listed],
        "version": version if status == 200 else None,
    }


class StreamEvents:
    """Fills the record of a request. Call `feed` for every read, then `close` once."""

    def __init__(self, record: RequestRecord, *, silent_tokens: bool = False) -> None:
        self.record = record
        self._silent_tokens = silent_tokens
        self._pending = b""
        self._counted = 0
        self._usage = 0
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that arrived at `now`, seconds since the run's start; events may be split anywhere."""
        lines = (self._pending + data).split(b"\n")
        self._pending = lines.pop()
        if len(self._pending) > MAX_LINE:
            raise ValueError("the server sent a line over 16 MiB")
        for line in lines:
            if line.startswith(DATA):
                self._event(line[len(DATA) :].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == DONE:
            self._done = True
            return
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.record.error = self.record.error or "an event is not JSON"
            return
        if not isinstance(chunk, dict):
            return
        if error := chunk.get("error"):
            self.record.error = str(error.get("message", error) if isinstance(error, dict) else error)[:300]
            return
        usage = chunk.get("usage")
        if usage:
            self._usage = read_usage(self.record, usage)
        for choice in (chunk.get("choices") or ())[:1]:
            if has_tokens(choice) or (self._silent_tokens and usage and self._usage > self._counted):
                self._tokens(now, max(1, self._usage - self._counted) if usage else 1)
            self.record.finish_reason = str(choice.get("finish_reason") or self.record.finish_reason)

    def _tokens(self, now: float, grown: int) -> None:
        self._counted += grown
        record = self.record
        if record.first_token_at is None:
            record.first_token_at = now
        record.chunk_at.append(now)
        record.chunk_tokens.append(grown)

    def close(self, now: float) -> None:
        """End the stream at `now`: set the outcome and the token count."""
        record = self.record
        record.ended_at = now
        record.output_tokens = max(self._usage, self._counted)
        record.outcome = self._outcome()

    def _outcome(self) -> Outcome:
        if self.record.error:
            return "stream_error"
        if not self._done and not self.record.finish_reason:
            return "cut"
        return "ok" if self.record.chunk_at else "empty"


def read_usage(record: RequestRecord, usage: dict[str, Any]) -> int:
    """Note the prompt tokens and the cached ones that a server reports, and return the output tokens."""
    if usage.get("prompt_tokens") is not None:
        record.input_tokens = int(usage["prompt_tokens"])
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        record.cached_tokens = int(cached)
    return int(usage.get("completion_tokens") or 0)


def has_tokens(choice: dict[str, Any]) -> bool:
    """Return whether a choice has content, reasoning or tool calls (chat delta or completion text)."""
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    return bool(choice.get("text") or delta.get("content") or thought or delta.get("tool_calls"))


def whole_answer(record: RequestRecord, body: dict[str, Any], now: float) -> None:
    """Fill a record from an answer that was not streamed; all tokens arrived at `now`."""
    record.ended_at = now
    record.output_tokens = tokens = read_usage(record, body.get("usage") or {})
    choices = body.get("choices") or [{}]
    record.finish_reason = str(choices[0].get("finish_reason") or "")
    record.outcome = "ok" if tokens else "empty"
    if tokens:
        record.first_token_at = now
        record.chunk_at, record.chunk_tokens = [now], [tokens]


TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
UNEXECUTED = frozenset({"batch_cancelled", "batch_expired"})
"""OpenAI's error codes of lines that were never executed."""
CANCEL_GRACE = 60.0
"""Maximum wait for the terminal state of a cancelled job, seconds."""


def job_lines(bodies: Iterable[dict[str, Any]], endpoint: str, job: int) -> bytes:
    """Return the input file: a line per body, with `custom_id` "<job>-<line>"."""
    return b"".join(
        orjson.dumps(
            {"custom_id": f"{job}-{index}", "method": "POST", "url": endpoint, "body": body},
            option=orjson.OPT_APPEND_NEWLINE,
        )
        for index, body in enumerate(bodies)
    )


async def expect(client: Client, method: str, path: str, **arguments: Any) -> dict[str, Any]:
    """Send a request and return the JSON object of the response. Raise ServerError for any other response."""
    status, data = await client.raw(method, path, **arguments)
    if status != 200:
        raise ServerError(f"{method} {path} returned {status}: {error_message(data)}")
    loaded = orjson.loads(data)
    if not isinstance(loaded, dict):
        raise ServerError(f"{method} {path} did not return a JSON object")
    return loaded


async def upload(client: Client, data: bytes, name: str) -> str:
    """Upload an input file and return its id."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", data, filename=name, content_type="application/jsonl")
    return str((await expect(client, "POST", "/v1/files", data=form))["id"])


async def create(client: Client, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
    """Create a batch over an uploaded file and return it."""
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
    return await expect(client, "POST", "/v1/batches", json=body)


class JobRun:
    """Runs a batch job. Setting `stop` cancels the job; results of finished lines are still downloaded."""

    def __init__(
        self, client: Client, record: JobRecord, *, now: Callable[[], float], poll_every: float, stop: asyncio.Event
    ) -> None:
        self.client = client
        self.record = record
        self._now = now
        self._poll_every = poll_every
        self._stop = stop

    async def run(self, data: bytes, endpoint: str, window: str) -> None:
        """Upload `data`, run the job to a terminal state and fill the record. Errors are stored in `record.error`."""
        try:
            file_id = await upload(self.client, data, f"job-{self.record.index}.jsonl")
            batch = await create(self.client, file_id, endpoint, window)
            self.record.created_at = self._now()
            self._note(batch)
            await self._collect(await self._watch(batch))
        except ServerError as error:
            self.record.error = str(error)

    def _note(self, batch: dict[str, Any]) -> None:
        counts = batch.get("request_counts") or {}
        usage = batch.get("usage") or {}
        tokens = usage.get("total_tokens")
        if not tokens and "input_tokens" in usage:
            tokens = int(usage["input_tokens"]) + int(usage.get("output_tokens") or 0)
        self.record.status = str(batch.get("status", "unknown"))
        completed, failed = int(counts.get("completed") or 0), int(counts.get("failed") or 0)
        self.record.polls.append(JobPoll(self._now(), self.record.status, completed, failed, tokens))

    async def _watch(self, batch: dict[str, Any]) -> dict[str, Any]:
        path, cancelled_at = f"/v1/batches/{batch['id']}", None
        while self.record.status not in TERMINAL:
            if cancelled_at is not None:
                await asyncio.sleep(min(self._poll_every, 0.25))
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._poll_every)
                    cancelled_at = self._now()
                    await self.client.call("POST", f"{path}/cancel")
            batch = await expect(self.client, "GET", path)
            self._note(batch)
            if cancelled_at is not None and self._now() - cancelled_at > CANCEL_GRACE:
                self.record.error = f"still {self.record.status} {CANCEL_GRACE:g} s after cancel"
                break
        return batch

    async def _collect(self, batch: dict[str, Any]) -> None:
        seen: Counter[str] = Counter()
        record = self.record
        for kind in ("output_file_id", "error_file_id"):
            if not batch.get(kind):
                continue
            status, data = await self.client.raw("GET", f"/v1/files/{batch[kind]}/content")
            if status != 200:
                raise ServerError(f"cannot download {kind}: {status} {error_message(data)}")
            rows = [orjson.loads(line) for line in data.splitlines() if line.strip()]
            seen.update(row["custom_id"] for row in rows)
            if kind == "output_file_id":
                record.output_lines = len(rows)
                self._count_tokens(rows)
            else:
                record.unexecuted = sum((row.get("error") or {}).get("code") in UNEXECUTED for row in rows)
                record.error_lines = len(rows) - record.unexecuted
        record.duplicated = seen.total() - len(seen)
        # Only a completed job must return every line.
        record.missing = record.lines - len(seen) if record.status == "completed" else 0

    def _count_tokens(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            usage = ((row.get("response") or {}).get("body") or {}).get("usage") or {}
            self.record.input_tokens += int(usage.get("prompt_tokens") or 0)
            self.record.output_tokens += int(usage.get("completion_tokens") or 0)
