"""Whose fault a failed step was: the state machine by itself, and in the core on the virtual clock."""

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from driver import Driver, is_error, make_request
from fakes.runner import FakeRunner, solo
from faulty_runner import FaultyRunner, Work, poison
from hypothesis import HealthCheck, given
from integrity import check_core
from support.fuzz import fuzz

from engine.api import EngineRequest, FinishReason, RequestClass
from engine.colocation.waits import objective_of
from engine.core import EngineCore
from engine.errors import EngineStepError, EngineUnavailableError
from engine.limits import UNLIMITED_QUEUE, SchedulerConfig
from engine.scheduling.objective import StepObjective
from engine.scheduling.recovery import CANARY_ID, LONE_FAILURES, LONE_WAITS, PATIENCE, SICK_AFTER, Blame, FaultRecovery
from predictor.slo import SLO

VOCAB = 50
BLOCK = 4


# The state machine


def test_a_failure_counts_against_nobody_until_the_engine_has_been_judged() -> None:
    blame = Blame()
    blame.failed({"a": 5, "b": 5})
    assert blame.on_trial(0.0) == ()
    assert blame.clear() == ["a", "b"]
    assert not blame.suspects


def test_suspects_run_in_halves_and_are_acquitted_behind_the_place_where_they_failed() -> None:
    blame = Blame()
    blame.failed({"a": 5, "b": 9, "c": 1})
    assert blame.judge(0.0) is None
    assert blame.on_trial(0.0) == ("a", "b")
    assert blame.passed({"a": 5, "b": 10}) == ["b"]
    assert blame.on_trial(0.0) == ("a",), "it may fail yet, as the next token of an answer"
    assert blame.passed({"a": 6}) == ["a"]
    assert blame.on_trial(0.0) == ("c",)


def test_three_failures_alone_on_an_engine_that_works_are_proof() -> None:
    blame = Blame()
    now = 0.0
    for wait in (*LONE_WAITS, None):
        blame.failed({"a": 5})
        guilty = blame.judge(now)
        if wait is None:
            assert guilty == "a"
            break
        assert guilty is None
        assert blame.on_trial(now) == (), "it rests"
        assert blame.retry_at == now + wait
        now += wait
        assert blame.on_trial(now) == ("a",)


def test_a_failure_of_the_engine_does_not_count_against_one_alone() -> None:
    blame = Blame()
    now = 0.0
    for _ in range(LONE_FAILURES - 1):
        blame.failed({"a": 5})
        assert blame.judge(now) is None
        now += 100.0
        assert blame.on_trial(now) == ("a",)
    for _ in range(10):
        blame.failed({"a": 5})
        assert blame.clear() == [], "it was suspected before"
        assert blame.on_trial(now) == ("a",)
    assert blame.passed({"a": 6}) == ["a"]


def test_a_trial_that_took_the_place_of_others_comes_before_they_start_again() -> None:
    core = EngineCore(SchedulerConfig(num_units=2 * 64, max_model_len=64, block_size=BLOCK))
    core.add_request(make_request("suspect", [1] * 8), 0.0)
    suspect, recovery = core.state.requests["suspect"], FaultRecovery(core.state)
    recovery._blame.failed({"suspect": 5})
    assert recovery._blame.judge(0.0) is None
    now = LONE_WAITS[0]
    ordinary, trial, forced = recovery.turns(now)
    assert (ordinary.requests, trial.requests, trial.force, forced.force) == (None, [suspect], False, True)
    recovery.waits(forced)
    assert recovery.turns(now)[0] == forced
    recovery.took(forced)
    assert recovery.turns(now)[:2] == (ordinary, trial)
    recovery.took(ordinary)
    assert recovery.turns(now)[0] == trial


# In the core


CONFIG = SchedulerConfig(
    2 * 64, 64, block_size=BLOCK, max_num_seqs=80, max_num_batched_tokens=128, max_queue_time=UNLIMITED_QUEUE
)


def make_driver(fails: Any, depth: int = 0, **changes: Any) -> tuple[Driver, FaultyRunner]:
    objective = changes.pop("objective", None)
    config = replace(CONFIG, pipeline_depth=depth, **changes)
    runner = FaultyRunner(FakeRunner(block_size=BLOCK, vocab_size=VOCAB), fails)
    return Driver(runner, config, objective=objective), runner


