"""Derives the time limits of one step from the latency objective (HyGen §4.2 and our KKT rules).

Times are seconds on the core's clock. Without a latency model or an objective every limit is infinite, and only tokens,
sequences and units bound a step.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Request
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures, LatencyPredictor

UNLIMITED = BudgetParams("hygen", math.inf)
EASY_SHARE = 0.8
"""Share of the TBT limit that prompts may use while every prompt is on time.

Step times vary, and a missed token gap costs more than an early first token gains.
"""
LONGEST_REST = 1.0
"""Maximum pause in seconds, so that one unexpectedly slow step does not stop offline work for long."""


@dataclass(frozen=True, slots=True)
class StepObjective:
    """The latency limits of online requests, and the share of a step that offline work may take.

    Attributes:
        ttft: Absolute limit in seconds; infinite if none is set.
        tbt: Absolute limit in seconds; infinite if none is set.
        gap_limited: The TBT limit applies to each gap (`tbt_pNN`), not only to the mean (`tbt_mean`, `tpot`). Time
            saved by earlier tokens must not be spent in one gap then.
        budget: Rule of the offline fill: L, λ, δ and the protected metric; see `predictor.budget`.
        idle: Maximum seconds of a step without online work, because an arrival waits for its end; None: L.
        wait: Mean seconds that an arrival may wait for an offline step to end. If finite, offline steps without online
            work alternate with pauses.
        awaited: Seconds after the last online work for which these pauses are made.
        patient: TTFT limit in seconds from which on the prompt of a request gives way to arrivals of a stricter class.
        arrival: Maximum seconds of a step with such a prompt, because an arrival waits for its end.
    """

    ttft: float = math.inf
    tbt: float = math.inf
    gap_limited: bool = True
    budget: BudgetParams = UNLIMITED
    idle: float | None = None
    wait: float = math.inf
    awaited: float = math.inf
    patient: float = math.inf
    arrival: float = math.inf

    @property
    def idle_limit(self) -> float:
        """Return the maximum seconds of a step without online work."""
        return self.budget.latency_budget if self.idle is None else self.idle

    def rest_after(self, seconds: float) -> float:
        """Return the pause in seconds after an offline step of `seconds` without online work.

        If steps take a share q of the time, an arrival waits q · seconds ÷ 2 on average; this is set equal to `wait`.
        """
        return min(max(0.0, seconds * (seconds / (2.0 * self.wait) - 1.0)), LONGEST_REST) if self.wait > 0.0 else 0.0

    def first_due(self, request: Request, step: float) -> float:
        """Return the time at which the first token of a request is due; `step`: seconds per token of its answer."""
        promise, arrival = request.spec.promise, request.times.arrival
        if promise is None:
            return arrival + self.ttft
        rest = 0.0 if math.isinf(promise.e2e) else step * (request.num_remaining_tokens - 1)
        return promise.first_due(arrival, rest)

    def prompt_limit(self, request: Request) -> float:
        """Return the maximum seconds of a step in which this prompt is computed."""
        if math.isinf(self.arrival):
            return math.inf
        promise = request.spec.promise
        return self.arrival if (self.ttft if promise is None else promise.start) >= self.patient else math.inf

    def is_late(self, request: Request, now: float) -> bool:
        """Return whether the first token came late or can only come late, or a promise to the request is broken."""
        promise, times = request.spec.promise, request.times
        waited = (now if times.first_token is None else times.first_token) - times.arrival
        return waited > self.ttft if promise is None else waited > promise.ttft or now - times.arrival > promise.e2e

    def next_due(self, request: Request, now: float) -> float:
        """Return the deadline of the next token of a request that has a promise of its own."""
        promise, times = request.spec.promise, request.times
        assert promise is not None
        if times.last_token is None:
            return self.first_due(request, 0.0)
        return promise.next_due(times.arrival, times.last_token, request.num_remaining_tokens, now)

    def token_deadlines(self, requests: Sequence[Request]) -> list[float]:
        """Return the deadline of each request's next token; for the first token the TTFT limit."""
        if self.gap_limited:
            # Without a missed gap this is earlier than the cumulative deadline. After a miss, the cumulative deadline
            # would make every later token late and so stop protecting gaps that can still be kept.
            known = [request.times for request in requests]
            return [t.arrival + self.ttft if t.last_token is None else t.last_token + self.tbt for t in known]
        return [self._cumulative_deadline(request) for request in requests]

    def _cumulative_deadline(self, request: Request) -> float:
        times = request.times
        if times.first_token is None:
            return times.arrival + self.ttft
        # Tokens in flight count as emitted: the deadline is that of the token computed by the next step.
        given = len(request.token_ids) + request.num_placeholders - request.num_prompt_tokens
        return times.first_token + given * self.tbt


@dataclass(slots=True)
class OfflineAllowance:
    """Limit on the offline work of one step: the budget's rule, applied item by item.

    Attributes:
        limit: Predicted end of the step, seconds from its start.
        num_decodes: Online decodes in the step.
        saturated: Features of a step full of decodes; an item's value is the time that it adds to this step.
    """

    model: LatencyPredictor | None
    limit: float
    num_decodes: int
    budget: BudgetParams
    saturated: BatchFeatures

    def fits_decodes(self, features: BatchFeatures, seconds: float, count: int, context_sum: int) -> bool:
        """Return whether `count` decodes certainly fit into a step predicted to take `seconds`, and so does any subset.

        False also if the budget's rule needs a check of each decode. `context_sum`: sum of their context tokens.
        """
        model = self.model
        if model is None:
            return True
        if self.num_decodes and not math.isinf(self.budget.lam):
            return False
        room = self.limit - seconds
        return room > 0.0 and model.marginal_decodes(features, count, context_sum) <= room

    def largest(self, features: BatchFeatures, seconds: float, start: int, wanted: int) -> int:
        """Return the largest chunk that fits into a step predicted to take `seconds`.

        The chunk has at most `wanted` tokens from `start`.
        """
        model = self.model
        if model is None:
            return wanted
        room = self.limit - seconds
        if room <= 0.0:
            return 0
        if wanted == 1:
            fits = model.marginal(features, start, 1) <= room and self._is_worth(features, start, 1)
            return 1 if fits else 0
        length = wanted if math.isinf(room) else model.max_prefill(features, room, wanted, start)
        if length == 0 or self._is_worth(features, start, length):
            return length
        # The step time is convex in its tokens, so the ratio of cost to value grows with the length: bisect.
        return bisect_left(range(1, length), True, key=lambda tokens: not self._is_worth(features, start, tokens))

    def _is_worth(self, features: BatchFeatures, start: int, length: int) -> bool:
        weight = self.budget.lam
        if self.model is None or self.num_decodes == 0 or math.isinf(weight):
            return True
        value = self.model.marginal(self.saturated, start, length)
        if length == 1:
            value *= self.budget.delta
        return self.model.marginal(features, start, length) * self.num_decodes <= weight * value
