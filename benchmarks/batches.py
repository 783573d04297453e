"""Memory of files and batches: a 200 MB upload, then many queued batches, beside the server's resident memory.

    python -m benchmarks.batches [--batches 1000] [--lines 1000]

The server runs the random model of the other benchmarks. Memory is what the server says of itself in /metrics.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.live import make_model_folder, read_metric, read_page, server
from benchmarks.machine import describe
from loadgen.client import Client
from loadgen.jobs import TERMINAL, create, expect, job_lines, upload
from loadgen.target import Target

ENDPOINT = "/v1/completions"

UPLOAD_LINES = 50_000
PADDING = "x" * 4000
WARM_LINES = 100
"""Of the first batch, before memory is looked at: by then the engine has written to all of its cache, which the system
hands out page by page, and to the buffers of its largest steps. That memory is the engine's, not the queue's."""
QUEUE_LINE = {"model": "model", "prompt": "one two three", "max_tokens": 64, "ignore_eos": True}


class Server:
    """The server's side: its resident memory in MB with the highest seen, and its jobs by id."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.peak = 0.0

    async def memory(self) -> float:
        resident = read_metric(await read_page(self.client), "process_resident_memory_bytes") / 1e6
        self.peak = max(self.peak, resident)
        return resident

    async def create(self, file_id: str) -> str:
        return str((await create(self.client, file_id, ENDPOINT, "24h"))["id"])

    async def look(self, job: str) -> dict[str, Any]:
        return await expect(self.client, "GET", f"/v1/batches/{job}")

    async def until_ended(self, job: str, lines: int) -> None:
        """Until so many lines of a job have ended, looking at the memory now and then."""
        while (counts := (await self.look(job))["request_counts"])["completed"] + counts["failed"] < lines:
            await self.memory()
            await asyncio.sleep(0.2)

    async def until_validated(self, jobs: list[str]) -> None:
        """Until every job has left `validating`, looking at the memory now and then."""
        for job in jobs:
            while (await self.look(job))["status"] == "validating":
                await self.memory()
                await asyncio.sleep(0.1)
        await self.memory()

    async def cancel(self, job: str) -> None:
        """Cancel and wait for the end: every line has its row then."""
        await expect(self.client, "POST", f"/v1/batches/{job}/cancel")
        while (batch := await self.look(job))["status"] not in TERMINAL:  # noqa: ASYNC110 - another process knows
            await asyncio.sleep(0.5)
        counts = batch["request_counts"]
        if counts["completed"] + counts["failed"] != counts["total"]:
            raise SystemExit(f"lines of the batch job are missing: {counts}")


async def measure_upload(server: Server) -> None:
    body = {"model": "model", "prompt": "x", "max_tokens": 1, "user": PADDING}
    content = job_lines([body] * UPLOAD_LINES, ENDPOINT, 0)
    before, begin = await server.memory(), time.perf_counter()
    job = await server.create(await upload(server.client, content, "job.jsonl"))
    uploaded, after = time.perf_counter(), await server.memory()
    await server.until_validated([job])
    validated = time.perf_counter()
    await server.cancel(job)
    print(
        f"upload of {UPLOAD_LINES:,} lines, {len(content) / 1e6:.0f} MB: {uploaded - begin:.1f} s, validation "
        f"{validated - uploaded:.1f} s; resident {before:.0f} MB before, {after:.0f} after the upload, "
        f"highest {server.peak:.0f}, {await server.memory():.0f} after all",
        flush=True,
    )


async def measure_queue(server: Server, batches: int, lines: int) -> None:
    file_id = await upload(server.client, job_lines([QUEUE_LINE] * lines, ENDPOINT, 0), "queue.jsonl")
    jobs = [await server.create(file_id)]
    await server.until_ended(jobs[0], min(WARM_LINES, lines))
    server.peak = 0.0
    before, begin = await server.memory(), time.perf_counter()
    jobs += [await server.create(file_id) for _ in range(batches - 1)]
    created, after = time.perf_counter() - begin, await server.memory()
    await server.until_validated(jobs)
    print(
        f"{batches:,} batches of {lines:,} lines: created in {created:.1f} s, all validated after "
        f"{time.perf_counter() - begin:.1f} s; resident {before:.0f} MB with one that runs, {after:.0f} when created, "
        f"highest {server.peak:.0f}, {await server.memory():.0f} when validated",
        flush=True,
    )


async def measure(url: str, batches: int, lines: int) -> None:
    async with Client(Target(url), time.monotonic) as client:
        await measure_upload(Server(client))
        await measure_queue(Server(client), batches, lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=1000, help="lines of each batch in the queue")
    args = parser.parse_args(argv)
    print(f"batches: {describe()}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        flags = ("--profile-seconds", "0", "--state-dir", str(folder / "state"))
        with server(folder, 1, *flags, "--num-gpu-blocks-override", "400") as url:
            asyncio.run(measure(url, args.batches, args.lines))


if __name__ == "__main__":
    main()
