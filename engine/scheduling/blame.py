"""Whose fault a failed step was: a pure state machine over request ids, with its clock as an argument.

A failed step proves nothing against any of its requests. They become suspects: they run again in halves, in steps of
their own, until one is alone. One that gets past the place at which it failed is acquitted. Each failure waits for a
verdict on the engine (see `engine.scheduling.recovery`): while the engine fails at anything, no request is to blame,
and its suspects stay as they were. Only a request that fails `LONE_FAILURES` times alone, each time on an engine
that works, is guilty. One that makes every step fail is found within ceil(log2 n) + `LONE_FAILURES` steps of its own, n
being the size of the first of them.

A request alone is tried again only after `waits`: a shortage of memory that small steps survive and large ones do not
passes in the meantime. Knows nothing of requests' contents, queues or steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LONE_FAILURES = 3
LONE_WAITS = (2.0, 8.0)
"""Seconds before a request that failed alone is tried for the second and for the third time."""


@dataclass(slots=True)
class _Suspect:
    """`passes_at`: tokens that it must have computed to be acquitted; one more than where it failed, for what fails as
    the next token of an answer may pass as the last one of a prompt."""

    passes_at: int = 0
    lone_failures: int = 0


class Blame:
    """Suspects, in groups; `on_trial` may run in the next step, and no other request beside them."""

    def __init__(self, waits: Sequence[float] = LONE_WAITS) -> None:
        assert len(waits) == LONE_FAILURES - 1
        self._waits = waits
        self._suspects: dict[str, _Suspect] = {}
        self._groups: list[list[str]] = []  # the last one is tried first
        self._resting: list[tuple[float, str]] = []
        self._in_doubt: list[str] = []
        self._unproven: frozenset[str] = frozenset()

    @property
    def suspects(self) -> Iterable[str]:
        return self._suspects.keys()

    @property
    def retry_at(self) -> float | None:
        """When the next suspect that rests may run again."""
        return min((due for due, _ in self._resting), default=None)

    def on_trial(self, now: float) -> Sequence[str]:
        """The suspects that may run in the next step; empty while there are none, or all of them rest."""
        for due, request_id in sorted(self._resting):
            if due <= now:
                self._resting.remove((due, request_id))
                self._groups.append([request_id])
        return tuple(self._groups[-1]) if self._groups else ()

    def suspect(self, request_id: str, passes_at: int) -> None:
        """It runs alone until so many of its tokens have been computed, for a reason from outside."""
        self._suspects[request_id] = _Suspect(passes_at)
        self._groups.append([request_id])

    def failed(self, reached: Mapping[str, int]) -> None:
        """A step failed. `reached`: for each of its requests, how many tokens would have been computed after it.

        They must be judged before anything else fails.
        """
        assert not self._in_doubt, "a step failed while another waits for its verdict"
        self._unproven = frozenset(request_id for request_id in reached if request_id not in self._suspects)
        for request_id, tokens in reached.items():
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.passes_at = max(suspect.passes_at, tokens + 1)
        self._in_doubt = self._withdraw(reached)

    def passed(self, reached: Mapping[str, int]) -> list[str]:
        """A step passed; returns those of its requests that are acquitted by it."""
        acquitted = [
            request_id
            for request_id, tokens in reached.items()
            if request_id in self._suspects and tokens >= self._suspects[request_id].passes_at
        ]
        for request_id in acquitted:
            self.forget(request_id)
        return acquitted

    def clear(self) -> list[str]:
        """The engine was at fault; returns those that are no longer suspects."""
        acquitted = [request_id for request_id in self._in_doubt if request_id in self._unproven]
        for request_id in acquitted:
            self.forget(request_id)
        if self._in_doubt:
            self._groups.append(self._in_doubt)
            self._in_doubt = []
        return acquitted

    def judge(self, now: float) -> str | None:
        """The engine works, so the failure was due to one of the step's requests; returns it when that is proven."""
        members, self._in_doubt = self._in_doubt, []
        if len(members) > 1:
            half = (len(members) + 1) // 2
            self._groups += [members[half:], members[:half]]
            return None
        for request_id in members:
            suspect = self._suspects[request_id]
            suspect.lone_failures += 1
            if suspect.lone_failures == LONE_FAILURES:
                return request_id
            self._resting.append((now + self._waits[suspect.lone_failures - 1], request_id))
        return None

    def forget(self, request_id: str) -> None:
        """The request has ended, or is acquitted."""
        if self._suspects.pop(request_id, None) is not None:
            self._withdraw((request_id,))
            if request_id in self._in_doubt:
                self._in_doubt.remove(request_id)

    def _withdraw(self, request_ids: Iterable[str]) -> list[str]:
        """Take requests out of the groups and from those that rest."""
        gone = dict.fromkeys(request_ids)
        self._groups = [left for group in self._groups if (left := [each for each in group if each not in gone])]
        self._resting = [(due, each) for due, each in self._resting if each not in gone]
        return list(gone)
