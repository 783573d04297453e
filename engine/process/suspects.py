"""Whose fault the death of an engine process was: a pure state machine over request ids.

The flight recorder says who was in the steps that ran. One death proves nothing, and costs nobody more than a pause.
Who was in the step of the next one as well, and has not got past the place of the first, is a suspect: the others go on
at once, the suspects after them and one by one, in steps of their own (`Resumption.apart_until`), those with which a
process has died behind the others. Whoever gets past its place is like others again. Each process had passed the step
with which it starts, so the engine works.

A request is guilty when `LONE_DEATHS` processes or more have died of it alone, unless somebody else may have done it: a
SIGKILL comes from a step or from outside, and nothing tells which. So deaths by one are compared with how often
processes die without it, idle ones as well, since the first death that is held against it: it is guilty if, were all of
them from outside, so many would fall into the time of its trials with a probability below `CHANCE`. After each death
alone it rests twice as long before its next trial, while the process goes on without it: that is what makes the
comparison sharp, and what gives the others time. See docs/develop/process.md.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.process.causes import Origin, origin_of

SUSPECT_AFTER = 2
LONE_DEATHS = 3
HEAD_START = 5.0
"""Seconds after which suspects are tried although others have not got on yet."""
CHANCE = 1e-5
"""Of deaths from outside that look like those of a guilty request."""
FIRST_REST, LONGEST_REST = 0.5, 60.0
"""Seconds without the suspect in a process before its trial, after its first death alone and at most."""
SUSPECTING = frozenset({Origin.OUTSIDE, Origin.REQUEST})
"""Origins of deaths of which a request may be the cause."""


@dataclass(slots=True)
class Suspicion:
    """What is held against a request. `passes_at`: tokens that it must have computed to be acquitted, one more than
    where it was. `lone_seconds`: of its trials that ended in a death that may have come from outside. `seconds_before`,
    `deaths_before`: what the clock of `Suspects` showed at the first death, which counts as one without it;
    `rests_until`: what it shows when the next trial may begin. `died_at`: the times of the deaths."""

    passes_at: int = 0
    deaths: int = 0
    lone_deaths: int = 0
    lone_seconds: float = 0.0
    seconds_before: float = 0.0
    deaths_before: int = 0
    rests_until: float = 0.0
    died_at: tuple[float, ...] = ()


class DeathVerdict(NamedTuple):
    """What a death says of the request that was alone in it. `deaths`: in how many it took part; `guilty`: it is proven
    that it ends the process; `others_well`: something else has got on since the last proof; `suspicion`: all that was
    held against it."""

    request_id: str
    deaths: int
    guilty: bool
    others_well: bool
    suspicion: Suspicion


class Suspects:
    """`trial`: the suspect that runs now. Times are seconds on any clock; its own stands still while there is no
    process, and leaves out trials that a death has ended."""

    def __init__(self) -> None:
        self._records: dict[str, Suspicion] = {}
        self._others_got_on = False
        self._awaited: set[str] = set()
        self._ready_at: float | None = None
        self._trial_at = 0.0
        self._seconds = 0.0
        self._num_deaths = 0
        self.trial: str | None = None

    def __contains__(self, request_id: str) -> bool:
        """Whether it may not run beside others."""
        record = self._records.get(request_id)
        return record is not None and record.deaths >= SUSPECT_AFTER

    def died(self, cause: str, in_flight: Mapping[str, int], now: float) -> DeathVerdict | None:
        """A process died; `in_flight`: the open requests in its steps, and how many tokens of each they would have
        computed. Returns a verdict if the one on trial was alone; of the guilty nothing more is kept."""
        trial, self.trial = self.trial, None
        lived = 0.0 if self._ready_at is None else now - self._ready_at
        tried = 0.0 if trial is None else now - self._trial_at
        was_ready, self._ready_at = self._ready_at is not None, None
        self._seconds += lived - tried
        if origin_of(cause) not in SUSPECTING or not was_ready:
            return None
        for request_id, tokens in in_flight.items():
            record = self._records.get(request_id)
            if record is None:
                record = Suspicion(seconds_before=self._seconds, deaths_before=self._num_deaths)
                self._records[request_id] = record
            record.passes_at = max(record.passes_at, tokens + 1)
            record.deaths += 1
            record.died_at += (now,)
        self._num_deaths += 1
        if trial is None or list(in_flight) != [trial]:
            return None
        record = self._records[trial]
        record.lone_deaths += 1
        record.lone_seconds += tried if origin_of(cause) is Origin.OUTSIDE else 0.0
        record.rests_until = self._seconds + rest(record.lone_deaths)
        guilty = record.lone_deaths >= LONE_DEATHS and self._chance(record) <= CHANCE
        verdict = DeathVerdict(trial, record.deaths, guilty, self._others_got_on, record)
        if guilty:
            self._num_deaths -= record.lone_deaths  # they say nothing against the innocence of others
            self.forget(trial)
            self._others_got_on = False
        return verdict

    def _chance(self, record: Suspicion) -> float:
        """That so many of all deaths since it is held to be one fall into its trials, if they come at any time."""
        lone = record.lone_deaths
        total = lone + max(1, self._num_deaths - record.deaths_before - lone)
        seconds = max(0.0, self._seconds - record.seconds_before) + record.lone_seconds
        return at_least(lone, total, record.lone_seconds / seconds if record.lone_seconds else 0.0)

    def deaths_to_try(self, request_ids: Iterable[str]) -> set[float]:
        """Return the times of the deaths for which suspects among these requests are to be tried."""
        return {at for name in request_ids if name in self for at in self._records[name].died_at}

    def after(self, request_ids: Iterable[str], now: float) -> None:
        """Another process has begun, and goes on with these: first they, then the suspects."""
        self._awaited = set(request_ids)
        self._ready_at = now

    def got_on(self, request_id: str, tokens: int) -> bool:
        """So many tokens of a request have been computed; return whether that acquits it."""
        self._awaited.discard(request_id)
        record = self._records.get(request_id)
        if record is None:
            self._others_got_on = True
        elif tokens >= record.passes_at:
            self.forget(request_id)
            return True
        return False

    def forget(self, request_id: str) -> None:
        """It has ended, or is acquitted."""
        self._awaited.discard(request_id)
        self._records.pop(request_id, None)
        if self.trial == request_id:
            self.trial = None

    def release(self, request_id: str) -> Suspicion | None:
        """It leaves; return what is held against it, for another engine or for when it comes again."""
        suspicion = self._records.get(request_id)
        self.forget(request_id)
        return suspicion

    def admit(self, request_id: str, suspicion: Suspicion) -> None:
        """It comes from another engine, or once more, under another id: the deaths of other requests since are not
        known here."""
        suspicion.deaths_before = self._num_deaths - suspicion.lone_deaths - 1
        suspicion.seconds_before = suspicion.rests_until = self._seconds
        self._records[request_id] = suspicion

    def apart_until(self, request_id: str) -> int:
        """For `Resumption`: 0 for those that run beside others."""
        return self._records[request_id].passes_at if request_id in self else 0

    def next_trial(self, now: float) -> str | None:
        """The suspect to try now, which is on trial from now on; None: one is already, or it is nobody's turn."""
        if self.trial is not None or not self._records or self._ready_at is None:
            return None
        up = now - self._ready_at
        if self._awaited and up < HEAD_START:
            return None
        clock = self._seconds + up
        waiting = [name for name, record in self._records.items() if name in self and clock >= record.rests_until]
        self.trial = min(waiting, key=self._place, default=None)
        self._trial_at = now
        return self.trial

    def _place(self, request_id: str) -> tuple[bool, int]:
        """In the order of trials: those that nothing is known of first, then those of which most is known."""
        lone_deaths = self._records[request_id].lone_deaths
        return lone_deaths > 0, -lone_deaths


def rest(lone_deaths: int) -> float:
    """Seconds for which processes run without a request of which so many have died alone, before it is tried again."""
    return min(LONGEST_REST, FIRST_REST * 2.0 ** (lone_deaths - 1)) if lone_deaths else 0.0


def at_least(count: int, total: int, share: float) -> float:
    """The probability that of `total` events, each of which falls with the probability `share` into it, `count` or more
    do."""
    if share <= 0.0 or share >= 1.0:
        return float(share >= 1.0)
    inside, outside, ways = math.log(share), math.log1p(-share), math.lgamma(total + 1)
    return math.fsum(
        math.exp(ways - math.lgamma(k + 1) - math.lgamma(total - k + 1) + k * inside + (total - k) * outside)
        for k in range(count, total + 1)
    )
