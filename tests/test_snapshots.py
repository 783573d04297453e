"""Snapshots of recurrent layers: their places, requests that start from them, and their end."""

from typing import Any

import pytest
from driver import Driver, fake_driver, make_request, small_config
from fakes.runner import FakeRunner, solo_tokens

from engine.api import RequestClass
from engine.cache.snapshots import Snapshots
from engine.request import Request, RequestTimes
from engine.scheduling.offline import whole
from predictor.model import LatencyModel

BLOCK, VOCAB = 4, 97
FAR = 1000  # from one snapshot to the next: every prompt of the tests is shorter


def make_driver(
    slots: int = 40, num_blocks: int = 60, every: int = FAR, rows: int = 4, model: Any = None, **options: Any
) -> Driver:
    limits = {"max_model_len": 4 * num_blocks, "max_num_seqs": rows, "unit_bytes": 0}
    config = small_config(num_blocks, state_slots=slots, snapshot_tokens=every, **limits | options)
    return fake_driver(config, VOCAB, {"invalid": lambda tokens: tokens[-1] == VOCAB}, model=model)


def ask(driver: Driver, name: str, prompt: list[int], max_tokens: int = 3) -> int:
    """How many tokens of the prompt were there already when it was answered, rightly."""
    request = make_request(name, prompt, max_tokens)
    driver.add(request)
    driver.run()
    assert driver.outputs[name] == solo_tokens(prompt, request.sampling, VOCAB)
    return driver.finals[name].num_cached_tokens


def saved(driver: Driver) -> list[int]:
    return [each.num_tokens for step in driver.steps for each in step.saved_states]


def test_a_prompt_has_snapshots_at_a_distance_and_at_its_last_block() -> None:
    driver = make_driver(every=8)
    assert ask(driver, "a", list(range(31)), max_tokens=1) == 0
    assert saved(driver) == [8, 16, 24, 28]
    assert [len(step.chunks) for step in driver.steps] == [1, 1]  # no chunk ends for their sake
    assert ask(driver, "shares 21 tokens", [*range(21), *range(50, 60)]) == 16
    assert ask(driver, "the same again", list(range(31))) == 28


@pytest.mark.parametrize("depth", [0, 1])
def test_the_next_turn_goes_on_behind_the_answer(depth: int) -> None:
    driver = make_driver(pipeline_depth=depth)
    question = list(range(10))
    assert ask(driver, "turn 1", question, max_tokens=9) == 0
    told = [*question, *driver.outputs["turn 1"]]
    assert ask(driver, "turn 2", [*told, 5, 6, 7]) == 16  # 18 tokens were computed, the 19th never is
    assert ask(driver, "thoughts dropped", [*question, 50, 51, 52]) == 8
    stats = driver.stats()
    assert stats.prefix_hit_tokens == 24 and stats.prefix_queried_tokens == 10 + 22 + 13


def test_only_the_last_state_of_an_answer_is_kept() -> None:
    driver = make_driver(slots=3)
    ask(driver, "long", list(range(10)), max_tokens=30)
    assert saved(driver) == [8, *range(12, 40, 4)]
    pool = driver.core.state.cache.snapshots.pool
    assert pool.num_cached_units == 2 and pool.num_free_units == 1


def test_where_an_earlier_prompt_was_left_is_known_from_the_second_one_on() -> None:
    driver = make_driver()
    ask(driver, "first", [*range(14), 20, 21, 22, 23, 24])
    assert ask(driver, "second", [*range(14), 30, 31, 32, 33, 34]) == 0  # blocks were there, and no state
    assert ask(driver, "third", [*range(14), 40, 41, 42, 43, 44]) == 12


def test_a_hit_is_where_both_are() -> None:
    driver = make_driver(slots=4)
    prompt = list(range(18))
    ask(driver, "a", prompt)
    for index in range(4):
        ask(driver, f"other {index}", [50 + index] * 9)
    cache = driver.core.state.cache
    request = make_request("looks", prompt)
    driver.add(request)
    found = cache._find_published(driver.core.state.requests["looks"])
    assert len(found) == 4  # keys and values are still there, the states are not
    assert cache.find_prefix(driver.core.state.requests["looks"]) == []
    driver.run()
    assert driver.finals["looks"].num_cached_tokens == 0
    assert ask(driver, "and now", prompt) == 16
    small = make_driver(slots=40, num_blocks=16)
    ask(small, "a", prompt)
    ask(small, "fills the cache", list(range(30, 90)))
    assert ask(small, "a again", prompt) == 0  # the state is there, keys and values are not


def test_who_loses_its_place_goes_on_from_its_last_block() -> None:
    driver = make_driver(num_blocks=16, rows=3)
    offline = make_request("line", list(range(20)), 24, request_class=RequestClass.OFFLINE)
    driver.add(offline)
    for _ in range(10):
        driver.step()
    computed = driver.core.state.requests["line"].num_confirmed_tokens
    driver.core.state.preempt(driver.core.state.requests["line"], "test", driver.now)
    driver.step()
    (new,) = driver.steps[-1].new_requests
    (chunk,) = driver.steps[-1].chunks
    assert new.state >= 0 and chunk.start == computed // BLOCK * BLOCK
    driver.run()
    assert driver.outputs["line"] == solo_tokens(list(range(20)), offline.sampling, VOCAB)


