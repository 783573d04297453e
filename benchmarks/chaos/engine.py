"""Faults of the engine process beside mixed requests and a batch: one table of faults and promises.

Each part has a server of its own. Answers are compared with those that the same server gave undisturbed.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import median

from benchmarks.chaos import inputs, load, oracle, work
from benchmarks.chaos import server as chaos_server
from benchmarks.chaos.child import POISON
from benchmarks.chaos.oracle import Tally
from benchmarks.chaos.promises import Part, Promise, Scale, at_most, never, shown
from benchmarks.chaos.server import Server, lag_within, read_lag
from benchmarks.hostile import MAX_BYTES, Bomb, bombs
from benchmarks.live import read_page
from loadgen.client import Client

WEIGHTS = {"kill": 12, "kill twice": 3, "hang": 2, "failing steps": 2, "hostile bodies": 3, "stop": 0.3, "pause": 3}
MEAN_REST, FAIL_SECONDS, POLL = 2.0, 4.0, 0.02
AT_ONCE, COMPLETIONS = 16, "/v1/completions"
NOTICED = 0.3
"""Seconds: a shorter gap in a stream is no pause."""
WARM_SHARE = 0.2
"""Share of a run before memory is compared."""
INNOCENT = 64
TENANTS = {"heavy-key": "heavy requests=8 queued=4000", "light-key": "light"}
HEAVY_TOKENS, LIGHT_TOKENS = 48, 8


class Saboteur:
    """Faults of a server and their effects.

    Attributes:
        client: Client of the server.
        faults: Faults by name.
        down: Spans in which no engine process could answer.
        noticed: Seconds from each hung step until the server said so.
        late_status: Times that /ready was still green 2 s into failing steps.
        wrong: Hostile bodies that were not refused.
        poison: How requests with the poison ended.
    """

    def __init__(self, client: Client, server: Server, dice: random.Random) -> None:
        self.client = client
        self._pid_file = server.folder / "state" / "engine.pid"
        self._chaos = server.folder / "chaos"
        self._dice = dice
        self.faults: Counter[str] = Counter()
        self.down: list[tuple[float, float]] = []
        self.noticed: list[float] = []
        self.late_status = 0
        self.wrong: Counter[str] = Counter()
        self.poison: Counter[str] = Counter()

    async def storm(self, seconds: float) -> None:
        """Send the poison, cause every fault once, then random faults."""
        until = time.monotonic() + seconds
        acts: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill, "kill twice": self._kill_twice, "hang": self._hang, "stop": self._stop,
            "pause": self._pause, "failing steps": self._fail, "hostile bodies": self._send_some,
        }  # fmt: skip
        await self.send_poison()
        once = self._dice.sample(list(WEIGHTS), len(WEIGHTS))
        while once or time.monotonic() < until:
            await asyncio.sleep(self._dice.expovariate(1 / MEAN_REST))
            name = once.pop() if once else self._dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self.faults[name] += 1
            await acts[name]()

    async def kill_often(self, times: int, seconds: float) -> None:
        """Kill the process at random moments of equal spans, never before the server is ready again."""
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
        """Send a request that kills each process that computes it, until the server has convicted it."""
        self.faults["poison"] += 1
        start = time.monotonic()
        answer = await oracle.send(self.client, COMPLETIONS, load.body_of(POISON, 20))
        await self._until_ready(start)
        self.poison[str(answer.error).partition(":")[0]] += 1

    async def send_bombs(self, chosen: list[Bomb], at_once: int) -> None:
        """Send all bodies, `at_once` at a time."""
        for first in range(0, len(chosen), at_once):
            self.faults[f"bombs, {at_once} at once"] += len(chosen[first : first + at_once])
            async with asyncio.TaskGroup() as group:
                for bomb in chosen[first : first + at_once]:
                    group.create_task(self._send(bomb))

    async def _send_some(self) -> None:
        await self.send_bombs(self._dice.sample(bombs(load.MODEL), AT_ONCE), AT_ONCE)

    async def _send(self, bomb: Bomb) -> None:
        body = await asyncio.to_thread(bomb.make, MAX_BYTES)
        status, _ = await work.ask(self.client, bomb.path, body)
        closed = isinstance(status, str) and status != TimeoutError.__name__  # before it was read: refused
        if not closed and status not in {*bomb.statuses, 429, 503}:
            self.wrong[f"{bomb.name}: {status}"] += 1

    async def _end(self, number: int) -> None:
        """Send a signal to the current process until there is another one."""
        before, another = self._pid_file.read_text(), self._another()
        while not another():
            with suppress(OSError, ValueError):  # it is gone, or there is none
                os.kill(int(before), number)
            await asyncio.sleep(POLL)

    async def _until_ready(self, start: float, gone: Callable[[], bool] = lambda: True) -> None:
        """Wait until the server is ready again, once `gone` says that it noticed."""
        while not gone() or not await self._is_ready():  # noqa: ASYNC110 - a state of another process
            await asyncio.sleep(POLL)
        self.down.append((start, time.monotonic()))

    async def _is_ready(self) -> bool:
        status, _ = await self.client.raw("GET", "/ready")
        return status == 200

    def _another(self) -> Callable[[], bool]:
        """Return a test of whether another process has been started since this call."""
        before = self._pid_file.read_text()
        return lambda: self._pid_file.exists() and self._pid_file.read_text() != before

    async def _kill(self) -> None:
        start = time.monotonic()
        await self._end(signal.SIGKILL)
        await self._until_ready(start)

    async def _kill_twice(self) -> None:
        """Kill the process, and the next one while it starts or soon after."""
        start = time.monotonic()
        await self._end(signal.SIGKILL)
        await asyncio.sleep(self._dice.uniform(0.0, 5.0))
        await self._end(signal.SIGKILL)
        await self._until_ready(start)

    async def _hang(self) -> None:
        """Make a step that does not end: the watchdog of the process finds it."""
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
        """Stop the process for good: the gateway finds it."""
        start = time.monotonic()
        await self._end(signal.SIGSTOP)
        await self._until_ready(start)

    async def _pause(self) -> None:
        """Stop the process for less time than the gateway waits, or a little more."""
        start = time.monotonic()
        with suppress(OSError, ValueError):
            paused = int(self._pid_file.read_text())
            os.kill(paused, signal.SIGSTOP)
            await asyncio.sleep(self._dice.uniform(0.2, 4.0))
            os.kill(paused, signal.SIGCONT)
        await self._until_ready(start)

    async def _fail(self, seconds: float = FAIL_SECONDS) -> None:
        start = time.monotonic()
        (self._chaos / "fail").touch()
        await asyncio.sleep(2.0)
        self.late_status += await self._is_ready()
        await asyncio.sleep(max(0.0, seconds - 2.0))
        (self._chaos / "fail").unlink()
        await self._until_ready(start)


def pauses(gaps: Sequence[tuple[float, float]], down: Sequence[tuple[float, float]]) -> list[float]:
    """Return, for each noticeable gap that a fault touched, its seconds beyond the time without an engine process."""
    found = []
    for start, end in gaps:
        without = sum(max(0.0, min(end, back) - max(start, gone)) for gone, back in down)
        if end - start > NOTICED and without:
            found.append(max(0.0, end - start - without))
    return found


@dataclass(slots=True)
class Run:
    """Results of the work. `lag`: of the loop, before and after; `own_lag`: without its waits for a core; `work`:
    promises to clients and to the batch."""

    saboteur: Saboteur
    tally: Tally = field(default_factory=Tally)
    work: list[Promise] = field(default_factory=list)
    lag: tuple[dict[float, float], dict[float, float]] = field(default_factory=lambda: ({}, {}))
    own_lag: tuple[dict[float, float], dict[float, float]] = field(default_factory=lambda: ({}, {}))
    memory: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


async def _watch_memory(server: Server, seen: list[int]) -> None:
    while True:
        seen.append(await asyncio.to_thread(server.resident))
        await asyncio.sleep(0.5)


@asynccontextmanager
async def watched(client: Client, server: Server, run: Run) -> AsyncIterator[None]:
    """Watch memory and the lateness of the loop during the block."""
    before, own_before = await read_lag(client)
    watching = asyncio.create_task(_watch_memory(server, run.memory))
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    after, own_after = await read_lag(client)
    run.lag, run.own_lag = (before, after), (own_before, own_after)


async def beside_work(server: Server, scale: Scale, fault: "Fault") -> Run:
    """Let clients and a batch work during the fault, and compare their answers with undisturbed ones."""
    dice, lines = scale.dice(), scale.of(fault.lines, 20) if fault.lines else 0
    async with server.client() as client:
        expected = await oracle.undisturbed(client)
    before = await work.take_stock(server)
    async with server.client() as client:
        run = Run(Saboteur(client, server, dice))
        async with watched(client, server, run):
            batch = await work.submit_batch(client, lines) if lines else None
            async with oracle.clients(client, expected, fault.clients or scale.clients, dice) as run.tally:
                await fault.act(run.saboteur, scale)
            if batch is not None:
                run.work.append(await work.of_batch(client, batch, lines, expected))
        run.work += await work.of_answers(client, run.tally)
        run.ended = list(chaos_server.endings(await read_page(client)))
    choices = run.tally.choices if fault.counted else None
    run.work += work.of_holdings(before, await work.take_stock(server), choices, fault.memory)
    return run


def of_pauses(run: Run) -> list[Promise]:
    found = pauses(run.tally.gaps, run.saboteur.down) or [0.0]
    without = [end - start for start, end in run.saboteur.down] or [0.0]
    return [
        shown("time without engine, median", median(without), "s"),
        shown("time without engine, worst", max(without), "s"),
        at_most("pause beyond it, median", median(found), 1.0, "s"),
        at_most("pause beyond it, worst", max(found), 3.0, "s"),
    ]


def of_loop(run: Run) -> list[Promise]:
    warm = run.memory[int(WARM_SHARE * len(run.memory))]
    return [
        shown("loop lag with its waits for a core, P99", 1e3 * lag_within(*run.lag, 0.99), "ms"),
        shown("the same, worst", 1e3 * lag_within(*run.lag, 1.0), "ms"),
        at_most("loop lag, P99 at most", 1e3 * lag_within(*run.own_lag, 0.99), 20.0, "ms"),
        at_most("loop lag, worst at most", 1e3 * lag_within(*run.own_lag, 1.0), 50.0, "ms"),
        at_most("memory of the server grew by", (max(run.memory) - warm) / 2**20, 256.0, "MiB"),
    ]


def report(run: Run) -> None:
    print("  faults: " + ", ".join(f"{count} {name}" for name, count in run.saboteur.faults.items()))
    print("  engine processes that ended: " + (", ".join(run.ended) or "none"))
    if run.saboteur.wrong:
        print(f"  bombs that were not refused: {dict(run.saboteur.wrong)}")


# --- the table


@dataclass(frozen=True, slots=True)
class Fault:
    """A part: a fault and its promises besides whole and equal answers. `lines`: of the batch; `clients`: instead of
    those of the command; `counted`: no other request than theirs is online; `servers`: flags of one server after the
    other; `memory`: bytes by which the idle gateway may grow."""

    about: str
    act: Callable[[Saboteur, Scale], Awaitable[None]]
    promises: Callable[[Run], list[Promise]]
    lines: int = 0
    clients: int = 0
    counted: bool = True
    servers: Sequence[Sequence[str]] = ((),)
    memory: float = work.MEMORY

    def part(self) -> Part:
        async def run_part(scale: Scale) -> list[Promise]:
            found: list[Promise] = []
            for flags in self.servers:
                with chaos_server.start(*flags) as server:
                    run = await beside_work(server, scale, self)
                report(run)
                found += [*run.work, *self.promises(run)]
            return found

        run_part.__doc__ = self.about
        return run_part


def of_bombs(run: Run) -> list[Promise]:
    return [never("bombs not refused", run.saboteur.wrong.total())]


def of_inputs(run: Run) -> list[Promise]:
    return [*of_bombs(run), never("engine processes that ended", len(run.ended)), *of_loop(run)]


def of_poison(run: Run) -> list[Promise]:
    ends = run.saboteur.poison
    return [never("poison not ended by engine_error", ends.total() - ends["engine_error"])]


def of_status(run: Run) -> list[Promise]:
    return [at_most("/ready green 2 s into failing steps", run.saboteur.late_status, 0, "times")]


def of_hangs(run: Run) -> list[Promise]:
    return [at_most("a hung step is found after, worst", max(run.saboteur.noticed), 3.0, "s")]


async def send_all_bombs(saboteur: Saboteur, scale: Scale) -> None:
    """Send bodies one after another, and then many at once."""
    chosen = scale.some(bombs(load.MODEL), AT_ONCE)
    for at_once in (1, AT_ONCE):
        await saboteur.send_bombs(chosen, at_once)


FAULTS = {
    "kill": Fault(
        "SIGKILLs of the engine process",
        lambda saboteur, scale: saboteur.kill_often(scale.of(200, 2), scale.seconds),
        lambda run: [*of_pauses(run), *of_loop(run)],
        lines=2000,
    ),
    "hang": Fault(
        "steps that do not end",
        lambda saboteur, scale: saboteur.hang_often(scale.of(20, 2)),
        lambda run: [*of_hangs(run), *of_pauses(run)],
        lines=500,
    ),
    "fail": Fault(
        "every step fails for a minute",
        lambda saboteur, scale: saboteur.fail_for(max(4.0, 60 * scale.whole)),
        lambda run: [*of_status(run), of_pauses(run)[-1]],
        lines=500,
    ),
    "poison": Fault(
        "one request among many that kills every process which computes it",
        lambda saboteur, _: saboteur.send_poison(),
        of_poison,
        clients=INNOCENT,
        counted=False,
    ),
    "bombs": Fault(
        "expensive bodies, one after another and many at once",
        send_all_bombs,
        lambda run: [*of_bombs(run), *of_loop(run)],
        counted=False,
    ),
    "storm": Fault(
        "every fault at random moments",
        lambda saboteur, scale: saboteur.storm(scale.seconds),
        lambda run: [*of_bombs(run), *of_poison(run), *of_status(run), *of_pauses(run), *of_loop(run)],
        lines=1200,
        counted=False,
    ),
    "inputs": Fault(
        "costly requests, grammars and batch lines of all sizes",
        inputs.send_inputs,
        of_inputs,
        clients=1,
        counted=False,
        servers=(("--tool-parser", "qwen3_xml"),),
        memory=200e6,
    ),
    "blanks": Fault(
        "answers of white space where a call of a function may begin",
        inputs.write_blanks,
        of_inputs,
        clients=1,
        counted=False,
        servers=(("--tool-parser", "llama3_json"), ("--tool-parser", "hermes")),
    ),
}


async def tenant(scale: Scale) -> list[Promise]:
    """A tenant with a thousand requests waiting, its share limited by the key file, beside one with a chat."""
    waiting, times = scale.of(1000, 50), scale.of(30, 5)
    prompts = load.make_prompts(scale.dice(), 64, 24)
    with chaos_server.start(keys=TENANTS) as server:
        async with server.client("light-key") as light, server.client("heavy-key") as heavy:
            await _first_tokens(light, prompts, 3)
            alone = await _first_tokens(light, prompts, times)
            bodies = [load.body_of(prompt, HEAVY_TOKENS) for prompt in prompts]
            flood = [asyncio.create_task(oracle.send(heavy, COMPLETIONS, bodies[i % 64])) for i in range(waiting)]
            await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
            beside = await _first_tokens(light, prompts, times)
            left = sum(not task.done() for task in flood)
            answers = await asyncio.gather(*flood)
    return [
        shown("heavy tenant's requests open meanwhile", f"{left} to {waiting}"),
        never("broken streams of the heavy tenant", sum(answer.error is not None for answer in answers)),
        shown("light tenant's TTFT alone, median", 1e3 * median(alone), "ms"),
        at_most("beside the heavy one, median", 1e3 * median(beside), 2e3 * median(alone), "ms"),
        shown("beside the heavy one, worst", 1e3 * max(beside), "ms"),
    ]


async def _first_tokens(client: Client, prompts: Sequence[list[int]], times: int) -> list[float]:
    """Return the seconds until the first token of one request after another, each with a prompt of its own."""
    found = []
    for number in range(times):
        prompt = [400 - number % 60, *prompts[number % len(prompts)]]
        answer = await oracle.send(client, COMPLETIONS, load.body_of(prompt, LIGHT_TOKENS))
        found.append(answer.at[1] - answer.at[0])
    return found


PARTS: dict[str, Part] = {
    **{name: FAULTS[name].part() for name in ("kill", "hang", "fail", "poison", "bombs")}, "tenant": tenant,
    **{name: FAULTS[name].part() for name in ("storm", "inputs", "blanks")},
}  # fmt: skip
