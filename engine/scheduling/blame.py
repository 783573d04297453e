"""Finds the request that makes steps fail: a pure state machine over request ids, with its clock as an argument.

A single failed step proves nothing. Its requests become suspects and run again in separate steps, in halves, until one
runs alone. A suspect that passes the position at which it failed is acquitted. Each failure waits for a verdict on the
engine (see `engine.scheduling.recovery`). While the engine fails at any work, no request is blamed and the suspects
stay as they were. A request is guilty after `LONE_FAILURES` failures alone, each on a working engine. A request that
makes every step fail is found within ceil(log2 n) + `LONE_FAILURES` trial steps, for n requests in the first failed
step.

A lone suspect is retried only after `LONE_WAITS`, so that a temporary shortage of memory can pass. This module uses
only request ids and token counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LONE_FAILURES = 3
LONE_WAITS = (2.0, 8.0)
"""Seconds before the second and before the third trial of a request that failed alone."""


@dataclass(slots=True)
class _Suspect:
    """`passes_at`: computed tokens required for acquittal, one more than at the failure.

    A token that fails as the next token of an answer might pass as the last token of a prompt.
    """

    passes_at: int = 0
    lone_failures: int = 0


class Blame:
    """Suspects in groups. Only the requests of `on_trial` may run in a trial step."""

    def __init__(self) -> None:
        self._suspects: dict[str, _Suspect] = {}
        self._groups: list[list[str]] = []  # the last group is tried first
        self._resting: list[tuple[float, str]] = []
        self._in_doubt: list[str] = []
        self._unproven: frozenset[str] = frozenset()

    @property
    def suspects(self) -> Iterable[str]:
        return self._suspects.keys()

    @property
    def retry_at(self) -> float | None:
        """Return the earliest time at which a resting suspect may run again, or None."""
        return min((due for due, _ in self._resting), default=None)

    def on_trial(self, now: float) -> Sequence[str]:
        """Return the suspects that may run in the next step; empty if there are none or all are resting."""
        for due, request_id in sorted(self._resting):
            if due <= now:
                self._resting.remove((due, request_id))
                self._groups.append([request_id])
        return tuple(self._groups[-1]) if self._groups else ()

    def suspect(self, request_id: str, passes_at: int) -> None:
        """Make a request a suspect for an external reason.

        It runs alone until `passes_at` of its tokens are computed.
        """
        self._suspects[request_id] = _Suspect(passes_at)
        self._groups.append([request_id])

    def failed(self, reached: Mapping[str, int]) -> None:
        """Record a failed step. `reached`: for each of its requests, the tokens computed after the step.

        `judge` or `clear` must be called before the next failure.
        """
        assert not self._in_doubt, "a step failed while another waits for its verdict"
        self._unproven = frozenset(request_id for request_id in reached if request_id not in self._suspects)
        for request_id, tokens in reached.items():
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.passes_at = max(suspect.passes_at, tokens + 1)
        self._in_doubt = self._withdraw(reached)

    def passed(self, reached: Mapping[str, int]) -> list[str]:
        """Record a completed step. Return the requests that it acquits."""
        acquitted = [
            request_id
            for request_id, tokens in reached.items()
            if request_id in self._suspects and tokens >= self._suspects[request_id].passes_at
        ]
        for request_id in acquitted:
            self.forget(request_id)
        return acquitted

    def clear(self) -> list[str]:
        """Record that the engine was at fault. Return the requests that are no longer suspects."""
        acquitted = [request_id for request_id in self._in_doubt if request_id in self._unproven]
        for request_id in acquitted:
            self.forget(request_id)
        if self._in_doubt:
            self._groups.append(self._in_doubt)
            self._in_doubt = []
        return acquitted

    def judge(self, now: float) -> str | None:
        """Record that the engine works, so a request caused the failure.

        Return the request id once it is proven guilty.
        """
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
            self._resting.append((now + LONE_WAITS[suspect.lone_failures - 1], request_id))
        return None

    def forget(self, request_id: str) -> None:
        """Remove a request that ended or was acquitted."""
        if self._suspects.pop(request_id, None) is not None:
            self._withdraw((request_id,))
            if request_id in self._in_doubt:
                self._in_doubt.remove(request_id)

    def _withdraw(self, request_ids: Iterable[str]) -> list[str]:
        """Remove requests from the groups and from the resting suspects. Return them without duplicates."""
        gone = dict.fromkeys(request_ids)
        self._groups = [left for group in self._groups if (left := [each for each in group if each not in gone])]
        self._resting = [(due, each) for due, each in self._resting if each not in gone]
        return list(gone)
