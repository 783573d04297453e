"""The host pool as a prefix cache: saved blocks at eviction, their way back, and the cost of faults."""

import random
from collections.abc import Iterable

import pytest
from driver import Driver, make_request
from fakes.runner import FakeRunner, solo
from test_hybrid_scheduling import BLOCK, MODEL, VOCAB, actions, check_solo, make

from engine.api import EngineRequest, FinishReason, RequestClass
from engine.cache.blocks import CacheAction, Tier
from engine.limits import UNITS_PER_BLOCK
from predictor.model import LatencyModel

TURN = 41
"""Tokens of a chat's history: ten blocks, and one to compute."""
DEAR_COPIES = LatencyModel(intercept=0.01, prefill_tokens=1e-3, transferred=1.0)


def chat(name: str, length: int = TURN, outputs: int = 2) -> EngineRequest:
    return make_request(name, list(range(length)), outputs)


def batch(name: str, number: int) -> list[EngineRequest]:
    """Lines that share nothing and fill a pool of 24 blocks."""
    prompts = [[(7 * number + 3 * line + at) % VOCAB for at in range(30)] for line in range(4)]
    return [make_request(f"{name}{i}", p, 12, request_class=RequestClass.OFFLINE) for i, p in enumerate(prompts)]


def serve(driver: Driver, *requests: EngineRequest) -> int:
    """Run to the end; the prompt tokens that were computed meanwhile."""
    before = driver.stats().prefill_tokens
    driver.add(*requests)
    driver.run()
    check_solo(driver, *requests)
    return driver.stats().prefill_tokens - before


def filled(depth: int, host: int, **options: object) -> Driver:
    """A chat's turn, and then so many other chats that nothing of it is left on the device."""
    driver = make(depth, blocks=24, host=host, **options)  # type: ignore[arg-type]
    serve(driver, chat("first"))
    for number in range(3):
        serve(driver, make_request(f"other{number}", [number + 1] * 80, 4))
    return driver


def test_what_the_device_evicts_comes_back_from_the_host(depth: int) -> None:
    computed = {}
    for host in (0, 400):
        driver = filled(depth, host)
        computed[host] = serve(driver, chat("second"))
        stats = driver.stats()
        assert stats.prefix_host_hit_tokens == (TURN - 1 if host else 0)
        assert stats.host_units_used == stats.host_units_cached
        assert (stats.host_units_cached > 0) == (host > 0)
    assert computed == {0: TURN, 400: 0}, "its last token alone, which counts as a decode"


def test_the_host_keeps_what_it_gave_back(depth: int) -> None:
    """The second time that the device evicts the same blocks there is nothing to copy."""
    driver, copied = filled(depth, 400), []
    for turn in range(4):
        assert serve(driver, chat(f"turn{turn}")) == 0
        for number in range(3):
            serve(driver, make_request(f"other{turn}{number}", [number + 1] * 80, 4))
        copied.append(driver.stats().cache_units["swap_out"])
    assert copied[-1] == copied[-2] > 0, "all of it lies on the host already"
    hits = driver.stats().prefix_host_hit_tokens
    assert serve(driver, chat("last")) == serve(driver, chat("once more")) == 0
    assert driver.stats().prefix_host_hit_tokens == hits + TURN - 1, "then the device has it again"


@pytest.mark.parametrize("chats", [2, 3])
def test_chats_that_come_back_together_find_what_makes_room_for_each_other(depth: int, chats: int) -> None:
    """The first one's history takes the place of the others' on the device, which is copied out in the same step: they
    start from the copies when it has ended, and do not compute everything again."""
    driver = make(depth, blocks=40, host=400)
    histories = [[10 + number] * 60 for number in range(5)]
    for number, history in enumerate(histories):
        serve(driver, make_request(f"opens{number}", history, 2))
    last = [make_request(f"back{number}", [*histories[number], 7, 7, 7, 7], 2) for number in (0, 3, 4)[:chats]]
    found = driver.stats().prefix_hit_tokens
    serve(driver, *last)
    assert driver.stats().prefix_hit_tokens - found == chats * 60


