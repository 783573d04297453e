"""Longrope: each request keeps one set of factors, by its prompt and `max_tokens`, in every backend."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from devices import device_of
from driver import Driver, make_request
from fakes.speculation import Oracle
from test_prompt_scores import check, score, table_of

from engine.api import EngineRequest
from engine.build import build_runner, plan_launch
from engine.build.plan import scheduler_config
from engine.config import EngineConfig
from engine.execution.runner import Runner
from engine.limits import SchedulerConfig
from engine.models.checkpoint import load_weights
from engine.models.spec import load_spec
from engine.request import Request

NAME = "phi3-longrope-partial"
SHORT = 64
"""Original context of the model, of 256 positions."""
CONFIG = SchedulerConfig(
    num_units=2 * 80, max_model_len=200, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, min_prefill_chunk=8,
    short_context=SHORT,
)  # fmt: skip


def driver_of(backend: str, config: SchedulerConfig = CONFIG, **options: Any) -> Driver:
    folder = tiny_models.model_folder(NAME)
    if backend == "modules":
        engine = EngineConfig(
            model=str(folder), model_impl="transformers", device="cpu", dtype="float32", threads=1, max_num_seqs=16,
            num_gpu_blocks_override=16, profile_seconds=0.0, max_num_batched_tokens=64, max_model_len=200,
        )  # fmt: skip
        runner, plan = build_runner(engine, plan_launch(engine))
        return Driver(runner, scheduler_config(engine, plan), **options)
    spec = load_spec(folder)
    assert spec.short_context == SHORT
    device = device_of(backend, spec, load_weights(spec, folder), config.limits)
    return Driver(Runner(device), config, **options)


@functools.cache
def best_tokens(ids: tuple[int, ...], *, is_long: bool) -> list[int]:
    """The most likely token behind each position, by transformers. It takes the long factors for sequences above
    SHORT tokens; tokens behind a position cannot change it otherwise."""
    padded = [*ids, *[0] * (200 - len(ids))] if is_long else ids
    with torch.inference_mode():
        logits = tiny_models.reference_model(NAME)(torch.tensor([padded])).logits[0]
    best: list[int] = logits[: len(ids)].argmax(dim=-1).tolist()
    return best


def crowd() -> list[EngineRequest]:
    """Requests on both sides of the border; every other one shares the prompt of its neighbour."""
    prompts = np.random.default_rng(5).integers(3, 97, (6, 150)).tolist()
    sizes = [(30, 34), (30, 35), (50, 14), (50, 40), (63, 1), (63, 30), (64, 9), (90, 9), (9, 12), (9, 90), (150, 12)]
    return [make_request(f"r{i}", prompts[i // 2][:size], most) for i, (size, most) in enumerate(sizes)]


def check_tokens(driver: Driver, request: EngineRequest) -> None:
    output, size = driver.outputs[request.request_id], len(request.prompt_token_ids)
    assert len(output) == request.sampling.max_tokens
    is_long = size + len(output) > SHORT
    assert output == best_tokens((*request.prompt_token_ids, *output), is_long=is_long)[size - 1 : -1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "depth"), [("torch", 0), ("native", 0), ("cuda", 0), ("cuda", 1), ("modules", 0)], ids=str
)
def test_each_request_has_the_factors_of_its_length(backend: str, depth: int) -> None:
    """With mixed steps, preemptions and, in the second turn, drafts and cached prefixes of both sets."""
    driver = driver_of(backend, replace(CONFIG, pipeline_depth=depth))
    oracle = Oracle(lambda spec: driver.outputs[spec.request_id.replace("-1", "-0")], seed=depth)
    for turn in range(2):
        driver.core.state.speculation = oracle if turn else None
        requests = [replace(each, request_id=f"{each.request_id}-{turn}") for each in crowd()]
        for request in requests:
            driver.add(request)
            driver.step()
        driver.run()
        for request in requests:
            check_tokens(driver, request)
    assert any(final.num_preemptions for final in driver.finals.values())
    assert sum(oracle.judged) > 10, oracle.judged
    assert any(final.num_cached_tokens for final in driver.finals.values())


@pytest.mark.parametrize("backend", ["torch", "native", "cuda"])
def test_scores_of_a_prompt_have_the_factors_of_the_prompt(backend: str) -> None:
    driver = driver_of(backend)
    for size in (SHORT - 1, SHORT, SHORT + 1, 110):
        ids = np.random.default_rng(size).integers(3, 97, size).tolist()
        driver.add(score(str(size), ids))
        driver.run()
        check(table_of(driver, str(size), size), NAME, tuple(ids))


def test_the_sets_share_no_blocks() -> None:
    """Also with an adapter, and in the resumption of a request."""
    short, long = make_request("a", [1] * 10, 54), make_request("a", [1] * 10, 55)
    roots = set()
    for adapter in (0, 1):
        for request in (short, long):
            spec = replace(request, adapter=adapter)
            roots.add(spec.prefix_root(is_long=spec.is_long(SHORT)))
            assert not spec.is_long(0)
    assert len(roots) == 4
    driver = driver_of("torch")
    driver.add(short, replace(long, request_id="b"))
    requests = driver.core.state.requests
    assert isinstance(requests["a"], Request) and (requests["a"].is_long, requests["b"].is_long) == (False, True)


def test_hidden_state_is_refused_where_a_context_has_two_sets() -> None:
    folder = tiny_models.model_folder(NAME)
    engine = EngineConfig(model=str(folder), device="cpu", overload="hidden", num_gpu_blocks_override=64)
    told = "longrope's set of factors (--max-model-len 64 does)"
    for most in (SHORT, SHORT + 1):
        plan = plan_launch(replace(engine, max_model_len=most))
        assert not plan.scratch_blocks and any(told in note for note in plan.notes) is (most > SHORT)
