"""Three servers with stub engines share PostgreSQL and an object store: the throughput of three servers against one,
and batches, chats and changes of keys under random faults: servers and PostgreSQL killed, their network paused. Exit 1
on a broken promise.

Needs PostgreSQL's programs, and `pip install 'tidemill[cluster]' 'moto[server]'`.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos import load
from benchmarks.chaos.promises import Promise, never, none_of, show, shown
from benchmarks.cluster_server import MODEL
from benchmarks.machine import describe
from engine.errors import ConfigError
from gateway.commands.migrate import put_key_file
from gateway.store.batch_rows import DEAD_SECONDS

SERVERS, SLOTS, TENANTS = 3, 32, ("red", "blue")
KEYS = {tenant: f"sk-{tenant}" for tenant in TENANTS}
START_SECONDS, RETRY_SECONDS, WAIT_SECONDS = 60.0, 0.3, 240.0
TOKENS, SPEEDUP = 8, 2.7
OBJECTS = "s3://bucket/p"
CHATS, CHAT_LIMIT, KEY_SECONDS = 4, 6, 5.0
"""Chats of a tenant at a time, its limit of requests on all servers, and mean seconds between changes of the keys."""
LATE_SECONDS = 60.0 + 2 * DEAD_SECONDS
"""Maximum time from the cancellation or expiry of a batch to its end, without faults after it: other servers have
`cancel_seconds`, and the owner may have to be replaced."""


class Proxy:
    """Forward TCP connections to `target`, a port or the path of a socket. Data wait while it is paused."""

    def __init__(self, target: int | str) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._open.set()
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    def pause(self) -> None:
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):  # cancelled at the end
            await self._open.wait()
            if isinstance(self._target, int):
                far = await asyncio.open_connection("127.0.0.1", self._target)
            else:
                far = await asyncio.open_unix_connection(self._target)
            await asyncio.gather(self._copy(reader, far[1]), self._copy(far[0], writer))
        writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Database:
    """A PostgreSQL server in a folder of its own, on a socket there."""

    def __init__(self, folder: Path) -> None:
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")) or [Path(shutil.which("pg_ctl") or "")]
        self._programs, self.folder = programs[-1].parent, folder
        folder.mkdir()
        if os.getuid() == 0:
            shutil.chown(folder, "postgres")
        self._run("initdb", "--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8")
        self.start()

    @property
    def socket(self) -> str:
        return f"{self.folder}/.s.PGSQL.5432"

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c fsync=off"
        self._run("pg_ctl", "start", "--wait", "--silent", f"--log={self.folder}/log", f"--options={options}")

    def kill(self) -> None:
        """End all its processes without a checkpoint."""
        self._run("pg_ctl", "stop", "--mode=immediate", "--silent")

    def _run(self, name: str, *options: str) -> None:
        words = [str(self._programs / name), f"--pgdata={self.folder}/data", *options]
        if os.getuid() == 0:
            words = ["runuser", "--user", "postgres", "--", *words]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd="/")


class Member:
    """One server with its own local folder and its own way to the database and the object store."""

    def __init__(self, folder: Path, database: str, objects: int, seconds: float) -> None:
        self.folder = folder
        self._seconds = seconds
        self._proxies = Proxy(database), Proxy(objects)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self.url = ""
        self.is_up = False
        self.is_reachable = True

    async def start(self) -> None:
        """Start the process and wait until it listens. Raises RuntimeError."""
        for proxy in self._proxies:
            if not proxy.port:
                await proxy.start()
        await asyncio.to_thread(self._launch)

    def _launch(self) -> None:
        database, objects = (proxy.port for proxy in self._proxies)
        state = f"postgresql://postgres@127.0.0.1:{database}/postgres?sslmode=disable&objects={OBJECTS}"
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(self.folder),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{objects}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
        }
        self.folder.mkdir(exist_ok=True)
        self._starts += 1
        log = self.folder / f"log-{self._starts}"
        words = [sys.executable, "-m", "benchmarks.cluster_server", state, str(SLOTS)]
        with log.open("wb") as output:
            words += [str(self._seconds), self.url.rpartition(":")[2] or "0"]
            self._process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self.url = f"http://127.0.0.1:{_port_in(log, 'listening on http://', self._process)}"
        self.is_up = True

    def kill(self) -> None:
        self.is_up = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Stop all traffic to the database and the object store; connections stay open."""
        self.is_reachable = False
        for proxy in self._proxies:
            proxy.pause()

    def go_on(self) -> None:
        self.is_reachable = True
        for proxy in self._proxies:
            proxy.go_on()

    async def ask(self, method: str, path: str, tenant: str, **options: Any) -> tuple[int, bytes]:
        """Return status and body. `tenant`: or another key. Raises aiohttp.ClientError or TimeoutError."""
        headers = {"Authorization": f"Bearer {KEYS.get(tenant, tenant)}", **options.pop("headers", {})}
        limit = aiohttp.ClientTimeout(total=40)
        async with (
            aiohttp.ClientSession(self.url, timeout=limit, headers=headers) as session,
            session.request(method, path, **options) as response,
        ):
            return response.status, await response.read()


