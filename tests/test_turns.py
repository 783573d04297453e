"""Without chunked prefill: steps of whole prompts or of decodes, and the vote between them."""

import random

import hypothesis.strategies as st
import pytest
from driver import Driver, make_request
from fakes.runner import FakeRunner, solo_tokens
from hypothesis import HealthCheck, given, settings
from test_core_fuzz import BLOCK, LIKE_COPIES, VOCAB, arrival, build

from engine.api import EngineRequest, RequestClass
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.queue_time import UNLIMITED_QUEUE
from engine.scheduling.objective import StepObjective
from predictor.model import LatencyModel

BLOCKS = 22
MODEL = LatencyModel(intercept=0.01, decodes=1e-4, prefill_tokens=1e-3)


def make(
    policy: str, *, depth: int = 0, host: int = 0, scratch: int = 0, model: LatencyModel | None = None, seqs: int = 6
) -> Driver:
    config = SchedulerConfig(
        num_units=2 * BLOCKS,
        max_model_len=BLOCKS * BLOCK,
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=BLOCKS * BLOCK,
        chunked_prefill=False,
        pipeline_depth=depth,
        host_units=host,
        unit_bytes=1,
        scratch_blocks=scratch,
        max_queue_time=UNLIMITED_QUEUE,
    )
    runner = FakeRunner(block_size=BLOCK, vocab_size=VOCAB, host_units=host, scratch_blocks=scratch)
    return Driver(runner, config, online_policy=policy, model=model)


def check_turns(driver: Driver) -> tuple[int, int]:
    """Every step starts requests, whole, or continues some by one token each; the numbers of both kinds."""
    prompts = 0
    for step in driver.steps:
        started = {new.row: new for new in step.new_requests}
        assert not started or started.keys() == {chunk.row for chunk in step.chunks}, "a step is of one type"
        for chunk in step.chunks:
            assert chunk.sample and (chunk.length == 1 or chunk.row in started)
            if chunk.row in started:
                assert chunk.start + chunk.length == len(started[chunk.row].token_ids), "prompts go whole"
        prompts += bool(started)
    return prompts, len(driver.steps) - prompts


def check_solo(driver: Driver, requests: list[EngineRequest]) -> None:
    for request in requests:
        expected = solo_tokens(list(request.prompt_token_ids), request.sampling, VOCAB)
        assert driver.outputs[request.request_id] == expected


@pytest.mark.parametrize("depth", [0, 1])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=st.lists(arrival, min_size=1, max_size=14),
    seqs=st.integers(1, 6),
    tiers=st.sampled_from([(0, 0), (60, 0), (30, 8)]),
    policy=st.sampled_from(["fcfs", "larry", "apt", "goodput"]),
    costed=st.booleans(),
)
def test_no_step_mixes_nobody_starves_and_no_token_changes(
    depth: int,
    arrivals: list,  # type: ignore[type-arg]
    seqs: int,
    tiers: tuple[int, int],
    policy: str,
    costed: bool,
) -> None:
    model = LIKE_COPIES if costed else None
    driver = make(policy, depth=depth, host=tiers[0], scratch=tiers[1], seqs=seqs, model=model)
    requests = []
    for index, (wait, shape, _, _) in enumerate(arrivals):
        for _ in range(wait):
            driver.step()
        requests.append(build(str(index), shape))
        driver.add(requests[-1])
    driver.run()
    check_turns(driver)
    check_solo(driver, requests)


@pytest.mark.parametrize("policy", ["fcfs", "apt", "goodput"])
def test_a_steady_stream_of_prompts_lets_decodes_and_offline_work_end(policy: str) -> None:
    """An online prompt arrives every few steps for as long as the first requests need: all of those end meanwhile."""
    driver = make(policy, model=MODEL, seqs=4)
    driver.core.set_objective(StepObjective(ttft=0.5, tbt=0.05))
    first = [make_request(f"first-{i}", [i] * 9, 20) for i in range(2)]
    first.append(make_request("offline", [7] * 9, 5, request_class=RequestClass.OFFLINE))
    driver.add(*first)
    generator, index = random.Random(0), 0
    while not {request.request_id for request in first[:2]} <= driver.finals.keys():
        index += 1
        assert index < 400, "a running request starves"
        if index % 3 == 0:
            driver.add(make_request(str(index), [generator.randrange(VOCAB) for _ in range(5)], 2))
        driver.step()
    driver.run()
    prompts, decodes = check_turns(driver)
    assert prompts > 5 and decodes >= 19
    check_solo(driver, first)


def test_base_lines_run_prompts_first_and_the_knapsack_votes() -> None:
    """Four running requests have waited for a token when one arrives: by the vote they decode before it starts."""
    started = {}
    for policy in ("fcfs", "larry", "apt", "goodput"):
        driver = make(policy, model=MODEL)
        driver.core.set_objective(StepObjective(ttft=5.0, tbt=5.0))
        driver.add(*(make_request(str(i), [i] * 5, 9) for i in range(4)))
        driver.step()
        driver.now += 0.3
        driver.add(make_request("new", [9] * 5, 2))
        driver.now += 0.1
        driver.step()
        started[policy] = bool(driver.steps[-1].new_requests)
        driver.run()
        check_turns(driver)
    assert started == {"fcfs": True, "larry": True, "apt": False, "goodput": False}


def test_waiting_long_enough_wins_the_vote() -> None:
    driver = make("apt", model=MODEL)
    driver.core.set_objective(StepObjective(ttft=5.0, tbt=5.0))
    driver.add(make_request("a", [1] * 5, 9))
    driver.step()
    driver.add(make_request("b", [2] * 5, 2), make_request("c", [3] * 5, 2))
    turns = []
    for _ in range(4):
        driver.step()
        turns.append(len(driver.steps[-1].new_requests))
    # At first nobody has waited; then `a` has just had a token, and the other two have not.
    assert turns[:3] == [0, 2, 0]


def test_who_cannot_start_does_not_hold_the_decodes_up() -> None:
    """The pool is full: the vote or the order says prompts, and the decodes run all the same."""
    for policy in ("fcfs", "apt"):
        driver = make(policy, model=MODEL)
        driver.add(make_request("big", [1] * (BLOCKS * BLOCK - 20), 12))
        driver.step()
        driver.add(*(make_request(str(i), [i] * 30, 2) for i in range(4)))
        driver.now += 1.0
        driver.step()
        assert not driver.steps[-1].new_requests and len(driver.steps[-1].chunks) == 1
        driver.run()
        check_turns(driver)


def test_prompts_must_fit_a_step() -> None:
    with pytest.raises(ConfigError, match="--no-chunked-prefill needs --max-num-batched-tokens of at least"):
        SchedulerConfig(num_units=10, max_model_len=600, chunked_prefill=False)
    with pytest.raises(ConfigError, match="--no-chunked-prefill"):
        EngineConfig(chunked_prefill=False, max_model_len=600)
    assert not EngineConfig(chunked_prefill=False, max_model_len=512).chunked_prefill
    assert EngineConfig(max_model_len=600).chunked_prefill
