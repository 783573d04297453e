"""The budget of offline work, and the latency promised to one online request.

The promise is the only value that scheduler, keeper and judge read about a request's latency. A gateway derives it once
from the request, its API key and the service classes of `--slo`. Pure; times in seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_OUTPUT = 64
"""Assumed output tokens of a request of unknown output length if no output length is known at all."""
DEFAULT_CLASS = "default"
"""The class of requests that name none; its objectives are those of `--slo` without a name."""


class Promise(NamedTuple):
    """Limits of one request in seconds; infinite: none.

    Attributes:
        service: Name of the service class.
        ttft: From arrival to the first token.
        tbt: Between two tokens.
        e2e: From arrival to the last token.
        is_stated: A limit is tighter than that of the class without a bound that the operator allows, so that the
            request is judged by the limits of its class.
    """

    service: str = DEFAULT_CLASS
    ttft: float = math.inf
    tbt: float = math.inf
    e2e: float = math.inf
    is_stated: bool = False

    def judged(self, usual: "Promise") -> "Promise":
        """Return the promise by which the request is judged; `usual`: that of its class."""
        if not self.is_stated:
            return self
        limits = max(self.ttft, usual.ttft), max(self.tbt, usual.tbt), max(self.e2e, usual.e2e)
        return Promise(self.service, *limits)

    def __str__(self) -> str:
        limits = {name: getattr(self, name) for name in ("ttft", "tbt", "e2e")}
        shown = [f"{name}={value * 1e3:g}ms" for name, value in limits.items() if value < math.inf]
        return "; ".join([self.service, *shown])

    def limit(self, metric: str) -> float:
        """Return the limit on a metric of the SLO; `tbt` limits the mean gap (`tpot`), too."""
        return {"ttft": self.ttft, "e2e": self.e2e}.get(metric, self.tbt)

    @property
    def start(self) -> float:
        """Return the seconds after arrival within which the answer must begin."""
        return min(self.ttft, self.e2e)

    def first_due(self, arrival: float, rest: float) -> float:
        """Return the time at which the first token is due if the tokens behind it take `rest` seconds."""
        return arrival + min(self.ttft, self.e2e - rest)

    def next_due(self, arrival: float, last_token: float, remaining: int, now: float) -> float:
        """Return the time at which the next of `remaining` tokens is due: an equal part of the time to the deadline."""
        gap = last_token + self.tbt
        return gap if math.isinf(self.e2e) else min(gap, now + (arrival + self.e2e - now) / remaining)

    def is_missed(self, now: float, arrival: float, first_token: float | None, last_token: float | None) -> bool:
        """Return whether a limit is broken, or can only be kept by a token in the past."""
        if now - arrival > self.e2e:
            return True
        if first_token is None or last_token is None:
            return now - arrival > self.ttft
        return first_token - arrival > self.ttft or now - last_token > self.tbt

    def kept(self, ttft: float | None, gaps: Sequence[float]) -> bool:
        """Return whether an answer met its limits: TTFT, mean gap and the time of its last token."""
        if ttft is None:
            return False
        total = math.fsum(gaps)
        return ttft <= self.ttft and total <= self.tbt * len(gaps) and ttft + total <= self.e2e


POLICIES = ("hygen", "tidemill")


@dataclass(frozen=True, slots=True)
class BudgetParams:
    """How far offline work may extend a step that has online work.

    Attributes:
        policy: One of POLICIES.
        latency_budget: L in seconds; offline work never extends a step beyond it. 0: no offline work.
        lam: λ. An item joins n online decodes while added time · n ≤ λ · value of the item. Infinite: no such rule.
        delta: δ, value of one second of offline decode relative to one second of offline prefill.
        rule: Weight of a step, named after the metric that it protects. `flat`: no weight. `tbt_mean`: the number of
            online decodes. `ttft_mean`, `ttft_p99`: almost nothing, or only the slack, beside a waiting prompt.
            `tbt_p99`: steps that exceed L anyway are free.
    """

    policy: str
    latency_budget: float
    lam: float = math.inf
    delta: float = 1.0
    rule: str = "flat"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy '{self.policy}'; known: {', '.join(POLICIES)}")
        if not (self.latency_budget >= 0.0 and self.lam >= 0.0 and self.delta > 0.0):
            raise ValueError("latency_budget and lam must not be negative, delta must be positive")

    def __str__(self) -> str:
        weights = "" if math.isinf(self.lam) else f", λ {self.lam:.3g}, δ {self.delta:g}"
        return f"L {self.latency_budget * 1e3:.1f} ms, {self.rule}{weights}" if self.latency_budget else "online only"
