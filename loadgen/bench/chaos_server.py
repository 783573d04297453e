"""A server of the demo model for `chaos`: how it is started, and what can be seen of it from outside."""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from engine.process.sabotage import VARIABLE

FLAGS = ("--slo", "ttft_p99=120s", "--max-queue-time", "none", "--dtype", "float32", "--profile-seconds", "5")
POLICY = ("--max-engine-deaths", "1000000", "--max-restart-delay", "0")
LAG, OWN_LAG = "tidemill_loop_lag_seconds_bucket", "tidemill_loop_own_lag_seconds_bucket"
"""Of the event loop; the second one without its waits for a core, which any process of a busy machine has."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs. `folder` holds its state, its log, and `chaos`, where faults are asked for."""

    url: str
    pid: int
    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def chaos(self) -> Path:
        return self.folder / "chaos"

    @asynccontextmanager
    async def session(self, key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        """As many connections as one wants, without a time limit."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        no_limit, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=no_limit, connector=connector, headers=headers) as session:
            yield session

    def resident(self) -> int:
        """Bytes of the server process itself."""
        (row,) = [row for row in Path(f"/proc/{self.pid}/status").read_text().splitlines() if row.startswith("VmRSS")]
        return 1024 * int(row.split()[1])


@contextmanager
def start(*flags: str, faults: bool = True, keys: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`tidemill serve` of the demo model until the end of the block. `faults`: on demand; `keys`: what the key file
    says of each key."""
    with tempfile.TemporaryDirectory(prefix="tidemill-chaos-") as name:
        folder = Path(name)
        (folder / "chaos").mkdir()
        command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--state-dir", str(folder / "state")]
        command += ["--profile-dir", str(folder), *FLAGS, *POLICY, *flags]
        if keys:
            command += ["--api-key-file", str(_key_file(folder, keys))]
        environment = {**os.environ, VARIABLE: str(folder / "chaos")} if faults else dict(os.environ)
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                yield Server(_address(process, log), process.pid, folder)
            finally:
                process.terminate()
                try:
                    process.wait(60)
                finally:
                    process.kill()


def _key_file(folder: Path, keys: Mapping[str, str]) -> Path:
    path = folder / "keys"
    path.touch(0o600)
    path.write_text("".join(f"{hashlib.sha256(key.encode()).hexdigest()} {words}\n" for key, words in keys.items()))
    return path


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if "listening on http://" in line:
                return line.rsplit(" ", 1)[1].rstrip("/")
        time.sleep(0.1)
    raise SystemExit(log.read_text()[-4000:])


async def read_metrics(session: aiohttp.ClientSession) -> str:
    async with session.get("/metrics") as response:
        return await response.text()


async def read_lag(session: aiohttp.ClientSession) -> tuple[dict[float, float], dict[float, float]]:
    """How often the event loop was at most so late, and how often so but for waiting for a core."""
    page = (await read_metrics(session)).splitlines()
    return _buckets(page, LAG), _buckets(page, OWN_LAG)


def _buckets(page: Sequence[str], name: str) -> dict[float, float]:
    rows = [row for row in page if row.startswith(name)]
    return {float(row.split('le="')[1].split('"')[0]): float(row.rsplit(" ", 1)[1]) for row in rows}


def lag_within(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float:
    """The bound that this share of the looks between the two kept; a bucket's upper end."""
    total = after[float("inf")] - before[float("inf")]
    return min(bound for bound in after if after[bound] - before[bound] >= share * total)


def endings(page: str) -> Sequence[str]:
    """How often engine processes ended by each cause, as /metrics says it."""
    name = "tidemill_engine_restarts_total"
    return [row[len(name) :] for row in page.splitlines() if row.startswith(name + "{") and not row.endswith(" 0.0")]
