"""Parts of `chaos` about the engine process, hostile bodies and greedy tenants: each has a server of its own."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import median

import aiohttp

from benchmarks.chaos import load
from benchmarks.chaos import server as chaos_server
from benchmarks.chaos.faults import AT_ONCE, Saboteur
from benchmarks.chaos.promises import Part, Promise, Scale, at_most, never, shown
from benchmarks.chaos.server import Server, lag_within, read_lag
from benchmarks.hostile import bombs

NOTICED = 0.3
"""Seconds: a shorter gap in a stream is no pause."""
WARM_SHARE = 0.2
"""Of a run, before memory is compared."""
DRAIN_SECONDS = 900.0
INNOCENT, INNOCENT_TOKENS = 64, 200
TENANTS = {"heavy-key": "heavy requests=8 queued=4000", "light-key": "light"}
HEAVY_TOKENS, LIGHT_TOKENS = 48, 8


def pauses(gaps: Sequence[tuple[float, float]], down: Sequence[tuple[float, float]]) -> list[float]:
    """Of the gaps that a reader notices and that a fault touched: how long they were beyond the time without engine."""
    found = []
    for start, end in gaps:
        without = sum(max(0.0, min(end, back) - max(start, gone)) for gone, back in down)
        if end - start > NOTICED and without:
            found.append(max(0.0, end - start - without))
    return found


# --- streams and a batch beside faults


@dataclass(slots=True)
class Run:
    """What is known once the work has ended. `down`: without an engine; `lag`: of the loop, before and after;
    `own_lag`: but for its waits for a core."""

    saboteur: Saboteur
    outcome: load.Outcome = field(default_factory=load.Outcome)
    lag: tuple[dict[float, float], dict[float, float]] = field(default_factory=lambda: ({}, {}))
    own_lag: tuple[dict[float, float], dict[float, float]] = field(default_factory=lambda: ({}, {}))
    memory: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    batch: str = ""


async def _watch_memory(server: Server, seen: list[int]) -> None:
    while True:
        seen.append(await asyncio.to_thread(server.resident))
        await asyncio.sleep(0.5)


@asynccontextmanager
async def watched(session: aiohttp.ClientSession, server: Server, run: Run) -> AsyncIterator[None]:
    """Memory and the lateness of the loop during the block."""
    before, own_before = await read_lag(session)
    watching = asyncio.create_task(_watch_memory(server, run.memory))
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    after, own_after = await read_lag(session)
    run.lag, run.own_lag = (before, after), (own_before, own_after)


async def beside_work(
    server: Server, scale: Scale, lines: int, faults: Callable[[Saboteur], Awaitable[None]],
    streams: int | None = None, tokens: int = load.STREAM_TOKENS,
) -> Run:  # fmt: skip
    """Streams, one answer after another, and a batch of so many lines while `faults` goes on; then what became of the
    work. Answers are compared with those that the same server gave undisturbed."""
    dice, streams = scale.dice(), scale.streams if streams is None else streams
    prompts = load.make_prompts(dice, streams, 24)
    line_prompts = load.make_prompts(dice, load.LINE_PROMPTS, 12)
    async with server.session() as session:
        run = Run(Saboteur(session, server, dice))
        undisturbed = await asyncio.gather(*[load.stream(session, prompt, tokens) for prompt in prompts])
        expected = [answer.tokens for answer in undisturbed]
        texts = [await load.text_of(session, prompt) for prompt in line_prompts]
        assert all(len(found) == tokens for found in expected), "undisturbed answers are not whole"
        async with watched(session, server, run):
            batch = await load.submit_batch(session, line_prompts, lines) if lines else None
            done = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for number in range(streams):
                    group.create_task(load.keep_streaming(session, prompts, expected, number, done, run.outcome))
                await faults(run.saboteur)
                done.set()
            if batch is not None:
                state = await load.wait_batch(session, batch, time.monotonic() + DRAIN_SECONDS)
                run.batch = state["status"]
                await load.count_rows(session, state, texts, lines, run.outcome)
        run.ended = list(chaos_server.endings(await chaos_server.read_metrics(session)))
    return run


def of_work(run: Run) -> list[Promise]:
    """Nothing broken, nothing different, nothing lost or doubled."""
    outcome, found = run.outcome, [shown("streams", str(run.outcome.streams))]
    found += [never("broken streams", outcome.broken), never("streams with differing tokens", outcome.differing)]
    if run.batch:
        found += [shown(f"rows of the batch ({run.batch})", str(outcome.rows)), never("rows lost", outcome.lost)]
        found += [never("rows doubled", outcome.doubled), never("rows failed", outcome.failed)]
        found.append(never("rows with differing text", outcome.rows_differing))
    return found


def of_pauses(run: Run) -> list[Promise]:
    found = pauses(run.outcome.gaps, run.saboteur.down) or [0.0]
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
    if run.outcome.errors:
        print(f"  streams that broke: {dict(run.outcome.errors)}")
    if run.saboteur.wrong:
        print(f"  bombs that were not refused: {dict(run.saboteur.wrong)}")


# --- the parts


async def kill(scale: Scale) -> list[Promise]:
    """SIGKILLs of the engine process under streams and a batch."""
    times, lines = scale.of(200, 2), scale.of(5000, 20)
    with chaos_server.start() as server:
        run = await beside_work(server, scale, lines, lambda s: s.kill_often(times, scale.seconds))
    report(run)
    return [*of_work(run), *of_pauses(run), *of_loop(run)]


async def hang(scale: Scale) -> list[Promise]:
    """Steps that do not end."""
    with chaos_server.start() as server:
        run = await beside_work(server, scale, scale.of(500, 20), lambda s: s.hang_often(scale.of(20, 2)))
    report(run)
    noticed = at_most("a hung step is found after, worst", max(run.saboteur.noticed), 3.0, "s")
    return [*of_work(run), noticed, *of_pauses(run)]


async def fail(scale: Scale) -> list[Promise]:
    """Every step fails for a minute."""
    with chaos_server.start() as server:
        run = await beside_work(server, scale, scale.of(500, 20), lambda s: s.fail_for(max(4.0, 60 * scale.whole)))
    report(run)
    late = at_most("/ready green 2 s into failing steps", run.saboteur.late_status, 0, "times")
    return [*of_work(run), late, of_pauses(run)[-1]]


async def poison(scale: Scale) -> list[Promise]:
    """One request among many that kills every process which computes it."""

    async def send(saboteur: Saboteur) -> None:
        await saboteur.send_poison()

    with chaos_server.start() as server:
        run = await beside_work(server, scale, 0, send, streams=INNOCENT, tokens=INNOCENT_TOKENS)
    report(run)
    ends = run.saboteur.poison
    return [*of_work(run), never("poison not ended by engine_error", ends.total() - ends["engine_error"])]


async def bomb(scale: Scale) -> list[Promise]:
    """The worst bodies there are, one after another and many at once."""
    chosen = bombs(load.MODEL)
    scale.dice().shuffle(chosen)
    chosen = chosen[: scale.of(len(chosen), AT_ONCE)]
    found = []
    with chaos_server.start() as server:
        for at_once in (1, AT_ONCE):
            run = await beside_work(server, scale, 0, lambda s, at_once=at_once: s.send_bombs(chosen, at_once))  # type: ignore[misc]
            report(run)
            wrong = never("bombs not refused", run.saboteur.wrong.total())
            found += [shown("bombs at once", str(at_once)), *of_work(run), wrong, *of_loop(run)]
    return found


async def storm(scale: Scale) -> list[Promise]:
    """Every fault at random moments."""
    with chaos_server.start() as server:
        run = await beside_work(server, scale, scale.of(1200, 20), lambda s: s.storm(scale.seconds))
    report(run)
    ends = run.saboteur.poison
    return [
        *of_work(run),
        never("bombs not refused", run.saboteur.wrong.total()),
        never("poison not ended by engine_error", ends.total() - ends["engine_error"]),
        at_most("/ready green 2 s into failing steps", run.saboteur.late_status, 0, "times"),
        *of_pauses(run),
        *of_loop(run),
    ]


async def tenant(scale: Scale) -> list[Promise]:
    """A tenant with a thousand requests waiting, its share limited by the key file, beside one with a chat."""
    waiting, times = scale.of(1000, 50), scale.of(30, 5)
    prompts = load.make_prompts(scale.dice(), 64, 24)
    with chaos_server.start(keys=TENANTS) as server:
        async with server.session("light-key") as light, server.session("heavy-key") as heavy:
            await _first_tokens(light, prompts, 3)
            alone = await _first_tokens(light, prompts, times)
            flood = [asyncio.create_task(load.stream(heavy, prompts[i % 64], HEAVY_TOKENS)) for i in range(waiting)]
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


async def _first_tokens(session: aiohttp.ClientSession, prompts: Sequence[list[int]], times: int) -> list[float]:
    """Seconds until the first token of one request after another, none of whose prompts is known."""
    found = []
    for number in range(times):
        prompt = [400 - number % 60, *prompts[number % len(prompts)]]
        found.append(await _timed(session, prompt))
    return found


async def _timed(session: aiohttp.ClientSession, prompt: list[int]) -> float:
    """Seconds until the first token."""
    start = time.monotonic()
    return (await load.stream(session, prompt, LIGHT_TOKENS)).at[0] - start


PARTS: dict[str, Part] = {
    "kill": kill, "hang": hang, "fail": fail, "poison": poison, "bombs": bomb, "tenant": tenant,
    "storm": storm,
}  # fmt: skip