def test_what_only_offline_work_touched_is_not_saved(depth: int) -> None:
    driver = make(depth, blocks=24, host=400)
    for number in range(4):
        serve(driver, *batch(f"b{number}-", number))
    out = [op for step in driver.steps for op in step.operations if op.action is CacheAction.SWAP_OUT]
    assert driver.stats().host_units_cached == 0
    assert len(out) == sum(op.action is CacheAction.SWAP_IN for step in driver.steps for op in step.operations)


def test_copies_that_cost_more_than_computing_are_not_made(depth: int) -> None:
    driver = filled(depth, 400, model=DEAR_COPIES)
    assert serve(driver, chat("second")) == TURN
    assert not actions(driver.steps)


def saved_units(driver: Driver, prompts: Iterable[tuple[str, int]]) -> int:
    """Serve one chat after the other, each prompt 80 times its token; the units that were copied to the host."""
    before = driver.stats().cache_units.get("swap_out", 0)
    for name, token in prompts:
        serve(driver, make_request(name, [token] * 80, 1))
    return driver.stats().cache_units.get("swap_out", 0) - before


def test_prefixes_are_copied_only_while_enough_chats_come_back(depth: int) -> None:
    """A copy one way costs a quarter of recomputing a block, so that a third of the blocks must be asked for again."""
    model = LatencyModel(intercept=0.01, prefill_tokens=1e-3, transferred=BLOCK * 1e-3 / UNITS_PER_BLOCK / 4)
    driver = make(depth, blocks=24, host=160, model=model)
    first = saved_units(driver, ((f"first{i}", i) for i in range(4)))
    assert first >= 80, "nothing is known yet"
    saved_units(driver, ((f"once{i}", 10 + i) for i in range(16)))
    assert saved_units(driver, ((f"never{i}", 30 + i) for i in range(4))) == 0, "no chat has come back"
    for turn in range(12):
        again = saved_units(driver, ((f"turn{turn}.{i}", 40 + i) for i in range(3)))
    assert again == 0 and driver.stats().prefix_host_hit_tokens > 0, "all three chats lie on the host again"


def test_a_full_host_keeps_what_was_used_last(depth: int) -> None:
    """Room for two histories: the third to leave takes the place of the first."""
    driver = make(depth, blocks=12, host=44)
    prompts = {name: [start + at for at in range(37)] for name, start in (("a", 0), ("b", 1), ("c", 2), ("d", 3))}
    for name, prompt in prompts.items():
        serve(driver, make_request(name, [token % VOCAB for token in prompt], 1))
    serve(driver, make_request("a2", prompts["a"], 1))
    assert driver.stats().prefix_host_hit_tokens < 36, "its tail went first"
    before = driver.stats().prefix_host_hit_tokens
    serve(driver, make_request("c2", [token % VOCAB for token in prompts["c"]], 1))
    assert driver.stats().prefix_host_hit_tokens - before == 36


def test_waiting_pasts_take_the_place_of_prefixes(depth: int) -> None:
    """Requests that are preempted need the host: cached prefixes make way, and nothing is computed twice."""
    driver = make(depth, blocks=10, host=40)
    for number in range(4):
        serve(driver, make_request(f"chat{number}", [number] * 37, 1))
    assert driver.stats().host_units_cached == 40, "the host is full"
    four = [make_request(str(i), [20 + i] * 6, 30) for i in range(4)]
    assert serve(driver, *four) == 4 * 6
    assert sum(driver.stats().preemptions.values()) > 0


@pytest.mark.parametrize("after", [False, True])
def test_a_copy_of_a_failed_step_is_offered_to_nobody(depth: int, after: bool) -> None:
    """Every step that copies out or in fails once, before or behind its operations: misses, and nothing else."""
    clean = filled(depth, 400)
    serve(clean, chat("second"))
    wanted = [step.step_id for step in clean.steps if step.operations]
    assert wanted
    for step_id in wanted:
        driver = make(depth, blocks=24, host=400)
        assert isinstance(driver.runner, FakeRunner)
        if after:
            driver.runner.fail_after_operations = frozenset({step_id})
        else:
            driver.runner.fail_steps = frozenset({step_id})
        serve(driver, chat("first"))
        for number in range(3):
            serve(driver, make_request(f"other{number}", [number + 1] * 80, 4))
        serve(driver, chat("second"))
        assert driver.stats().failed_steps == 1


