"""The part `oracle`: mixed requests and a batch beside signals to the engine process, then the gateway killed in every
phase of a batch. Every answer is compared with an undisturbed run."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from benchmarks.chaos import load, oracle
from benchmarks.chaos.gateway_kills import PHASES, Killed
from benchmarks.chaos.oracle import Answer, Tally, request_of
from benchmarks.chaos.promises import Promise, Scale, never, none_of, shown
from benchmarks.chaos.server import Server, figure, read_metrics, start

CLIENTS, MEAN_REST = 6, 5.0
ACTS = {"kill": 12, "kill twice": 3, "stop": 2, "pause": 3}
ENGINE_SHARE = 0.7
"""Of the time; the gateway is killed in the rest."""
MEMORY, DESCRIPTORS = 64e6, 8
"""Growth of the gateway that is no leak: pools of threads and connections, caches."""
DRAWN = 1
"""Draws at a boundary: rounding in another engine process changes about one sampled token in a million."""
IDLE_SECONDS, BATCH_SECONDS = 60.0, 900.0


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resources of a server. `requests`: ended requests, by /metrics."""

    requests: float
    active: float
    owned: float
    memory: int
    descriptors: int


async def take_stock(server: Server, session: aiohttp.ClientSession) -> Holdings:
    """Wait until nothing runs, and look."""
    until = time.monotonic() + IDLE_SECONDS
    while True:
        page = await read_metrics(session)
        active = figure(page, "tidemill_requests_running") + figure(page, "tidemill_requests_waiting")
        if not active or time.monotonic() > until:
            owned = figure(page, 'tidemill_device_units_by_state{state="owned"}')
            ended = figure(page, 'tidemill_requests_total{class="online"')
            return Holdings(ended, active, owned, server.resident(), server.descriptors())
        await asyncio.sleep(0.2)


