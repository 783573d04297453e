"""The part `disk`: faults of the disk beside chats, uploads and a batch, each also with an engine process killed."""

import asyncio
import errno
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.chaos import load
from benchmarks.chaos.promises import Promise, Scale, at_most, none_of, shown
from benchmarks.chaos.server import Server, figure, read_metrics
from benchmarks.chaos.work import CHAT, ask

SOURCE = Path(__file__).with_name("disk_fault.c")
WRITE, SYNC, READ, NAME = 1, 2, 4, 8
"""Kinds of system calls, as in disk_fault.c."""
TMPFS = "16m"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the disk. `refuses`: nothing can be stored meanwhile, so an upload gets 507."""

    name: str
    begin: Callable[[Server], None]
    end: Callable[[Server], None]
    refuses: bool = True


class Page:
    """The page of memory that the preloaded library reads."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 16)

    def set(self, operations: int = 0, error: int = 0, percent: int = 0, delay_ms: int = 0) -> None:
        self._memory[:] = struct.pack("4i", operations, error, percent, delay_ms)


def fill(server: Server) -> None:
    """Leave no room in the state folder's file system, a small one of its own."""
    hog = os.open(_hog(server), os.O_WRONLY | os.O_CREAT)
    try:
        for size in (1 << 16, 1):
            while _write(hog, size):
                pass
    finally:
        os.close(hog)


def _hog(server: Server) -> Path:
    return server.state.parent / "hog"


def _write(descriptor: int, size: int) -> bool:
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
        return os.write(descriptor, bytes(size)) == size
    except OSError:
        return False


def move_away(server: Server) -> None:
    """Rename the state folder."""
    server.state.rename(server.state.with_name("away"))


def move_back(server: Server) -> None:
    """Give the state folder its name again."""
    if server.state.exists():  # made again meanwhile, which would be a fault of the server
        shutil.rmtree(server.state)
    server.state.with_name("away").rename(server.state)


@dataclass(frozen=True, slots=True)
class Ground:
    """Where faults can happen: `environment` of the server, `folder` for its state, the faults, and messages on those
    that this machine cannot have."""

    environment: Mapping[str, str]
    folder: Path
    faults: tuple[Fault, ...]
    skipped: tuple[str, ...]


@contextmanager
def ground(folder: Path) -> Iterator[Ground]:
    """Compile the library and mount a small file system, where the machine allows it, until the end of the block."""
    disk, skipped, faults = folder / "disk", list[str](), list[Fault]()
    disk.mkdir()
    environment: dict[str, str] = {}
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS}", "tmpfs", str(disk)]
    mounted = _run(command, skipped, "'full' is a failing call instead of a full file system")
    if mounted:
        faults.append(Fault("full", fill, lambda server: _hog(server).unlink()))
    library = folder / "disk_fault.so"
    compiler = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    if _run(compiler, skipped, "faults of system calls are skipped: they need a C compiler"):
        page = Page(folder / "page")
        environment = {"LD_PRELOAD": str(library), "TIDEMILL_FAULT_PAGE": str(folder / "page"),
                       "TIDEMILL_FAULT_ROOT": str(disk)}  # fmt: skip
        faults += call_faults(page, full=not mounted)
    try:
        yield Ground(environment, disk, (*faults, Fault("moved away", move_away, move_back)), tuple(skipped))
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)


