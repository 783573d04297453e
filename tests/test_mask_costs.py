"""What masks cost is part of the latency model: measured, charged, and kept from chats beside structured rows."""

import functools
from collections.abc import Iterator
from itertools import count

import pytest
from driver import make_request
from fakes.runner import features_of

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.core import EngineCore
from engine.execution.masks import PATIENCE
from engine.forms import Grammar, ThinkingBudget, ThoughtMarks
from engine.limits import SchedulerConfig
from engine.profiling.calibration import measure_profile
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import LATE_TOKEN, Collect, ModelRunnerOutput, SchedulerOutput
from engine.virtual import Arrival, VirtualDriver
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.profile import Profile, ProfileKey

FORWARD = LatencyModel(intercept=0.004, decode_context=2e-7, prefill_chunks=1e-4, knots=(0, 64), hinges=(1e-5, 5e-5))
CONFIG = SchedulerConfig(
    num_units=2 * 800, max_model_len=256, block_size=16, max_num_seqs=64, max_num_batched_tokens=256
)
KEY = ProfileKey("model", "device", "float32", "1")
GRAMMAR = Grammar("regex", "[a-z]*")
TBT = 0.012
OFFLINE = RequestClass.OFFLINE


class MaskedMachine:
    """A runner on the virtual clock. A step with masks takes 0.4 ms more, each that is there 0.2 ms; they are made one
    after the other, `each` seconds for one, while the forward pass runs and `PATIENCE` longer: the others are late.

    Which samples have masks it knows from its rows. `late`: how many were; `steps`: of each step its features as it was
    announced, and its time."""

    def __init__(self, each: float) -> None:
        self.late = 0
        self.steps: list[tuple[BatchFeatures, float]] = []
        self._each = each
        self._from: dict[int, int] = {}

    def launch(self, output: SchedulerOutput) -> Collect:
        for new in output.new_requests:
            self._from[new.row] = new.num_prompt_tokens + new.sampling.masked_from
        sampled = [chunk for chunk in output.chunks if chunk.sample]
        masked = [n for n, c in enumerate(sampled) if c.start + c.length >= self._from[c.row]]
        assert output.features.masked_rows == len(masked)
        features = features_of(output)
        plain = FORWARD.predict(features)
        ready = min(len(masked), int((plain + PATIENCE) / self._each))
        seconds = max(plain, ready * self._each)
        if masked:
            seconds = plain + PATIENCE if ready < len(masked) else seconds
            seconds += 0.0004 + 0.0002 * ready
        tokens = [5] * len(sampled)
        for index in masked[ready:]:
            tokens[index] = LATE_TOKEN
        self.late += len(masked) - ready
        self.steps.append((features, seconds))
        result = ModelRunnerOutput(output.step_id, tokens, None, seconds)
        return lambda: result


@functools.cache
def profile_of(each: float, *, masks: bool = True) -> Profile:
    return measure_profile(MaskedMachine(each), CONFIG.limits, 50, KEY, seconds=8.0, masks=masks)


def structured(name: str, number: int) -> EngineRequest:
    """An offline row: a prompt of 40 tokens and 60 under a grammar."""
    prompt = tuple((7 * number + 3 * index) % 50 for index in range(40))
    return EngineRequest(f"{name} {number}", prompt, SamplingParams(60, grammar=GRAMMAR), OFFLINE)


def online_model(profile: Profile) -> OnlineModel:
    return OnlineModel(profile.model, profile.held_out_mape)


def run_beside_chats(
    machine: MaskedMachine, model: LatencyModel | OnlineModel, seconds: float = 8.0
) -> tuple[list[float], int]:
    """Every gap of chats, one in four with a thinking budget, beside structured rows without end, and the rows'
    tokens."""
    rows: Iterator[EngineRequest] = (structured("row", number) for number in count())
    thinking = ThinkingBudget(20, ThoughtMarks((1,), (2,)), begun=True)
    chats = [
        Arrival(0.2 * n, make_request(f"chat {n}", [n % 50] * 30, 80, thinking=None if n % 4 else thinking))
        for n in range(round(seconds / 0.2))
    ]
    objective = StepObjective(ttft=1.0, tbt=TBT, budget=BudgetParams("hygen", TBT))
    core = EngineCore(CONFIG, model=model, objective=objective)
    run = VirtualDriver(core, machine, chats, rows).run(seconds, drain=2.0)
    assert all(chat.ended is not None for chat in run.online)
    return [gap for chat in run.online for gap in chat.gaps], run.offline_output_tokens


@pytest.mark.parametrize("each", [5e-5, 4e-4])
def test_a_machine_whose_masks_cost_time_is_predicted(each: float) -> None:
    """Masks that are done within the forward pass, and masks with some late ones."""
    profile = profile_of(each)
    assert profile.held_out_mape < 0.05
    assert profile.model.masked_rows > 0.0 and profile.model.masks > 0.0
    machine = MaskedMachine(each)
    run_beside_chats(machine, online_model(profile))
    with_masks = [(f, seconds) for f, seconds in machine.steps if f.masked_rows]
    errors = [abs(profile.model.predict(f) - seconds) / seconds for f, seconds in with_masks]
    assert len(errors) > 100 and sum(errors) / len(errors) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("each", [5e-5, 4e-4])
def test_chats_keep_their_gaps_beside_structured_rows(each: float) -> None:
    """As the 99th percentile wants it, though rows sit steps out where their masks are late; a model that knows of no
    masks breaks them. The run is long enough that the steps before the first correction do not decide."""
    machine = MaskedMachine(each)
    gaps, tokens = run_beside_chats(machine, online_model(profile_of(each)), seconds=24.0)
    assert sum(gap > TBT for gap in gaps) <= 0.01 * len(gaps) and len(gaps) > 1000
    assert tokens > 1000 and (machine.late > 0) is (each > 1e-4)
    blind, _ = run_beside_chats(MaskedMachine(each), online_model(profile_of(each, masks=False)))
    assert sum(gap > TBT for gap in blind) > 0.1 * len(blind)
