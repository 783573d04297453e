"""From the latency objective to time limits of one step (HyGen §4.2 and our KKT rules).

All times are seconds on the core's clock. Without a latency model or an objective every limit is infinite and steps are
bounded by tokens, sequences and units alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Request
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures
from predictor.model import LatencyPredictor
from predictor.slo import SLO

UNLIMITED = BudgetParams("hygen", math.inf)
LONGEST_REST = 1.0
"""Seconds: a single step that took far longer than predicted stops nothing for long."""


@dataclass(frozen=True, slots=True)
class StepObjective:
    """What online requests were promised, and how much of a step offline work may take.

    `ttft`, `tbt`: absolute limits in seconds (infinite: none stated). `gap_limited`: the TBT limit holds for every gap
    (`tbt_pNN`), not only for the mean (`tbt_mean`, `tpot`): then banked slack may not be spent in one gap.
    `idle`: the longest step without online work: a request that arrives within it waits for its end. L holds there too.
    `wait`: if it is finite, offline steps without online work take turns with rests, such that who arrives at any time
    waits that long on average for the end of one, seconds; `awaited`: for so many seconds after the last online work.
    `budget` is the offline fill's rule: L, λ, δ and which metric it protects; see `predictor.budget`.
    """

    ttft: float = math.inf
    tbt: float = math.inf
    gap_limited: bool = True
    budget: BudgetParams = UNLIMITED
    idle: float = math.inf
    wait: float = math.inf
    awaited: float = math.inf

    @classmethod
    def from_slo(cls, slo: SLO, budget: BudgetParams) -> "StepObjective":
        """The absolute part of an SLO with a budget; tolerances live in the budget, and in `idle` and `wait`."""
        tbt = min((limit for metric in ("tbt", "tpot") if (limit := slo.limit_of(metric))), default=math.inf)
        return cls(slo.limit_of("ttft") or math.inf, tbt, slo.gap_limited, budget)

    def rest_after(self, seconds: float) -> float:
        """How long nothing offline runs after an offline step of so many seconds without online work. Who arrives in a
        share q of the time waits for half a step: q · seconds ÷ 2 is `wait`."""
        return min(max(0.0, seconds * (seconds / (2.0 * self.wait) - 1.0)), LONGEST_REST) if self.wait > 0.0 else 0.0

    def token_deadlines(self, requests: Sequence[Request]) -> list[float]:
        """When the next token of each is due; before its first token that is its TTFT limit."""
        if self.gap_limited:
            # While no gap was missed this is also before the cumulative deadline; after a miss the cumulative one would
            # call every later token late and so end the protection of gaps that can still be kept.
            known = [request.times for request in requests]
            return [t.arrival + self.ttft if t.last_token is None else t.last_token + self.tbt for t in known]
        return [self._cumulative_deadline(request) for request in requests]

    def _cumulative_deadline(self, request: Request) -> float:
        times = request.times
        if times.first_token is None:
            return times.arrival + self.ttft
        # Tokens in flight count as given: the deadline is that of the token which the next step computes.
        given = len(request.token_ids) + request.num_placeholders - request.num_prompt_tokens
        return times.first_token + given * self.tbt


@dataclass(slots=True)
class OfflineAllowance:
    """How much offline work one step may take in: the budget's rule, applied item by item.

    `limit`: predicted end of the step, seconds from its start. `num_decodes`: online decodes beside it.
    """

    model: LatencyPredictor | None
    limit: float
    num_decodes: int
    budget: BudgetParams
    saturated: BatchFeatures

    def fits_decodes(self, features: BatchFeatures, seconds: float, count: int, context_sum: int) -> bool:
        """Whether so many decodes, with that sum of contexts, may surely join a step predicted to take `seconds`, and
        so any of them: no decode takes less than no time. False also where each must be looked at by itself."""
        model = self.model
        if model is None:
            return True
        if self.num_decodes and not math.isinf(self.budget.lam):
            return False
        room = self.limit - seconds
        return room > 0.0 and model.marginal_decodes(features, count, context_sum) <= room

    def largest(self, features: BatchFeatures, seconds: float, start: int, wanted: int) -> int:
        """The largest chunk (≤ wanted tokens from `start`) that may join a step predicted to take `seconds`."""
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
        # The step time is convex in its tokens, so what a token costs beside what it is worth only grows.
        low, high = 0, length
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_worth(features, start, middle):
                low = middle
            else:
                high = middle
        return low

    def _is_worth(self, features: BatchFeatures, start: int, length: int) -> bool:
        weight = self.budget.lam
        if self.model is None or self.num_decodes == 0 or math.isinf(weight):
            return True
        value = self.model.marginal(self.saturated, start, length)
        if length == 1:
            value *= self.budget.delta
        return self.model.marginal(features, start, length) * self.num_decodes <= weight * value
