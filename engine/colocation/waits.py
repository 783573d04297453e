"""What an SLO implies before any search: the first budget of offline work, and limits on the waits of arrivals.

A chat that arrives while only offline work runs waits for the current step to end. Torch-free; used by the live server
and by replays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.scheduling.objective import StepObjective
from engine.scheduling.offline import LOST_BUDGET_STEPS
from predictor.budget import DEFAULT_CLASS, BudgetParams
from predictor.features import BatchFeatures, LatencyPredictor, smallest_step
from predictor.judge import MAX_AGE
from predictor.model import LatencyModel
from predictor.slo import SLO

BUDGET_SHARE = 0.8
"""Initial share of the time that a TBT limit leaves above the smallest step, until a search has found a better one.

Predictions have a margin of their own. 0.8 of the limit itself would exclude offline work if online steps take that
long (3 ms of 3.2).
"""
ROOM = 3.0
"""Suggested limit, as a multiple of the smallest step."""


def initial_budget(slo: SLO, model: LatencyModel) -> BudgetParams:
    """Return the budget used before any search: a flat L.

    L is the smallest step plus BUDGET_SHARE of the time that the TBT limit leaves above it, or the smallest step
    extended by the tolerance. Without a TBT limit, or if no step can meet it, L is a few smallest steps: a limit that
    is missed anyway (streamed weights make every step long) must not reduce offline work to steps of one request.
    """
    smallest = smallest_step(model)
    stated = [limit for metric in ("tbt", "tpot") if (limit := slo.limit_of(metric)) is not None]
    limits = [smallest + BUDGET_SHARE * (limit - smallest) for limit in stated if limit >= smallest]
    limits += [smallest * (1.0 + o.tolerance) for o in slo.objectives if o.tolerance is not None and o.metric != "ttft"]
    return BudgetParams("tidemill", min(limits, default=LOST_BUDGET_STEPS * smallest))


def slo_warning(slo: SLO, model: LatencyModel) -> str | None:
    """Return a warning about limits that are shorter than the smallest step; None without such a limit."""
    smallest = smallest_step(model)
    lost, advice = [], []
    for name, own in slo.by_class:
        missed = [each for each in own.objectives if each.limit is not None and each.limit < smallest]
        service = "" if name == DEFAULT_CLASS else f"{name}:"
        lost += [f"{service}{each}" for each in missed]
        if missed:
            longer = [str(replace(each, limit=_round_up(ROOM * smallest))) for each in missed]
            advice.append(f"--slo {service}{','.join(longer)}")
    if not lost:
        return None
    return (
        f"warning: {', '.join(lost)} cannot be met: a step with a single chat takes {smallest * 1e3:.2g} ms "
        f"on this machine; use for example {' '.join(advice)}"
    )


def _round_up(seconds: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= seconds)


IDLE_STEPS = 2.0
"""Minimum step limit without online work, in smallest steps, so that a very tight SLO does not stop offline work.

It is also the most efficient length with the pauses that a tolerance asks for. A step of n tokens takes a + b · n
seconds, the mean wait grows with its square, and n ÷ (a + b · n)² is highest for a step of 2a seconds.
"""
AWAITED_GAPS, SHORTEST_AWAITED = 3.0, 10.0
"""Pauses are made for AWAITED_GAPS mean gaps after the last chat, but for at least SHORTEST_AWAITED seconds (bursts).

If chats arrive independently, one in twenty comes after more than three mean gaps. Its wait adds a hundredth to the
mean, and at night all the time is left to offline work.
"""
LONGEST_WAIT = 1 / 3
"""Maximum wait of an arrival for a step, as a share of what its TTFT limit leaves beside the time of its own prompt.

