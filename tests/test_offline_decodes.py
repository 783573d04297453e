"""Offline decodes that are planned and added at once: the same steps as one by one."""

import random

import pytest

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.scheduling.objective import OfflineAllowance, StepObjective
from engine.scheduling.output import ModelRunnerOutput
from engine.scheduling.planner import whole
from predictor.budget import BudgetParams
from predictor.model import LatencyModel

LAW = LatencyModel(intercept=0.008, decode_context=4e-7, decodes=1e-5, knots=(32,), hinges=(5e-5,))
MODELS = {
    "no model": None,
    "no limit": StepObjective(),
    "a limit": StepObjective(1.0, 0.05, True, BudgetParams("tidemill", 0.0085)),
}


def run(objective: StepObjective | None, seed: int) -> list[object]:
    """Every step of a load whose requests evict one another, but for what a sum rounds."""
    rng, now = random.Random(seed), 0.0
    seen: list[object] = []
    config = SchedulerConfig(num_units=120, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64)
    core = EngineCore(config) if objective is None else EngineCore(config, model=LAW, objective=objective)
    for step in range(150):
        now += 0.01
        if step < 60:
            request_class = RequestClass.ONLINE if rng.random() < 0.3 else RequestClass.OFFLINE
            prompt = tuple(rng.randrange(50) for _ in range(rng.randrange(1, 90)))
            sampling = SamplingParams(rng.randrange(1, 60), stop_token_ids=frozenset({3}))
            core.add_request(EngineRequest(str(step), prompt, sampling, request_class), now)
        output = core.schedule(now, whole(core.plan_offline(now)))
        if output is None:
            continue
        tokens = [rng.randrange(40) for chunk in output.chunks if chunk.sample]
        given = core.update(output, ModelRunnerOutput(output.step_id, tokens, None, 0.01), now)
        latency = None if output.predicted_latency is None else pytest.approx(output.predicted_latency)
        seen.append((output.chunks, output.new_requests, output.appended, output.released_rows, latency, given))
    core.check_integrity()
    return seen


@pytest.mark.parametrize("objective", MODELS.values(), ids=MODELS)
def test_decodes_added_at_once_make_the_same_steps(
    objective: StepObjective | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = run(objective, 0)
    asked: list[int] = []

    def refuse(_self: OfflineAllowance, _features: object, _seconds: float, count: int, _context_sum: int) -> bool:
        asked.append(count)
        return False

    monkeypatch.setattr(OfflineAllowance, "fits_decodes", refuse)
    assert run(objective, 0) == at_once
    assert max(asked) > 2, "the load has no steps of several offline decodes"
