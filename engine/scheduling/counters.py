"""Counters of steps and of scheduling decisions."""

from dataclasses import dataclass, field

from engine.api import EngineRequest, RequestClass
from engine.scheduling.output import Chunk


@dataclass(slots=True)
class StepCounters:
    """Step counters of the core, named as in `EngineStats`; times in seconds."""

    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0
    offline_computed_tokens: int = 0
    probe_tokens: int = 0
    predicted_seconds: float = 0.0

    def count_decodes(self, decodes: int, offline: int) -> None:
        """Count one decoded token for each of `decodes` requests, including `offline` offline ones and no probe."""
        self.decode_tokens += decodes
        self.offline_computed_tokens += offline

    def count(self, chunk: Chunk, request: EngineRequest) -> None:
        """Count a computed chunk of a request."""
        _, _, length, sample = chunk
        if request.probe:
            self.probe_tokens += length
            return
        if request.request_class is RequestClass.OFFLINE:
            self.offline_computed_tokens += length
        if length == 1 and sample:
            self.decode_tokens += 1
        else:
            self.prefill_tokens += length


@dataclass(slots=True)
class SchedulerCounters:
    """Scheduling counters for `EngineStats`; they never decrease. Seconds are predicted times."""

    preemptions: dict[str, int] = field(default_factory=dict)
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0
    leftover_seconds: float = 0.0
    leftover_used_seconds: float = 0.0
