"""What crosses the boundary between gateway and engine: values that do not change and that another process can read."""

import math
import pickle
from typing import Any

import msgspec
import pytest
from driver import make_request
from fake_engine import colocation_stats
from fakes.runner import FakeRunner

from engine.api import (
    EngineRequest,
    FinishReason,
    Lane,
    RequestClass,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenCosts,
    TokenLogprobs,
)
from engine.cache.blocks import CacheKind
from engine.client import EngineInfo, EngineStats
from engine.core import EngineCore
from engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineStepError,
    EngineUnavailableError,
    ErrorInfo,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
    TidemillError,
)
from engine.limits import SchedulerConfig
from engine.text.tokenizer import Tokenizer
from gateway.generate.choices import ChoiceState
from gateway.generate.params import GenerationPlan, TokenizedPrompt
from gateway.telemetry.account import Account
from predictor.slo import Standing

ERRORS = [
    ConfigError("a"),
    ModelLoadError("b"),
    InvalidRequestError("c", param="n", code="invalid_value"),
    ContextLengthError("d", param="prompt"),
    QueueFullError("e", retry_after=2.5),
    EngineUnavailableError("f", retry_after=7.0),
    EngineStepError("g"),
    TidemillError("h"),
]
SAMPLING = SamplingParams(
    max_tokens=9, seed=-(2**63), logit_bias=((5, -1.5),), logprobs=3, stop_token_ids=frozenset({7, 8})
)
VALUES: list[Any] = [
    EngineRequest("r", (1, 2, 3), SAMPLING, RequestClass.OFFLINE, b"\x00\xff", math.inf, lane=Lane.AT_RISK),
    RequestOutput(
        "r", (4,), (TokenLogprobs(-0.5, ((4, -0.5), (1, -math.inf))),), RequestTimes(1.0, 2.0, 3.0, 4.0), 3, 0, 1,
        FinishReason.ERROR, error=ErrorInfo.of(QueueFullError("full", retry_after=2.5)),
    ),
    EngineInfo(64, 10, frozenset({1}), "A", "float32", "cpu", 1000, 128),
    EngineStats(
        running={RequestClass.ONLINE: 3}, preemptions={"memory": 1}, token_costs=TokenCosts(0.5, 0.25),
        colocation=colocation_stats(objectives=(Standing("ttft_p99=1s", 0.5, 1.0, 1.0),)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_the_same_behind_the_boundary(value: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


def test_a_kind_of_block_is_itself_behind_the_boundary() -> None:
    assert all(pickle.loads(pickle.dumps(kind)) is kind is CacheKind(kind.value) for kind in CacheKind)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_does_not_change(value: Any) -> None:
    kinds = ("_fields", "__struct_fields__", "__dataclass_fields__")
    first, *_ = next(getattr(value, kind) for kind in kinds if hasattr(value, kind))
    with pytest.raises(AttributeError):
        setattr(value, first, 1)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_behind_the_boundary(error: TidemillError) -> None:
    again = ErrorInfo.of(error).to_error()
    assert type(again) is type(error) and vars(again) == vars(error)


def test_a_slow_reader_does_not_falsify_the_time_between_tokens(tokenizer: Tokenizer) -> None:
    """A token a second, all read after the last one."""
    core = EngineCore(SchedulerConfig(num_units=16, max_model_len=64, block_size=4))
    runner = FakeRunner(block_size=4, vocab_size=tokenizer.vocab_size)
    request = make_request("r", [1, 2, 3], 5)
    outputs: list[RequestOutput] = []
    core.add_request(request, 0.0)
    for step in range(5):
        output = core.schedule(float(step))
        assert output is not None
        outputs += core.update(output, runner.launch(output)(), float(step + 1))
    metrics = Observed()
    prompts = (TokenizedPrompt((1, 2, 3)),)
    plan = GenerationPlan("r", "m", prompts, (request,), RequestClass.ONLINE, stream=True)
    choice = ChoiceState(0, plan, tokenizer, metrics)  # type: ignore[arg-type]
    for output in outputs:
        choice.advance(output)
    assert metrics.tbt.seen == [1.0, 1.0, 1.0, 1.0] and metrics.ttft.seen == [1.0]
    assert metrics.longest == 1.0


class Observed:
    """What a class's metrics are told."""

    class Series:
        def __init__(self) -> None:
            self.seen: list[float] = []

        def observe(self, value: float) -> None:
            self.seen.append(value)

    def __init__(self) -> None:
        self.tbt, self.ttft = self.Series(), self.Series()
        self.longest: float | None = None

    def observe_end(self, account: Account) -> None:
        self.longest = account.longest_gap
