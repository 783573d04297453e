"""A run whose flex requests are sent by a process of their own beside the online requests of this one."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from loadgen import ServerError
from loadgen.plan import Plan
from loadgen.records import Records
from loadgen.runner import LEAD, loop_factory, run_plan


async def run_here(plan: Plan, begin: Callable[[float], None] = lambda _epoch: None) -> Records:
    """Run the plan in the running event loop, without workers and progress.

    `begin` is called before the start with the run's time 0, a value of time.monotonic(). Flex requests beside online
    ones are sent by another process until the online ones have ended: reading a hundred streams in this loop would
    delay the tokens of online requests.
    """
    beside = plan.online is not None and plan.offline_mode == "flex"
    with _offline_apart(plan) if beside else nullcontext() as offline:

        def epoch() -> float:
            found = time.monotonic() + LEAD if offline is None else offline.begin()
            begin(found)
            return found

        records = await run_plan(replace(plan, offline_mode="none") if beside else plan, lambda _: None, epoch)
        return records if offline is None else merge([records, await asyncio.to_thread(offline.end)])


def merge(parts: Sequence[Records]) -> Records:
    """Return the records of all parts, ordered by time."""
    merged = Records(
        requests=[record for part in parts for record in part.requests],
        jobs=[job for part in parts for job in part.jobs],
        samples=[sample for part in parts for sample in part.samples],
        ended_at=max(part.ended_at for part in parts),
        interrupted=any(part.interrupted for part in parts),
    )
    merged.requests.sort(key=lambda record: (record.scheduled_at, record.index))
    merged.samples.sort(key=lambda sample: sample.at)
    return merged


class _Apart:
    """A process that sends the offline requests of a plan."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self._process, self._connection = process, connection

    def begin(self) -> float:
        """Wait until the process is ready and return the run's time 0. Raise ServerError if the process has ended."""
        self._receive()
        found = time.monotonic() + LEAD
        self._connection.send(found)
        return found

    def end(self) -> Records:
        """Stop the process and return its records. Raise ServerError if it has ended without records."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)
        records = self._receive()
        assert isinstance(records, Records), "the process sends its records last"
        return replace(records, interrupted=False)

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except EOFError:
            raise ServerError("the process that sends offline requests ended without a result") from None


@contextmanager
def _offline_apart(plan: Plan) -> Iterator[_Apart]:
    windows = replace(plan.windows, warmup=0.0, cooldown=0.0, horizon=None)
    offline = replace(plan, online=None, windows=windows)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=_child, args=(offline, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Apart(process, ours)
    finally:
        process.join(timeout=1)
        process.kill()


def _child(plan: Plan, connection: Connection) -> None:
    """Main function of the process: send "ready", receive the epoch, run, send the records."""

    def epoch() -> float:
        connection.send("ready")
        return float(connection.recv())

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        connection.send(runner.run(run_plan(plan, lambda _: None, epoch)))
