"""EngineCore by hand: the contract of schedule/update at pipeline depth 0 and 1 over a runner that checks the cache."""

import math
from dataclasses import replace
from typing import Any

import pytest
from driver import Driver, make_request
from fakes.runner import FakeRunner, solo, solo_tokens

from engine.api import EngineRequest, FinishReason, RequestClass, RequestTimes, Resumption
from engine.errors import ContextLengthError, InvalidRequestError, QueueFullError
from engine.forms import ThinkingBudget, ThoughtMarks
from engine.limits import SchedulerConfig
from engine.loop.planner import may_run_ahead
from engine.request import RequestStatus
from predictor.model import LatencyModel

VOCAB = 50
BLOCK = 4


CONFIG = SchedulerConfig(64, 64, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=16)


def make_driver(
    depth: int, *, runner: FakeRunner | None = None, model: LatencyModel | None = None, **changes: Any
) -> Driver:
    config = replace(CONFIG, pipeline_depth=depth, **changes)
    return Driver(runner or FakeRunner(block_size=BLOCK, vocab_size=VOCAB), config, model=model)


def check_solo(driver: Driver, *requests: EngineRequest) -> None:
    for request in requests:
        expected = solo(request, VOCAB)
        assert driver.outputs[request.request_id] == expected, request.request_id


def test_steps_are_scheduled_ahead_where_the_host_is_the_device_behind_short_ones_of_few_rows() -> None:
    def runs_ahead(
        num: int, *, step: float = 0.001, ahead: float = 0.02, prompt: int = 3, offline: int = 0, **sampling: object
    ) -> bool:
        model = LatencyModel(intercept=step)
        driver = make_driver(1, ahead_seconds=ahead, model=model)
        driver.add(*[make_request(f"r{i}", range(prompt), 6, **sampling) for i in range(num)])
        driver.add(*[make_request(f"o{i}", range(3), 6, request_class=RequestClass.OFFLINE) for i in range(offline)])
        assert may_run_ahead(driver.core.state), "nothing is in flight"
        assert driver.launch()
        found = may_run_ahead(driver.core.state)
        driver.run()
        return found

    assert runs_ahead(1) and runs_ahead(4)
    assert not runs_ahead(5), "the host's work has no core to itself"
    assert not runs_ahead(1, step=0.05), "what arrives would wait for a long step more"
    assert not runs_ahead(1, prompt=20), "a prompt goes on"
    assert not runs_ahead(1, offline=1)
    thinking = ThinkingBudget(2, ThoughtMarks((1,), (2,)), begun=True)
    assert not runs_ahead(1, thinking=thinking), "the next mask is made from the last token"
    assert runs_ahead(5, step=0.05, offline=1, ahead=math.inf), "a GPU does not wait for the host"


def test_a_step_ahead_behind_a_short_one_needs_room_for_a_decode_where_a_full_one_needs_a_step() -> None:
    settings: dict[str, Any] = {"num_units": 60, "max_model_len": 200, "block_size": BLOCK, "window": 40}
    settings["max_num_batched_tokens"] = 16
    alone, full, short = (
        SchedulerConfig(**settings, pipeline_depth=depth, ahead_seconds=seconds).most_blocks
        for depth, seconds in ((0, math.inf), (1, math.inf), (1, 0.02))
    )
    assert (full - alone, short - alone) == (4, 1)


def test_stop_token_ends_and_min_tokens_delays_it(depth: int) -> None:
    prompt = [3, 1, 4]
    free = solo_tokens(prompt, make_request("x", prompt, 12).sampling, VOCAB)
    stop = frozenset({free[2]})
    driver = make_driver(depth)
    early = make_request("early", prompt, 12, stop_token_ids=stop)
    late = make_request("late", prompt, 12, stop_token_ids=stop, min_tokens=6)
    driver.add(early, late)
    driver.run()
    check_solo(driver, early, late)
    assert driver.finals["early"].finish_reason is FinishReason.STOP
    assert driver.finals["early"].stop_token_id == free[2]
    assert driver.finals["early"].num_output_tokens == free.index(free[2]) + 1
    assert driver.finals["late"].num_output_tokens >= 6


