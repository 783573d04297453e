"""Keeps the SLO while the engine runs: learns step times and the load, judges online requests, drives the breakers.

HyGen §4.2 (the SLO-aware loop) and our circuit breakers. The engine loop calls it after every step and at every arrival
and end of a request. Torch-free, no asyncio, no timers; the clock is an argument. It never changes a request: it only
sets the core's objective and offline share.

The baseline of a tolerance: the most recent online requests, replayed on a server without offline work.

The live server cannot observe that run, so a replay with the same latency model provides it (HyGen measures a separate
run). This module selects the requests to replay and compares measurements with the replay. Torch-free.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.api import EngineRequest, FinishReason, RequestClass, RequestOutput
from engine.client import ClassStanding, ColocationStats
from engine.colocation.replay import ReplayedServer, ReplayWindow, offline_lengths, run_workload
from engine.colocation.waits import ArrivalWaits
from engine.core import EngineCore
from engine.scheduling.objective import EASY_SHARE
from engine.scheduling.output import SchedulerOutput
from predictor.breaker import BreakerState, CircuitBreaker
from predictor.budget import DEFAULT_CLASS, DEFAULT_OUTPUT, BudgetParams, Promise
from predictor.judge import MAX_AGE, WINDOW, Judge, Served, aggregate, attainment_of, excess_over
from predictor.load import Lengths, LoadModel, OnlineArrival
from predictor.online import OnlineModel, Tail
from predictor.slo import SLO, parse_key, service_of

LEAD_IN = 32
"""Requests replayed before the window, so that it does not start on an empty server. They are not compared."""
MIN_ALONE = 8
"""Minimum number of requests without offline work that calibrate the gaps of a baseline."""


@dataclass(slots=True)
class _Recent:
    """A request that ended.

    Attributes:
        served: Its latencies; None if it was refused or aborted and only counts as load.
        compared: A baseline has covered it.
    """

    arrival: OnlineArrival
    served: Served | None
    beside_offline: bool
    compared: bool = False


class RecentRequests:
    """The most recent online requests, in order of their ends. Times on the engine's clock."""

    def __init__(self) -> None:
        self._ended: deque[_Recent] = deque(maxlen=WINDOW + LEAD_IN)
        self._window: list[_Recent] = []

    def add(self, arrival: OnlineArrival, served: Served | None, beside_offline: bool) -> None:
        self._ended.append(_Recent(arrival, served, beside_offline))

    def num_new(self, now: float) -> int:
        """Return the number of requests of the next window that no baseline has covered yet."""
        fresh = (r for r in self._ended if not r.compared and r.arrival.at > now - MAX_AGE)
        return sum(_is_compared(recent.served) for recent in fresh)

    def window(self, running: Iterable[OnlineArrival], now: float) -> tuple[list[OnlineArrival], list[bool]]:
        """Return the requests to replay, by arrival, and whether each one is compared. `compare` uses the same window.

        `running`: unfinished requests with their current lengths, which are part of the load.
        """
        ended = [recent for recent in self._ended if recent.arrival.at > now - MAX_AGE]
        window = [*ended, *(_Recent(arrival, None, False) for arrival in running)]
        self._window = sorted(window, key=lambda recent: recent.arrival.at)
        lead_in = LEAD_IN if len(ended) > 2 * LEAD_IN else 0
        counted = [index >= lead_in and _is_compared(r.served) for index, r in enumerate(self._window)]
        return [recent.arrival for recent in self._window], counted

    def pace(self, own: Sequence[tuple[float, float] | None]) -> float | None:
        """Return measured ÷ replayed gaps of the window's requests without offline work; None for fewer than MIN_ALONE.

        `own`: the replayed (TTFT, mean gap) of each request.
        """
        measured, replayed, count = 0.0, 0.0, 0
        for recent, alone in zip(self._window, own, strict=True):
            if alone is not None and recent.served is not None and recent.served.gaps and not recent.beside_offline:
                measured += math.fsum(recent.served.gaps)
                replayed += alone[1] * len(recent.served.gaps)
                count += 1
        return measured / replayed if count >= MIN_ALONE and replayed > 0.0 else None

    def compare(
        self, slo: SLO, aggregates: dict[str, float], own: Sequence[tuple[float, float] | None]
    ) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield (arrival, excess by key) of every request beside offline work that was not compared before."""
        for recent, alone in zip(self._window, own, strict=True):
            served, is_new = recent.served, not recent.compared
            recent.compared = True
            if alone is None or served is None or not is_new or not recent.beside_offline:
                continue
            excesses = {o.key: excess_over(o, served, aggregates, alone) for o in slo.objectives}
            yield recent.arrival.at, {key: value for key, value in excesses.items() if value is not None}


def _is_compared(served: Served | None) -> bool:
    """Return whether a tolerance applies to a request: it was served, and is not of a named class."""
    return served is not None and service_of(served.promise) == DEFAULT_CLASS


def workload_of(arrivals: Sequence[OnlineArrival]) -> ReplayWindow:
    """Return the workload of `arrivals` at their own times.

    The unknown output of a refused request is estimated.
    """
    begin = arrivals[0].at
    rows = [
        a._replace(at=a.at - begin, lengths=a.lengths._replace(output=a.lengths.output or DEFAULT_OUTPUT))
        for a in arrivals
    ]
    return ReplayWindow(tuple(rows), rows[-1].at)


def replay_alone(
    workload: ReplayWindow, server: ReplayedServer, counted: Sequence[bool]
) -> tuple[dict[str, float], list[tuple[float, float] | None]]:
    """Replay without offline work. Return the SLO's aggregates by key, and each request's TTFT and mean gap in seconds.

    Only `counted` requests are aggregated. The others, and requests without a token, get None.
    """
    run = run_workload(workload, server, BudgetParams("tidemill", 0.0))
    own: list[tuple[float, float] | None] = []
    spans: list[tuple[float, list[float]]] = []
    for record, counts in zip(run.online, counted, strict=True):
        ttft, gaps = record.ttft, record.gaps
        if not counts or ttft is None:
            own.append(None)
            continue
        own.append((ttft, sum(gaps) / len(gaps) if gaps else 0.0))
        spans.append((ttft, gaps))
    return aggregate(spans, [objective.key for objective in server.slo.objectives]), own


log = logging.getLogger("tidemill.colocation")

LEARNED = ("searches_made", "searches_failed", "search_seconds", "baselines_made", "baselines_failed")
"""Counters of budget searches and baselines, which the tuner increments."""

RARE, LEAST_SHARE = 2e-4, 0.5
"""Share of steps that may exceed the TBT limit of a strict class, and the least share of the limit for a step's work.

