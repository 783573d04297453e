"""The part `descriptors`: more idle connections than the server has descriptors, and an engine process killed."""

import asyncio
import os
import resource
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from benchmarks.chaos import oracle
from benchmarks.chaos.load import MODEL
from benchmarks.chaos.oracle import Tally
from benchmarks.chaos.promises import Promise, Scale, at_most, none_of, shown
from benchmarks.chaos.server import Server
from benchmarks.chaos.work import CHAT, ask

LIMIT, IDLE, CLIENTS = 1024, 1100, 2
PROMPT_SECONDS, PAUSE_SECONDS, RECOVERY_SECONDS = 5.0, 15.0, 60.0
"""Longest wait of a new connection, of a stream for the next engine process, and of all for the state before."""
CHAT_BODY = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}],"max_tokens":8}}'.encode()


@dataclass(slots=True)
class Crowd:
    """Idle connections to one address; those that the server closes are opened again."""

    host: str
    port: int
    sockets: list[socket.socket] = field(default_factory=list)

    def fill(self) -> None:
        """Bring the number of open connections to IDLE, or as near as the server lets them."""
        self.sockets = [known for known in self.sockets if _is_open(known)]
        while len(self.sockets) < IDLE:
            try:
                self.sockets.append(socket.create_connection((self.host, self.port), timeout=1.0))
            except OSError:
                return

    def close(self) -> None:
        for known in self.sockets:
            known.close()


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        if connection.recv(1, socket.MSG_PEEK):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


@dataclass(slots=True)
class Seen:
    """`new`: results of new connections; `recovered`: seconds after the crowd left until all is as before."""

    tally: Tally = field(default_factory=Tally)
    new: Counter[int | str] = field(default_factory=Counter)
    most: int = 0
    recovered: float = float("inf")
    exited: bool = False


def connect(host: str, port: int) -> int | str:
    """Ask for /health on a new connection; return the status, `refused` if the server closes it, or `silence`."""
    try:
        with socket.create_connection((host, port), timeout=PROMPT_SECONDS) as connection:
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = connection.recv(64)
        return int(answer.split()[1]) if answer else "refused"
    except TimeoutError:
        return "silence"
    except OSError:
        return "refused"


async def _crowd(server: Server, seen: Seen, seconds: float) -> None:
    """Hold idle connections, kill the engine process, and try new connections meanwhile."""
    address = urlsplit(server.url)
    host, port = str(address.hostname), int(address.port or 0)
    crowd = Crowd(host, port)
    try:
        await asyncio.to_thread(crowd.fill)
        await asyncio.sleep(1.0)
        if (engine := server.engine()) is not None:
            os.kill(engine, signal.SIGKILL)
        until = time.monotonic() + seconds
        while time.monotonic() < until and server.exit_code is None:
            seen.most = max(seen.most, len(crowd.sockets))
            seen.new[await asyncio.to_thread(connect, host, port)] += 1
            await asyncio.sleep(1.0)
            await asyncio.to_thread(crowd.fill)
    finally:
        crowd.close()


async def _recover(server: Server, seen: Seen) -> None:
    start = time.monotonic()
    while time.monotonic() < start + RECOVERY_SECONDS and server.exit_code is None:
        async with server.session(seconds=PROMPT_SECONDS) as session:
            statuses = [(await ask(session, CHAT, CHAT_BODY))[0]]
            with suppress(aiohttp.ClientError, TimeoutError):
                statuses.append((await session.get("/ready")).status)
        if statuses == [200, 200]:
            seen.recovered = time.monotonic() - start
            return
        await asyncio.sleep(0.5)


def promises(seen: Seen) -> list[Promise]:
    """Check the effects on clients."""
    harm = {
        "exits of the server": int(seen.exited),
        "answers that failed": seen.tally.errors.total(),
        "answers that differ": len(seen.tally.differences),
        "new connections without an answer or an end": seen.new["silence"],
    }
    never_back = {"servers that did not recover": int(seen.recovered == float("inf"))}
    return [
        shown("idle connections", str(seen.most)),
        shown("new connections", ", ".join(f"{count} x {what}" for what, count in seen.new.items())),
        shown("answers beside them", str(seen.tally.asked)),
        none_of("harm", harm | never_back),
        at_most("longest gap in a stream", seen.tally.longest_gap(), PAUSE_SECONDS, "s"),
        at_most("recovery", seen.recovered, 30.0, "s"),
    ]


async def descriptors(scale: Scale) -> list[Promise]:
    """1,100 idle connections to a server with 1,024 descriptors, and one SIGKILL of the engine process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * IDLE:
        return [shown("skipped", f"needs {2 * IDLE} descriptors of its own, ulimit -Hn is {hard}")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2 * IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)[0]), hard))
    seen = Seen()
    async with _serving() as (server, session):
        expected = await oracle.undisturbed(session)
        async with oracle.clients(session, expected, CLIENTS, scale.dice()) as seen.tally:
            await _crowd(server, seen, max(20.0, 60.0 * scale.whole))
        await _recover(server, seen)
        seen.exited = server.exit_code is not None
    return promises(seen)


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    """Run a server with few descriptors."""
    with tempfile.TemporaryDirectory(prefix="tidemill-chaos-") as name:
        server = Server(Path(name), limits={resource.RLIMIT_NOFILE: LIMIT})
        try:
            server.begin()
            async with server.session(seconds=120.0) as session:
                yield server, session
        finally:
            server.end()
