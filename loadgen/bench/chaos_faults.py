"""What `chaos` does to a server: one fault after another at random moments, each from the seed."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import aiohttp

from engine.process.sabotage import POISON
from loadgen.bench.chaos_load import MODEL, stream

WEIGHTS = {"kill": 12, "kill twice": 3, "hang": 2, "failing steps": 2, "hostile bodies": 3, "stop": 0.3}
MEAN_REST = 2.0
FAIL_SECONDS = 4.0
POLL = 0.05


def _hostile_bodies() -> dict[str, bytes]:
    """4 MB each but for the first two."""
    head = f'{{"model":"{MODEL}","messages":['
    size = 4_000_000
    return {
        "no JSON": b'{"model":',
        "a number of 4,000 digits": (head + '{"role":"user","content":"x"}],"seed":' + "9" * 4000 + "}").encode(),
        "empty messages": (head + ",".join(["{}"] * (size // 3)) + "]}").encode(),
        "empty parts": (head + '{"role":"user","content":[' + ",".join(["{}"] * (size // 3)) + "]}]}").encode(),
        "brackets": (head + "[" * size).encode(),
        "one long word": (head + '{"role":"user","content":"' + "x" * size + '"}]}').encode(),
        "too large": (head + '{"role":"user","content":"' + "x" * 2 * size + '"}]}').encode(),
    }


HOSTILE = _hostile_bodies()


class Saboteur:
    """`faults`: by name; `down`: from when to when there was none that could answer. `late_status`: times that /ready
    was still green 2 s into failing steps; `wrong`: hostile bodies that were not refused; `poison`: how those ended."""

    def __init__(self, session: aiohttp.ClientSession, state: Path, chaos: Path, dice: random.Random) -> None:
        self._session = session
        self._pid_file = state / "engine.pid"
        self._chaos = chaos
        self._dice = dice
        self.faults: Counter[str] = Counter()
        self.down: list[tuple[float, float]] = []
        self.late_status = 0
        self.wrong: Counter[str] = Counter()
        self.poison: Counter[str] = Counter()

    async def run(self, until: float) -> None:
        """The poison first, beside everything else, then every fault once, then whatever comes until then."""
        acts: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill, "kill twice": self._kill_twice, "hang": self._hang, "stop": self._stop,
            "failing steps": self._fail, "hostile bodies": self._send_bodies,
        }  # fmt: skip
        await self._poison()
        once = self._dice.sample(list(WEIGHTS), len(WEIGHTS))
        while once or time.monotonic() < until:
            await asyncio.sleep(self._dice.expovariate(1 / MEAN_REST))
            name = once.pop() if once else self._dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self.faults[name] += 1
            await acts[name]()

    def _signal(self, number: int) -> None:
        with suppress(OSError, ValueError):  # between two processes there is none
            os.kill(int(self._pid_file.read_text()), number)

    async def _until_ready(self, start: float, gone: Callable[[], bool] = lambda: True) -> None:
        """Until the server is ready again, once `gone` says that it noticed."""
        while not gone() or not await self._is_ready():  # noqa: ASYNC110 - a state of another process
            await asyncio.sleep(POLL)
        self.down.append((start, time.monotonic()))

    async def _is_ready(self) -> bool:
        async with self._session.get("/ready") as response:
            return response.status == 200

    def _another(self) -> Callable[[], bool]:
        """Whether another process has been started since."""
        before = self._pid_file.read_text()
        return lambda: self._pid_file.exists() and self._pid_file.read_text() != before

    async def _kill(self) -> None:
        start, another = time.monotonic(), self._another()
        self._signal(signal.SIGKILL)
        await self._until_ready(start, another)

    async def _kill_twice(self) -> None:
        """The second time while the next process starts, or soon after."""
        start, another = time.monotonic(), self._another()
        self._signal(signal.SIGKILL)
        while not another():  # noqa: ASYNC110 - a state of another process
            await asyncio.sleep(POLL)
        await asyncio.sleep(self._dice.uniform(0.0, 5.0))
        another = self._another()
        self._signal(signal.SIGKILL)
        await self._until_ready(start, another)

    async def _hang(self) -> None:
        """A step that does not end: the watchdog of the process finds it."""
        start, another = time.monotonic(), self._another()
        (self._chaos / "hang").touch()
        await self._until_ready(start, another)

    async def _stop(self) -> None:
        """A process that says nothing more: the gateway finds it."""
        start, another = time.monotonic(), self._another()
        self._signal(signal.SIGSTOP)
        await self._until_ready(start, another)

    async def _fail(self) -> None:
        start = time.monotonic()
        (self._chaos / "fail").touch()
        await asyncio.sleep(2.0)
        self.late_status += await self._is_ready()
        await asyncio.sleep(FAIL_SECONDS - 2.0)
        (self._chaos / "fail").unlink()
        await self._until_ready(start)

    async def _poison(self) -> None:
        """It kills whatever process computes it, until the server has found it out."""
        self.faults["poison"] += 1
        start = time.monotonic()
        answer = await stream(self._session, POISON, 20)
        await self._until_ready(start)
        self.poison[str(answer.error)] += 1

    async def _send_bodies(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, body in HOSTILE.items():
                group.create_task(self._send(name, body))

    async def _send(self, name: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post("/v1/chat/completions", data=body, headers=headers) as response:
                if not 400 <= response.status < 500:
                    self.wrong[f"{name}: {response.status}"] += 1
        except aiohttp.ClientError:
            return  # closed before it was read: refused as well
