"""Every family through the whole engine: 20 prompts together, chunked, preempted, with prefix hits, equal to
transformers' own greedy generation; and random disturbances on one family (reliability E6)."""

import functools
import inspect
from typing import Any

import hypothesis.strategies as st
import pytest
import tiny_models
import torch
from driver import Driver, make_request, small_config
from hypothesis import HealthCheck, given
from support.fuzz import fuzz

from engine.api import FinishReason, RequestClass
from engine.cache.blocks import CacheAction
from engine.execution.cpu.device import TorchDevice
from engine.execution.runner import Runner
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.spec import hidden_state_refusal, load_spec

OUTPUT = 12
TIE = 1e-4

CASES = [
    *tiny_models.FAMILY_CASES,
    "gemma2-uncapped",
    "llama-mha-tied",
    "llama-gqa3-odd-heads",
    "llama-head80-biases",
    "llama3-rope",
    "neox-sequential-tied",
    "mistral-window",
    "qwen2-window",
]


@functools.cache
def decoder_of(case: str) -> Decoder:
    folder = tiny_models.model_folder(case)
    spec = load_spec(folder)
    return Decoder(spec, load_weights(spec, folder, dtype="float32"))


def prompts_of(case: str) -> list[list[int]]:
    """20 prompts of 1 to 70 tokens; some share long prefixes."""
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 31, 33, 40, 47, 58, 64, 70]
    return tiny_models.prompts_of(decoder_of(case).spec.vocab_size, lengths, shared=30)


@functools.cache
def reference(case: str, prompt: tuple[int, ...], output: int = OUTPUT) -> tuple[list[int], list[float]]:
    """Greedy tokens by transformers alone, and at each the gap between the best two logits."""
    model = tiny_models.reference_model(case)
    tokens, gaps = list(prompt), []
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # since 5.24
    with torch.inference_mode():
        past = None
        ids = torch.tensor([tokens])
        for _ in range(output):
            answer = model(input_ids=ids, use_cache=True, **{cache: past})
            past = answer[cache]
            best = answer.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            ids = torch.tensor([[tokens[-1]]])
    return tokens[len(prompt) :], gaps


def assert_equal_but_for_ties(case: str, prompt: list[int], got: list[int]) -> None:
    """Equal to the reference up to the first place where the reference itself is tied."""
    expected, gaps = reference(case, tuple(prompt))
    for index, (left, right) in enumerate(zip(got, expected, strict=False)):
        if left != right:
            assert gaps[index] < TIE, f"{case}: token {index} is {left}, not {right} (gap {gaps[index]:.2e})"
            return


def make_driver(case: str, num_blocks: int, policy: str = "fcfs", **changes: Any) -> Driver:
    config = small_config(num_blocks, **changes)
    tiers = {"scratch_blocks": config.scratch_blocks, "host_units": config.host_units}
    return Driver(Runner(TorchDevice(decoder_of(case), config.limits, **tiers)), config, online_policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "prefix_caching"), [*((case, True) for case in CASES), ("qwen3", False), ("opt", False)]
)
def test_greedy_tokens_equal_transformers(case: str, prefix_caching: bool) -> None:
    driver = make_driver(case, 34, enable_prefix_caching=prefix_caching, pipeline_depth=int(prefix_caching))
    prompts = prompts_of(case)
    outputs = driver.run_all(prompts, OUTPUT)
    stats = driver.stats()
    assert sum(stats.preemptions.values()) > 0, "the pool was meant to be too small"
    assert (stats.prefix_hit_tokens > 0) == prefix_caching
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == OUTPUT
        assert_equal_but_for_ties(case, prompt, output)


HYBRID_RUNS = [
    ("opt", "apt", 0), ("opt", "goodput", 1), ("neox", "apt", 1), ("llama-mha-tied", "apt", 0),
    ("qwen3", "goodput", 0), ("gemma3", "apt", 1), ("llama-gqa2", "apt", 1),
]  # fmt: skip
"""Case, policy and depth."""


@pytest.mark.parametrize(("case", "policy", "depth"), HYBRID_RUNS)
def test_greedy_tokens_over_the_hybrid_cache_equal_transformers(case: str, policy: str, depth: int) -> None:
    scratch = 0 if hidden_state_refusal(decoder_of(case).spec) else 12
    check_hybrid(make_driver(case, 30, policy, pipeline_depth=depth, host_units=70, scratch_blocks=scratch), case)


def check_hybrid(driver: Driver, case: str) -> None:
    """Memory so short that requests start from hidden state where the model offers it and go to the host and back."""
    offered = driver.core.config.scratch_blocks > 0
    assert offered == (case != "llama-gqa2")
    prompts = prompts_of(case)
    for index, prompt in enumerate(prompts):
        request_class = RequestClass.OFFLINE if index % 5 == 4 else RequestClass.ONLINE
        driver.add(make_request(str(index), prompt, OUTPUT, request_class=request_class))
        if index % 4 == 3:
            driver.step()
    while offered and not any(step.features.compact_tokens for step in driver.steps):
        assert driver.step(), "no request ran from hidden state"
    started = {new.request_id for step in driver.steps for new in step.new_requests}
    gone = [name for name in list(driver.outputs) if offered and name not in started]
    for name in gone:  # so that the room is back before those that run from hidden state have ended
        driver.abort(name)
        prompts[int(name)] = []
    driver.run()
    met = {operation.action for step in driver.steps for operation in step.operations}
    assert met == {CacheAction.SWAP_OUT, CacheAction.SWAP_IN} | ({CacheAction.RESTORE} if offered else set())
    assert sum(map(bool, prompts)) >= 6
    for index, prompt in enumerate(prompts):
        if prompt:
            assert len(driver.outputs[str(index)]) == OUTPUT
            assert_equal_but_for_ties(case, prompt, driver.outputs[str(index)])


arrival = st.tuples(
    st.integers(0, 3), st.integers(0, 19), st.sampled_from([0, 0, 1, 2, 3]), st.sampled_from(list(RequestClass))
)


@pytest.mark.parametrize("depth", [0, 1])
@fuzz(12, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=st.lists(arrival, min_size=2, max_size=16),
    num_blocks=st.integers(26, 36),
    chunk=st.integers(6, 40),
    prefix_caching=st.booleans(),
)
def test_disturbed_outputs_equal_the_solo_run(
    depth: int, arrivals: list[Any], num_blocks: int, chunk: int, prefix_caching: bool
) -> None:
    case = "qwen3"
    prompts = prompts_of(case)
    driver = make_driver(
        case, num_blocks, enable_prefix_caching=prefix_caching, pipeline_depth=depth,
        max_num_batched_tokens=max(8, chunk),
    )  # fmt: skip
    aborts: dict[int, list[str]] = {}
    for step, (wait, which, abort_after, request_class) in enumerate(arrivals):
        for _ in range(wait):
            driver.step()
        request_id = f"{step}:{which}"
        driver.add(make_request(request_id, prompts[which], OUTPUT, request_class=request_class))
        if abort_after:
            aborts.setdefault(step + abort_after, []).append(request_id)
        for due in aborts.pop(step, []):
            driver.abort(due)
    driver.run()
    for request_id, final in driver.finals.items():
        prompt = prompts[int(request_id.split(":")[1])]
        assert final.finish_reason in {FinishReason.LENGTH, FinishReason.ABORT}
        assert_equal_but_for_ties(case, prompt, driver.outputs[request_id])
