"""`tidemill fleet restart` and `tidemill replay FILE`: restart the engines of a server; print a flight recording."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from engine import flight
from engine.errors import ConfigError
from gateway.store.opening import holder, state_path

RESTART = signal.SIGUSR1


def restart(state_dir: str | None) -> str:
    """Signal the server that holds the state folder and return a message. Raise ConfigError if there is no server."""
    root = state_path(state_dir)
    pid = holder(root)
    if pid is None:
        raise ConfigError(f"no server of this version uses --state-dir {root}; set the --state-dir of the server")
    try:
        os.kill(pid, RESTART)
    except OSError as error:
        raise ConfigError(
            f"cannot signal process {pid}: {error.strerror}; run the command as the server's user"
        ) from None
    return f"process {pid} restarts its engines, one after another; its log and /ready show the progress"


def replay(path: Path) -> int:
    """Print a recording and return the exit code. Raise ConfigError if the file is not a recording."""
    for line in table(flight.load(path)):
        print(line)
    return 0


def table(recording: flight.Recording) -> Iterator[str]:
    """Yield a line per step, with its time before the end, and a line per request in the unfinished steps."""
    facts, entries = recording.facts, recording.entries
    yield f"{facts.cause}: {facts.model}, {facts.dtype} on {facts.device}; {len(entries)} entries"
    titles = f"{'step':>8} {'before the end':>14} {'requests':>8} {'adapted':>7} {'new':>4} {'tokens':>6}"
    yield f"{titles} {'predicted':>10} {'took':>10}"
    ends = {entry.step_id: entry for entry in entries if isinstance(entry, flight.Completed | flight.FailedStep)}
    for entry in entries:
        if isinstance(entry, flight.Launched):
            yield _row(entry, ends.get(entry.step_id), facts.clock)
        elif isinstance(entry, flight.Idle):
            yield f"{'idle':>8} {entry.at - facts.clock:12.3f} s"
    for request_id, tokens in flight.in_flight(entries).items():
        yield f"in the last steps: {request_id}, up to token {tokens}"


def _row(entry: flight.Launched, end: flight.Completed | flight.FailedStep | None, clock: float) -> str:
    tokens = sum(chunk.length for chunk in entry.chunks)
    predicted = "" if entry.predicted is None else f"{1e3 * entry.predicted:.1f} ms"
    match end:
        case flight.Completed():
            took = f"{1e3 * end.latency:.1f} ms"
        case flight.FailedStep():
            took = end.error
        case _:
            took = "no end"
    counts = f"{len(entry.chunks):8} {entry.adapted:7} {len(entry.started):4} {tokens:6}"
    return f"{entry.step_id:8} {entry.at - clock:12.3f} s {counts} {predicted:>10} {took:>10}"