@dataclass
class Site:
    """The database, the object store and the servers."""

    database: Database
    members: list[Member]
    dice: random.Random
    folder: Path
    harm: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    extra: str = ""
    """A key that only the last change of the keys has."""

    def put_keys(self) -> None:
        """Change the keys in the database. Raises ConfigError while it is away."""
        extra, file = secrets.token_hex(8), self.folder / "keys"
        keys = {**KEYS, "blue": extra}.items() | KEYS.items()
        lines = [f"{hashlib.sha256(key.encode()).hexdigest()} {name} requests={CHAT_LIMIT}" for name, key in keys]
        file.touch(0o600)
        file.write_text("\n".join(lines))
        put_key_file(str(file), f"postgresql://postgres@/postgres?host={self.database.folder}&objects={OBJECTS}")
        self.extra = extra

    def pick(self) -> Member | None:
        return self.dice.choice(up) if (up := [member for member in self.members if member.is_up]) else None

    async def insist(self, method: str, path: str, tenant: str, make: Callable[[], dict[str, Any]] = dict) -> Any:
        """Ask servers at random until one answers with 200; return its JSON."""
        while True:
            if (member := self.pick()) is not None:
                with suppress(aiohttp.ClientError, TimeoutError):
                    status, body = await member.ask(method, path, tenant, **make())
                    if status == 200:
                        return json.loads(body)
                    self.refused += 1
                    self.harm[f"{method} with status {status}"] += status not in (503, 507)
            await asyncio.sleep(RETRY_SECONDS)

    async def submit(self, tenant: str, lines: int, window: str = "24h") -> str:
        """Upload lines to one server and create their batch on any; return its id."""
        body = {"model": MODEL, "prompt": "some words to answer", "max_tokens": TOKENS}
        text = "".join(load.line(str(i), json.dumps(body)) for i in range(lines)).encode()

        def form() -> dict[str, Any]:
            data = aiohttp.FormData()
            data.add_field("purpose", "batch")
            data.add_field("file", text, filename="lines.jsonl")
            return {"data": data}

        file = await self.insist("POST", "/v1/files", tenant, form)
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": window}
        once = {"json": wanted, "headers": {"Idempotency-Key": secrets.token_hex(8)}}
        return str((await self.insist("POST", "/v1/batches", tenant, lambda: dict(once)))["id"])

    async def until_ended(self, batch: str, tenant: str, seconds: float) -> dict[str, Any]:
        until, state = time.monotonic() + seconds, {}
        while time.monotonic() < until:
            state = await self.insist("GET", f"/v1/batches/{batch}", tenant)
            if state["status"] in load.TERMINAL:
                break
            await asyncio.sleep(0.2)
        return dict(state)


def _port_in(log: Path, words: str, process: "subprocess.Popen[bytes]") -> int:
    """Return the port at the end of the line with `words`, once there is one. Raises RuntimeError."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if words in line:
                return int(line.rpartition(":")[2].strip("/ "))
        time.sleep(0.05)
    raise RuntimeError(f"a process did not start: {log.read_text(errors='replace')[-2000:]}")


def _begin(folder: Path) -> tuple[Database, "subprocess.Popen[bytes]", int]:
    """Start the database and the object store; return the store's process and its port."""
    folder.chmod(0o755)  # for the user of PostgreSQL
    database = Database(folder / "postgres")
    with (folder / "moto").open("wb") as output:
        words = [sys.executable, "-m", "moto.server", "-p", "0"]
        moto = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
    return database, moto, _port_in(folder / "moto", "Running on http://", moto)