All gaps of an answer with fewer than 100 tokens count towards its P99, so an answer of 50 tokens is late with a
probability of 1 % then.
"""
MIN_OFFLINE = 32
"""Minimum number of ended offline requests before only their lengths are used."""
MAX_QUEUED = 1024
"""Maximum number of queued offline requests whose lengths are used."""


@dataclass(slots=True)
class _Live:
    """An online request in progress.

    Attributes:
        arrival: Its arrival, with the tokens so far.
        moment: Time of its worst wait, relative to its limit.
        worst: That wait as a share of the limit.
        promise: The promise to it; None: that of the class `default`.
    """

    arrival: OnlineArrival
    promise: Promise | None = None
    gaps: list[float] = field(default_factory=list)
    last_token: float | None = None
    beside_offline: bool = False
    moment: float = 0.0
    worst: float = -1.0

    def wait(self, seconds: float, limit: float, now: float) -> None:
        """Record the wait for a token."""
        if seconds / limit > self.worst:
            self.worst, self.moment = seconds / limit, now


class Colocation:
    """SLO keeper of one engine. `model` is shared with the core, which uses it for predictions.

    `calendar`: offset from the engine's clock to calendar seconds. `load`: load learned by an earlier server.
    """

    def __init__(
        self,
        core: EngineCore,
        model: OnlineModel,
        slo: SLO,
        budget: BudgetParams,
        *,
        calendar: float = 0.0,
        load: LoadModel | None = None,
    ) -> None:
        self.slo = slo
        self.model = model
        self.calendar = calendar
        self.load = load or LoadModel(calendar)
        self.recent = RecentRequests()
        self.on_change: Callable[[float], None] = lambda _now: None
        self._core = core
        self.initial = self._budget = budget
        self._breakers = {name: CircuitBreaker(own.attainment_target) for name, own in slo.by_class}
        self._tail = Tail()
        self._judges = {name: Judge(own, name) for name, own in slo.by_class}
        self._promise = slo.promise()
        self._strictest_gap = slo.tightest("tbt")
        self._step_limit = min(map(slo.tightest, ("ttft", "tbt", "tpot")))
        self._live: dict[str, _Live] = {}
        self._offline_tokens = 0
        self._offline_seen = -math.inf
        self._shown = dict.fromkeys(self._breakers, BreakerState.CLOSED)
        self._now = 0.0
        self._held = ""
        self._refits = {True: 0, False: 0}
        self._refit_errors: dict[str, float] = {}
        self.learned: dict[str, float] = dict.fromkeys(LEARNED, 0)
        self.noise: Mapping[str, float] = {}
        self._pace_alone = 1.0  # measured ÷ replayed gaps without offline work
        self.set_budget(budget, "as long as no search has ended")

    def set_budget(self, budget: BudgetParams, origin: str, *, replayed: bool = False, searched: bool = False) -> None:
        """Use this budget from the next step on.

        L = 0 means that no offline budget keeps the SLO: then no offline work runs beside online work. Offline steps
        without online work continue as before, short enough for arrivals.

        Args:
            origin: Source of the budget, for logs and statistics.
            replayed: The budget was just verified by replay for the current load, so the breaker grants all of it.
                Otherwise the share that the breaker granted of the previous budget is rescaled to this one.
            searched: A search found exactly this budget for the current load or a higher rate.
        """
        self._origin, self._searched = origin, searched
        self._held = "" if budget.latency_budget > 0.0 else f"no offline budget keeps the SLO ({origin}){self.doubt}"
        if not self._held:
            for breaker in self._breakers.values():
                if replayed:
                    breaker.renew()
                else:
                    breaker.rescale(self._budget.latency_budget / budget.latency_budget)
            self._budget = budget
        self._set_objective()
        self._follow_breakers(self._now)

    @property
    def doubt(self) -> str:
        """Return a clause that names the tolerances below the noise of the baseline; empty without one."""
        below = {key: share for key, share in self.noise.items() if share > self.slo.tolerances().get(key, math.inf)}
        if not below:
            return ""
        named = " and ".join(f"{key} by ± {share:.0%}" for key, share in below.items())
        return f"; without batch work {named}: a tolerance below it lets batch work run only without chats"

    def _set_objective(self) -> None:
        prompts = [(service_of(each.promise), each.lengths.to_compute) for each in self.load.arrivals]
        waits = ArrivalWaits.of(self.slo, self.model, prompts, self.load.rate(self._now + self.calendar))
        searched = self._searched and not self._held
        self._core.set_objective(waits.objective(self.slo, self._budget, searched=searched, initial=self.initial))

    def on_arrival(self, request_class: RequestClass, now: float) -> None:
        """Record a queued request."""
        if request_class is RequestClass.ONLINE:
            self.load.arrive(now + self.calendar)
            self._follow_breakers(now)
        else:
            self._offline_seen = now

    def on_promise(self, request: EngineRequest, now: float) -> None:
        """Record a queued request that has a promise of its own."""
        assert request.promise is not None
        promise = request.promise.judged(self.slo.promise(request.promise.service))
        arrival = OnlineArrival(now, Lengths(len(request.prompt_token_ids), 0), promise)
        self._live[request.request_id] = _Live(arrival, promise)

    def on_refused(
        self, request_class: RequestClass, prompt_tokens: int, now: float, promise: Promise | None = None
    ) -> None:
        """Record a refused request (429), which is part of the load, too. `prompt_tokens` may be an estimate."""
        if request_class is RequestClass.ONLINE:
            self.load.arrive(now + self.calendar)
            self._judge_of(promise).refused += 1
            self._remember(OnlineArrival(now, Lengths(prompt_tokens, 0), promise), None, False)
            self._follow_breakers(now)

    def on_step(
        self,
        output: SchedulerOutput,
        measured: float,
        outputs: list[RequestOutput],
        now: float,
        device: float | None = None,
        trial: bool = False,
    ) -> None:
        """Record a completed step of `measured` seconds with its outputs. The time of a `trial` is not learned.

        `device`: seconds on the device; None: all.
        """
        if not trial:
            predicted = self.model.predict(output.features)
            self.model.observe(output.features, measured, 0.0 if device is None else measured - device)
            if self._core.state.has_online or any(o.request_class is RequestClass.ONLINE for o in outputs):
                # Relative to the step limit: with a limit of 100 ms, an excess of 2 ms is harmless.
                allowed = max(measured, self._step_limit if self._step_limit < math.inf else self.model.usual_seconds)
                gap = self._strictest_gap
                self._tail.add(min(measured - predicted, gap))
                share = max(LEAST_SHARE, 1.0 - self._tail.excess(RARE) / gap)
                self._core.state.strict_share = min(EASY_SHARE, share)
                for breaker in self._breakers.values():  # wrong predictions concern all classes
                    breaker.record_step(now, (measured - predicted) / allowed if allowed > 0.0 else 0.0)
        for request_output in outputs:
            self._on_output(request_output, now)
        self._follow_breakers(now)

    def note_refit(self, better: bool, before: float, after: float) -> None:
        """Count a refit of the latency model; `better`: the fit replaced the model."""
        self._refits[better] += 1
        self._refit_errors = {"before": before, "after": after}

    def on_end(self, output: RequestOutput, now: float) -> None:
        """Record a request that ended outside a step (aborted, or not started)."""
        self._on_output(output, now)
        self._follow_breakers(now)

    def has_offline(self, now: float, seconds: float) -> bool:
        """Return whether offline work exists or existed in the last `seconds`."""
        return self._core.has_offline or now - self._offline_seen < seconds

    def offline_work(self) -> list[Lengths]:
        """Return the lengths of offline requests that ended, extended by queued ones if too few have ended."""
        ended = list(self.load.offline)
        return ended if len(ended) >= MIN_OFFLINE else ended + offline_lengths(self._core.state, MAX_QUEUED)

    @property
    def budget(self) -> BudgetParams:
        """Return the budget in force."""
        return self._budget

    @property
    def num_openings(self) -> int:
        """Return how often the breaker of the class with the most openings has opened."""
        return max(breaker.num_openings for breaker in self._breakers.values())

    def window(self, now: float) -> tuple[list[OnlineArrival], list[bool]]:
        """Return the recent online requests for a baseline replay, and whether each one is compared with it."""
        return self.recent.window([live.arrival for live in self._live.values()], now)

    def set_baseline(self, aggregates: dict[str, float], own: list[tuple[float, float] | None], now: float) -> None:
        """Set the replayed latencies of `window` without offline work.

        Gaps are scaled by the measured gaps of requests without offline work, since the error of the latency model can
        exceed the tolerance.

        `aggregates`: by metric key. `own`: (TTFT, mean gap) of each request, or None.
        """
        self._pace_alone = pace = self.recent.pace(own) or self._pace_alone
        aggregates = {k: v * pace if parse_key(k)[0] in ("tbt", "tpot") else v for k, v in aggregates.items()}
        own = [alone and (alone[0], alone[1] * pace) for alone in own]
        self._judges[DEFAULT_CLASS].set_baseline(aggregates)
        self._set_objective()
        for arrival, excesses in self.recent.compare(self.slo, aggregates, own):
            self._breakers[DEFAULT_CLASS].record_excesses(now, arrival, excesses)
        self._follow_breakers(now)

    def stats(self, now: float) -> ColocationStats:
        """Return a snapshot for /metrics and /ready. Its breaker is that of the class with the smallest share."""
        breaker = min(self._breakers.values(), key=lambda each: each.share(now))
        return ColocationStats(
            slo=str(self.slo),
            attainment=attainment_of(list(self._judges.values()), now),
            good_requests=sum(judge.good for judge in self._judges.values()),
            bad_requests=sum(judge.bad for judge in self._judges.values()),
            objectives=tuple(standing for judge in self._judges.values() for standing in judge.standings(now)),
            online_rate=self.load.rate(now + self.calendar),
            policy=self._budget.policy,
            rule=self._budget.rule,
            latency_budget=self._budget.latency_budget,
            interference_weight=self._budget.lam,
            decode_value=self._budget.delta,
            breaker=breaker.state(now).value,
            breaker_cause=breaker.cause,
            breaker_openings=self.num_openings,
            predictor_mape=self.model.mape,
            offline_tokens=self._offline_tokens,
            budget_origin=self._origin,
            offline_share=self._share(now),
            held=self._held,
            overrun=self._breakers[DEFAULT_CLASS].overrun,
            model_refits=self._refits[True],
            model_refits_refused=self._refits[False],
            refit_errors=dict(self._refit_errors),
            learned=dict(self.learned),
            baseline_noise=dict(self.noise),
            margins=self.model.margins(),
            share_limit=self._ruling(now).limit(now),
            classes=tuple(
                ClassStanding(name, str(judge.slo), judge.attainment(now)) for name, judge in self._judges.items()
            ),
            class_good={name: judge.good for name, judge in self._judges.items()},
            class_bad={name: judge.bad for name, judge in self._judges.items()},
            class_refused={name: judge.refused for name, judge in self._judges.items()},
        )

    def _on_output(self, output: RequestOutput, now: float) -> None:
        if output.probe:
            return
        if output.request_class is RequestClass.ONLINE:
            self._on_online(output, now)
        else:
            self._on_offline(output, now)
        if output.finish_reason is not None:
            self.on_change(now)

    def _on_offline(self, output: RequestOutput, now: float) -> None:
        self._offline_seen = now
        self._offline_tokens += len(output.token_ids)
        if output.token_ids and output.num_output_tokens == len(output.token_ids):  # the first output tokens
            self._offline_tokens += output.num_prompt_tokens
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.load.remember_offline(_lengths(output))

    def _on_online(self, output: RequestOutput, now: float) -> None:
        arrival = OnlineArrival(output.times.arrival, _lengths(output))
        live = self._live.setdefault(output.request_id, _Live(arrival))
        live.arrival = arrival._replace(promise=live.promise)
        promise = live.promise or self._promise
        live.beside_offline = live.beside_offline or output.beside_offline
        if output.token_ids:
            if live.last_token is None:
                live.wait(now - output.times.arrival, promise.ttft, now)
            else:
                live.gaps.append(now - live.last_token)
                live.wait(live.gaps[-1], promise.tbt, now)
            live.last_token = now
        if output.finish_reason is not None:
            del self._live[output.request_id]
            self._end_online(output, live, now)

    def _end_online(self, output: RequestOutput, live: _Live, now: float) -> None:
        """Judge a request that ended and record its lengths.

        A request aborted by its client counts only if a limit was already broken.
        """
        times, promise = output.times, live.promise
        judge = self._judge_of(promise)
        served: Served | None
        if output.finish_reason is FinishReason.ABORT:
            waited = now - times.arrival if times.first_token is None else times.first_token - times.arrival
            gaps = live.gaps if live.last_token is None else [*live.gaps, now - live.last_token]
            served = Served(times.arrival, waited, gaps, promise=promise)
            served = served if judge.breaks_a_limit(served) else None
        else:
            ttft = None if times.first_token is None else times.first_token - times.arrival
            served = Served(times.arrival, ttft, live.gaps, output.finish_reason is FinishReason.ERROR, promise)
        self._remember(live.arrival, served, live.beside_offline)
        if served is not None:
            verdict = judge.judge(now, served)
            moment, beside = live.moment if live.last_token is not None else now, live.beside_offline
            self._breakers[service_of(promise)].record_request(
                now, times.arrival, verdict.limits_kept, beside, verdict.excesses, moment, verdict.used
            )

    def _judge_of(self, promise: Promise | None) -> Judge:
        return self._judges[service_of(promise)]

    def _remember(self, arrival: OnlineArrival, served: Served | None, beside_offline: bool) -> None:
        self.recent.add(arrival, served, beside_offline)
        self.load.remember(arrival._replace(at=arrival.at + self.calendar))
        known = len(self.load.arrivals)
        if known & (known - 1) == 0:  # 1, 2, 4 ...: the first chats change the estimated lengths most
            self._set_objective()

    def _ruling(self, now: float) -> CircuitBreaker:
        """Return the breaker of the smallest share, of the class `default` and the classes of live requests.

        Each class has evidence of its own. Otherwise the kept promises of a lenient class would outweigh the missed
        ones of a strict class, and misses of the strict class would cost offline work beside all other chats.
        """
        live = {DEFAULT_CLASS, *(service_of(request.spec.promise) for request in self._core.state.promised)}
        return min((self._breakers[name] for name in live), key=lambda breaker: breaker.share(now))

    def _share(self, now: float) -> float:
        """Return the share of its budget that offline work may use beside the live online work, 0 to 1."""
        return 0.0 if self._held else self._ruling(now).share(now)

    def _follow_breakers(self, now: float) -> None:
        self._now = now
        self._core.set_offline_share(self._share(now))
        for name, breaker in self._breakers.items():
            if (state := breaker.state(now)) is not self._shown[name]:
                self._shown[name] = state
                cause = f" ({breaker.cause})" if breaker.cause else ""
                text = "circuit breaker of class '%s' %s%s: offline share beside its requests is now %.0f %%"
                log.warning(text, name, state.value, cause, 0.0 if self._held else 100 * breaker.share(now))


def _lengths(output: RequestOutput) -> Lengths:
    """Return the lengths of a request; an aborted one counts with the tokens that it got."""
    return Lengths(output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens)