def test_prefix_is_shared_within_a_tenant_only(depth: int) -> None:
    driver = make_driver(depth)
    prompt = list(range(20))
    driver.add(make_request("first", prompt, 2, salt=b"one"))
    driver.run()
    same = make_request("same", [*prompt, 42], 2, salt=b"one")
    exact = make_request("exact", prompt, 2, salt=b"one")
    other = make_request("other", prompt, 2, salt=b"two")
    driver.add(same, exact, other)
    driver.run()
    check_solo(driver, same, exact, other)
    assert driver.finals["same"].num_cached_tokens == 20
    assert driver.finals["exact"].num_cached_tokens == 16, "the last token is always computed"
    assert driver.finals["other"].num_cached_tokens == 0


def test_prefix_caching_can_be_switched_off(depth: int) -> None:
    driver = make_driver(depth, enable_prefix_caching=False)
    driver.add(make_request("a", range(20), 2))
    driver.run()
    driver.add(make_request("b", range(20), 2))
    driver.run()
    assert driver.finals["b"].num_cached_tokens == 0
    assert driver.stats().units_cached == 0


def test_cached_blocks_are_evicted_least_recently_used_first_and_offline_before_online(depth: int) -> None:
    driver = make_driver(depth, num_units=2 * 12)
    online, offline = list(range(8)), list(range(20, 28))
    driver.add(make_request("on", online, 1))
    driver.run()
    driver.add(make_request("off", offline, 1, request_class=RequestClass.OFFLINE))
    driver.run()
    driver.add(make_request("big", range(30, 66 - 24), 28))  # needs ten blocks: two cached ones must go
    driver.run()
    driver.add(make_request("on2", [*online, 1], 1))
    driver.run()
    driver.add(make_request("off2", [*offline, 1], 1))
    driver.run()
    assert driver.finals["on2"].num_cached_tokens == 8
    assert driver.finals["off2"].num_cached_tokens < 8


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "output"), [(40, 8), (100, 20), (20, 80)], ids=["short", "long", "growing"])
def test_a_chat_hits_its_prefix_after_thousands_of_offline_blocks(depth: int, prompt: int, output: int) -> None:
    """Between the two turns more offline work wants to run than the pool holds, all the time."""
    driver = make_driver(depth, num_units=2 * 64, max_model_len=256, max_num_batched_tokens=64)
    driver.check_every = 20
    chat = [3] * 5 + list(range(40))
    driver.add(make_request("turn-1", chat, 8))
    driver.run()
    jobs = [
        make_request(f"job-{i}", [i % 50, i // 50] * (prompt // 2), output, request_class=RequestClass.OFFLINE)
        for i in range(150)
    ]
    driver.add(*jobs)
    driver.run()
    assert 150 * (prompt + output) // BLOCK > 25 * 64, "the pool was filled over and over"
    history = [*chat, *driver.outputs["turn-1"]]
    driver.add(make_request("turn-2", [*history, 1, 2, 3], 4))
    driver.run()
    assert driver.finals["turn-2"].num_cached_tokens == (len(history) - 1) // BLOCK * BLOCK
    check_solo(driver, *jobs[:3], *jobs[-3:])


def test_offline_work_leaves_the_chats_used_last_a_quarter_of_the_pool(depth: int) -> None:
    driver = make_driver(depth, num_units=2 * 64)
    for i in range(12):
        driver.add(make_request(f"chat-{i}", [i] * 24, 1))
        driver.run()
    driver.add(*[make_request(f"job-{i}", [20 + i] * 24, 8, request_class=RequestClass.OFFLINE) for i in range(8)])
    driver.run()
    for name, chat, cached in (("new", 11, 24), ("old", 0, 0)):
        driver.add(make_request(name, [*[chat] * 24, 1], 1))
        driver.run()
        assert driver.finals[name].num_cached_tokens == cached, "the last used stay, the first go"


def test_a_lonely_job_may_have_the_whole_pool(depth: int) -> None:
    """E4: the blocks kept for chats never stop the oldest line."""
    driver = make_driver(depth, num_units=2 * 16)
    driver.add(make_request("chat", range(40), 1))
    driver.run()
    jobs = [make_request(f"job-{i}", [i] * 40, 20, request_class=RequestClass.OFFLINE) for i in range(2)]
    driver.add(*jobs)
    driver.run()
    check_solo(driver, *jobs)


def test_online_takes_memory_and_rows_from_offline(depth: int) -> None:
    driver = make_driver(depth, num_units=2 * 12, max_num_seqs=2)
    jobs = [make_request(f"off{i}", [i] * 8, 30, request_class=RequestClass.OFFLINE) for i in range(3)]
    driver.add(*jobs)
    for _ in range(4):
        driver.step()
    chats = [make_request(f"on{i}", [9, i] * 4, 16) for i in range(2)]
    driver.add(*chats)
    driver.run()
    check_solo(driver, *jobs, *chats)
    assert driver.stats().preemptions["online"] >= 1
    assert all(driver.finals[c.request_id].num_preemptions == 0 for c in chats)


def test_nan_ends_one_request_and_its_blocks_leave_the_index(depth: int) -> None:
    bad = list(range(30, 42))
    runner = FakeRunner(
        block_size=BLOCK, vocab_size=VOCAB, invalid=lambda prefix: len(prefix) == 14 and prefix[0] == 30
    )
    driver = make_driver(depth, runner=runner)
    good = make_request("good", range(12), 8)
    driver.add(make_request("bad", bad, 8), good)
    driver.run()
    assert driver.finals["bad"].finish_reason is FinishReason.ERROR
    check_solo(driver, good)
    driver.add(make_request("again", bad[:11], 1))
    driver.run()
    assert driver.finals["again"].num_cached_tokens == 0


def test_requests_that_can_never_run_are_refused() -> None:
    driver = make_driver(0, max_num_waiting=2)
    with pytest.raises(ContextLengthError):
        driver.add(make_request("long", range(60), 5))
    with pytest.raises(InvalidRequestError):
        driver.add(make_request("empty", [], 5))
    driver.add(make_request("a", [1], 1), make_request("b", [1], 1))
    with pytest.raises(InvalidRequestError):
        driver.add(make_request("a", [1], 1))
    with pytest.raises(QueueFullError):
        driver.add(make_request("c", [1], 1))
    driver.add(make_request("job", [1], 1, request_class=RequestClass.OFFLINE))
    driver.run()
    assert sorted(driver.finals) == ["a", "b", "job"]


def test_illegal_transition_is_refused() -> None:
    driver = make_driver(0)
    driver.add(make_request("a", [1], 1))
    request = driver.core.state.requests["a"]
    with pytest.raises(AssertionError, match="illegal transition"):
        request.move_to(RequestStatus.PREEMPTED)


def test_what_another_engine_began_goes_on_as_if_it_had_been_preempted(depth: int) -> None:
    """Cut at every token; online and offline; nothing is refused for room."""
    whole = [
        make_request(str(i), range(i, i + 9), 12, request_class=list(RequestClass)[i % 2], seed=i) for i in range(6)
    ]
    for cut in range(12):
        driver = make_driver(depth, max_num_waiting=1)
        times = RequestTimes(-1.0, -1.0, -0.5, -0.1) if cut else RequestTimes(-1.0)
        given = {r.request_id: solo(r, VOCAB)[:cut] for r in whole}
        resumed = [replace(r, resumed=Resumption(tuple(given[r.request_id]), times, 3)) for r in whole]
        driver.add(*resumed)
        driver.run()
        for request in whole:
            final = driver.finals[request.request_id]
            assert given[request.request_id] + driver.outputs[request.request_id] == solo(request, VOCAB)
            assert (final.num_output_tokens, final.num_prompt_tokens) == (12, 9)
            assert final.times.arrival == -1.0 and final.num_preemptions == 0
            if cut:
                assert final.num_cached_tokens == 3 and final.times.first_token == -0.5
