"""The limits of one step: those that its latency objective sets (HyGen §4.2 and our KKT rules), and those left in it.

Times are seconds on the core's clock. Without a latency model or an objective every limit is infinite, and only tokens,
sequences and units bound a step.

`StepLedger` holds the remaining limits of a step and its predicted time. `token_costs` is the price of a token, the
unit of fair sharing and of progress forecasts: seconds in a full step, or 1 per token without a latency model. On some
machines the prices of prompt and output tokens differ by a factor of ten.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import TokenCosts
from engine.limits import SchedulerConfig
from engine.request import Request
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures, CacheWork, LatencyPredictor


@dataclass(slots=True)
class StepLedger:
    """Remaining tokens and sequences of one step, and its predicted time. Every chunk is charged, decodes included.

    Units are counted by the pool instead. `seconds`: predicted time of the charged work, 0 without a model.
    """

    tokens_left: int
    sequences_left: int
    model: LatencyPredictor | None = None
    features: BatchFeatures = field(init=False)
    seconds: float = 0.0
    adapters: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.features = BatchFeatures() if self.model is None else BatchFeatures(self.model.reach)

    @property
    def open(self) -> bool:
        """Return whether one more chunk could be charged."""
        return self.tokens_left > 0 and self.sequences_left > 0

    def charge_decodes(self, contexts: Sequence[int]) -> None:
        """Charge the first decodes of a step in bulk. `contexts`: tokens up to and including each decoded one."""
        count = len(contexts)
        self.tokens_left -= count
        self.sequences_left -= count
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        self.features.add_decodes(count, self.read(contexts))
        if self.model is not None:
            self.seconds = self.model.predict(self.features)

    def tightest(self, limits: Sequence[float]) -> float:
        """Return the tightest limit on the step's end, in seconds, that the charged work can still meet; or infinity.

        A limit between the usual and the predicted time can be met if no work is added: the result is the predicted
        time then. A limit below the usual time is lost.
        """
        if (tightest := min(limits, default=math.inf)) >= self.seconds:
            return tightest
        usual = 0.0 if self.model is None else self.model.usual(self.features)
        return max(self.seconds, min([limit for limit in limits if limit >= usual], default=math.inf))

    def charge_more_decodes(self, count: int, context_sum: int) -> None:
        """Charge more decodes in bulk, as if one by one. `context_sum`: sum of the context tokens that they read."""
        self.tokens_left -= count
        self.sequences_left -= count
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        if self.model is not None:
            self.seconds += self.model.marginal_decodes(self.features, count, context_sum)
        self.features.add_decodes(count, context_sum)

    def read(self, contexts: Sequence[int]) -> int:
        """Return the number of tokens that decodes with these contexts read."""
        return self.features.reach.contexts(contexts)

    def charge(self, start: int, length: int) -> None:
        """Charge one chunk, which must fit."""
        self.tokens_left -= length
        self.sequences_left -= 1
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        if self.model is not None:
            self.seconds += self.model.marginal(self.features, start, length)
        self.features.add_chunk(start, length)

    def charge_cache_work(self, work: CacheWork) -> None:
        """Charge cache work: compact, restored and transferred data. Negative numbers cancel a charge."""
        if self.model is not None:
            self.seconds += self.model.cache_work(*work, beside=self.features)
        self.features.add_cache_work(*work)

    def charge_moves(self, num_bytes: int) -> None:
        """Charge bytes copied between device and host. A negative number cancels a charge."""
        if num_bytes:
            self.charge_cache_work(CacheWork(transferred_bytes=num_bytes))

    def compact_seconds(self, tokens: int) -> float:
        """Return the seconds that projecting `tokens` tokens from compact form would add."""
        return self.model.cache_work(tokens, beside=self.features) if tokens and self.model is not None else 0.0

    def charge_adapter(self, number: int, tokens: int) -> None:
        """Charge a chunk's LoRA adapter: once per step for its weights, and per token for its work."""
        is_new = number not in self.adapters
        self.adapters.add(number)
        self.features.add_adapted(is_new, tokens)
        if self.model is not None:
            self.seconds += self.model.adapter_work(is_new, tokens)

    def mask_seconds(self, rows: int) -> float:
        """Return the seconds that masks for `rows` more samples would add."""
        return self.model.mask_work(self.features, rows) if rows and self.model is not None else 0.0

    def charge_masks(self, rows: int) -> None:
        """Charge the masks of `rows` samples."""
        self.seconds += self.mask_seconds(rows)
        self.features.add_masked(rows)


def num_masked(decodes: Sequence[Request]) -> int:
    """Return the number of decodes whose sampling a mask may restrict."""
    return sum([request.num_computed_tokens + 1 >= request.masked_from for request in decodes])


DECODE_CONTEXT = 512
"""Context length, in tokens, of the decodes from which the price of an output token is computed."""


def token_costs(model: LatencyPredictor | None, config: SchedulerConfig, *, usual: bool = False) -> TokenCosts:
    """Return the token costs in the fullest steps that `config` allows; 1 per token without a model.

    `usual`: without the latency margin, for forecasts.
    """
    if model is None:
        return TokenCosts()
    seconds, reach = model.usual if usual else model.predict, model.reach
    prompt, decodes = BatchFeatures(reach), BatchFeatures(reach)
    length = max(2, min(config.max_num_batched_tokens, config.max_model_len))
    prompt.add_chunk(0, length)
    count = config.max_num_seqs
    decodes.add_decodes(count, count * reach.tokens(min(DECODE_CONTEXT, config.max_model_len) - 1, 1))
    return TokenCosts(seconds(prompt) / length, seconds(decodes) / count)


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