async def disturb(server: Server, dice: random.Random, seconds: float, acts: Counter[str]) -> None:
    """Kill, stop and pause the engine process at random moments."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(dice.expovariate(1 / MEAN_REST))
        act = dice.choices(list(ACTS), list(ACTS.values()))[0]
        acts[act] += 1
        _signal(server, signal.SIGKILL if act.startswith("kill") else signal.SIGSTOP)
        if act == "kill twice":
            await asyncio.sleep(dice.uniform(0.0, 3.0))
            _signal(server, signal.SIGKILL)
        elif act == "pause":
            paused = server.engine()
            await asyncio.sleep(dice.uniform(0.2, 4.0))
            _signal(server, signal.SIGCONT, paused)


def _signal(server: Server, number: int, process: int | None = None) -> None:
    if (found := process or server.engine()) is not None:
        with suppress(ProcessLookupError):
            os.kill(found, number)


async def compare_batch(session: aiohttp.ClientSession, batch: str, lines: int, expected: Sequence[Answer]) -> Promise:
    """Check that every line of the batch has one row with the undisturbed answer."""
    state = await load.wait_batch(session, batch, time.monotonic() + BATCH_SECONDS)
    rows, errors = await load.read_rows(session, state)
    harm = Counter({"lines without one row": load.miscounted(map(str, range(lines)), rows + errors)})
    harm["error rows"] = len(errors)
    used = 0
    for row in rows:
        answer, number = Answer(), number_of(int(row["custom_id"]))
        answer.take(row["response"]["body"])
        used += answer.tokens or 0
        for difference in oracle.compare(number, expected[number], answer):
            harm["rows that differ"] += 1
            print(f"  line {row['custom_id']}: {difference}", flush=True)
    harm["wrong usage"] = int(state["usage"]["output_tokens"] != used)
    harm[f"batches that are {state['status']}"] = int(state["status"] != "completed")
    return none_of(f"batch of {lines}: harm", harm)


COMPLETIONS = [number for number in range(oracle.NUMBERS) if request_of(number)[1] == "/v1/completions"]


def number_of(line: int) -> int:
    """Return the number of the request that a line of the batch repeats."""
    return COMPLETIONS[line % len(COMPLETIONS)]


async def engine_killed(server: Server, scale: Scale) -> list[Promise]:
    """Mixed requests and a batch while the engine process is killed, stopped and paused."""
    dice, tally, acts, lines = scale.dice(), Tally(), Counter[str](), scale.of(2000, 40)
    async with server.session() as session:
        expected = await oracle.undisturbed(session)
        choices = sum(len(answer.choices) for answer in expected)
    async with server.session() as session:
        before = await take_stock(server, session)
    async with server.session() as session:
        bodies = [json.dumps(request_of(number_of(i))[2]) for i in range(lines)]
        batch = await load.submit(session, (load.line(str(i), body) for i, body in enumerate(bodies)))
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                client = random.Random(dice.random())
                group.create_task(oracle.keep_asking(session, expected, client, done, tally))
            await disturb(server, dice, ENGINE_SHARE * scale.seconds, acts)
            done.set()
        of_batch = await compare_batch(session, batch, lines, expected)
        ties = [difference for difference in tally.differences if await oracle.is_tie(session, difference)]
    async with server.session() as session:
        after = await take_stock(server, session)
    print(f"  {dict(acts)}; {choices} choices undisturbed; longest wait between chunks {tally.gap:.1f} s", flush=True)
    return [*of_answers(tally, len(ties)), of_batch, *of_holdings(before, after, tally)]


def of_answers(tally: Tally, ties: int) -> list[Promise]:
    """Check what clients got."""
    for difference in tally.differences:
        print(f"  {difference}", flush=True)
    drawn = sum(difference.sampled for difference in tally.differences)
    return [
        shown("answers", f"{tally.asked}, {tally.cut} cut"),
        shown("ties that a recomputed prompt broke", str(ties)),
        never("answers that differ", len(tally.differences) - ties - drawn),
        Promise("sampled answers that differ", str(drawn), str(DRAWN), drawn <= DRAWN),
        none_of("answers that failed", tally.errors),
    ]


def of_holdings(before: Holdings, after: Holdings, tally: Tally) -> list[Promise]:
    """Check that nothing is held any more, and that requests have ended as often as they were asked."""
    ended = int(after.requests - before.requests)
    grown, more = after.memory - before.memory, after.descriptors - before.descriptors
    return [
        Promise("choices ended, by /metrics", str(ended), str(tally.choices), ended == tally.choices),
        never("requests left", int(after.active)),
        Promise("blocks owned", f"{after.owned:g}", f"{before.owned:g}", after.owned <= before.owned),
        Promise("memory of the gateway", f"{grown / 1e6:.0f} MB", f"{MEMORY / 1e6:.0f} MB", grown <= MEMORY),
        Promise("descriptors more", str(more), str(DESCRIPTORS), more <= DESCRIPTORS),
    ]


async def gateway_killed(server: Server, scale: Scale) -> list[Promise]:
    """The gateway killed in every phase of a batch, for the rest of the time."""
    until = time.monotonic() + (1 - ENGINE_SHARE) * scale.seconds
    prompts = load.make_prompts(scale.dice(), load.LINE_PROMPTS, 12)
    async with server.session() as session:
        texts = [await load.text_of(session, prompt) for prompt in prompts]
    killed, times = Killed(server, scale.dice(), prompts, texts, scale.of(1000, 60)), Counter[str]()
    while not times or time.monotonic() < until:
        for phase in PHASES:
            times[phase] += 1
            await killed.in_phase(phase)
    await asyncio.to_thread(server.end)
    killed.left_over()
    print(f"  gateway killed: {dict(times)}", flush=True)
    return [none_of("gateway killed: harm", killed.harm)]


async def oracle_part(scale: Scale) -> list[Promise]:
    """Mixed requests and a batch beside random signals to the engine process; the gateway killed in every phase."""
    with start() as server:
        return [*await engine_killed(server, scale), *await gateway_killed(server, scale)]
