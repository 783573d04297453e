"""The scheduler over the hybrid cache: parking on the host, running from hidden state, restoring, failing, aborting."""

import random
from dataclasses import replace

import pytest
from driver import Driver, fake_driver, make_request, small_config
from fakes.runner import solo

from engine.api import EngineRequest, FinishReason, RequestClass
from engine.cache.blocks import CacheAction, CacheKind
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import SchedulerOutput
from predictor.model import LatencyModel

BLOCK = 4
VOCAB = 50
MODEL = LatencyModel(
    intercept=0.01, decodes=1e-4, prefill_chunks=1e-3, prefill_tokens=1e-3, transferred=1e-6, restored=1e-5,
    compact=1e-6,
)  # fmt: skip


def make(
    depth: int = 0, blocks: int = 10, host: int = 0, scratch: int = 0, policy: str = "fcfs",
    model: LatencyModel | None = None, fail: frozenset[int] = frozenset(), **options: float,
) -> Driver:  # fmt: skip
    config = small_config(
        blocks, max_model_len=4 * BLOCK * blocks, max_num_batched_tokens=64, pipeline_depth=depth, host_units=host,
        scratch_blocks=scratch, **options,
    )  # fmt: skip
    return fake_driver(config, VOCAB, {"fail_after_operations": fail}, online_policy=policy, model=model)


def check_solo(driver: Driver, *requests: EngineRequest) -> None:
    for request in requests:
        assert driver.outputs[request.request_id] == solo(request, VOCAB)


def actions(steps: list[SchedulerOutput]) -> list[CacheAction]:
    return [operation.action for step in steps for operation in step.operations]


def four_that_grow() -> list[EngineRequest]:
    return [make_request(str(i), [i] * 6, 30) for i in range(4)]


def test_what_is_parked_on_the_host_is_not_computed_again(depth: int) -> None:
    computed = {}
    for host in (0, 400):
        driver = make(depth, host=host)
        requests = four_that_grow()
        driver.add(*requests)
        driver.run()
        check_solo(driver, *requests)
        stats = driver.stats()
        assert stats.preemptions["memory"] > 0
        computed[host] = sum(step.features.num_tokens for step in driver.steps)
    assert computed[400] == sum(6 + 30 - 1 for _ in range(4)), "every token is computed once"
    assert computed[0] > computed[400]
    assert stats.cache_units["swap_out"] >= stats.cache_units["swap_in"] > 0, "some of it was still on the device"


def test_a_prefix_on_the_device_comes_before_the_host(depth: int) -> None:
    """Four equal requests: what one has copied to the host another still holds on the device."""
    driver = make(depth, host=400)
    requests = [make_request(str(i), [5] * 6, 30) for i in range(4)]
    driver.add(*requests)
    driver.run()
    check_solo(driver, *requests)
    units = driver.stats().cache_units
    assert units["swap_out"] > units.get("swap_in", 0)
    assert sum(step.features.num_tokens for step in driver.steps) == sum(6 + 30 - 1 for _ in range(4))


def test_a_past_that_is_cheaper_to_compute_is_not_copied(depth: int) -> None:
    slow_copies = LatencyModel(intercept=0.001, prefill_tokens=1e-5, transferred=1.0)
    driver = make(depth, host=400, model=slow_copies)
    requests = four_that_grow()
    driver.add(*requests)
    driver.run()
    check_solo(driver, *requests)
    assert driver.stats().preemptions["memory"] > 0 and not actions(driver.steps)


def test_an_abort_gives_the_host_back_at_every_moment(depth: int) -> None:
    swapped = False
    for steps in range(40):
        driver = make(depth, host=400)
        requests = four_that_grow()
        driver.add(*requests)
        for _ in range(steps):
            driver.step()
        parked = driver.stats().host_units_used
        swapped = swapped or parked > 0
        for request in requests[1:]:
            driver.abort(request.request_id)
        driver.run()
        check_solo(driver, requests[0])
        assert all(driver.finals[r.request_id].finish_reason is not None for r in requests)
    assert swapped, "no abort met a parked request"


@pytest.mark.slow
def test_a_failed_step_takes_what_it_moved_with_it(depth: int) -> None:
    """Targets of a failed step's operations are in doubt: no request may read the blocks again."""
    met: set[CacheAction] = set()
    for step in range(60):
        driver = make(depth, host=400, scratch=20, policy="apt", fail=frozenset({step}))
        requests = [make_request(str(i), [i] * (6 + i), 26, request_class=list(RequestClass)[i % 2]) for i in range(6)]
        driver.add(*requests)
        driver.run()
        met |= {action for each in driver.steps if each.step_id == step for action in actions([each])}
        for request in requests:
            if driver.finals[request.request_id].finish_reason is not FinishReason.ERROR:
                check_solo(driver, request)
    assert met >= {CacheAction.SWAP_OUT, CacheAction.SWAP_IN}, met


