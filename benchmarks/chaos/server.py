"""A server of the demo model for `chaos`: run it, ask it, observe it."""

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.child import VARIABLE
from benchmarks.live import read_page, serving
from loadgen.client import Client
from loadgen.plan import Target

FLAGS = ("--slo", "ttft_p99=120s", "--max-queue-time", "none", "--dtype", "float32", "--profile-seconds", "5")
LAG, OWN_LAG = "tidemill_loop_lag_seconds_bucket", "tidemill_loop_own_lag_seconds_bucket"
"""Lateness of the event loop; the second one without waits for a core, which a busy machine causes."""


@dataclass(frozen=True, slots=True)
class Server:
    """`tidemill serve` with its log, its state, and `chaos`, through which faults are requested, in `folder`. `pid` is
    the gateway's process. Engine deaths are unlimited."""

    url: str
    pid: int
    folder: Path

    def client(self, key: str = "") -> Client:
        """Return a client with any number of connections and hours of patience."""
        return Client(Target(self.url, api_key=key, timeout=6 * 3600.0), time.monotonic)

    def resident(self) -> int:
        """Return the resident bytes of the gateway; 0 if it has ended."""
        try:
            rows = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return 0
        return sum(1024 * int(row.split()[1]) for row in rows if row.startswith("VmRSS"))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextmanager
def start(*flags: str, keys: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run `tidemill serve` until the end of the block. `keys`: the key file's words for each key. Raises SystemExit
    when it does not come up, after printing the end of its log."""
    with tempfile.TemporaryDirectory(prefix="tidemill-chaos-") as name:
        folder = Path(name)
        (folder / "chaos").mkdir()
        if keys:
            flags += ("--api-key-file", str(_key_file(folder, keys)))

        def command(port: int) -> list[str]:
            own = [sys.executable, "-m", "benchmarks.chaos.serve", "serve", "--port", str(port)]
            return [*own, "--state-dir", str(folder / "state"), *FLAGS, *flags]

        environment = {**os.environ, "XDG_CACHE_HOME": name, VARIABLE: str(folder / "chaos")}
        log = folder / "log"
        try:
            with log.open("wb") as out, serving(command, environment, out=out) as served:
                yield Server(served.url, served.group, folder)
        except SystemExit:
            print(log.read_text(errors="replace")[-4000:])
            raise


def _key_file(folder: Path, keys: Mapping[str, str]) -> Path:
    path = folder / "keys"
    path.touch(0o600)
    path.write_text("".join(f"{hashlib.sha256(key.encode()).hexdigest()} {words}\n" for key, words in keys.items()))
    return path


def figure(page: str, name: str) -> float:
    """Sum of the samples of /metrics whose name and labels begin with `name`."""
    return sum(float(row.rsplit(" ", 1)[1]) for row in page.splitlines() if row.startswith(name))


async def read_lag(client: Client) -> tuple[dict[float, float], dict[float, float]]:
    """Count, by bound, how often the event loop was at most so late; the second one without waits for a core."""
    page = (await read_page(client)).splitlines()
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