def test_an_abort_while_a_copy_is_on_its_way_loses_nothing(depth: int) -> None:
    """At every moment of its turn: the blocks are given back, the copy on the host stays."""
    aborted = set()
    for moment in range(4):
        driver = filled(depth, 400)
        driver.add(chat("second", outputs=3))
        for _ in range(moment):
            driver.launch() or driver.complete()
        driver.abort("second")
        aborted.add(driver.finals["second"].finish_reason)
        driver.run()
        assert serve(driver, chat("third")) == 0
        assert driver.stats().prefix_host_hit_tokens >= TURN - 1
    assert aborted == {FinishReason.ABORT}


def test_what_is_in_doubt_leaves_the_host_too(depth: int) -> None:
    """Logits that are not finite behind a history that came from the host: all of it is computed again."""
    driver = filled(depth, 400)
    assert isinstance(driver.runner, FakeRunner)
    failed: list[int] = []

    def invalid(prefix: object) -> bool:
        failed.append(1)
        return len(failed) == 1

    driver.runner._invalid = invalid
    assert serve(driver, chat("second")) >= TURN, "with the canary's tokens"
    assert driver.stats().failed_steps == 1 and len(failed) > 1


def test_a_start_is_charged_for_its_copies_once(depth: int) -> None:
    driver = filled(depth, 400, model=MODEL)
    before = len(driver.steps)
    serve(driver, chat("second"))
    steps = driver.steps[before:]
    moved = [sum(len(op.target.units) for op in step.operations) for step in steps]
    assert [step.features.transferred_bytes for step in steps] == moved and sum(moved) >= 20
    for step, units in zip(steps, moved, strict=True):
        assert step.predicted_latency is not None and step.predicted_latency > MODEL.transferred * units


def test_an_offline_request_may_start_from_a_chats_history(depth: int) -> None:
    driver = filled(depth, 400)
    line = make_request("line", list(range(TURN)), 2, request_class=RequestClass.OFFLINE)
    assert serve(driver, line) == 0
    assert driver.stats().prefix_host_hit_tokens == TURN - 1


def test_random_turns_from_every_tier_equal_the_solo_run() -> None:
    """Chats of several turns beside lines, with aborts and failures, on pools that are too small for both tiers."""
    hits = outs = 0
    for seed in range(30):
        rng = random.Random(seed)
        scratch, policy = rng.choice([(0, "fcfs"), (12, "apt"), (0, "goodput")])
        driver = make(seed % 2, blocks=14, host=rng.choice([12, 30, 60, 200]), scratch=scratch, policy=policy)
        assert isinstance(driver.runner, FakeRunner)
        driver.runner.fail_after_operations = frozenset(rng.sample(range(80), 4))
        histories = [[chat] * 3 for chat in range(4)]
        requests: list[EngineRequest] = []
        for turn in range(12):
            history = rng.choice(histories)
            if len(history) > 40:
                del history[3:]
            history += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
            offline = rng.random() < 0.3
            request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
            prompt = [rng.randrange(VOCAB) for _ in range(20)] if offline else list(history)
            requests.append(make_request(f"{turn}", prompt, rng.randrange(1, 10), request_class=request_class))
            driver.add(requests[-1])
            for _ in range(rng.randrange(6)):
                driver.step()
            if rng.random() < 0.15:
                driver.abort(requests[-1].request_id)
        driver.run()
        for request in requests:
            expected = solo(request, VOCAB)
            got = driver.outputs[request.request_id]
            assert got == expected[: len(got)]
            assert len(got) == len(expected) or driver.finals[request.request_id].finish_reason is FinishReason.ABORT
        hits += driver.stats().prefix_host_hit_tokens
        outs += sum(op.target.tier is Tier.HOST for step in driver.steps for op in step.operations)
    assert hits > 25 * BLOCK and outs > 100, "the host was hardly used"
