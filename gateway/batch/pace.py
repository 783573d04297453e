"""Throughput of batch work, and the share of the machine that online work uses. Pure: no disk, no engine, no clock."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.api import TokenCosts
from gateway.store.objects import Usage

HALF_LIFE = 600.0
"""Half-life of measurements in seconds."""
HORIZONS = (HALF_LIFE, 3_600.0, 21_600.0, 129_600.0)
"""Half-lives of the averages of the pace in seconds. Work is expected at an average until the average's half-life from
now: the load of the next minutes is that of the last ones, and a day goes through high and low load."""
LEAST_SEEN = 2.0
"""Seconds of batch work before the measured pace is used."""
FIRST_PACE_SECONDS = 10.0
"""Weight in seconds of the expected pace beside the measured one: at first, prompts of running lines are not counted
yet."""
LEAST_LEFT = 0.05
"""Minimum share of the machine assumed for offline work."""
MAX_STEP = 120.0
"""Maximum seconds counted between two measurements: the clock may be set."""
DAY, DAY_PARTS = 86_400.0, 48
"""Seconds of a day, and the number of its parts whose online load is learned."""
KNOWN_DAYS = 2.0
"""Days of observation from which online load is expected by time of day."""
DAY_MEMORY = 3.0
"""Half-life of the load of a part of the day, in days."""
TODAY = 0.25
"""Half-life in days of the ratio of today's load to the usual one, looking back and ahead."""
MAX_RATIO = 2.0
"""Ratio of today's load to the usual one, or inverse, from which the day is unusual, e.g. the first day off."""
AHEAD_DAYS = 7
"""Days for which the load is expected part by part; later, at the mean of a day."""
FIRST_PROMPT_TOKENS_PER_BYTE, FIRST_OUTPUT_TOKENS, FIRST_LINE_BYTES = 0.25, 64.0, 400.0
"""Assumptions before the first line has finished."""


@dataclass(slots=True)
class Average:
    """Decaying sums of the seconds with batch work, of the work done in them, and of the seconds of the machine that
    online work left (`room`)."""

    half_life: float
    seconds: float = 0.0
    work: float = 0.0
    room: float = 0.0

    def advance(self, step: float, left: float = 1.0) -> None:
        decay = 0.5 ** (step / self.half_life)
        self.seconds = self.seconds * decay + step
        self.room = self.room * decay + step * left
        self.work *= decay

    @property
    def rate(self) -> float | None:
        """Work per second; None before LEAST_SEEN seconds of batch work."""
        return self.work / self.seconds if self.seconds >= LEAST_SEEN and self.work > 0 else None

    def rate_after(self, first: float) -> float:
        """Work per second, blended with the expected rate `first` for the first seconds."""
        if self.rate is None:
            return first
        return (self.work + FIRST_PACE_SECONDS * first) / (self.seconds + FIRST_PACE_SECONDS)

    @property
    def efficiency(self) -> float:
        """Work per second of the machine that online work left; about 1 before the first measurement."""
        return (self.work + FIRST_PACE_SECONDS) / (self.room + FIRST_PACE_SECONDS)


