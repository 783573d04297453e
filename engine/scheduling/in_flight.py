"""Steps in flight, and the counters of steps and scheduling decisions."""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.api import EngineRequest, RequestClass
from engine.request import Request, RequestStatus
from engine.scheduling.output import Chunk, SchedulerOutput


class ReachedPoint(NamedTuple):
    """A request of a step, and the number of its tokens computed after the step."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """A scheduled step that has not been updated yet.

    Attributes:
        requests: Its requests in the order of its chunks.
        epochs: Epochs of the requests when the step was scheduled; a rewound request has a newer one.
        guesses: By index of a chunk that a draft added, the drafted token that the chunk computes.
        known: Requests whose token from this step became known, and was emitted, while the step ran (forced tokens).
    """

    output: SchedulerOutput
    requests: list[Request]
    epochs: list[int]
    guesses: dict[int, int] = field(default_factory=dict)
    known: set[Request] = field(default_factory=set)

    def live(self) -> list[Request]:
        """Return the step's requests that have neither ended nor been rewound since."""
        pairs = zip(self.requests, self.epochs, strict=True)
        live = [r for r, epoch in pairs if r.status is not RequestStatus.FINISHED and r.epoch == epoch]
        return list(dict.fromkeys(live)) if self.guesses else live

    def reached(self) -> list[ReachedPoint]:
        """Return the live requests with the number of their tokens computed after the step."""
        live = set(self.live())
        chunks = enumerate(zip(self.output.chunks, self.requests, strict=True))
        return [
            ReachedPoint(request, chunk.start + chunk.length)
            for number, (chunk, request) in chunks
            if request in live and number not in self.guesses
        ]


@dataclass(slots=True)
class Counters:
    """Counters named as in `EngineStats`; they never decrease. Times in seconds."""

    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    refused_requests: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    offline_prefill_tokens: int = 0
    offline_decode_tokens: int = 0
    probe_tokens: int = 0
    predicted_seconds: float = 0.0
    preemptions: dict[str, int] = field(default_factory=dict)
    knapsack: dict[str, int] = field(default_factory=lambda: {"kv": 0, "compact": 0, "passed_over": 0})
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0
    leftover_seconds: float = 0.0
    leftover_used_seconds: float = 0.0

    def count(self, chunk: Chunk, request: EngineRequest) -> None:
        """Count a computed chunk of a request."""
        if request.probe:
            self.probe_tokens += chunk.length
            return
        is_offline = request.request_class is RequestClass.OFFLINE
        if chunk.length == 1 and chunk.sample:
            self.decode_tokens += 1
            self.offline_decode_tokens += is_offline
        else:
            self.prefill_tokens += chunk.length
            self.offline_prefill_tokens += chunk.length * is_offline
