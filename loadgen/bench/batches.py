"""Memory of files and batches: a 200 MB upload, then many queued batches, beside the server's resident memory.

    python -m loadgen.bench.batches [--batches 1000] [--lines 1000]

The server runs the random model of the other benchmarks. Memory is what the server says of itself in /metrics.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import aiohttp

from loadgen.bench.batch_job import JobClient, job_lines, read_metric
from loadgen.bench.machine import describe
from loadgen.bench.serving import make_model_folder, server

UPLOAD_LINES = 50_000
PADDING = "x" * 4000
WARM_LINES = 100
"""Of the first batch, before memory is looked at: by then the engine has written to all of its cache, which the system
hands out page by page, and to the buffers of its largest steps. That memory is the engine's, not the queue's."""
QUEUE_LINE = {"model": "model", "prompt": "one two three", "max_tokens": 64, "ignore_eos": True}


class Watch:
    """Resident memory of the server in MB, and the highest seen."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.peak = 0.0

    async def look(self) -> float:
        async with self._session.get(f"{self._url}/metrics") as response:
            resident = read_metric(await response.text(), "process_resident_memory_bytes") / 1e6
        self.peak = max(self.peak, resident)
        return resident

    async def until_ended(self, job: JobClient, lines: int) -> None:
        """Until so many lines of a job have ended, looking at the memory now and then."""
        counts = job.batch["request_counts"]
        while counts["completed"] + counts["failed"] < lines:
            await self.look()
            await asyncio.sleep(0.2)
            counts = (await job.look())["request_counts"]

    async def until_validated(self, jobs: list[JobClient]) -> None:
        """Until every job has left `validating`, looking at the memory now and then."""
        for job in jobs:
            while (await job.look())["status"] == "validating":
                await self.look()
                await asyncio.sleep(0.1)
        await self.look()


async def upload(session: aiohttp.ClientSession, url: str, watch: Watch) -> None:
    body = {"model": "model", "prompt": "x", "max_tokens": 1, "user": PADDING}
    content = job_lines([body] * UPLOAD_LINES)
    before, begin = await watch.look(), time.perf_counter()
    job = JobClient(session, url)
    await job.submit(content)
    uploaded, after = time.perf_counter(), await watch.look()
    await watch.until_validated([job])
    validated = time.perf_counter()
    await job.cancel()
    print(
        f"upload of {UPLOAD_LINES:,} lines, {len(content) / 1e6:.0f} MB: {uploaded - begin:.1f} s, validation "
        f"{validated - uploaded:.1f} s; resident {before:.0f} MB before, {after:.0f} after the upload, "
        f"highest {watch.peak:.0f}, {await watch.look():.0f} after all",
        flush=True,
    )


async def queue(session: aiohttp.ClientSession, url: str, watch: Watch, batches: int, lines: int) -> None:
    content = job_lines([QUEUE_LINE] * lines)
    first = JobClient(session, url)
    await first.submit(content)
    await watch.until_ended(first, WARM_LINES)
    watch.peak, jobs = 0.0, [first]
    before, begin = await watch.look(), time.perf_counter()
    for _ in range(batches - 1):
        jobs.append(JobClient(session, url))
        await jobs[-1].create(first.batch["input_file_id"])
    created, after = time.perf_counter() - begin, await watch.look()
    await watch.until_validated(jobs)
    print(
        f"{batches:,} batches of {lines:,} lines: created in {created:.1f} s, all validated after "
        f"{time.perf_counter() - begin:.1f} s; resident {before:.0f} MB with one that runs, {after:.0f} when created, "
        f"highest {watch.peak:.0f}, {await watch.look():.0f} when validated",
        flush=True,
    )


async def measure(url: str, batches: int, lines: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await upload(session, url, Watch(session, url))
        await queue(session, url, Watch(session, url), batches, lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench.batches", description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=1000, help="lines of each batch in the queue")
    args = parser.parse_args(argv)
    print(f"batches: {describe()}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        flags = ("--profile-dir", name, "--profile-seconds", "0", "--state-dir", str(folder / "state"))
        with server(folder, 1, *flags, "--num-gpu-blocks-override", "400") as url:
            asyncio.run(measure(url, args.batches, args.lines))


if __name__ == "__main__":
    main()
