"""A server of the demo model for `chaos`: start it, kill it, start it again on the same state, observe it."""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp

from benchmarks.chaos.child import VARIABLE

FLAGS = ("--slo", "ttft_p99=120s", "--max-queue-time", "none", "--dtype", "float32", "--profile-seconds", "5")
LAG, OWN_LAG = "tidemill_loop_lag_seconds_bucket", "tidemill_loop_own_lag_seconds_bucket"
"""Lateness of the event loop; the second one without waits for a core, which a busy machine causes."""
START_SECONDS, STOP_SECONDS = 120.0, 60.0


class StartError(Exception):
    """The server did not start; the message is the end of its log."""


class Server:
    """`tidemill serve` in `folder`, which holds its log, its state, and `chaos`, through which faults are
    requested. Engine deaths are unlimited."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.state, self.chaos = folder, folder / "state", folder / "chaos"
        self.url = ""
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._logs = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """Exit status of the process, or None while it runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def log(self) -> Path:
        """Output of the process that was started last."""
        return self.folder / f"log-{self._logs}"

    def begin(self) -> None:
        """Start the process and wait until it listens. Raises StartError."""
        self.chaos.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.chaos.serve", "serve", "--port", str(self._port)]
        command += ["--state-dir", str(self.state), *FLAGS, *self._flags]
        self._logs += 1
        with self.log.open("wb") as output:
            own = {"XDG_CACHE_HOME": str(self.folder), VARIABLE: str(self.chaos)}
            environment = {**os.environ, **own}
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self.url = self._address()
        self._port = int(self.url.rsplit(":", 1)[1])

    def _address(self) -> str:
        until = time.monotonic() + START_SECONDS
        while self.exit_code is None and time.monotonic() < until:
            for line in self.log.read_text(errors="replace").splitlines():
                if "listening on http://" in line:
                    return line.rsplit(" ", 1)[1].rstrip("/")
            time.sleep(0.05)
        text = self.log.read_text(errors="replace")[-4000:]
        raise StartError(text if self.exit_code is not None else f"{text}\nthe server neither listens nor ends")

    def kill(self) -> None:
        """Send SIGKILL to the gateway and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """Send SIGTERM; kill the process if it does not stop in time."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self.kill()

    @asynccontextmanager
    async def session(
        self, key: str | None = None, seconds: float | None = None
    ) -> AsyncIterator[aiohttp.ClientSession]:
        """Open a client with any number of connections; `seconds`: the longest that one request may take."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limit, connector = aiohttp.ClientTimeout(total=seconds), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=limit, connector=connector, headers=headers) as session:
            yield session

    def resident(self) -> int:
        """Bytes of the gateway process itself."""
        return _memory(self.pid)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _memory(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it has ended."""
    rows = [row for row in _read(f"/proc/{pid}/status").decode().splitlines() if row.startswith("VmRSS")]
    return 1024 * int(rows[0].split()[1]) if rows else 0


@contextmanager
def start(*flags: str, keys: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run `tidemill serve` until the end of the block. `keys`: the key file's words for each key."""
    with tempfile.TemporaryDirectory(prefix="tidemill-chaos-") as name:
        folder = Path(name)
        if keys:
            flags += ("--api-key-file", str(_key_file(folder, keys)))
        server = Server(folder, *flags)
        try:
            server.begin()
            yield server
        finally:
            server.end()


def _key_file(folder: Path, keys: Mapping[str, str]) -> Path:
    path = folder / "keys"
    path.touch(0o600)
    path.write_text("".join(f"{hashlib.sha256(key.encode()).hexdigest()} {words}\n" for key, words in keys.items()))
    return path


async def read_metrics(session: aiohttp.ClientSession) -> str:
    async with session.get("/metrics") as response:
        return await response.text()


def figure(page: str, name: str) -> float:
    """Sum of the samples of /metrics whose name and labels begin with `name`."""
    return sum(float(row.rsplit(" ", 1)[1]) for row in page.splitlines() if row.startswith(name))


async def read_lag(session: aiohttp.ClientSession) -> tuple[dict[float, float], dict[float, float]]:
    """Count, by bound, how often the event loop was at most so late; the second one without waits for a core."""
    page = (await read_metrics(session)).splitlines()
    return _buckets(page, LAG), _buckets(page, OWN_LAG)


def _buckets(page: Sequence[str], name: str) -> dict[float, float]:
    rows = [row for row in page if row.startswith(name)]
    return {float(row.split('le="')[1].split('"')[0]): float(row.rsplit(" ", 1)[1]) for row in rows}


def lag_within(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float:
    """Return the bound that this share of the looks between the two kept; a bucket's upper end."""
    total = after[float("inf")] - before[float("inf")]
    return min(bound for bound in after if after[bound] - before[bound] >= share * total)


def endings(page: str) -> Sequence[str]:
    """List how often engine processes ended by each cause, from /metrics."""
    name = "tidemill_engine_restarts_total"
    return [row[len(name) :] for row in page.splitlines() if row.startswith(name + "{") and not row.endswith(" 0.0")]