class Pace:
    """Batch throughput: work and tokens per second of time with batch work present."""

    def __init__(self) -> None:
        self.averages = [Average(half_life) for half_life in HORIZONS]
        self._tokens = self._held = 0.0
        self._lines = self._bytes = self._prompts = self._outputs = 0.0
        self._last: float | None = None

    def advance(self, now: float, busy: bool, held: float = 0.0, left: float = 1.0) -> None:
        """Advance to `now` and decay older measurements; `busy`: batch work was present since the last call; `held`:
        work done for unfinished lines; `left`: share of the machine that online work left since the last call."""
        step = 0.0 if self._last is None else min(max(0.0, now - self._last), MAX_STEP)
        self._last = now
        if busy:
            for average in self.averages:
                average.advance(step, left)
            self._tokens *= 0.5 ** (step / HALF_LIFE)
        self._add(held - self._held)
        self._held = held

    def line_ended(self, num_bytes: int, usage: Usage, work: float) -> None:
        decay = 0.998  # average over about 500 lines
        computed = usage.input_tokens - usage.cached_tokens
        self._add(work)
        self._tokens += usage.input_tokens + usage.output_tokens
        self._lines = self._lines * decay + 1
        self._bytes = self._bytes * decay + num_bytes
        self._prompts = self._prompts * decay + computed
        self._outputs = self._outputs * decay + usage.output_tokens

    def _add(self, work: float) -> None:
        for average in self.averages:
            average.work += work

    @property
    def rate(self) -> float | None:
        """Recent work per second; None before LEAST_SEEN seconds of batch work."""
        return self.averages[0].rate

    def seconds(self, work: float, first: float | None, room: "Room | None" = None) -> float:
        """Return the seconds until `work` is done; `first`: expected rate for the first seconds, if known; `room`: what
        online work is expected to leave, if known."""
        if room is not None and self.rate is not None:
            return self._seconds_of(work, room)
        begin, rate = 0.0, first
        for average in self.averages:
            rate = average.rate if first is None else average.rate_after(first)
            if rate is None or work <= (average.half_life - begin) * rate:
                break
            work -= (average.half_life - begin) * rate
            begin = average.half_life
        return begin + work / rate if rate else math.inf

    def _seconds_of(self, work: float, room: "Room") -> float:
        """Return the seconds until `work` is done in the `room` that online work leaves."""
        begin = efficiency = 0.0
        for average in self.averages:
            efficiency, end = average.efficiency, room.until(average.half_life)
            if work <= (end - begin) * efficiency:
                break
            work -= (end - begin) * efficiency
            begin = end
        return room.seconds(begin + work / efficiency)

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens of finished lines per second of batch work."""
        seconds = self.averages[0].seconds
        return self._tokens / seconds if seconds > 0 else 0.0

    @property
    def tokens_per_byte(self) -> float:
        """Computed (not cached) prompt tokens per byte of input."""
        return self._prompts / self._bytes if self._bytes else FIRST_PROMPT_TOKENS_PER_BYTE

    @property
    def output_per_line(self) -> float:
        return self._outputs / self._lines if self._lines else FIRST_OUTPUT_TOKENS

    @property
    def bytes_per_line(self) -> float:
        return self._bytes / self._lines if self._lines else FIRST_LINE_BYTES


class Room:
    """Seconds of the machine that online work is expected to leave from now on.

    `borders`, `sums`: ascending times in seconds from now, and the room until then. Later there are `rate` seconds of
    room in a second.
    """

    def __init__(self, borders: Sequence[float], sums: Sequence[float], rate: float) -> None:
        self._borders, self._sums, self._rate = (0.0, *borders), (0.0, *sums), rate

    def seconds(self, room: float) -> float:
        """Return the time until there was that much room."""
        at = bisect_left(self._sums, room, lo=1)
        if at == len(self._sums):
            return self._borders[-1] + (room - self._sums[-1]) / self._rate
        share = (room - self._sums[at - 1]) / (self._sums[at] - self._sums[at - 1])
        return self._borders[at - 1] + share * (self._borders[at] - self._borders[at - 1])

    def until(self, seconds: float) -> float:
        """Return the room in the next `seconds`."""
        at = bisect_left(self._borders, seconds, lo=1)
        if at == len(self._borders):
            return self._sums[-1] + (seconds - self._borders[-1]) * self._rate
        share = (seconds - self._borders[at - 1]) / (self._borders[at] - self._borders[at - 1])
        return self._sums[at - 1] + share * (self._sums[at] - self._sums[at - 1])


class DayLoad:
    """Share of the machine that online work uses, by time of day (UTC), over the last days."""

    def __init__(self) -> None:
        self._parts = [Average(DAY_MEMORY * DAY / DAY_PARTS) for _ in range(DAY_PARTS)]
        self._seen = self._actual = self._usual = 0.0

    def advance(self, now: float, step: float, use: float) -> None:
        """Count the `use` of the last `step` seconds, in seconds of the machine."""
        part = self._parts[int(now % DAY / DAY * DAY_PARTS)]
        if part.seconds:
            decay = 0.5 ** (step / (TODAY * DAY))
            self._actual = self._actual * decay + use
            self._usual = self._usual * decay + step * part.work / part.seconds
        part.advance(step)
        part.work += use
        self._seen += step

    def room(self, now: float) -> Room | None:
        """Return the room that is expected from `now` on; None before KNOWN_DAYS and on an unusual day.

        If today's load differs from the usual one, so does the expected load, less and less.
        """
        ratio = self._actual / self._usual if self._usual > 0.0 else 1.0
        unusual = not 1.0 / MAX_RATIO <= ratio <= MAX_RATIO
        if self._seen < KNOWN_DAYS * DAY or unusual:
            return None
        known = [part.work / part.seconds for part in self._parts if part.seconds]
        others = sum(known) / len(known)  # for hours in which the server never ran
        usual = [part.work / part.seconds if part.seconds else others for part in self._parts]
        length = DAY / DAY_PARTS
        first, into = divmod(now % DAY, length)
        borders = [length * (count + 1) - into for count in range(AHEAD_DAYS * DAY_PARTS)]
        rooms = []
        for count, border in enumerate(borders):
            expected = usual[(int(first) + count) % DAY_PARTS] * (1.0 + (ratio - 1.0) * 0.5 ** (border / (TODAY * DAY)))
            rooms.append(max(LEAST_LEFT, 1.0 - expected) * min(length, border))
        mean = sum(max(LEAST_LEFT, 1.0 - share) for share in usual) / DAY_PARTS
        return Room(borders, list(accumulate(rooms)), mean)


class OnlineUse:
    """Share of the machine used by online work, from cumulative token counters: recently and by time of day."""

    def __init__(self) -> None:
        self._seconds = self._work = 0.0
        self._last: tuple[float, float, float] | None = None
        self._day = DayLoad()
        self.left_last = 1.0
        """Share left for offline work between the last two measurements."""

    def advance(self, now: float, tokens: tuple[float, float], prices: TokenCosts) -> None:
        """Advance to `now`; `tokens`: prompt tokens computed and output tokens of online requests since the start."""
        if self._last is not None:
            step = min(max(0.0, now - self._last[0]), MAX_STEP)
            decay = 0.5 ** (step / HALF_LIFE)
            prompt, output = (max(0.0, new - old) for new, old in zip(tokens, self._last[1:], strict=True))
            use = prices.of(prompt, output)
            self._seconds = self._seconds * decay + step
            self._work = self._work * decay + use
            if step > 0.0:
                self.left_last = max(LEAST_LEFT, 1.0 - use / step)
                self._day.advance(now, step, use)
        self._last = (now, *tokens)

    @property
    def left(self) -> float:
        """Share of the machine left for offline work; 1 before the first measurement."""
        return max(LEAST_LEFT, 1.0 - self._work / self._seconds) if self._seconds > 0.0 else 1.0

    def room(self) -> Room | None:
        """Return the room for offline work that is expected from the last measurement on; None if it is not known."""
        return None if self._last is None else self._day.room(self._last[0])
