"""A frozen snapshot of the engine for /metrics, /ready and the log; counters grow for ever, gauges are of now."""

from dataclasses import dataclass, field

from engine.request import RequestClass
from engine.service_cost import TokenCosts
from predictor.judge import Standing


@dataclass(frozen=True, slots=True)
class ColocationStats:
    """How the SLO is kept. `attainment` and `objectives` are of the last requests judged (NaN: none); times in seconds.

    `online_rate`: online requests a second of late, refused ones included.
    `offline_share`: what of its budget offline work may use beside online work, 0 to 1. `held`: why it is 0 whatever
    the breaker says, "" when it is not. `budget_origin`: where the budget comes from.
    """

    slo: str
    attainment: float
    good_requests: int
    bad_requests: int
    objectives: tuple[Standing, ...]
    online_rate: float
    policy: str
    rule: str
    latency_budget: float
    interference_weight: float
    decode_value: float
    breaker: str
    breaker_cause: str | None
    breaker_openings: int
    predictor_mape: float
    offline_tokens: int
    budget_origin: str
    offline_share: float
    held: str


@dataclass(slots=True)
class StepCounters:
    """What the core counts of its steps, under the names of `EngineStats`; times in seconds."""

    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    refused_requests: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    offline_computed_tokens: int = 0
    predicted_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts per class are keyed by RequestClass; units are pool units (a KV block takes two).

    `host_units_*`: of the host tier; `hidden_blocks`: run from hidden state; `cache_units`: units that were swapped
    out, swapped in and restored, by the name of the operation. `prefill_tokens` and `decode_tokens` are of both
    classes; `offline_computed_tokens` is the part of both together that was offline work. `token_costs`: None without
    a latency model.
    """

    running: dict[RequestClass, int] = field(default_factory=dict)
    waiting: dict[RequestClass, int] = field(default_factory=dict)
    units_total: int = 0
    units_free: int = 0
    units_cached: int = 0
    units_owned: int = 0
    host_units_total: int = 0
    host_units_used: int = 0
    hidden_blocks: int = 0
    cache_units: dict[str, int] = field(default_factory=dict)
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    refused_requests: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    offline_computed_tokens: int = 0
    predicted_seconds: float = 0.0
    leftover_seconds: float = 0.0
    leftover_used_seconds: float = 0.0
    colocation: ColocationStats | None = None
    token_costs: TokenCosts | None = None
