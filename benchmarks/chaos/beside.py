"""Well-behaved clients beside a fault, and the effects that they see."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp

from benchmarks.chaos import load
from benchmarks.chaos.load import MODEL, Outcome
from benchmarks.chaos.prober import Probes, probing
from benchmarks.chaos.promises import Promise, at_most, none_of, shown
from benchmarks.chaos.server import Server, endings, lag_within, read_lag, read_metrics

CHAT, REST = "/v1/chat/completions", 0.5
LOOP_SECONDS, QUIET_SECONDS = 0.05, 0.025
"""Longest stall of the event loop, and the worst answer to a probe on a machine without other work."""
MOST_MEMORY = 200e6
STRUCTURED_SECONDS = 10.0


@dataclass(slots=True)
class Bystanders:
    """`structured`: seconds of each answer by a schema of its own; `refused`: those without one, by reason. `lag`:
    the loop's worst own lateness; `grown`: bytes of the gateway; `deaths`: of the engine process. `gone`: the gateway
    has exited, or does not answer any more."""

    outcome: Outcome = field(default_factory=Outcome)
    probes: Probes = field(default_factory=Probes)
    structured: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lag: float = 0.0
    grown: int = 0
    deaths: Sequence[str] = ()
    gone: bool = False


async def ask(session: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int | str, bytes]:
    """Post JSON; return the status and the answer, or the name of the error and nothing."""
    try:
        async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return type(error).__name__, b""


async def _ask_structured(session: aiohttp.ClientSession, found: Bystanders, name: str) -> None:
    """Ask for an object with one property of this name."""
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


async def _keep_asking(session: aiohttp.ClientSession, found: Bystanders) -> None:
    number = time.monotonic_ns()
    while True:
        number += 1
        await _ask_structured(session, found, f"p{number}")
        await asyncio.sleep(REST)


@asynccontextmanager
async def bystanders(server: Server, session: aiohttp.ClientSession, expected: list[int]) -> AsyncIterator[Bystanders]:
    """Run a probe, a stream whose tokens are known and structured requests during the block; the figures are there
    after it."""
    found, done = Bystanders(), asyncio.Event()
    _, before = await read_lag(session)
    ended = set(endings(await read_metrics(session)))
    server.reset_peak()
    memory = server.resident()
    async with probing(server.url, server.pid) as found.probes:
        streams = asyncio.create_task(load.keep_streaming(session, [PROMPT], [expected], 0, done, found.outcome))
        structured = asyncio.create_task(_keep_asking(session, found))
        try:
            yield found
        finally:
            done.set()
            structured.cancel()
            with suppress(asyncio.CancelledError):
                await structured
            await streams
    found.grown = server.peak() - memory
    try:
        async with asyncio.timeout(30.0):
            _, after = await read_lag(session)
            found.deaths = sorted(set(endings(await read_metrics(session))) - ended)
    except (aiohttp.ClientError, TimeoutError, OSError):
        found.gone = True
    else:
        found.lag = lag_within(before, after, 1.0)


PROMPT = [30, *range(40, 63)]
"""Of the stream."""


async def undisturbed(session: aiohttp.ClientSession) -> list[int]:
    """Return the stream's tokens on a server without other work."""
    return (await load.stream(session, PROMPT, load.STREAM_TOKENS)).tokens


def promises(name: str, found: Bystanders, quiet: Probes) -> list[Promise]:
    """Check what bystanders noticed of `name`. `quiet`: probes without it. Limits of time are scaled to how late a
    process of this machine gets a core, before and meanwhile."""
    scale = max(1.0, max(quiet.worst(), found.probes.late) / QUIET_SECONDS)
    for reason in sorted(set(found.refused))[:3]:
        print(f"  {name}: a structured request of another client got {reason}")
    harm = {
        "gateway gone": int(found.gone),
        f"engine processes that ended ({', '.join(found.deaths)})": len(found.deaths),
        "probes failed": found.probes.failed,
        "streams broken": found.outcome.broken,
        "streams with differing tokens": found.outcome.differing,
        "structured requests not served": len(found.refused),
    }
    served = len(found.structured) - len(found.refused)
    grown = Promise(f"{name}: gateway memory", f"{found.grown / 1e6:.0f} MB", f"{MOST_MEMORY / 1e6:.0f} MB",
                    found.grown <= MOST_MEMORY)  # fmt: skip
    return [
        none_of(f"{name}: harm to others", harm),
        shown(f"{name}: served beside it", f"{found.outcome.streams} + {served}"),
        at_most(
            f"{name}: structured, worst", max(found.structured, default=0.0), min(3.0, scale) * STRUCTURED_SECONDS, "s"
        ),
        shown(f"{name}: /health, worst", f"{1e3 * found.probes.worst():.3g} ms"),
        at_most(
            f"{name}: /health without waits for a core",
            1e3 * found.probes.worst_own(),
            1e3 * scale * LOOP_SECONDS,
            "ms",
        ),
        at_most(f"{name}: loop's own lag", 1e3 * found.lag, 1e3 * scale * LOOP_SECONDS, "ms"),
        grown,
    ]
