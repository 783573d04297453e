"""The last seven days by minute: chats within their limits, batch work, and its pauses.

Each minute in which something happened becomes a line of `timeline.jsonl` in the state folder (about 60 bytes; at most
`KEPT_MINUTES` lines after a start), so that a restart keeps the night. A stop writes the minute in progress; a
start within that minute begins another line, and readers add both. A line that a crash has cut is left out. If the
folder cannot be written, lines wait in memory.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from engine.api import RequestClass
from engine.client import EngineStats

FILE = "timeline.jsonl"
MINUTE = 60
KEPT_MINUTES = 7 * 24 * 60
MAX_STEP = 30.0
"""Maximum seconds of a pause that are counted between two looks."""
CAUSES = {"slo": "chats missed their limits", "predictor": "steps took longer than predicted"}
"""Causes of the breaker in words."""


@dataclass(slots=True)
class Minute:
    """What happened in one minute. `time`: its begin in Unix seconds."""

    time: int
    good: int = 0
    """Judged chats that met every objective."""
    bad: int = 0
    refused: int = 0
    answers: int = 0
    """Complete answers of offline requests; `prompt` and `output`: the tokens of all that ended."""
    prompt: int = 0
    output: int = 0
    paused: float = 0.0
    """Seconds in which offline work waited for the sake of chats."""
    why: str = ""
    """Reason of the last pause."""

    @property
    def is_empty(self) -> bool:
        return not any((self.good, self.bad, self.refused, self.answers, self.output, self.paused))


class Timeline:
    """Args:

    path: file that keeps the minutes; None keeps them in memory only.
    clock: wall clock in seconds.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._minutes: deque[Minute] = deque(_read(path) if path is not None else (), KEPT_MINUTES)
        self._unwritten = list[Minute]()
        self._counts: dict[str, int] | None = None
        self._looked_at = clock()
        self._current = Minute(self._minute())

    def look(self, stats: EngineStats, offline: Mapping[str, int]) -> bool:
        """Count what happened since the last look, and return whether a minute has ended that `write` stores.

        `offline`: totals of offline requests since the start, as in `ClassMetrics.totals`.
        """
        now, colocation = self._clock(), stats.colocation
        counts = {"refused": stats.refused_requests, "answers": offline["answers"]}
        counts |= {"prompt": offline["prompt_tokens"], "output": offline["output_tokens"]}
        if colocation is not None:
            counts |= {"good": colocation.good_requests, "bad": colocation.bad_requests}
        ended = False
        if self._minute() != self._current.time:
            ended = self.end_minute()
        before = self._counts or counts
        for name, count in counts.items():
            grown = count - before.get(name, 0)  # a counter that fell is that of another engine process
            setattr(self._current, name, getattr(self._current, name) + (grown if grown >= 0 else count))
        if why := _pause(stats):
            self._current.paused += min(max(0.0, now - self._looked_at), MAX_STEP)
            self._current.why = why
        self._counts, self._looked_at = counts, now
        return ended

    def end_minute(self) -> bool:
        """End the minute in progress, and return whether `write` stores it: something happened in it."""
        ended, self._current = self._current, Minute(self._minute())
        if ended.is_empty:
            return False
        self._minutes.append(ended)
        self._unwritten.append(ended)
        return True

    def write(self) -> None:
        """Append the ended minutes to the file. Blocking. If that fails, the next call repeats it."""
        if self._path is None or not self._unwritten:
            return
        minutes, self._unwritten = self._unwritten, []
        try:
            with self._path.open("ab") as file:
                file.write(_lines(minutes))
        except OSError:
            self._unwritten = [*minutes, *self._unwritten][-KEPT_MINUTES:]

    def since(self, start: float) -> list[dict[str, Any]]:
        """Return the minutes from `start` (Unix seconds) to now, in order; minutes without an event have no entry."""
        every = (*self._minutes, self._current)
        return [asdict(each) for each in every if each.time + MINUTE > start and not each.is_empty]

    def _minute(self) -> int:
        return int(self._clock()) // MINUTE * MINUTE


def _pause(stats: EngineStats) -> str:
    """Return why offline requests wait for the sake of chats; "" if they do not."""
    online, offline = (
        stats.running.get(each, 0) + stats.waiting.get(each, 0) for each in (RequestClass.ONLINE, RequestClass.OFFLINE)
    )
    if stats.colocation is None or not online or not offline:
        return ""
    opened = stats.colocation.breaker_cause if stats.colocation.breaker == "open" else None
    return stats.colocation.held or ("" if opened is None else CAUSES.get(opened, f"the objective {opened} was missed"))


def _lines(minutes: Iterable[Minute]) -> bytes:
    return b"".join(orjson.dumps(asdict(each), option=orjson.OPT_APPEND_NEWLINE) for each in minutes)


def _read(path: Path) -> list[Minute]:
    """Return the minutes in the file that are not too old, and write it anew without the others."""
    minutes = list[Minute]()
    with suppress(OSError):
        data = path.read_bytes()
        for line in data.splitlines():
            with suppress(ValueError, TypeError):
                minutes.append(Minute(**orjson.loads(line)))
        oldest = time.time() - KEPT_MINUTES * MINUTE
        minutes = [each for each in minutes if each.time >= oldest][-KEPT_MINUTES:]
        kept = _lines(minutes)
        if kept != data:
            copy = path.with_suffix(".new")
            copy.write_bytes(kept)
            os.replace(copy, path)
    return minutes
