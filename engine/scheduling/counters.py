"""What the core counts of its steps."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepCounters:
    """What the core counts of its steps, under the names of `EngineStats`; times in seconds."""

    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0
    offline_computed_tokens: int = 0
    predicted_seconds: float = 0.0