def pressed(
    depth: int, policy: str, scratch: int, blocks: int = 12, **options: int
) -> tuple[Driver, list[EngineRequest]]:
    """Eight prompts at once where KV has room for three; an objective that makes early ones savable."""
    driver = make(depth, blocks=blocks, scratch=scratch, policy=policy, model=MODEL, **options)
    driver.core.set_objective(StepObjective(ttft=5.0, tbt=5.0))
    requests = [make_request(str(i), [i] * 14, 10 + 3 * i) for i in range(8)]
    driver.add(*requests)
    return driver, requests


@pytest.mark.parametrize("policy", ["apt", "goodput"])
def test_under_pressure_requests_start_from_hidden_state(depth: int, policy: str) -> None:
    most = {}
    for scratch in (0, 40):
        driver, requests = pressed(depth, policy, scratch)
        for _ in range(4):
            driver.step()
        most[scratch] = driver.stats().running[RequestClass.ONLINE]
        hidden = driver.stats().hidden_blocks
        assert (hidden > 0) == (scratch > 0)
        driver.run()
        check_solo(driver, *requests)
    assert most[40] > most[0], "hidden state takes half the room"


def test_hidden_state_becomes_kv_when_the_room_is_back(depth: int) -> None:
    driver, requests = pressed(depth, "apt", 40, blocks=16)
    driver.run()
    check_solo(driver, *requests)
    assert CacheAction.RESTORE in actions(driver.steps)
    restored = [step for step in driver.steps if step.replaced]
    assert restored and all(step.features.restored_tokens > 0 for step in restored)
    assert any(step.features.compact_tokens > 0 for step in driver.steps)


def test_an_expensive_rho_refuses_hidden_state(depth: int) -> None:
    driver = make(depth, blocks=12, scratch=40, policy="apt", model=MODEL, rho=10.0)
    requests = [make_request(str(i), [i] * 14, 10) for i in range(8)]
    driver.add(*requests)
    while driver.step():
        assert driver.stats().hidden_blocks == 0
    driver.run()
    check_solo(driver, *requests)


def test_what_a_step_pays_anyway_keeps_nobody_from_hidden_state(depth: int) -> None:
    """Too dear for the first request, for all of a step's own share falls to it; not once another one runs from it."""
    driver, requests = pressed(depth, "apt", 40)
    for _ in range(4):
        driver.step()
    assert driver.stats().hidden_blocks > 0
    assert driver.stats().knapsack["compact"] >= 5 and driver.stats().knapsack["passed_over"] > 0
    core, before = driver.core, len(driver.steps)
    core.state.config = replace(core.state.config, rho=10.0)
    later = [make_request(f"later-{i}", [20 + i] * 14, 10) for i in range(4)]
    driver.add(*later)
    driver.run()
    check_solo(driver, *requests, *later)
    started = [new for step in driver.steps[before:] for new in step.new_requests]
    assert any(entry.kind is CacheKind.HIDDEN for new in started for entry in new.entries)


def test_without_pressure_apt_is_first_come_first_served(depth: int) -> None:
    orders = []
    for policy in ("fcfs", "apt", "goodput"):
        driver = make(depth, blocks=100, scratch=40, policy=policy)
        generator = random.Random(1)
        for i in range(20):
            driver.add(make_request(str(i), [i] * generator.randrange(2, 20), generator.randrange(1, 6)))
            driver.step()
        driver.run()
        orders.append([(chunk.row, chunk.start, chunk.length) for step in driver.steps for chunk in step.chunks])
    assert orders[0] == orders[1] == orders[2]


def test_goodput_starts_those_that_can_still_be_saved() -> None:
    """Four have waited beyond their objective when four new ones come: those go first, and the old ones still end."""
    driver = make(0, blocks=12, policy="goodput", model=MODEL)
    driver.core.set_objective(StepObjective(ttft=2.0, tbt=2.0))
    old = [make_request(f"old-{i}", [i] * 40, 2) for i in range(4)]
    driver.add(*old)
    driver.now = 3.0
    new = [make_request(f"new-{i}", [10 + i] * 10, 2) for i in range(4)]
    driver.add(*new)
    driver.step()
    started = {new_request.request_id for step in driver.steps for new_request in step.new_requests}
    assert started >= {request.request_id for request in new}
    driver.run()
    check_solo(driver, *old, *new)
