"""A frozen snapshot of the engine for /metrics, /ready and the log; counters grow for ever, gauges are of now."""

from dataclasses import dataclass, field

from engine.request import RequestClass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts per class are keyed by RequestClass; units are pool units (a KV block takes two)."""

    running: dict[RequestClass, int] = field(default_factory=dict)
    waiting: dict[RequestClass, int] = field(default_factory=dict)
    units_total: int = 0
    units_free: int = 0
    units_cached: int = 0
    units_owned: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    failed_steps: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
