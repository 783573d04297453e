"""Shared parts of the live benchmarks: a model of random weights, `tidemill serve` as a user would start it, runs of
the load generator against it, and its page of metrics."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.apart import run_here
from loadgen.client import Client
from loadgen.plan import Plan, Target
from loadgen.records import Records, RequestRecord

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""A Llama of 134.5 M parameters."""
PACKAGED = Path(__file__).resolve().parents[1] / "engine" / "models" / "demo" / "weights"
"""Where the tokenizer comes from."""
READY_SECONDS = 600.0
ANSWER_SECONDS = 600.0
QUIET_SECONDS, QUIET_POLLS = 0.5, 3
LOOK_SECONDS, MOST_LOOKS, RESTING = 0.5, 20, 0.04
"""How long a look at servers that should rest takes, how often at most, and how much of a core they may have then."""
PAGE_SECONDS, LOOKS, GRID_SECONDS = 5.0, 20, 0.5
"""Seconds between two looks at the page of metrics, at most; looks in a run, at least; resolution of growth.

A page takes the server about 15 ms of processor time on one core. On two cores the step in progress waits for it.
"""
OPEN = ("tidemill_requests_running", "tidemill_requests_waiting")
"""The server's metrics of open requests."""


def make_model_folder(folder: Path, config: Mapping[str, Any] = CONFIG) -> None:
    """A model's configuration with the packaged tokenizer; the server makes up the weights."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PACKAGED / name, folder / name)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs: its address, and the id of its process and of the group of all its processes."""

    url: str
    group: int

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far."""
        total = 0
        for path in (each / "stat" for each in Path("/proc").glob("[0-9]*")):
            with suppress(OSError):
                fields = path.read_text().rpartition(") ")[2].split()
                total += int(fields[11]) + int(fields[12]) if int(fields[2]) == self.group else 0
        return total / os.sysconf("SC_CLK_TCK")

    async def answers(self, plan: Plan) -> list[RequestRecord]:
        """What came of a plan's requests."""
        return await over_http(plan)


@contextmanager
def serving(
    command: Callable[[int], list[str]],
    environment: Mapping[str, str],
    ready: str = "/ready",
    *,
    folder: Path | None = None,
    out: IO[bytes] | None = None,
) -> Iterator[Served]:
    """A server on a free port until the end of the block, started in `folder`; `ready` answers 200 when it is. Raises
    SystemExit when it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        command(port), env=environment, cwd=folder, stdout=out, stderr=out and subprocess.STDOUT, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url + ready, process)
        yield Served(url, process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes left behind
        process.wait()


@contextmanager
def server(folder: Path, threads: int, *flags: str, cache: Path | None = None) -> Iterator[str]:
    """`tidemill serve` on a free port with further flags; yields its base URL. `threads` 0: its own choice.
    `cache`: the folder of its profiles (default: `folder`)."""

    def command(port: int) -> list[str]:
        own = [sys.executable, "-m", "gateway", "serve", str(folder), "--load-format", "dummy", "--port", str(port)]
        return [*own, "--served-model-name", "model", "--no-enable-prefix-caching", *flags]

    environment = {**os.environ, "XDG_CACHE_HOME": str(cache or folder)}
    with serving(command, environment | ({"OMP_NUM_THREADS": str(threads)} if threads else {})) as served:
        yield served.url


@contextmanager
def demo_server(folder: str, *flags: str) -> Iterator[Served]:
    """`tidemill serve` with the packaged model on a free port, with its state and profiles in `folder`."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "gateway", "serve", "--port", str(port), "--state-dir", folder, *flags]

    with serving(command, {**os.environ, "XDG_CACHE_HOME": folder}) as served:
        yield served


def _wait_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit("the server did not start")
        with suppress(OSError), urllib.request.urlopen(address):  # an answer other than 200 is an OSError
            return
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready within {READY_SECONDS:g} s")


def plan_for(url: str, seed: int, **settings: Any) -> Plan:
    """A plan against such a server: completions of made-up token ids (or from another `source`), forced lengths, every
    token counted when it came, also one without text of its own (random weights give pieces of characters)."""
    target = Target(url, model="model", silent_tokens=True)
    return Plan(target, seed=seed, salt=seed, **settings)


