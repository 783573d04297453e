"""Ask a server for its health again and again, in a process that does nothing else; print how long it took, as JSON.

`python -m benchmarks.chaos.prober URL PATH SECONDS PID` ends with its standard input. PID is the process whose main
thread is the server's event loop.
"""

import asyncio
import http.client
import json
import os
import select
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

REST = 0.01


@dataclass(slots=True)
class Probes:
    """`waits`: seconds of each answer; `own`: the same without the time that the server's event loop waited for a CPU
    core; `late`: the most seconds that the prober itself woke up late, for want of a core; `failed`: requests that had
    no answer or another status than 200."""

    waits: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    late: float = 0.0
    failed: int = 0

    def worst(self) -> float:
        return max(self.waits, default=0.0)

    def worst_own(self) -> float:
        return max(self.own, default=0.0)


@asynccontextmanager
async def probing(url: str, pid: int = 0, path: str = "/health", seconds: float = 60.0) -> AsyncIterator[Probes]:
    """Probe during the block; the figures are there after it. `pid`: the server's process (default: this one);
    `seconds`: the longest that an answer may take."""
    command = [sys.executable, "-m", "benchmarks.chaos.prober", url, path, str(seconds), str(pid or os.getpid())]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    probes = Probes()
    try:
        yield probes
    finally:
        output, _ = await process.communicate(b"end")
        found = json.loads(output)
        probes.waits, probes.own, probes.late, probes.failed = (
            found[name] for name in ("waits", "own", "late", "failed")
        )


def _core_wait(pid: int) -> float:
    """Return the seconds that the process' main thread has waited for a core since its start; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def main(url: str, path: str, seconds: float, pid: int) -> None:
    waits, own, late, failed = [], [], 0.0, 0
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=seconds)
    rested = time.monotonic()
    while not select.select([sys.stdin], [], [], REST)[0]:
        start, waited = time.monotonic(), _core_wait(pid)
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
        own.append(max(0.0, waits[-1] - max(0.0, _core_wait(pid) - waited)))
    print(json.dumps({"waits": waits, "own": own, "late": late, "failed": failed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
