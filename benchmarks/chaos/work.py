"""Well-behaved work beside a fault, its answers compared with an undisturbed run, and the promises to it."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.chaos import load, oracle
from benchmarks.chaos.oracle import Answer, Tally, request_of
from benchmarks.chaos.promises import Promise, never, none_of, shown
from benchmarks.chaos.server import Server, figure
from benchmarks.live import read_page
from loadgen.client import Client

CHAT = "/v1/chat/completions"
MEMORY, DESCRIPTORS = 64e6, 8
"""Growth of the idle gateway that is no leak: pools of threads and connections, caches."""
DRAWN = 1
"""Draws at a boundary: rounding in another engine process changes about one sampled token in a million."""
IDLE_SECONDS, BATCH_SECONDS, ANSWER_SECONDS = 60.0, 900.0, 120.0
COMPLETIONS = [number for number in range(oracle.NUMBERS) if request_of(number)[1] == "/v1/completions"]


async def ask(client: Client, path: str, body: bytes) -> tuple[int | str, bytes]:
    """Post JSON; return the status and the answer, or the name of the error and nothing."""
    headers, limit = {"Content-Type": "application/json"}, aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    url = client.target.url(path)
    try:
        async with client.session.post(url, data=body, headers=headers, timeout=limit) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return type(error).__name__, b""


# --- answers


async def of_answers(client: Client, tally: Tally) -> list[Promise]:
    """Check the answers of clients."""
    ties = [difference for difference in tally.differences if await oracle.is_tie(client, difference)]
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


async def submit_batch(client: Client, lines: int) -> str:
    """Submit a batch of requests with known answers and return its id."""
    bodies = (json.dumps(request_of(number_of(i))[2]) for i in range(lines))
    return await load.submit(client, (load.line(str(i), body) for i, body in enumerate(bodies)))


async def of_batch(client: Client, batch: str, lines: int, expected: Sequence[Answer]) -> Promise:
    """Check that every line of the batch has one row with the undisturbed answer."""
    state = await load.wait_batch(client, batch, time.monotonic() + BATCH_SECONDS)
    rows, errors = await load.read_rows(client, state)
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
    async with server.client() as client:
        while True:
            page = await read_page(client)
            active = figure(page, "tidemill_requests_running") + figure(page, "tidemill_requests_waiting")
            if not active or time.monotonic() > until:
                owned = figure(page, 'tidemill_device_units_by_state{state="owned"}')
                ended = figure(page, 'tidemill_requests_total{class="online"')
                return Holdings(ended, active, owned, server.resident(), server.descriptors())
            await asyncio.sleep(0.2)


def of_holdings(before: Holdings, after: Holdings, choices: int | None, memory: float = MEMORY) -> list[Promise]:
    """Check that the idle server holds no more than before, `memory` bytes aside, and, if known, the number of choices
    that have ended."""
    ended = int(after.requests - before.requests)
    grown, more = after.memory - before.memory, after.descriptors - before.descriptors
    counted = Promise("choices ended, by /metrics", str(ended), str(choices), ended == choices)
    return [
        *([] if choices is None else [counted]),
        never("requests left", int(after.active)),
        Promise("blocks owned", f"{after.owned:g}", f"{before.owned:g}", after.owned <= before.owned),
        Promise("memory of the gateway", f"{grown / 1e6:.0f} MB", f"{memory / 1e6:.0f} MB", grown <= memory),
        Promise("descriptors more", str(more), str(DESCRIPTORS), more <= DESCRIPTORS),
    ]
