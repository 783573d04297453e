"""The budget of offline work, and the standing of an objective."""

import math
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Standing:
    """One objective evaluated over the window; NaN for unknown values, times in seconds.

    Attributes:
        objective: The objective in the syntax of the SLO.
        value: Measured percentile or mean.
        bound: Upper bound of `value`.
        attainment: Share of requests at whose end the objective was met.
    """

    objective: str
    value: float
    bound: float
    attainment: float
