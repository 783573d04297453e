"""What `chaos` does to a server: one fault after another, each from the seed."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp

from benchmarks.chaos.child import POISON
from benchmarks.chaos.load import MODEL, stream
from benchmarks.chaos.server import Server
from benchmarks.hostile import MAX_BYTES, Bomb, bombs

WEIGHTS = {"kill": 12, "kill twice": 3, "hang": 2, "failing steps": 2, "hostile bodies": 3, "stop": 0.3}
MEAN_REST = 2.0
FAIL_SECONDS = 4.0
POLL = 0.02
AT_ONCE = 16


class Saboteur:
    """`faults`: by name; `down`: from when to when there was none that could answer. `noticed`: seconds from a hung
    step until the server said so. `late_status`: times that /ready was still green 2 s into failing steps; `wrong`:
    bombs that were not refused; `poison`: how those ended."""

    def __init__(self, session: aiohttp.ClientSession, server: Server, dice: random.Random) -> None:
        self._session = session
        self._pid_file = server.state / "engine.pid"
        self._chaos = server.chaos
        self._dice = dice
        self.faults: Counter[str] = Counter()
        self.down: list[tuple[float, float]] = []
        self.noticed: list[float] = []
        self.late_status = 0
        self.wrong: Counter[str] = Counter()
        self.poison: Counter[str] = Counter()

    async def storm(self, seconds: float) -> None:
        """The poison first, beside everything else, then every fault once, then whatever comes until then."""
        until = time.monotonic() + seconds
        acts: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill, "kill twice": self._kill_twice, "hang": self._hang, "stop": self._stop,
            "failing steps": self._fail, "hostile bodies": self._send_some,
        }  # fmt: skip
        await self.send_poison()
        once = self._dice.sample(list(WEIGHTS), len(WEIGHTS))
        while once or time.monotonic() < until:
            await asyncio.sleep(self._dice.expovariate(1 / MEAN_REST))
            name = once.pop() if once else self._dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self.faults[name] += 1
            await acts[name]()

    async def kill_often(self, times: int, seconds: float) -> None:
        """Spread evenly, each at a random moment; the next one never before the server is ready again."""
        begin = time.monotonic()
        for number in range(times):
            due = begin + (number + self._dice.random()) * seconds / times
            await asyncio.sleep(max(self._dice.uniform(0.0, 0.5), due - time.monotonic()))
            self.faults["kill"] += 1
            await self._kill()

    async def hang_often(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(self._dice.expovariate(1 / MEAN_REST))
            self.faults["hang"] += 1
            await self._hang()

    async def fail_for(self, seconds: float) -> None:
        await asyncio.sleep(self._dice.uniform(1.0, 2.0))
        self.faults["failing steps"] += 1
        await self._fail(seconds)

    async def send_poison(self) -> None:
        """It kills whatever process computes it, until the server has found it out."""
        self.faults["poison"] += 1
        start = time.monotonic()
        answer = await stream(self._session, POISON, 20)
        await self._until_ready(start)
        self.poison[str(answer.error)] += 1

    async def send_bombs(self, chosen: list[Bomb], at_once: int) -> None:
        """All of these, so many at a time."""
        for first in range(0, len(chosen), at_once):
            self.faults[f"bombs, {at_once} at once"] += len(chosen[first : first + at_once])
            async with asyncio.TaskGroup() as group:
                for bomb in chosen[first : first + at_once]:
                    group.create_task(self._send(bomb))

    async def _send_some(self) -> None:
        await self.send_bombs(self._dice.sample(bombs(MODEL), AT_ONCE), AT_ONCE)

    async def _send(self, bomb: Bomb) -> None:
        body = await asyncio.to_thread(bomb.make, MAX_BYTES)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(bomb.path, data=body, headers=headers) as response:
                if response.status not in {*bomb.statuses, 429, 503}:
                    self.wrong[f"{bomb.name}: {response.status}"] += 1
        except aiohttp.ClientError:
            return  # closed before it was read: refused as well

    async def _end(self, number: int) -> None:
        """Send the process that runs a signal until there is another one."""
        before, another = self._pid_file.read_text(), self._another()
        while not another():
            with suppress(OSError, ValueError):  # it is gone, or there is none
                os.kill(int(before), number)
            await asyncio.sleep(POLL)

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
        start = time.monotonic()
        await self._end(signal.SIGKILL)
        await self._until_ready(start)

    async def _kill_twice(self) -> None:
        """The second time while the next process starts, or soon after."""
        start = time.monotonic()
        await self._end(signal.SIGKILL)
        await asyncio.sleep(self._dice.uniform(0.0, 5.0))
        await self._end(signal.SIGKILL)
        await self._until_ready(start)

    async def _hang(self) -> None:
        """A step that does not end: the watchdog of the process finds it."""
        another, hang = self._another(), self._chaos / "hang"
        hang.touch()
        while hang.exists():  # noqa: ASYNC110 - a step takes it away
            await asyncio.sleep(POLL)
        start = time.monotonic()
        while await self._is_ready() and not another():  # noqa: ASYNC110 - a state of another process
            await asyncio.sleep(POLL)
        self.noticed.append(time.monotonic() - start)
        await self._until_ready(start, another)

    async def _stop(self) -> None:
        """A process that says nothing more: the gateway finds it."""
        start = time.monotonic()
        await self._end(signal.SIGSTOP)
        await self._until_ready(start)

    async def _fail(self, seconds: float = FAIL_SECONDS) -> None:
        start = time.monotonic()
        (self._chaos / "fail").touch()
        await asyncio.sleep(2.0)
        self.late_status += await self._is_ready()
        await asyncio.sleep(max(0.0, seconds - 2.0))
        (self._chaos / "fail").unlink()
        await self._until_ready(start)
