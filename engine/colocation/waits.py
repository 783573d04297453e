"""What a chat may wait that arrives while nothing but offline work runs: for the end of the step that it finds.

Torch-free; live and replays ask the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.scheduling.objective import StepObjective
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures
from predictor.judge import MAX_AGE
from predictor.model import LatencyPredictor, smallest_step
from predictor.slo import SLO

IDLE_STEPS = 2.0
"""A promise so tight that hardly any step keeps it does not stop offline work: so many of the smallest step may run.
With the rests that a tolerance asks for that is also the length at which most is done: a step of n tokens takes
a + b · n seconds, who arrives waits for its square, and n ÷ (a + b · n)² is highest where it takes 2a."""
AWAITED_GAPS, SHORTEST_AWAITED = 3.0, 10.0
"""One in twenty chats comes after more than three times the mean gap, if they come by themselves: what it waits is a
hundredth of the mean, and at night everything is left for offline work. Not less than so many seconds: bursts."""
USUAL_PROMPT = 256
"""What the prompt of a chat is taken for before the first one came."""


@dataclass(frozen=True, slots=True)
class ArrivalWaits:
    """`idle`: the longest step without online work; `mean`: what arrivals may wait on average for the end of one, which
    rests between steps see to (infinite: no tolerance over the mean TTFT says so); `awaited`: how long after the last
    chat there are rests for the next one. Seconds."""

    idle: float
    mean: float
    awaited: float

    @classmethod
    def of(cls, slo: SLO, model: LatencyPredictor, prompts: Sequence[int], rate: float) -> "ArrivalWaits":
        """For chats with prompts of so many tokens to compute, that come at a rate, per second.

        Who arrives within a step waits for its end, half of it on average. Half of a tolerance may go so, and of an
        absolute limit on single requests half of what the prompt itself leaves, for it may not be alone.
        """
        features = BatchFeatures(model.reach)
        features.add_chunk(0, max(2, sum(prompts) // len(prompts) if prompts else USUAL_PROMPT))
        alone = model.predict(features)
        limits, mean = [], math.inf
        awaited = min(max(AWAITED_GAPS / rate, SHORTEST_AWAITED), MAX_AGE) if rate > 0.0 else MAX_AGE
        for objective in slo.objectives:
            if objective.metric == "ttft" and objective.limit is not None:
                limits.append((objective.limit - alone) * (2.0 if objective.percentile is None else 0.5))
            elif objective.metric == "ttft" and objective.tolerance is not None:
                limits.append(objective.tolerance * alone)
                if objective.percentile is None:
                    mean = objective.tolerance * alone / 2.0
        return cls(max(min(limits, default=math.inf), IDLE_STEPS * smallest_step(model)), mean, awaited)

    def objective(self, slo: SLO, budget: BudgetParams, *, searched: bool) -> StepObjective:
        """What the core goes by. `searched`: replays have shown what the budget does to arrivals; they show only what
        it does beside chats where rests see to the others."""
        idle = math.inf if searched and math.isinf(self.mean) else self.idle
        return replace(StepObjective.from_slo(slo, budget), idle=idle, wait=self.mean, awaited=self.awaited)
