"""Well-behaved work beside a fault, its answers compared with an undisturbed run, and the promises to it."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp

from benchmarks.chaos import load, oracle
from benchmarks.chaos.load import MODEL
from benchmarks.chaos.oracle import Answer, Tally, request_of
from benchmarks.chaos.prober import Probes, probing
from benchmarks.chaos.promises import Promise, Scale, at_most, never, none_of, shown
from benchmarks.chaos.server import Server, endings, figure, lag_within, read_lag, read_metrics

CHAT, REST = "/v1/chat/completions", 0.5
LOOP_SECONDS, QUIET_SECONDS = 0.05, 0.025
"""Longest stall of the event loop, and the worst answer to a probe on a machine without other work."""
MOST_MEMORY = 200e6
STRUCTURED_SECONDS = 10.0
MEMORY, DESCRIPTORS = 64e6, 8
"""Growth of the idle gateway that is no leak: pools of threads and connections, caches."""
DRAWN = 1
"""Draws at a boundary: rounding in another engine process changes about one sampled token in a million."""
IDLE_SECONDS, BATCH_SECONDS = 60.0, 900.0
COMPLETIONS = [number for number in range(oracle.NUMBERS) if request_of(number)[1] == "/v1/completions"]


async def ask(session: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int | str, bytes]:
    """Post JSON; return the status and the answer, or the name of the error and nothing."""
    try:
        async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return type(error).__name__, b""


# --- answers


async def of_answers(session: aiohttp.ClientSession, tally: Tally) -> list[Promise]:
    """Check the answers of clients."""
    ties = [difference for difference in tally.differences if await oracle.is_tie(session, difference)]
    for difference in tally.differences:
        print(f"  {difference}", flush=True)
    drawn = sum(difference.sampled for difference in tally.differences)
    return [
        shown("answers", f"{tally.asked}, {tally.cut} cut"),
        shown("ties that a recomputed prompt broke", str(len(ties))),
        never("answers that differ", len(tally.differences) - len(ties) - drawn),
        Promise("sampled answers that differ", str(drawn), str(DRAWN), drawn <= DRAWN),
        none_of("answers that failed", tally.errors),
    ]


# --- batches


def number_of(line: int) -> int:
    """Return the number of the request that a line of the batch repeats."""
    return COMPLETIONS[line % len(COMPLETIONS)]


async def submit_batch(session: aiohttp.ClientSession, lines: int) -> str:
    """Submit a batch of requests with known answers and return its id."""
    bodies = (json.dumps(request_of(number_of(i))[2]) for i in range(lines))
    return await load.submit(session, (load.line(str(i), body) for i, body in enumerate(bodies)))


async def of_batch(session: aiohttp.ClientSession, batch: str, lines: int, expected: Sequence[Answer]) -> Promise:
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


# --- resources


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resources of an idle server. `requests`: ended requests, by /metrics."""

    requests: float
    active: float
    owned: float
    memory: int
    descriptors: int


async def take_stock(server: Server) -> Holdings:
    """Wait until no request runs, and return the resources that the server holds."""
    until = time.monotonic() + IDLE_SECONDS
    async with server.session() as session:
        while True:
            page = await read_metrics(session)
            active = figure(page, "tidemill_requests_running") + figure(page, "tidemill_requests_waiting")
            if not active or time.monotonic() > until:
                owned = figure(page, 'tidemill_device_units_by_state{state="owned"}')
                ended = figure(page, 'tidemill_requests_total{class="online"')
                return Holdings(ended, active, owned, server.resident(), server.descriptors())
            await asyncio.sleep(0.2)


def of_holdings(before: Holdings, after: Holdings, choices: int | None) -> list[Promise]:
    """Check that the idle server holds no more than before, and, if known, the number of choices that have ended."""
    ended = int(after.requests - before.requests)
    grown, more = after.memory - before.memory, after.descriptors - before.descriptors
    counted = Promise("choices ended, by /metrics", str(ended), str(choices), ended == choices)
    return [
        *([] if choices is None else [counted]),
        never("requests left", int(after.active)),
        Promise("blocks owned", f"{after.owned:g}", f"{before.owned:g}", after.owned <= before.owned),
        Promise("memory of the gateway", f"{grown / 1e6:.0f} MB", f"{MEMORY / 1e6:.0f} MB", grown <= MEMORY),
        Promise("descriptors more", str(more), str(DESCRIPTORS), more <= DESCRIPTORS),
    ]