def _run(command: list[str], skipped: list[str], otherwise: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        skipped.append(f"{otherwise} ({error})")
        return False
    if done.returncode:
        skipped.append(f"{otherwise} ({done.stderr.strip()[:200]})")
    return not done.returncode


def call_faults(page: Page, *, full: bool) -> Iterator[Fault]:
    """Yield faults of system calls on the state folder's files; `full`: also that of a full disk."""

    def fault(name: str, operations: int, error: int = 0, percent: int = 100, delay_ms: int = 0) -> Fault:
        refuses = percent == 100 and error != 0 and operations != READ
        return Fault(name, lambda _: page.set(operations, error, percent, delay_ms), lambda _: page.set(), refuses)

    if full:
        yield fault("full", WRITE | NAME, errno.ENOSPC)
    yield fault("read-only", WRITE | NAME, errno.EROFS)
    yield fault("EIO on writes", WRITE, errno.EIO)
    yield fault("EIO on fsync", SYNC, errno.EIO)
    yield fault("EIO on reads", READ, errno.EIO)
    yield fault("EIO on a third of all", WRITE | SYNC | READ, errno.EIO, percent=33)
    yield fault("fsync takes 3 s", SYNC, delay_ms=3000)
    yield fault("ESTALE on writes", WRITE, errno.ESTALE)
    yield fault("ENXIO on fsync", SYNC, errno.ENXIO)
    yield fault("ENOMEM on writes", WRITE, errno.ENOMEM)
    yield fault("EACCES on writes", WRITE | NAME, errno.EACCES)


@contextmanager
def during(fault: Fault, server: Server) -> Iterator[None]:
    """Put a fault on for the block."""
    fault.begin(server)
    try:
        yield
    finally:
        fault.end(server)


LINE_TOKENS, DONE_SHARE = 8, 0.2
TOKENS = 'tidemill_generated_tokens_total{class="offline"}'
COMPUTED_AGAIN = 64 * LINE_TOKENS
"""Most tokens that a death of the engine process may cost: those of the lines that ran."""
CHAT_SECONDS, KILL_SECONDS = 3.0, 30.0
"""Longest wait for a chat beside a fault, and with a restart of the engine process."""
REST, ANSWER_SECONDS, DRAIN_SECONDS = 0.5, 60.0, 180.0


@dataclass(slots=True)
class Round:
    """Effects of one fault. `chats`: statuses; `waits`: seconds of each; `uploads`: statuses; `told`: looks at /ready
    that told of the storage; `stored`: acknowledged files, by id."""

    name: str
    chats: Counter[int | str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    uploads: Counter[int | str] = field(default_factory=Counter)
    told: int = 0
    stored: list[str] = field(default_factory=list)
    unreadable: int = 0
    status: str = ""
    miscounted: int = 0
    failed: int = 0
    tokens: float = 0.0
    exited: bool = False


def lines(count: int, mark: str) -> list[str]:
    """Return lines whose prompts no other batch has."""
    body = {"model": load.MODEL, "max_tokens": LINE_TOKENS, "temperature": 0, "ignore_eos": True}
    prompts = [f"{mark} {i}" for i in range(count)]
    return [load.line(str(i), json.dumps({**body, "prompt": prompt})) for i, prompt in enumerate(prompts)]


async def disturb(session: aiohttp.ClientSession, server: Server, fault: Fault, scale: Scale, kill: bool) -> Round:
    """Run a batch with the fault in its middle; `kill`: the engine process dies meanwhile."""
    found = Round(fault.name + (", engine killed" if kill else ""))
    count = scale.of(250, 60)
    before = figure(await read_metrics(session), TOKENS)
    batch = await load.submit(session, lines(count, found.name))
    while not await _has_run(session, batch, DONE_SHARE * count):  # noqa: ASYNC110 - a state of another process
        await asyncio.sleep(0.05)
    with during(fault, server):
        until = time.monotonic() + max(5.0, 10.0 * scale.whole)
        async with asyncio.TaskGroup() as group:
            group.create_task(_chat(session, found, until))
            group.create_task(_upload(session, found, until))
            group.create_task(_look(session, found, until))
            if kill and (engine := server.engine()) is not None:
                await asyncio.sleep(1.0)
                os.kill(engine, signal.SIGKILL)
    if server.exit_code is None:
        with suppress(aiohttp.ClientError, TimeoutError):
            await _count(session, found, batch, count, before)
    found.exited = server.exit_code is not None
    return found


async def _has_run(session: aiohttp.ClientSession, batch: str, lines: float) -> bool:
    async with session.get(f"/v1/batches/{batch}") as response:
        state = await response.json()
    return bool(state["request_counts"]["completed"] >= lines or state["status"] in load.TERMINAL)


async def _chat(session: aiohttp.ClientSession, found: Round, until: float) -> None:
    body = {"model": load.MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    while time.monotonic() < until:
        start = time.monotonic()
        status, _ = await ask(session, CHAT, json.dumps(body).encode())
        found.chats[status] += 1
        found.waits.append(time.monotonic() - start)
        await asyncio.sleep(REST)


async def _upload(session: aiohttp.ClientSession, found: Round, until: float) -> None:
    text = "".join(lines(5, "upload")).encode()
    while time.monotonic() < until:
        try:
            response = await load.upload(session, text)
            found.uploads[response.status] += 1
            if response.status == 200:
                found.stored.append((await response.json())["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            found.uploads[type(error).__name__] += 1
        await asyncio.sleep(2 * REST)


async def _look(session: aiohttp.ClientSession, found: Round, until: float) -> None:
    while time.monotonic() < until:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.get("/ready") as response:
                found.told += response.status == 200 and "storage" in await response.json()
        await asyncio.sleep(REST)


async def _count(session: aiohttp.ClientSession, found: Round, batch: str, count: int, before: float) -> None:
    """Count rows, tokens and readable uploads once the fault is over."""
    state = await load.wait_batch(session, batch, time.monotonic() + DRAIN_SECONDS)
    rows, errors = await load.read_rows(session, state)
    found.status, found.failed = state["status"], len(errors)
    found.miscounted = load.miscounted(map(str, range(count)), rows + errors)
    found.tokens = figure(await read_metrics(session), TOKENS) - before - count * LINE_TOKENS
    for file in found.stored:
        async with session.get(f"/v1/files/{file}/content") as response:
            found.unreadable += response.status != 200


def promises(found: Round, fault: Fault, *, kill: bool) -> list[Promise]:
    """Check the effects of one fault."""
    name = found.name
    chats = found.chats.total() - found.chats[200]
    allowed = {507} if fault.refuses else {200, 507}
    uploads = sum(count for status, count in found.uploads.items() if status not in allowed)
    most = COMPUTED_AGAIN if kill else 0
    print(
        f"  {name}: chats {dict(found.chats)}, uploads {dict(found.uploads)}, /ready told {found.told} times, batch "
        f"{found.status or 'unknown'}, {found.failed} error rows",
        flush=True,
    )
    harm = {
        "exits of the server": int(found.exited),
        "chats without 200": chats,
        "uploads with a wrong answer": uploads,
        "times that /ready was silent": int(fault.refuses and not found.told),
        "lost uploads": found.unreadable,
        "batches that did not complete": int(found.status != "completed"),
        "lines without one row": found.miscounted,
        "error rows": found.failed,
    }
    return [
        none_of(f"{name}: harm", harm),
        at_most(f"{name}: a chat, worst", max(found.waits, default=0.0), KILL_SECONDS if kill else CHAT_SECONDS, "s"),
        Promise(f"{name}: tokens too many", f"{found.tokens:g}", str(most), 0 <= found.tokens <= most),
    ]


async def disk(scale: Scale) -> list[Promise]:
    """A disk that is full, read-only, moved away, slow or faulty, each also with one SIGKILL of the engine process."""
    found: list[Promise] = []
    with tempfile.TemporaryDirectory(prefix="tidemill-chaos-") as name, ground(Path(name)) as place:
        for message in place.skipped:
            print(f"  {message}", flush=True)
            found.append(shown("skipped", message[:60]))
        left = [(fault, kill) for fault in place.faults for kill in (False, True)]
        left = scale.some(left, 4)
        number = 0
        while left:
            number += 1
            async with _serving(Path(name), place, number) as (server, session):
                while left and server.exit_code is None:
                    fault, kill = left.pop()
                    found += promises(await disturb(session, server, fault, scale, kill), fault, kill=kill)
    return found


@asynccontextmanager
async def _serving(folder: Path, place: Ground, number: int) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    """Run a server with its state on the faulty ground."""
    server = Server(folder, state=place.folder / f"state-{number}", environment=place.environment)
    try:
        server.begin()
        async with server.session(seconds=ANSWER_SECONDS) as session:
            yield server, session
    finally:
        server.end()