On two cores, steps without online work run 1.1 times as many tokens/s at 0.4 predicted seconds as at 0.12.
"""
PATIENCE = 2.0
"""A prompt gives way to arrivals of the class with the strictest TTFT limit if its own limit is this many times as
long. Its chunks become shorter, which costs some of its speed."""
USUAL_PROMPT = 256
"""Assumed prompt tokens of a chat before the first one arrives."""


def objective_of(slo: SLO, budget: BudgetParams) -> StepObjective:
    """Return the absolute limits of an SLO with a budget. Tolerances are part of the budget, `idle` and `wait`."""
    tbt = min((limit for metric in ("tbt", "tpot") if (limit := slo.limit_of(metric))), default=math.inf)
    return StepObjective(slo.limit_of("ttft") or math.inf, tbt, slo.gap_limited, budget)


@dataclass(frozen=True, slots=True)
class ArrivalWaits:
    """Limits for arrivals without online work, in seconds.

    Attributes:
        idle: Maximum duration of a step without online work.
        patient: See `StepObjective`.
        arrival: See `StepObjective`.
        mean: Mean wait of an arrival for a step to end, kept by pauses between steps; infinite without a tolerance on
            the mean TTFT.
        awaited: Time after the last chat for which these pauses are made.
    """

    idle: float
    mean: float
    awaited: float
    patient: float = math.inf
    arrival: float = math.inf

    @classmethod
    def of(cls, slo: SLO, model: LatencyPredictor, prompts: Sequence[tuple[str, int]], rate: float) -> "ArrivalWaits":
        """Return the limits for chats of `prompts`, arriving at `rate` per second.

        An arrival waits half a step on average. This wait may use half of a tolerance, or half of the time that a limit
        on the mean leaves beside the prompt's own. Under a limit per request a step may take LONGEST_WAIT of that time,
        since the request may not be alone.

        Args:
            prompts: Class and number of prompt tokens to compute of each chat.
        """
        limits, mean, shortest = [], math.inf, IDLE_STEPS * smallest_step(model)
        awaited = min(max(AWAITED_GAPS / rate, SHORTEST_AWAITED), MAX_AGE) if rate > 0.0 else MAX_AGE
        strict = slo.tightest("ttft")
        arrival = math.inf
        for name, own in slo.by_class:
            alone = _alone(model, [tokens for service, tokens in prompts if service == name] or [n for _, n in prompts])
            for objective in own.objectives:
                if objective.metric == "ttft" and objective.limit is not None:
                    limit = (objective.limit - alone) * (1.0 if objective.percentile is None else LONGEST_WAIT)
                    limits.append(limit)
                    if objective.limit == strict:
                        arrival = min(arrival, max(limit, shortest))
                elif objective.metric == "ttft" and objective.tolerance is not None:
                    limits.append(objective.tolerance * alone)
                    if objective.percentile is None:
                        mean = objective.tolerance * alone / 2.0
        patient = PATIENCE * strict if slo.classes else math.inf
        return cls(max(min(limits, default=math.inf), shortest), mean, awaited, patient, arrival)

    def objective(
        self, slo: SLO, budget: BudgetParams, *, searched: bool, initial: BudgetParams | None = None
    ) -> StepObjective:
        """Return the objective of the core.

        An absolute TTFT limit bounds steps without online work by `idle` alone. Without one, L bounds them, too.

        Args:
            searched: The budget comes from replays, which include its effect on arrivals, so L bounds every step. With
                pauses it does not: then replays show the effect of the budget only beside chats.
            initial: The budget before any search. If `budget` was derived from a search for another load, its L may be
                far lower; steps without online work may take as long as without any search.
        """
        idle: float | None = None
        if math.isfinite(self.arrival):
            idle = self.idle
        elif not searched or not math.isinf(self.mean):
            idle = min(self.idle, max(each.latency_budget for each in (budget, initial or budget)))
        return replace(
            objective_of(slo, budget),
            idle=idle,
            wait=self.mean,
            awaited=self.awaited,
            patient=self.patient,
            arrival=self.arrival,
        )


def _alone(model: LatencyPredictor, prompts: Sequence[int]) -> float:
    """Return the predicted seconds of a step with a prompt of the mean length of `prompts`, tokens."""
    features = BatchFeatures(model.reach)
    features.add_chunk(0, max(2, sum(prompts) // len(prompts) if prompts else USUAL_PROMPT))
    return model.predict(features)