# --- bystanders of a hostile client


@dataclass(slots=True)
class Bystanders:
    """`structured`: seconds of each answer by a schema of its own; `refused`: those without one, by reason. `lag`:
    the loop's worst own lateness; `grown`: bytes of the gateway; `deaths`: of the engine process. `gone`: the gateway
    has exited, or does not answer any more."""

    tally: Tally = field(default_factory=Tally)
    probes: Probes = field(default_factory=Probes)
    structured: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lag: float = 0.0
    grown: int = 0
    deaths: Sequence[str] = ()
    gone: bool = False


async def _keep_asking(session: aiohttp.ClientSession, found: Bystanders) -> None:
    """Ask for one object after another, each with one property of a new name."""
    number = time.monotonic_ns()
    while True:
        name = f"p{(number := number + 1)}"
        properties = {name: {"type": "boolean"}}
        schema = {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}  # fmt: skip
        start = time.monotonic()
        status, answer = await ask(session, CHAT, json.dumps(body).encode())
        found.structured.append(time.monotonic() - start)
        if status != 200:
            found.refused.append(f"{status} {answer[:120].decode(errors='replace')}")
        elif list(json.loads(json.loads(answer)["choices"][0]["message"]["content"])) != [name]:
            found.refused.append(f"an answer beside its schema: {answer[:200].decode(errors='replace')}")
        await asyncio.sleep(REST)


@asynccontextmanager
async def bystanders(
    server: Server, session: aiohttp.ClientSession, expected: Sequence[Answer], scale: Scale
) -> AsyncIterator[Bystanders]:
    """Run a probe, a client whose answers are known and structured requests during the block; the figures are there
    after it."""
    found = Bystanders()
    _, before = await read_lag(session)
    ended = set(endings(await read_metrics(session)))
    server.reset_peak()
    memory = server.resident()
    async with probing(server.url, server.pid) as found.probes:
        structured = asyncio.create_task(_keep_asking(session, found))
        try:
            async with oracle.clients(session, expected, 1, scale.dice()) as found.tally:
                yield found
        finally:
            structured.cancel()
            with suppress(asyncio.CancelledError):
                await structured
    found.grown = server.peak() - memory
    try:
        async with asyncio.timeout(30.0):
            _, after = await read_lag(session)
            found.deaths = sorted(set(endings(await read_metrics(session))) - ended)
    except (aiohttp.ClientError, TimeoutError, OSError):
        found.gone = True
    else:
        found.lag = lag_within(before, after, 1.0)


def of_bystanders(name: str, found: Bystanders, quiet: Probes) -> list[Promise]:
    """Check the effects of `name` on bystanders. `quiet`: probes without it. Limits of time are scaled to how late a
    process of this machine gets a core, before and meanwhile."""
    scale = max(1.0, max(quiet.worst(), found.probes.late) / QUIET_SECONDS)
    for reason in sorted(set(found.refused))[:3]:
        print(f"  {name}: a structured request of another client got {reason}")
    harm = {
        "gateway gone": int(found.gone),
        f"engine processes that ended ({', '.join(found.deaths)})": len(found.deaths),
        "probes failed": found.probes.failed,
        "answers that failed": found.tally.errors.total(),
        "answers that differ": len(found.tally.differences),
        "structured requests not served": len(found.refused),
    }
    served = len(found.structured) - len(found.refused)
    slowest, limit = max(found.structured, default=0.0), min(3.0, scale) * STRUCTURED_SECONDS
    own, loop_limit = 1e3 * found.probes.worst_own(), 1e3 * scale * LOOP_SECONDS
    memory = f"{found.grown / 1e6:.0f} MB"
    return [
        none_of(f"{name}: harm to others", harm),
        shown(f"{name}: served beside it", f"{found.tally.asked} + {served}"),
        at_most(f"{name}: structured, worst", slowest, limit, "s"),
        shown(f"{name}: /health, worst", f"{1e3 * found.probes.worst():.3g} ms"),
        at_most(f"{name}: /health without waits for a core", own, loop_limit, "ms"),
        at_most(f"{name}: loop's own lag", 1e3 * found.lag, loop_limit, "ms"),
        Promise(f"{name}: gateway memory", memory, f"{MOST_MEMORY / 1e6:.0f} MB", found.grown <= MOST_MEMORY),
    ]
