"""Where every layer has a window, a request gives back the blocks that no later token of its own sees."""

import math

import pytest
from driver import Driver, fake_driver, make_request, small_config
from fakes.runner import FakeRunner, solo

from engine.api import FinishReason, RequestClass
from engine.cache.blocks import CacheKind

BLOCK, VOCAB, WINDOW, CHUNK = 4, 30, 8, 8


def make_driver(num_blocks: int = 16, *, depth: int = 0, window: int = WINDOW, **options: object) -> Driver:
    limits = {"max_model_len": 400, "max_num_seqs": 4, "max_num_batched_tokens": CHUNK, "min_prefill_chunk": 4}
    return fake_driver(small_config(num_blocks, pipeline_depth=depth, window=window, **limits | options), VOCAB)


def ends_as_alone(driver: Driver, *requests: object) -> None:
    for request in requests:
        final = driver.finals[request.request_id]  # type: ignore[attr-defined]
        assert final.finish_reason is FinishReason.LENGTH
        expected = solo(request, VOCAB)  # type: ignore[attr-defined]
        assert driver.outputs[request.request_id] == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_a_request_longer_than_the_pool_runs_to_its_end(depth: int, caching: bool) -> None:
    driver = make_driver(depth=depth, enable_prefix_caching=caching)
    request = make_request("long", list(range(1, 151)), 120)
    driver.add(request)
    most = 0
    while driver.step():
        most = max(most, driver.stats().units_owned)
    ends_as_alone(driver, request)
    assert most <= 2 * driver.core.config.most_blocks < 2 * 16
    stats = driver.stats()
    assert stats.units_owned == 0 and stats.units_free + stats.units_cached == stats.units_total
    assert not stats.preemptions


@pytest.mark.parametrize("online", [True, False])
def test_two_of_them_run_beside_each_other(online: bool) -> None:
    """The estimated need of each is the number of blocks that it holds at once: neither waits for the other's end."""
    driver = make_driver()
    kind = RequestClass.ONLINE if online else RequestClass.OFFLINE
    requests = [make_request(str(salt), [salt] * 100, 20, request_class=kind) for salt in (1, 2)]
    for request in requests:
        driver.add(request)
    together = 0
    while driver.step():
        together += driver.stats().running[kind] == 2
    ends_as_alone(driver, *requests)
    assert together > 10


def test_a_prefix_that_was_given_back_is_found_by_the_next_request_and_taken_as_far_as_it_is_seen() -> None:
    driver = make_driver(num_blocks=40)
    first = make_request("first", [5] * 40, 1)
    driver.add(first)
    driver.run()
    second, third = make_request("second", [5] * 41, 30), make_request("third", [5] * 39, 30)
    driver.add(second)
    driver.step()
    assert driver.stats().prefix_hit_tokens == 40
    (entries,) = (new.entries for new in driver.steps[-1].new_requests)
    assert [entry.kind for entry in entries[:8]] == [CacheKind.GONE] * 8  # tokens 33 on are seen by number 40
    assert all(entry.kind is CacheKind.KV for entry in entries[8:])
    driver.add(third)
    driver.run()
    ends_as_alone(driver, first, second, third)
    assert driver.stats().units_owned == 0


@pytest.mark.parametrize("host_units", [0, 40])
def test_one_that_loses_its_place_keeps_its_past_only_if_it_is_whole(host_units: int) -> None:
    driver = make_driver(num_blocks=12, host_units=host_units)
    lines = [make_request(f"line {salt}", [salt] * 60, 30, request_class=RequestClass.OFFLINE) for salt in (1, 2)]
    for line in lines:
        driver.add(line)
    for _ in range(14):
        driver.step()
    chat = make_request("chat", [3] * 100, 5)
    driver.add(chat)
    driver.run()
    ends_as_alone(driver, chat, *lines)
    assert sum(driver.stats().preemptions.values()) > 0
    assert driver.stats().units_owned == 0


def test_a_failed_step_starts_over_from_what_is_in_the_prefix_cache() -> None:
    driver = make_driver(depth=1)
    runner = driver.runner
    assert isinstance(runner, FakeRunner)
    runner.fail_steps = frozenset({9})
    request = make_request("long", [4] * 90, 40)
    driver.add(request)
    driver.run()
    ends_as_alone(driver, request)


def test_without_a_window_nothing_is_given_back() -> None:
    driver = make_driver(num_blocks=60, window=0)
    driver.add(make_request("long", [4] * 90, 40))
    for _ in range(30):
        driver.step()
        requests = driver.core.state.requests.values()
        assert all(block.entry.units for request in requests for block in request.cache_map.blocks)
    assert driver.core.config.most_blocks > math.ceil(400 / BLOCK)
