"""Whose fault the death of an engine process was: a pure state machine over request ids.

The flight recorder says who was in the steps that ran. One death proves nothing, and costs nobody more than a pause.
Who was in the step of the next one as well, and has not got past the place of the first, is a suspect: the others go on
at once, the suspects after them and one by one, in steps of their own (`Resumption.apart_until`), those with which a
process has died behind the others. Whoever gets past its place is like others again. A request is guilty when
`LONE_DEATHS` processes have died of it alone; each of them had passed the step with which it starts, so the engine
works.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

SUSPECT_AFTER = 2
LONE_DEATHS = 3
HEAD_START = 5.0
"""Seconds after which suspects are tried although others have not got on yet."""
PROOFLESS = frozenset({"start", "sick", "canary"})
"""Causes for which no request is to blame: no step had passed, every one failed, or answers were wrong."""


@dataclass(slots=True)
class Suspicion:
    """What is held against a request. `passes_at`: tokens that it must have computed to be acquitted, one more than
    where it was."""

    passes_at: int = 0
    deaths: int = 0
    lone_deaths: int = 0


class Verdict(NamedTuple):
    """What a death says of the request that was alone in it. `deaths`: in how many it took part; `guilty`: it is proven
    that it ends the process; `others_well`: something else has got on since the last proof."""

    request_id: str
    deaths: int
    guilty: bool
    others_well: bool


class Suspects:
    """`trial`: the suspect that runs now."""

    def __init__(self) -> None:
        self._records: dict[str, Suspicion] = {}
        self._others_got_on = False
        self._awaited: set[str] = set()
        self._not_before = 0.0
        self.trial: str | None = None

    def __contains__(self, request_id: str) -> bool:
        """Whether it may not run beside others."""
        record = self._records.get(request_id)
        return record is not None and record.deaths >= SUSPECT_AFTER

    def died(self, cause: str, in_flight: Mapping[str, int]) -> Verdict | None:
        """A process died; `in_flight`: the open requests in its steps, and how many tokens of each they would have
        computed. Returns a verdict if the one on trial was alone; of the guilty nothing more is kept."""
        trial, self.trial = self.trial, None
        if cause in PROOFLESS:
            return None
        for request_id, tokens in in_flight.items():
            record = self._records.setdefault(request_id, Suspicion())
            record.passes_at = max(record.passes_at, tokens + 1)
            record.deaths += 1
        if trial is None or list(in_flight) != [trial]:
            return None
        record = self._records[trial]
        record.lone_deaths += 1
        verdict = Verdict(trial, record.deaths, record.lone_deaths == LONE_DEATHS, self._others_got_on)
        if verdict.guilty:
            self.forget(trial)
            self._others_got_on = False
        return verdict

    def after(self, request_ids: Iterable[str], now: float) -> None:
        """Another process has begun, and goes on with these: first they, then the suspects."""
        self._awaited = set(request_ids)
        self._not_before = now + HEAD_START

    def got_on(self, request_id: str, tokens: int) -> None:
        """So many tokens of a request have been computed."""
        self._awaited.discard(request_id)
        record = self._records.get(request_id)
        if record is None:
            self._others_got_on = True
        elif tokens >= record.passes_at:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """It has ended, or is acquitted."""
        self._awaited.discard(request_id)
        self._records.pop(request_id, None)
        if self.trial == request_id:
            self.trial = None

    def release(self, request_id: str) -> Suspicion | None:
        """It goes to another engine, and what is held against it with it."""
        suspicion = self._records.get(request_id)
        self.forget(request_id)
        return suspicion

    def admit(self, request_id: str, suspicion: Suspicion) -> None:
        """It comes from another engine."""
        self._records[request_id] = suspicion

    def apart_until(self, request_id: str) -> int:
        """For `Resumption`: 0 for those that run beside others."""
        return self._records[request_id].passes_at if request_id in self else 0

    def next_trial(self, now: float) -> str | None:
        """The suspect to try now, which is on trial from now on; None: one is already, or it is nobody's turn."""
        if self.trial is not None or not self._records or (self._awaited and now < self._not_before):
            return None
        waiting = [request_id for request_id in self._records if request_id in self]
        self.trial = min(waiting, key=self._place, default=None)
        return self.trial

    def _place(self, request_id: str) -> tuple[bool, int]:
        """In the order of trials: those that nothing is known of first, then those of which most is known."""
        lone_deaths = self._records[request_id].lone_deaths
        return lone_deaths > 0, -lone_deaths
