"""Follows online requests against their promises: deadlines for the planner, verdicts for judges and circuit breakers.

Every service class of the SLO has a judge and a breaker of its own. Times are in seconds on one clock.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from predictor.breaker import CircuitBreaker
from predictor.budget import DEFAULT_CLASS, Promise
from predictor.judge import Judge, Served, attainment_of
from predictor.slo import SLO, SLOError

OPTION = "tidemill"
"""Key of `extra_args` (in HTTP: `vllm_xargs`) with the class or the limits of one request."""


@dataclass(slots=True)
class _Live:
    arrival: float
    promise: Promise
    first: float | None = None
    last: float = math.nan
    is_beside: bool = False
    gaps: list[float] = field(default_factory=list)


class Promises:
    """The online requests in progress, and the record of those that ended.

    Raises SLOError for an SLO without absolute limits: a tolerance needs a replay that only tidemill's own engine has.
    """

    def __init__(self, slo: SLO) -> None:
        if slo.tolerances():
            raise SLOError(str(slo), "a tolerance needs tidemill's own engine", "state limits, such as ttft_p99=1s")
        self.slo = slo
        self.judges = {name: Judge(own, name) for name, own in slo.by_class}
        self.breakers = {name: CircuitBreaker(own.attainment_target) for name, own in slo.by_class}
        for breaker in self.breakers.values():
            breaker.renew()
        self._live: dict[str, _Live] = {}

    @property
    def ttft(self) -> float:
        """Strictest TTFT limit of any class; infinite without one."""
        return min(self.slo.promise(name).start for name, _ in self.slo.by_class)

    @property
    def tbt(self) -> float:
        """Strictest gap limit of any class; infinite without one."""
        return min(self.slo.promise(name).tbt for name, _ in self.slo.by_class)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request_id: str, arrival: float, extra_args: Mapping[str, Any] | None) -> None:
        """Follow a request. Values of `extra_args` that cannot be understood are ignored: its class is `default`."""
        self._live[request_id] = _Live(arrival, self._promise((extra_args or {}).get(OPTION)))

    def _promise(self, stated: object) -> Promise:
        if isinstance(stated, str) and stated in self.judges:
            return self.slo.promise(stated)
        if not isinstance(stated, str):
            return self.slo.promise()
        try:
            own = SLO.parse(stated).promise()
        except SLOError:
            return self.slo.promise()
        usual = self.slo.promise()
        return Promise(DEFAULT_CLASS, min(usual.ttft, own.ttft), min(usual.tbt, own.tbt), min(usual.e2e, own.e2e))

    def forget(self, request_id: str) -> None:
        """Drop a request that was aborted: it is not judged."""
        self._live.pop(request_id, None)

    def forget_all(self) -> None:
        """Drop all requests in progress."""
        self._live.clear()

    def first_due(self, request_id: str) -> float:
        """Return when the next token of a request is due; infinite if it is not followed."""
        live = self._live.get(request_id)
        if live is None:
            return math.inf
        return live.arrival + live.promise.start if live.first is None else live.last + live.promise.tbt

    def gap(self, request_id: str) -> float:
        """Return the limit between two tokens of a request."""
        live = self._live.get(request_id)
        return math.inf if live is None else live.promise.tbt

    def mark_beside(self, request_ids: Sequence[str]) -> None:
        """Note that offline work ran in a step in which these requests ran or waited."""
        for request_id in request_ids:
            if (live := self._live.get(request_id)) is not None:
                live.is_beside = True

    def emitted(self, request_id: str, tokens: int, now: float, *, is_last: bool) -> None:
        """Record tokens of a request; judge it after its last one."""
        live = self._live.get(request_id)
        if live is None:
            return
        if tokens:
            if live.first is None:
                live.first = now
            else:
                live.gaps += [now - live.last, *[0.0] * (tokens - 1)]
            live.last = now
        if is_last:
            del self._live[request_id]
            self._judge(live, now)

    def _judge(self, live: _Live, now: float) -> None:
        ttft = None if live.first is None else live.first - live.arrival
        name = live.promise.service
        verdict = self.judges[name].judge(now, Served(live.arrival, ttft, live.gaps, promise=live.promise))
        self.breakers[name].record_request(
            now, live.arrival, verdict.limits_kept, live.is_beside, verdict.excesses, now, verdict.used
        )

    def record_step(self, now: float, overrun: float) -> None:
        """Record a step beside online work that took `overrun` seconds more than predicted."""
        limit = min(self.tbt, self.ttft)
        for breaker in self.breakers.values():
            breaker.record_step(now, overrun / limit if math.isfinite(limit) else 0.0)

    def share(self, now: float) -> float:
        """Return the share (0 to 1) of its budget that offline work may use beside online work."""
        return min(breaker.share(now) for breaker in self.breakers.values())

    def attainment(self, now: float) -> float:
        """Return the share of good requests of all classes; NaN without judged requests."""
        return attainment_of(list(self.judges.values()), now)

    def status(self, now: float) -> dict[str, dict[str, float | str | int]]:
        """Return for each class: attainment (NaN without requests), share of the budget, counts, and breaker state."""
        return {
            name: {
                "attainment": judge.attainment(now),
                "share": self.breakers[name].share(now),
                "breaker": self.breakers[name].state(now).value,
                "kept": judge.good,
                "missed": judge.bad,
            }
            for name, judge in self.judges.items()
        }
