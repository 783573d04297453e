"""Execution of a plan in this process or in several worker processes, and merging of their records.

Workers share the machine's monotonic clock; each gets every n-th request and the same epoch. Ctrl-C stops the run and
keeps its records.
"""

import asyncio
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from loadgen import ServerError
from loadgen.client import Client
from loadgen.plan import Plan
from loadgen.records import Records
from loadgen.runner import MonotonicClock, Progress, Run

LEAD = 0.3
"""Delay between the end of the preparation and time 0, seconds."""
SHOW_EVERY = 0.5

Show = Callable[[Progress], None]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's event loop factory if it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def execute(plan: Plan, workers: int, show: Show) -> Records:
    """Run the plan and return the merged records. `show` is called about twice per second."""
    if workers == 1:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(run_plan(plan, show, lambda: time.monotonic() + LEAD))
    return _spread(plan, workers, show)


async def run_plan(plan: Plan, show: Show, epoch: Callable[[], float]) -> Records:
    """Run the plan in the running event loop. `epoch` returns time 0, a value of time.monotonic()."""
    clock = MonotonicClock()
    async with Client(plan.target, clock.now) as client:
        run = Run(plan, clock, client)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, run.stop)
        # Existing objects live until the end of the run; collecting them would only delay requests.
        gc.collect()
        gc.freeze()
        clock.start(epoch())
        reporter = asyncio.create_task(_report(run, show))
        try:
            return await run.execute()
        finally:
            reporter.cancel()
            gc.unfreeze()


async def _report(run: Run, show: Show) -> None:
    while True:
        await asyncio.sleep(SHOW_EVERY)
        run.progress.at = run.clock.now()
        show(run.progress)


def _child(plan: Plan, connection: Connection) -> None:
    """Main function of a worker process: send "ready", receive the epoch, run, send progress, send the records."""

    def epoch() -> float:
        connection.send("ready")
        return float(connection.recv())

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        connection.send(runner.run(run_plan(plan, connection.send, epoch)))


def _spread(plan: Plan, workers: int, show: Show) -> Records:
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    for worker in range(workers):
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(target=_child, args=(plan.share(worker, workers), theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    previous = signal.signal(signal.SIGINT, lambda *_: _interrupt(processes))
    try:
        for connection in connections:
            connection.recv()
        epoch = time.monotonic() + LEAD
        for connection in connections:
            connection.send(epoch)
        return merge(_collect(connections, show))
    except EOFError:
        raise ServerError("a worker process ended without a result") from None
    finally:
        signal.signal(signal.SIGINT, previous)
        for process in processes:
            process.join(timeout=5)
            process.kill()


def _interrupt(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)


def _collect(connections: list[Connection], show: Show) -> list[Records]:
    latest: dict[int, Progress] = {}
    results: dict[int, Records] = {}
    while len(results) < len(connections):
        waiting = [item for number, item in enumerate(connections) if number not in results]
        for ready in wait(waiting, timeout=SHOW_EVERY):
            number = connections.index(ready)  # type: ignore[arg-type]
            message: Any = connections[number].recv()
            if isinstance(message, Records):
                results[number] = message
            else:
                latest[number] = message
        show(_total(list(latest.values())))
    return [results[number] for number in sorted(results)]


def _total(parts: list[Progress]) -> Progress:
    total = Progress()
    for part in parts:
        for item in fields(Progress):
            setattr(total, item.name, getattr(total, item.name) + getattr(part, item.name))
    total.at = max((part.at for part in parts), default=0.0)
    # Every worker reports the lines of all offline work.
    total.offline_lines = max((part.offline_lines for part in parts), default=0)
    return total


def merge(parts: list[Records]) -> Records:
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