@asynccontextmanager
async def site(servers: int, seconds: float, seed: int) -> AsyncIterator[Site]:
    """Run everything; `seconds`: time of an answer of the stub engines."""
    folder = Path(tempfile.mkdtemp(prefix="tidemill-cluster-"))
    database, moto, objects = await asyncio.to_thread(_begin, folder)
    paths = [folder / str(number) for number in range(servers)]
    members = [Member(path, database.socket, objects, seconds) for path in paths]
    made = Site(database, members, random.Random(seed), folder)
    try:
        async with aiohttp.ClientSession() as session, session.put(f"http://127.0.0.1:{objects}/bucket") as response:
            response.raise_for_status()
        await asyncio.to_thread(made.put_keys)
        await asyncio.gather(*(member.start() for member in members))
        yield made
    finally:
        for member in members:
            member.kill()
        moto.kill()
        moto.wait()
        with suppress(subprocess.CalledProcessError):
            database.kill()
        shutil.rmtree(folder, ignore_errors=True)


# Throughput


async def lines_per_second(servers: int, lines: int, seconds: float) -> float:
    """Return the pace of a batch of each tenant, from the first creation to the last end."""
    async with site(servers, seconds, 1) as made:
        batches = [(await made.submit(tenant, lines // len(TENANTS)), tenant) for tenant in TENANTS]
        ended = [await made.until_ended(batch, tenant, WAIT_SECONDS) for batch, tenant in batches]
        begin = min(state["in_progress_at"] for state in ended)
        end = time.time() if any(state["status"] != "completed" for state in ended) else 0.0
        end = end or max(state["completed_at"] for state in ended)
        done = sum(state["request_counts"]["completed"] for state in ended)
        return float(done / max(1.0, end - begin))


async def throughput(lines: int, seconds: float) -> list[Promise]:
    one = await lines_per_second(1, lines, seconds)
    three = await lines_per_second(SERVERS, lines, seconds)
    return [
        shown("lines/s, one server", one),
        shown(f"lines/s, {SERVERS} servers", three),
        Promise("speedup", f"{three / one:.2f}", f">= {SPEEDUP}", three >= SPEEDUP * one),
    ]


# Faults


async def disturb(made: Site, until: float, counts: Counter[str]) -> None:
    """Kill and pause at random until then."""
    dice = made.dice

    async def kill_server() -> None:
        member = dice.choice(made.members)
        if member.is_up:
            member.kill()
            await asyncio.sleep(dice.uniform(0.0, 1.5 * DEAD_SECONDS))
            member.go_on()
            await member.start()

    async def pause_network() -> None:
        member = dice.choice(made.members)
        member.pause()
        await asyncio.sleep(dice.uniform(1.0, 2.5 * DEAD_SECONDS))
        member.go_on()

    async def kill_database() -> None:
        await asyncio.to_thread(made.database.kill)
        await asyncio.sleep(dice.uniform(0.0, DEAD_SECONDS))
        await asyncio.to_thread(made.database.start)

    faults: dict[str, tuple[Callable[[], Coroutine[Any, Any, None]], asyncio.Lock]] = {
        "servers killed": (kill_server, asyncio.Lock()),
        "networks paused": (pause_network, asyncio.Lock()),
        "databases killed": (kill_database, asyncio.Lock()),
    }

    async def once(name: str) -> None:
        fault, lock = faults[name]
        if not lock.locked():
            async with lock:
                counts[name] += 1
                await fault()

    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < until:
            tasks.create_task(once(dice.choice(list(faults))))
            await asyncio.sleep(dice.uniform(1.0, DEAD_SECONDS))


async def look(made: Site, known: dict[str, str]) -> None:
    """Read batches from servers that reach the store: each server knows each batch."""
    while True:
        member = made.pick()
        if known and member is not None and member.is_reachable:
            batch = made.dice.choice(list(known))
            with suppress(aiohttp.ClientError, TimeoutError):
                status, _ = await member.ask("GET", f"/v1/batches/{batch}", known[batch])
                made.harm["servers that lack a batch"] += status == 404
        await asyncio.sleep(RETRY_SECONDS)


async def chat(made: Site, tenant: str, counts: Counter[str]) -> None:
    """Send chats to any server. Faults of the store change no answer; beyond the limit they are refused."""
    body = {"model": MODEL, "prompt": "some words to answer", "max_tokens": TOKENS}
    while True:
        member = made.pick()
        if member is not None:
            counts["sent"] += 1
            with suppress(aiohttp.ClientError, TimeoutError):
                status, answer = await member.ask("POST", "/v1/completions", tenant, json=body)
                counts[str(status)] += 1
                counts["tokens"] += json.loads(answer)["usage"]["completion_tokens"] if status == 200 else 0
                made.harm[f"chats with status {status}"] += status not in (200, 429)
        await asyncio.sleep(made.dice.uniform(0.0, 2 * RETRY_SECONDS))


async def change_keys(made: Site, counts: Counter[str]) -> None:
    while True:
        with suppress(ConfigError):  # the database is away
            await asyncio.to_thread(made.put_keys)
            counts["changes of keys"] += 1
        await asyncio.sleep(made.dice.uniform(0.0, 2 * KEY_SECONDS))


async def check_tenants(made: Site, sent: Counter[str]) -> int:
    """After the faults, change the keys once more; compare keys and usage of all servers. Return the tokens of blue."""
    old = made.extra
    await asyncio.to_thread(made.put_keys)
    await asyncio.sleep(DEAD_SECONDS)
    found = set()
    for member in made.members:
        for key, right in ((old, 401), (made.extra, 200)):
            status, body = await read(member, "/v1/usage", key)
            made.harm[f"servers that answer {status} to a key, not {right}"] += status != right
        rows = json.loads(body)["tenants"] if status == 200 else []
        found.add(json.dumps([row["requests"] for row in rows]))
    made.harm["servers with another usage"] += len(found) > 1
    used = sum(row["output_tokens"] for row in json.loads(found.pop()))
    made.harm["usage beyond the chats"] += used > TOKENS * sent["blue"]
    return int(used)


async def read(member: Member, path: str, tenant: str) -> tuple[int, bytes]:
    """Read from one server; repeat a 503, which it answers until it has connected again."""
    until, answer = time.monotonic() + LATE_SECONDS, (503, b"")
    while answer[0] == 503 and time.monotonic() < until:
        await asyncio.sleep(RETRY_SECONDS)
        answer = await member.ask("GET", path, tenant)
    return answer


async def check(made: Site, batch: str, tenant: str, lines: int, end: str) -> dict[str, Any]:
    """Wait for the end of a batch, and compare its rows and its state on all servers."""
    state = await made.until_ended(batch, tenant, LATE_SECONDS + 30.0)
    made.harm[f"batches that should be {end} and are {state['status']}"] += state["status"] not in (end, "completed")
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    for name, found in (("output_file_id", rows), ("error_file_id", errors)):
        if state.get(name):
            status, body = await read(made.members[0], f"/v1/files/{state[name]}/content", tenant)
            made.harm["result files that cannot be read"] += status != 200
            found += map(json.loads, body.splitlines()) if status == 200 else []
    made.harm["lines without one row"] += load.miscounted(map(str, range(lines)), rows + errors)
    made.harm["rows beyond the lines"] += max(0, len(rows) + len(errors) - lines)
    code = {"cancelled": "batch_cancelled", "expired": "batch_expired"}.get(state["status"])
    made.harm["error rows with another cause"] += sum((row["error"] or {}).get("code") != code for row in errors)
    counts = state["request_counts"]
    made.harm["wrong counts"] += (counts["completed"], counts["failed"]) != (len(rows), 0)
    used = sum(row["response"]["body"]["usage"]["completion_tokens"] for row in rows)
    made.harm["wrong usage"] += state["usage"]["output_tokens"] != used
    for member in made.members:
        status, body = await read(member, f"/v1/batches/{batch}", tenant)
        made.harm[f"servers that answer {status}"] += status != 200
        made.harm["servers that differ"] += status == 200 and json.loads(body) != state
    return {**state, "rows": len(rows)}


async def faults(lines: int, seconds: float, seed: int) -> list[Promise]:
    """A third of the batches is cancelled or expires; all run while servers, database and network fail."""
    each = max(20, lines // 20)
    kinds = ["completed"] * 12 + ["cancelled"] * 4 + ["expired"] * 4
    pace = SERVERS * SLOTS * 0.5 * seconds / lines
    counts: Counter[str] = Counter()
    async with site(SERVERS, pace, seed) as made:
        known: dict[str, str] = {}
        asked: dict[str, float] = {}
        wanted: list[tuple[str, str, str]] = []
        until = time.monotonic() + seconds
        disturber = asyncio.create_task(disturb(made, until, counts))
        chats: dict[str, Counter[str]] = {tenant: Counter() for tenant in TENANTS}
        others = [asyncio.create_task(look(made, known)), asyncio.create_task(change_keys(made, counts))]
        others += [asyncio.create_task(chat(made, tenant, chats[tenant])) for tenant in TENANTS * CHATS]
        made.dice.shuffle(kinds)
        windows = {"expired": f"{max(1, round(seconds / 5))}s"}

        async def cancel(batch: str, tenant: str) -> None:
            await asyncio.sleep(made.dice.uniform(0.0, seconds / 3))
            state = await made.insist("POST", f"/v1/batches/{batch}/cancel", tenant)
            asked[batch] = state["cancelling_at"] or 0

        async with asyncio.TaskGroup() as tasks:
            for number, kind in enumerate(kinds):
                tenant = TENANTS[number % len(TENANTS)]
                batch = await made.submit(tenant, each, windows.get(kind, "24h"))
                known[batch] = tenant
                wanted.append((batch, tenant, kind))
                if kind == "cancelled":
                    tasks.create_task(cancel(batch, tenant))
                await asyncio.sleep(made.dice.uniform(0.0, seconds / 30))
        await disturber
        calm = time.time()
        ended = [await check(made, batch, tenant, each, kind) for batch, tenant, kind in wanted]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        used = await check_tenants(made, Counter({name: found["sent"] for name, found in chats.items()}))
    late = [0.0]
    for state in ended:
        if state["status"] in ("cancelled", "expired"):
            begin = state["cancelling_at"] or state["expires_at"]
            made.harm["expired before the end of the window"] += (state["expired_at"] or begin) < begin
            late.append((state["cancelled_at"] or state["expired_at"]) - max(begin, calm))
    ends = Counter(state["status"] for state in ended)
    return [
        none_of("harm", made.harm),
        *(shown(name, str(count)) for name, count in sorted(counts.items())),
        shown("lines", str(each * len(kinds))),
        *(shown(f"batches {name}", str(count)) for name, count in sorted(ends.items())),
        shown("lines answered", str(sum(state["rows"] for state in ended))),
        shown("requests answered with 503", str(made.refused)),
        *(
            shown(f"chats of {name}", f"{found['200']} answered, {found['429']} refused beyond the limit")
            for name, found in chats.items()
        ),
        shown("usage of blue / tokens of its answers", f"{used} / {chats['blue']['tokens']}"),
        never(f"ends later than {LATE_SECONDS:.0f} s after the faults", sum(each > LATE_SECONDS for each in late)),
        shown("longest time to a cancelled or expired end", max(late), "s"),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cluster", description=__doc__)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=10.0, help="time of the faults; 0: throughput alone")
    parser.add_argument("--answer-seconds", type=float, default=1.0, help="of the stub engines; 0: faults alone")
    parser.add_argument("--seed", type=int, help="number from which faults are drawn (default: drawn)")
    options = parser.parse_args(argv)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"cluster: --lines {options.lines} --minutes {options.minutes:g} --seed {seed}; {describe()}", flush=True)
    promises: list[Promise] = []
    if options.answer_seconds > 0:
        promises += asyncio.run(throughput(options.lines, options.answer_seconds))
    if options.minutes > 0:
        promises += asyncio.run(faults(options.lines, 60.0 * options.minutes, seed))
    if not show(promises, loose=False):
        raise SystemExit("promises broken")


if __name__ == "__main__":
    main()
