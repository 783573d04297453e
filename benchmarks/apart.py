"""A run whose flex requests are sent by a process of their own beside the online requests of this one."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import uvloop

from loadgen import ServerError
from loadgen.plan import Plan
from loadgen.records import Records
from loadgen.runner import LEAD, run_plan


async def run_here(plan: Plan, begin: Callable[[float], None] = lambda _epoch: None) -> Records:
    """Run the plan in the running event loop, without workers and progress.

    `begin` is called before the start with the run's time 0, a value of time.monotonic(). Flex requests beside online
    ones are sent by another process until the online ones have ended: reading a hundred streams in this loop would
    delay the tokens of online requests.
    """

    def epoch() -> float:
        found = time.monotonic() + LEAD
        begin(found)
        return found

    if plan.online is None or plan.offline_mode != "flex":
        return await run_plan(plan, lambda _: None, epoch)
    with _offline_apart(plan) as (process, connection):

        def common_epoch() -> float:
            _receive(connection)  # the process is ready
            found = epoch()
            connection.send(found)
            return found

        records = await run_plan(replace(plan, offline_mode="none"), lambda _: None, common_epoch)
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
        offline: Records = await asyncio.to_thread(_receive, connection)
    records.requests = sorted(records.requests + offline.requests, key=lambda each: (each.scheduled_at, each.index))
    records.samples = sorted(records.samples + offline.samples, key=lambda sample: sample.at)
    records.ended_at = max(records.ended_at, offline.ended_at)
    return records


def _receive(connection: Connection) -> Any:
    """Return the next message of the process. Raise ServerError if it has ended."""
    try:
        return connection.recv()
    except EOFError:
        raise ServerError("the process that sends offline requests ended without a result") from None


@contextmanager
def _offline_apart(plan: Plan) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a process that sends the offline requests of a plan."""
    windows = replace(plan.windows, warmup=0.0, cooldown=0.0, horizon=None)
    offline = replace(plan, online=None, windows=windows)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=_child, args=(offline, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.join(timeout=1)
        process.kill()


def _child(plan: Plan, connection: Connection) -> None:
    """Main function of the process: send "ready", receive the epoch, run, send the records."""

    def epoch() -> float:
        connection.send("ready")
        return float(connection.recv())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        connection.send(runner.run(run_plan(plan, lambda _: None, epoch)))