def test_the_planner_knows_what_need_not_be_computed() -> None:
    driver = make_driver(every=8)
    ask(driver, "a", list(range(23)))
    driver.add(make_request("line", [*range(18), *range(60, 64)], 2, request_class=RequestClass.OFFLINE))
    (planned,) = whole(driver.core.plan_offline(driver.now)).chunks
    assert planned.length == 22 - 16
    driver.add(make_request("chat", [*range(18), 70, 71], 2))
    assert driver.core.state.requests["chat"].num_missing_tokens == 20 - 16
    driver.run()


def test_states_of_a_step_that_failed_are_not_offered() -> None:
    driver = make_driver(every=8)
    runner = driver.runner
    assert isinstance(runner, FakeRunner)
    runner.fail_after_operations = frozenset({0})
    assert ask(driver, "a", list(range(14))) == 0
    begun = [step for step in driver.steps if any(new.request_id == "a" for new in step.new_requests)]
    assert [[each.num_tokens for each in step.saved_states] for step in begun] == [[8, 12], [8, 12]]
    assert [new.state for step in begun for new in step.new_requests] == [-1, -1]
    assert ask(driver, "b", list(range(14))) == 12


def test_what_gave_no_finite_logits_leaves_no_state() -> None:
    driver = make_driver(every=8)
    driver.add(make_request("nan", [*range(14), VOCAB], 3))
    driver.run()
    assert ask(driver, "the same beginning", [*range(14), 3]) == 0


def test_one_prompt_does_not_take_all_slots() -> None:
    driver = make_driver(slots=12, every=4)
    ask(driver, "long", list(range(70)), max_tokens=1)
    assert saved(driver) == [32, 64, 68]


def new_request(name: str, num_tokens: int) -> Request:
    return Request(make_request(name, list(range(num_tokens)), 50), RequestTimes(0.0), 0)


def test_states_that_pass_take_half_of_the_slots() -> None:
    snapshots = Snapshots(small_config(1, max_model_len=8, state_slots=5))
    requests = [new_request(str(index), 3) for index in range(4)]
    for request in requests:
        request.num_computed_tokens = 8
    given = [snapshots.save(request, 7, 0) for request in requests]
    assert [[num_tokens for num_tokens, _slot in each] for each in given] == [[8], [8], [], []]
    snapshots.leave(requests[0])
    assert [num_tokens for num_tokens, _slot in snapshots.save(requests[2], 7, 1)] == [8]


def test_a_slot_is_not_given_away_while_a_step_reads_it() -> None:
    driver = make_driver(slots=1, rows=2)
    prompt = list(range(9))
    ask(driver, "a", prompt, max_tokens=1)
    driver.add(make_request("again", prompt, 1), make_request("other", list(range(40, 53)), 1))
    driver.launch()
    (step,) = driver.in_flight
    assert [new.state for new in step.new_requests] == [0, -1] and not step.saved_states
    driver.run()


HOST = {"host_units": 400, "host_state_slots": 20, "unit_bytes": 10, "state_bytes": 100}


def test_a_state_that_loses_its_slot_goes_to_the_host_and_is_started_from_there() -> None:
    driver = make_driver(slots=4, num_blocks=16, **HOST)
    first = list(range(18))
    ask(driver, "turn 1", first, max_tokens=7)
    for index in range(6):
        ask(driver, f"other {index}", [40 + index, *range(60, 72)])
    told = [*first, *driver.outputs["turn 1"], 7, 8]
    assert ask(driver, "turn 2", told) == 24
    (new,) = next(
        step for step in driver.steps if any(n.request_id == "turn 2" for n in step.new_requests)
    ).new_requests
    assert new.state >= 4  # behind the device's slots
    parked = sum(len(step.parked_states) for step in driver.steps)
    assert parked and driver.stats().prefix_host_hit_tokens == 24


def test_states_go_to_the_host_where_that_takes_less_than_computing_them_again() -> None:
    for transferred, pays in ((1e-6, True), (1.0, False)):
        model = LatencyModel(intercept=0.01, decodes=1e-3, prefill_tokens=1e-3, transferred=transferred)
        driver = make_driver(slots=2, model=model, every=8, **HOST)
        for index in range(4):
            ask(driver, str(index), [40 + index, *range(60, 72)])
        assert any(step.parked_states for step in driver.steps) == pays


def test_what_states_move_is_part_of_the_step() -> None:
    model = LatencyModel(intercept=0.01, decodes=1e-3, prefill_tokens=1e-3, transferred=1e-6)
    driver = make_driver(slots=2, model=model, **HOST)
    prompt = list(range(9))
    ask(driver, "a", prompt)
    ask(driver, "b", list(range(50, 59)))
    steps = len(driver.steps)
    assert ask(driver, "a again", prompt) == 8
    ask(driver, "c", list(range(70, 79)))
    for step in driver.steps:
        brought = sum(new.state >= 2 for new in step.new_requests)
        assert step.features.transferred_bytes == 100 * (len(step.parked_states) + brought)
    assert any(step.features.transferred_bytes for step in driver.steps[steps:])


def test_only_what_chats_may_come_back_for_goes_to_the_host() -> None:
    driver = make_driver(slots=2, **HOST)
    for index in range(5):
        prompt = [40 + index, *range(60, 72)]
        driver.add(make_request(str(index), prompt, 3, request_class=RequestClass.OFFLINE))
        driver.run()
    assert not any(step.parked_states for step in driver.steps)
