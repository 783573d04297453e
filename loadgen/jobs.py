"""Execution of a batch job over /v1/files and /v1/batches: upload, create, poll, download and check.

A `JobRecord` collects the polls, the result files, and whether every line was returned exactly once.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import orjson

from loadgen import ServerError
from loadgen.client import Client, error_message
from loadgen.records import JobPoll, JobRecord

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
            batch = await self._create(data, endpoint, window)
            batch = await self._watch(batch)
            await self._collect(batch)
        except ServerError as error:
            self.record.error = str(error)

    async def _create(self, data: bytes, endpoint: str, window: str) -> dict[str, Any]:
        file_id = await upload(self.client, data, f"job-{self.record.index}.jsonl")
        batch = await create(self.client, file_id, endpoint, window)
        self.record.created_at = self._now()
        self._note(batch)
        return batch

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
            if self._stop.is_set() and cancelled_at is None:
                cancelled_at = self._now()
                await self.client.call("POST", f"{path}/cancel")
            await self._pause(cancelled=cancelled_at is not None)
            batch = await expect(self.client, "GET", path)
            self._note(batch)
            if cancelled_at is not None and self._now() - cancelled_at > CANCEL_GRACE:
                self.record.error = f"still {self.record.status} {CANCEL_GRACE:g} s after cancel"
                break
        return batch

    async def _pause(self, *, cancelled: bool) -> None:
        if cancelled:
            await asyncio.sleep(min(self._poll_every, 0.25))
            return
        try:
            await asyncio.wait_for(self._stop.wait(), self._poll_every)
        except TimeoutError:
            return

    async def _collect(self, batch: dict[str, Any]) -> None:
        seen: dict[str, int] = {}
        record = self.record
        for kind in ("output_file_id", "error_file_id"):
            if not batch.get(kind):
                continue
            status, data = await self.client.raw("GET", f"/v1/files/{batch[kind]}/content")
            if status != 200:
                raise ServerError(f"cannot download {kind}: {status} {error_message(data)}")
            rows = [orjson.loads(line) for line in data.splitlines() if line.strip()]
            for row in rows:
                seen[row["custom_id"]] = seen.get(row["custom_id"], 0) + 1
            if kind == "output_file_id":
                record.output_lines = len(rows)
                self._count_tokens(rows)
            else:
                record.unexecuted = sum((row.get("error") or {}).get("code") in UNEXECUTED for row in rows)
                record.error_lines = len(rows) - record.unexecuted
        record.duplicated = sum(count - 1 for count in seen.values())
        # Only a completed job must return every line.
        record.missing = record.lines - len(seen) if record.status == "completed" else 0

    def _count_tokens(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            usage = ((row.get("response") or {}).get("body") or {}).get("usage") or {}
            self.record.input_tokens += int(usage.get("prompt_tokens") or 0)
            self.record.output_tokens += int(usage.get("completion_tokens") or 0)
