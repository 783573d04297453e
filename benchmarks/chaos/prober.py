"""Ask a server for its health again and again, in a process that does nothing else; print how long it took, as JSON.

`python -m benchmarks.chaos.prober URL PATH SECONDS` ends with its standard input.
"""

import asyncio
import http.client
import json
import select
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

REST = 0.01


@dataclass(slots=True)
class Probes:
    """`waits`: seconds of each answer; `late`: the most seconds that the prober itself woke up late, for want of a
    core; `failed`: requests that had no answer or another status than 200."""

    waits: list[float] = field(default_factory=list)
    late: float = 0.0
    failed: int = 0

    def worst(self) -> float:
        return max(self.waits, default=0.0)


@asynccontextmanager
async def probing(url: str, path: str = "/health", seconds: float = 60.0) -> AsyncIterator[Probes]:
    """Probe during the block; the figures are there after it. `seconds`: the longest that an answer may take."""
    command = [sys.executable, "-m", "benchmarks.chaos.prober", url, path, str(seconds)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    probes = Probes()
    try:
        yield probes
    finally:
        output, _ = await process.communicate(b"end")
        found = json.loads(output)
        probes.waits, probes.late, probes.failed = found["waits"], found["late"], found["failed"]


def main(url: str, path: str, seconds: float) -> None:
    waits, late, failed = [], 0.0, 0
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=seconds)
    rested = time.monotonic()
    while not select.select([sys.stdin], [], [], REST)[0]:
        start = time.monotonic()
        late = max(late, start - rested - REST)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            failed += response.status != 200
        except (OSError, http.client.HTTPException):
            failed += 1
            connection.close()
        rested = time.monotonic()
        waits.append(rested - start)
    print(json.dumps({"waits": waits, "late": late, "failed": failed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
