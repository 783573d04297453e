"""Budget of offline work before any search, and the check of an SLO against the smallest step. Torch-free."""

import math
from dataclasses import replace

from engine.scheduling.planner import LOST_BUDGET_STEPS
from predictor.budget import BudgetParams
from predictor.features import smallest_step
from predictor.model import LatencyModel
from predictor.promise import DEFAULT_CLASS
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
