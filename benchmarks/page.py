"""What open pages cost the server: its processor time with some that follow the figures, and with none, in alternation.

A page is what a browser keeps open: `/dashboard/history` once, then the stream `/dashboard/events`. The server is idle,
with the packaged model; the time is that of all its processes, from /proc, and the clients' is not in it.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import httpx

from benchmarks.live import Served, demo_server
from benchmarks.machine import describe


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time: seconds, processor seconds of the server in it, snapshots that each page got (the fewest)."""

    seconds: float
    busy: float
    snapshots: int

    @property
    def share(self) -> float:
        """Of one core."""
        return self.busy / self.seconds


async def follow(client: httpx.AsyncClient, counts: list[int], number: int) -> None:
    """One page until it is cancelled; counts its snapshots."""
    (await client.get("/dashboard/history")).raise_for_status()
    async with client.stream("GET", "/dashboard/events") as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            counts[number] += line.startswith("data:")


async def watch(served: Served, pages: int, seconds: float) -> Window:
    """A window with so many pages open. Raises RuntimeError when one of them ends."""
    counts = [0] * pages
    async with httpx.AsyncClient(base_url=served.url, timeout=None, limits=httpx.Limits(), trust_env=False) as client:
        open_pages = [asyncio.create_task(follow(client, counts, number)) for number in range(pages)]
        await asyncio.sleep(2)  # what opening them costs is not what keeping them open does
        began, busy, counts[:] = time.monotonic(), served.cpu_seconds(), [0] * pages
        await asyncio.sleep(seconds)
        window = Window(time.monotonic() - began, served.cpu_seconds() - busy, min(counts, default=0))
        ended = [page for page in open_pages if page.done()]
        for page in open_pages:
            page.cancel()
            with suppress(asyncio.CancelledError):
                await page
    if ended:
        raise RuntimeError("a page was closed by the server")
    return window


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks page", description=__doc__)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=float, default=0.01, help="of a core: exits 1 where the pages take more")
    options = parser.parse_args(argv)
    print(f"{options.pages} open pages, windows of {options.seconds:g} s; {describe()}", flush=True)
    print(f"{'pages':>6} {'% of a core':>12} {'snapshots':>10}")
    windows: dict[int, list[Window]] = {0: [], options.pages: []}
    with tempfile.TemporaryDirectory() as name, demo_server(name) as served:
        for _ in range(options.rounds):
            for pages, found in windows.items():
                found.append(asyncio.run(watch(served, pages, options.seconds)))
                print(f"{pages:6d} {found[-1].share:12.2%} {found[-1].snapshots:10d}", flush=True)
    pairs = [with_pages.share - none.share for none, with_pages in zip(*windows.values(), strict=True)]
    print(f"the pages take {', '.join(f'{pair:.2%}' for pair in pairs)} of a core; median {median(pairs):.2%}")
    sys.exit(median(pairs) > options.most)


if __name__ == "__main__":
    main()
