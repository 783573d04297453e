"""Offline decodes that are planned and added at once: the same steps as one by one."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Generator

import pytest
from integrity import check_core

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.loop.planner import Planner, continued
from engine.scheduling.moving import Moves
from engine.scheduling.objective import OfflineAllowance, StepObjective
from engine.scheduling.offline import OfflinePlan, PlannedChunk, whole
from engine.scheduling.output import ModelRunnerOutput
from engine.scheduling.results import EMITTED_TOGETHER
from predictor.budget import BudgetParams
from predictor.model import LatencyModel

LAW = LatencyModel(intercept=0.008, decode_context=4e-7, decodes=1e-5, knots=(32,), hinges=(5e-5,))
MODELS = {
    "no model": None,
    "no limit": StepObjective(),
    "a limit": StepObjective(1.0, 0.05, True, BudgetParams("tidemill", 0.0085)),
}


def run(objective: StepObjective | None, seed: int) -> list[object]:
    """Every step of a load whose requests evict one another, up to the rounding of sums."""
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
    check_core(core)
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


def test_tokens_that_wait_for_the_whole_answer_are_told_together_and_none_twice() -> None:
    """Beside others of both classes: the same tokens, with a few of the outputs; what ends early tells the rest."""

    def answers(final_only: bool) -> tuple[dict[str, list[int]], dict[str, int]]:
        config = SchedulerConfig(num_units=400, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64)
        core, told, outputs = EngineCore(config), defaultdict(list), Counter[str]()
        sampling = SamplingParams(100, stop_token_ids=frozenset({3}))
        for name in ("online", "whole", "stopped", "aborted"):
            offline = RequestClass.ONLINE if name == "online" else RequestClass.OFFLINE
            core.add_request(EngineRequest(name, (5, 6), sampling, offline, final_only=final_only), 0.0)
        names: dict[int, str] = {}
        for step in range(110):
            output = core.schedule(float(step), whole(core.plan_offline(float(step))))
            if output is None:
                break
            names |= {new.row: new.request_id for new in output.new_requests}
            tokens = [3 if names[chunk.row] == "stopped" and step == 40 else 10 + step for chunk in output.chunks]
            failed = step == 20
            result = None if failed else ModelRunnerOutput(output.step_id, tokens, None, 0.01)
            given = core.update(output, result, float(step))
            if step == 50 and (ended := core.abort("aborted", 50.0)) is not None:
                given.append(ended)
            for each in given:
                told[each.request_id] += each.token_ids
                outputs[each.request_id] += 1
                assert each.num_output_tokens == len(told[each.request_id])
        assert not core.has_requests
        check_core(core)
        return dict(told), dict(outputs)

    told, outputs = answers(final_only=True)
    each_by_itself, _ = answers(final_only=False)
    assert told == each_by_itself and len(told["whole"]) == outputs["online"] == 100
    assert outputs["whole"] == 1 + 98 // EMITTED_TOGETHER + 1 and outputs["stopped"] <= 5 >= outputs["aborted"]


def test_what_was_not_told_moves_with_its_request() -> None:
    config = SchedulerConfig(num_units=100, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    first, second, told = EngineCore(config), EngineCore(config), list[int]()
    request = EngineRequest("r", (5, 6), SamplingParams(20), RequestClass.OFFLINE, final_only=True)
    first.add_request(request, 0.0)
    for core, steps in ((first, 7), (second, 13)):
        if core is second:
            moved = Moves(first.state, first.recovery).detach("r")
            Moves(second.state, second.recovery).attach(moved)
        for step in range(steps):
            output = core.schedule(float(step), whole(core.plan_offline(float(step))))
            assert output is not None
            given = core.update(output, ModelRunnerOutput(output.step_id, [step], None, 0.01), float(step))
            told += [token for each in given for token in each.token_ids]
    assert told == [*range(7), *range(13)] and given[0].finish_reason is not None


async def test_plans_are_counted_as_made_continued_or_late() -> None:
    gate, ready, plan = asyncio.Event(), asyncio.Event(), OfflinePlan((PlannedChunk("line", 4, False),))

    def plan_offline(_now: float) -> Generator[None, None, OfflinePlan]:
        while not gate.is_set():
            yield
        return plan

    clock = iter(range(10**6))
    planner = Planner(plan_offline, lambda: float(next(clock)), ready.set)
    planner.start()
    planner.want()
    await asyncio.sleep(0)
    assert planner.take() is None and planner.counts == {"made": 0, "continued": 0, "late": 1}
    gate.set()
    await ready.wait()
    assert planner.take() is plan and planner.take() is None
    assert planner.take(go_on=True) == continued(plan)
    assert planner.counts == {"made": 1, "continued": 1, "late": 1}
    await planner.stop()