def check(driver: Driver, requests: list[EngineRequest], guilty: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """The guilty end with an error, every other request with the answer of the solo run."""
    for request in requests:
        final, expected = driver.finals[request.request_id], solo(request, VOCAB)
        if request.request_id in guilty:
            assert final.finish_reason is FinishReason.ERROR and is_error(final, EngineStepError)
            expected = expected[: len(driver.outputs[request.request_id])]
        else:
            assert final.finish_reason is FinishReason.LENGTH, request.request_id
        assert driver.outputs[request.request_id] == expected


def test_whoever_was_not_in_the_step_goes_on_while_suspects_are_tried() -> None:
    """Every other step is theirs; the suspects' prompts take many."""
    driver, runner = make_driver(poison({"bad"}, 40), max_num_batched_tokens=80, max_num_seqs=4)
    bad = [make_request(name, [n] * 40, 10) for n, name in enumerate(("bad", "good"))]
    driver.add(*bad)
    driver.step()
    chat = make_request("chat", range(4), 30)
    while not runner.failures:
        driver.step()
    driver.add(chat)
    for _ in range(70):
        driver.step()
    assert "chat" in driver.finals and "good" in driver.finals
    assert "bad" not in driver.finals or driver.finals["bad"].error is not None
    driver.run()
    check(driver, [*bad, chat], {"bad"})


def test_an_engine_that_always_fails_blames_nobody(depth: int) -> None:
    failing = True
    driver, runner = make_driver(lambda *_: failing, depth)
    lines = [make_request(str(i), [i, 2, 3], 5, request_class=RequestClass.OFFLINE) for i in range(40)]
    driver.add(*lines)
    for _ in range(300):
        driver.step()
    assert not driver.finals
    assert driver.core.recovery.sick_since is not None
    assert driver.now > 250.0, "it is not tried ever faster"
    failing = False
    driver.run()
    assert driver.core.recovery.sick_since is None
    check(driver, lines)
    assert all(len(work) == 1 for work in runner.failures[1:]), "the canary alone"


def test_canaries_are_in_no_figure() -> None:
    driver, _ = make_driver(lambda step, _: step < 4)
    driver.add(make_request("a", range(4), 3, request_class=RequestClass.OFFLINE))
    driver.add(make_request("b", range(9), 2))
    driver.run()
    stats = driver.stats()
    assert stats.failed_steps > 1 and stats.probe_tokens == 9
    assert (stats.prefill_tokens, stats.decode_tokens) == (13, 3)
    assert stats.offline_tokens == 6


def test_it_is_sick_after_a_failed_step_and_two_failed_canaries() -> None:
    driver, runner = make_driver(lambda *_: True)
    driver.add(make_request("a", range(4), 3, request_class=RequestClass.OFFLINE))
    for failures in range(1 + SICK_AFTER):
        assert driver.core.recovery.sick_since is None, failures
        driver.step()
    assert driver.core.recovery.sick_since is not None
    assert [work[0].request_id for work in runner.failures] == ["a", *[CANARY_ID] * SICK_AFTER]


def test_steps_that_fail_for_their_size_blame_nobody() -> None:
    """Memory is short for 8 seconds: large requests fail, the canary does not."""
    driver, runner = make_driver(lambda *_: False)

    def fails(_step: int, work: list[Work]) -> bool:
        return driver.now < 8.0 and sum(each.end - each.start for each in work) > 10

    runner._fails = fails
    lines = [make_request(str(i), [i] * 12, 5, request_class=RequestClass.OFFLINE) for i in range(5)]
    driver.add(*lines)
    driver.run()
    assert runner.failures
    check(driver, lines)


def test_canaries_with_logits_that_are_not_finite_make_it_sick() -> None:
    broken = True
    driver, _ = make_driver(lambda step, _work: step == 1)
    driver.runner._inner._invalid = lambda prefix: broken and prefix[:8] == list(range(8))  # type: ignore[attr-defined]
    request = make_request("a", [9, 9, 9], 5)
    driver.add(request)
    for _ in range(10):
        driver.step()
    assert driver.core.recovery.sick_since is not None
    broken = False
    driver.run()
    check(driver, [request])


def test_logits_that_are_not_finite_end_only_the_request_that_makes_them(depth: int) -> None:
    driver, runner = make_driver(lambda *_: False, depth)
    runner._inner._invalid = lambda prefix: prefix[0] == 3 and len(prefix) > 9
    requests = [make_request(str(i), [i, *range(6)], 8) for i in range(8)]
    driver.add(*requests)
    driver.run()
    check(driver, requests, guilty={"3"})
    assert driver.stats().failed_steps <= math.ceil(math.log2(len(requests))) + LONE_FAILURES + 1
    check_core(driver.core)


def test_a_device_that_gives_nothing_finite_fails_no_line(depth: int) -> None:
    broken = False
    driver, runner = make_driver(lambda *_: False, depth)
    runner._inner._invalid = lambda _: broken
    lines = [make_request(str(i), [i] * 12, 5, request_class=RequestClass.OFFLINE) for i in range(20)]
    driver.add(*lines)
    driver.step()
    broken = True
    for _ in range(60):
        driver.step()
    assert driver.core.recovery.sick_since is not None and not driver.finals
    broken = False
    driver.run()
    check(driver, lines)


def test_chats_do_not_wait_for_ever_for_a_sick_engine(depth: int) -> None:
    failing = False
    objective = objective_of(SLO.parse("ttft_p99=5s,tbt_p99=1s"), StepObjective().budget)
    driver, _ = make_driver(lambda *_: failing, depth, objective=objective, max_num_seqs=2, max_num_batched_tokens=8)
    streams = [make_request(f"stream{i}", [i, 2, 3], 50) for i in range(2)]
    driver.add(*streams)
    for _ in range(6):
        driver.step()
    failing = True
    driver.add(
        make_request("waiting", range(6), 3), make_request("line", range(6), 3, request_class=RequestClass.OFFLINE)
    )
    begun = driver.now
    while "waiting" not in driver.finals:
        driver.step()
    assert 5.0 < driver.now - begun < 15.0
    assert not set(driver.finals) & {"stream0", "stream1"}
    while "stream0" not in driver.finals:
        driver.step()
    assert driver.now - begun > PATIENCE
    for name in ("waiting", "stream0", "stream1"):
        assert is_error(driver.finals[name], EngineUnavailableError)
    failing = False
    driver.run()
    assert driver.finals["line"].finish_reason is FinishReason.LENGTH


request_shape = st.tuples(
    st.integers(1, 20),  # prompt
    st.integers(1, 12),  # answer
    st.booleans(),  # offline
    st.sampled_from([None, None, None, None, 0, 1, 3, 9, 15]),  # poison from this token on
    st.integers(0, 3),  # steps before it arrives
)


@pytest.mark.slow
@fuzz(150, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=st.lists(request_shape, min_size=1, max_size=16),
    depth=st.integers(0, 1),
    blocks=st.sampled_from([16, 24, 200]),
    seqs=st.sampled_from([1, 3, 16]),
    faults=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), max_size=2),
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=3),
)
def test_blame_falls_on_the_poison_alone_and_soon(
    shapes: list[Any], depth: int, blocks: int, seqs: int, faults: list[Any], aborts: list[Any]
) -> None:
    """Arrivals, aborts, poisons and times at which every step fails, on a pool that may be full."""
    places: dict[str, int] = {}
    broken = False

    def fails(step: int, work: list[Work]) -> bool:
        nonlocal broken
        broken = any(begin <= step < begin + length for begin, length in faults)
        return broken or any(each.end > places.get(each.request_id, 10**9) for each in work)

    driver, runner = make_driver(
        fails, depth, num_units=2 * blocks, max_num_seqs=seqs, max_num_batched_tokens=max(16, seqs)
    )
    own: dict[str, list[int]] = {}
    requests = []

    def step() -> None:
        before = len(runner.failures)
        driver.step()
        for work in runner.failures[before:]:
            poisons = [e.request_id for e in work if e.end > places.get(e.request_id, 10**9)]
            if not broken and len(poisons) == 1:
                own.setdefault(poisons[0], []).append(len(work))
        for index, victim in aborts:
            if index == len(driver.steps) and str(victim) in driver.outputs:
                driver.abort(str(victim))

    for index, (prompt, answer, offline, place, wait) in enumerate(shapes):
        request = make_request(
            str(index),
            [(index * 7 + i) % VOCAB for i in range(prompt)],
            answer,
            request_class=RequestClass.OFFLINE if offline else RequestClass.ONLINE,
        )
        requests.append(request)
        if place is not None and place < prompt + answer - 1:
            places[str(index)] = place
        for _ in range(wait):
            step()
        driver.add(request)
    for _ in range(3000):
        step()
        if not driver.core.has_requests:
            break
    driver.run()
    ended = {name for name, final in driver.finals.items() if final.finish_reason is FinishReason.ABORT}
    unwell = {n for n, f in driver.finals.items() if is_error(f, EngineUnavailableError)}
    assert not unwell or faults
    check(driver, [r for r in requests if r.request_id not in ended | unwell], set(places) - ended - unwell)
    for sizes in own.values() if not faults else ():
        assert len(sizes) <= math.ceil(math.log2(max(sizes))) + LONE_FAILURES