@dataclass(slots=True)
class Watch:
    """Metrics of the server, looked at every `every` seconds of a run: (seconds since its start, sum of the labels)."""

    names: tuple[str, ...]
    every: float
    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    async def follow(self, url: str, start: float) -> None:
        """Look until cancelled, and once more then."""
        async with Client(Target(url), time.monotonic) as client:
            try:
                while True:
                    await self._look(client, start)
                    await asyncio.sleep(self.every)
            finally:
                await self._look(client, start)

    async def _look(self, client: Client, start: float) -> None:
        page = await read_page(client)
        now = time.monotonic() - start
        for name in self.names:
            self.seen.setdefault(name, []).append((now, read_metric(page, name, missing=0.0)))

    def grown(self, name: str) -> list[tuple[float, float]]:
        """Return (end, growth) of a counter for each GRID_SECONDS, as if it grew evenly from one look to the next."""
        if len(seen := self.seen.get(name, [])) < 2:
            return []
        at, totals = zip(*seen, strict=True)
        grid = np.arange(at[0], at[-1] + GRID_SECONDS, GRID_SECONDS)
        growth = np.diff(np.interp(grid, at, totals))
        return list(zip(grid[1:].tolist(), growth.tolist(), strict=True))


async def run(plan: Plan, watch: Watch | None = None) -> Records:
    """Execute a plan in this loop, and `watch` beside it. Ctrl-C ends it with KeyboardInterrupt."""
    started: list[asyncio.Task[None]] = []

    def begin(epoch: float) -> None:
        if watch is not None:
            started.append(asyncio.create_task(watch.follow(plan.target.base_url, epoch)))

    try:
        records = await run_here(plan, begin)
    finally:
        for task in started:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    if records.interrupted:
        raise KeyboardInterrupt
    return records


async def over_http(plan: Plan) -> list[RequestRecord]:
    """What came of a plan's requests, sent to its server."""
    return (await run(plan)).requests


Ask = Callable[..., Awaitable[tuple[int, Any]]]
"""A body's fields in, (status, answer) out."""


@asynccontextmanager
async def completions(url: str, concurrency: int) -> AsyncIterator[Ask]:
    """Asks a server for whole completions, at most so many at a time."""
    turns = asyncio.Semaphore(concurrency)
    async with Client(Target(url, timeout=ANSWER_SECONDS), time.monotonic) as client:

        async def ask(**fields: Any) -> tuple[int, Any]:
            async with turns:
                return await client.call("POST", "/v1/completions", json=fields)

        yield ask


async def read_page(client: Client) -> str:
    _, page = await client.raw("GET", "/metrics")
    return page.decode()


async def metrics_page(url: str) -> str:
    async with Client(Target(url), time.monotonic) as client:
        return await read_page(client)


async def wait_quiet(url: str, names: Sequence[str] = OPEN) -> None:
    """Until the server has had nothing running or waiting for a while, by these metrics."""
    quiet = 0
    while quiet < QUIET_POLLS:
        await asyncio.sleep(QUIET_SECONDS)
        quiet = 0 if num_open(await metrics_page(url), names) else quiet + 1


def wait_for_rest(servers: Sequence[Served], looks: int = MOST_LOOKS) -> None:
    """Until these do nothing any more: threads of OpenMP spin for a while after the last step, and a step may go on
    without a client, on the cores of the next server."""
    for _ in range(looks):
        before = sum(server.cpu_seconds() for server in servers)
        time.sleep(LOOK_SECONDS)
        if sum(server.cpu_seconds() for server in servers) - before <= RESTING * LOOK_SECONDS:
            return


def num_open(page: str, names: Sequence[str] = OPEN) -> float:
    """Requests of both classes in a page of metrics, running and waiting."""
    return sum(read_metric(page, name) for name in names)


def read_metric(page: str, name: str, missing: float | None = None) -> float:
    """The sum over the labels of one metric; with its labels (`name{...}`), of that sample. Raises SystemExit when the
    page does not have it, unless `missing` stands in."""
    starts = (f"{name} ",) if name.endswith("}") else (f"{name} ", f"{name}{{")
    lines = [line for line in page.splitlines() if line.startswith(starts)]
    if not lines and missing is None:
        raise SystemExit(f"the server has no metric {name}")
    return sum((float(line.rsplit(" ", 1)[1]) for line in lines), 0.0 if lines else missing or 0.0)
