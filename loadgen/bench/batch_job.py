"""The offline side of one arm as a real batch job: a JSONL file through /v1/files, a job through /v1/batches.

What it brings is read from the server's count of offline tokens (a prompt with its first token, then each token), as
the clients of the other arms count; at the end the job's own rows must account for every line. Also waits for a server
to fall silent, so that nothing of one arm reaches the next.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from loadgen.bench.live import read_metric

POLL_SECONDS = 0.5
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


def job_lines(bodies: list[dict[str, Any]]) -> bytes:
    """One JSONL document of completion requests."""
    envelopes = (
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    )
    return b"".join(orjson.dumps(envelope, option=orjson.OPT_APPEND_NEWLINE) for envelope in envelopes)


class JobClient:
    """Submits one job, counts its tokens, cancels it. Raises SystemExit when the server refuses or the job fails."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._tokens = 0.0
        self.batch: dict[str, Any] = {}

    async def submit(self, content: bytes) -> None:
        """Upload and create; validation and the first lines go on behind it."""
        self._tokens = await self._offline_tokens()
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", content, filename="job.jsonl", content_type="application/jsonl")
        await self.create((await self._call("POST", "/v1/files", data=form))["id"])

    async def create(self, file_id: str) -> None:
        """A job over a file that is there."""
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        self.batch = await self._call("POST", "/v1/batches", json=body)

    async def follow(self, deliver: Callable[[int], None]) -> None:
        """Tell the offline tokens since the last look, until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            total = await self._offline_tokens()
            deliver(round(total - self._tokens))
            self._tokens = total

    async def _offline_tokens(self) -> float:
        async with self._session.get(f"{self._url}/metrics") as response:
            return read_metric(await response.text(), "tidemill_offline_tokens_total")

    async def cancel(self) -> None:
        """Cancel and wait for the end: every line has its row then. A job that has ended before was too short."""
        if (await self.look())["status"] in ENDED:
            raise SystemExit(f"the batch job is {self.batch['status']} before the arm's end; it needs more lines")
        await self._call("POST", f"/v1/batches/{self.batch['id']}/cancel")
        while (await self.look())["status"] not in ENDED:  # noqa: ASYNC110 - another process knows
            await asyncio.sleep(POLL_SECONDS)
        counts = self.batch["request_counts"]
        if counts["completed"] + counts["failed"] != counts["total"]:
            raise SystemExit(f"lines of the batch job are missing: {counts}")

    async def look(self) -> dict[str, Any]:
        """The batch as it is now."""
        self.batch = await self._call("GET", f"/v1/batches/{self.batch['id']}")
        return self.batch

    async def _call(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        headers = {} if "data" in body else {"content-type": "application/json"}
        async with self._session.request(method, self._url + path, headers=headers, **body) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise SystemExit(f"{method} {path}: {answer}")
            return answer
