"""Keeps the promise while the engine runs: learns step times, judges online requests, drives the circuit breaker.

HyGen §4.2 (the SLO-aware loop) and our breaker. Called by the engine loop after every step; torch-free, no asyncio, the
clock is an argument. It never touches a request: its only dials are the core's objective and offline share.
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core import EngineCore
from engine.request import FinishReason, RequestClass, RequestOutput
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import SchedulerOutput
from engine.stats import ColocationStats
from engine.virtual import step_features
from predictor.breaker import BreakerSettings, BreakerState, CircuitBreaker
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures
from predictor.load import Lengths, OnlineArrival
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.slo import SLO

log = logging.getLogger("tidemill.colocation")

BUDGET_SHARE = 0.8
"""L as a share of the TBT limit until a search has found better."""
FALLBACK_BUDGET_STEPS = 4.0
"""L in smallest steps where the SLO limits no TBT."""
ATTAINMENT_WINDOW = 60.0
MAX_RECORDED = 2048
MIN_OFFLINE = 32
"""Offline requests that must have ended before their lengths stand for those that wait."""


def initial_budget(slo: SLO, model: LatencyModel, policy: str) -> BudgetParams:
    """The budget before any search: a flat L of 0.8 × the TBT limit, or a few smallest steps without one."""
    limits = [limit for metric in ("tbt", "tpot") if (limit := slo.limit_of(metric)) is not None]
    smallest = _smallest_step(model)
    return BudgetParams(policy, BUDGET_SHARE * min(limits) if limits else FALLBACK_BUDGET_STEPS * smallest)


def _smallest_step(model: LatencyModel) -> float:
    features = BatchFeatures()
    features.add_decodes(1, 1)
    return model.predict(features)


@dataclass(slots=True)
class _Live:
    """An online request in progress."""

    gaps: list[float] = field(default_factory=list)
    last_token: float | None = None
    beside_offline: bool = False


class Colocation:
    """One engine's SLO keeper. `model` is shared with the core, which asks it for predictions."""

    def __init__(self, core: EngineCore, model: OnlineModel, slo: SLO, budget: BudgetParams) -> None:
        self.slo = slo
        self.model = model
        self.arrivals: deque[OnlineArrival] = deque(maxlen=MAX_RECORDED)
        self.offline_lengths: deque[Lengths] = deque(maxlen=MAX_RECORDED)
        self.on_recorded: Callable[[int], None] = lambda _count: None
        self._core = core
        self._budget = budget
        target = slo.attainment_target
        self._breaker = CircuitBreaker(BreakerSettings(attainment=target if target is not None else 0.99))
        self._live: dict[str, _Live] = {}
        self._judged: deque[tuple[float, bool]] = deque()
        self._good = self._bad = 0
        self._offline_tokens = 0
        self._shown = BreakerState.CLOSED
        self._held = ""
        self._breaker_seen = 0.0
        self.set_budget(budget, "as long as no search has ended")

    def set_budget(self, budget: BudgetParams, origin: str) -> None:
        """Fill by these parameters from the next step on; `origin` says where they come from.

        L = 0 is the answer that no offline budget keeps the SLO: then nothing offline runs beside online work. What
        runs while no online request is there stays as it was.
        """
        self._origin = origin
        self._held = "" if budget.latency_budget > 0.0 else f"no offline budget keeps the SLO ({origin})"
        if not self._held:
            self._budget = budget
        self._core.set_objective(StepObjective.from_slo(self.slo, self._budget))
        self._core.set_offline_share(self._share(self._breaker_seen))

    def on_step(self, output: SchedulerOutput, measured: float, outputs: list[RequestOutput], now: float) -> None:
        """A step ended after `measured` seconds with these outputs."""
        features = step_features(output)
        expected = self.model.expected(features)
        self.model.observe(features, measured)
        self._breaker.record_step(now, (expected - measured) / measured if measured > 0 else 0.0)
        for request_output in outputs:
            if request_output.request_class is RequestClass.ONLINE:
                self._on_online(request_output, now)
            else:
                self._on_offline(request_output)
        self._follow_breaker(now)

    def on_end(self, output: RequestOutput, now: float) -> None:
        """A request ended outside a step (it was aborted)."""
        if output.request_class is RequestClass.ONLINE:
            self._on_online(output, now)

    def on_refused(self, request_class: RequestClass, prompt_tokens: int, now: float) -> None:
        """A request was refused (429): it is a part of the load all the same. `prompt_tokens` may be a guess."""
        if request_class is RequestClass.ONLINE:
            self._record(OnlineArrival(now, Lengths(prompt_tokens, 0)))

    def offline_work(self) -> list[Lengths]:
        """Lengths of offline requests: of those that ended, and of the queue when too few did."""
        ended = list(self.offline_lengths)
        return ended if len(ended) >= MIN_OFFLINE else ended + self._core.offline_lengths(MAX_RECORDED)

    def stats(self, now: float) -> ColocationStats:
        """A snapshot for /metrics and /ready."""
        self._forget(now)
        judged = len(self._judged)
        return ColocationStats(
            slo=str(self.slo),
            attainment=sum(good for _, good in self._judged) / judged if judged else math.nan,
            good_requests=self._good,
            bad_requests=self._bad,
            policy=self._budget.policy,
            rule=self._budget.rule,
            latency_budget=self._budget.latency_budget,
            interference_weight=self._budget.lam,
            decode_value=self._budget.delta,
            breaker=self._breaker.state(now).value,
            breaker_cause=self._breaker.cause,
            breaker_openings=self._breaker.num_openings,
            budget_origin=self._origin,
            offline_share=self._share(now),
            held=self._held,
            predictor_mape=self.model.mape,
            offline_tokens=self._offline_tokens,
        )

    def _on_offline(self, output: RequestOutput) -> None:
        self._offline_tokens += len(output.token_ids)
        if output.num_output_tokens == 1:
            self._offline_tokens += output.num_prompt_tokens
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.offline_lengths.append(_lengths(output))

    def _record(self, arrival: OnlineArrival) -> None:
        self.arrivals.append(arrival)
        self.on_recorded(len(self.arrivals))

    def _on_online(self, output: RequestOutput, now: float) -> None:
        live = self._live.setdefault(output.request_id, _Live())
        live.beside_offline = live.beside_offline or output.beside_offline
        if output.token_ids:
            if live.last_token is not None:
                live.gaps.append(now - live.last_token)
            live.last_token = now
        if output.finish_reason is not None:
            del self._live[output.request_id]
            self._record(OnlineArrival(output.times.arrival, _lengths(output)))
            self._judge(output, live, now)

    def _judge(self, output: RequestOutput, live: _Live, now: float) -> None:
        """Good or not, by its TTFT and its own gaps; a request that its client gave up on proves nothing."""
        if output.finish_reason is FinishReason.ABORT:
            return
        times = output.times
        ttft = None if times.first_token is None else times.first_token - times.arrival
        good = output.finish_reason is not FinishReason.ERROR and self.slo.good(ttft, live.gaps)
        self._good += good
        self._bad += not good
        self._judged.append((now, good))
        self._forget(now)
        self._breaker.record_request(now, good, live.beside_offline)

    def _forget(self, now: float) -> None:
        while self._judged and self._judged[0][0] < now - ATTAINMENT_WINDOW:
            self._judged.popleft()

    def _share(self, now: float) -> float:
        """What of its budget offline work may use beside online work, 0 to 1."""
        return 0.0 if self._held else self._breaker.budget(now, 1.0, online_present=True)

    def _follow_breaker(self, now: float) -> None:
        self._breaker_seen = now
        state = self._breaker.state(now)
        self._core.set_offline_share(self._share(now))
        if state is not self._shown:
            cause = f" ({self._breaker.cause})" if self._breaker.cause else ""
            log.warning(
                "circuit breaker %s%s: offline share beside online work is now %.0f %%",
                state.value,
                cause,
                100 * self._share(now),
            )
            self._shown = state


def _lengths(output: RequestOutput) -> Lengths:
    """What a request turned out to be; one that was given up in the middle counts with what it got."""
    return Lengths(output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens)
