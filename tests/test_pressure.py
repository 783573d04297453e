"""Requests to preempt when memory is short: the choice by columns against one request at a time, and its short cuts."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import examples

from engine.api import EngineRequest, RequestClass, RequestTimes, SamplingParams
from engine.cache.blocks import CacheBlock, CacheEntry, CacheKind, Tier
from engine.request import Request, RequestStatus
from engine.scheduling.objective import StepObjective
from engine.scheduling.selection import (
    GRAIN,
    Columns,
    Pressure,
    _in_reach,
    _savable,
    _transposed,
    choose,
    goodput_values,
    pending_time,
    seconds_to_token,
    select_apt,
    select_goodput,
)
from predictor.budget import Promise
from predictor.features import BatchFeatures
from predictor.model import LatencyModel

NOW, SIZE = 10.0, 4
MODEL = LatencyModel(intercept=0.01, decodes=1e-4, prefill_tokens=1e-3, attention=1e-8)


def waiting(index: int, arrival: float, length: int) -> Request:
    spec = EngineRequest(str(index), tuple(range(length)), SamplingParams(max_tokens=50))
    return Request(spec, RequestTimes(arrival), index)


def preempted(index: int, arrival: float, length: int, first: float, last: float, parked: int) -> Request:
    """It has run: three tokens came, the last at `last`; `parked` blocks are on the host."""
    request = waiting(index, arrival, length)
    request.token_ids += [1, 2, 3]
    request.times = RequestTimes(arrival, first_token=first, last_token=last)
    request.num_preemptions, request.status = 1, RequestStatus.PREEMPTED
    entry = CacheEntry(CacheKind.KV, Tier.HOST, (0, 1))
    request.cache_map.blocks = [CacheBlock(entry) for _ in range(parked)]
    request.cache_map.num_parked_tokens = parked * SIZE
    return request


fresh = st.builds(waiting, st.integers(0, 99), st.floats(7.0, 10.0), st.integers(1, 60))
older = st.builds(
    preempted,
    st.integers(0, 99),
    st.floats(5.0, 8.0),
    st.integers(12, 60),
    st.floats(8.0, 9.0),
    st.floats(9.0, 10.0),
    st.integers(0, 3),
)
queues = st.lists(fresh | older, max_size=12)


def pressure(capacity: int = 40, compact_blocks: int = 0, **options: Any) -> Pressure:
    given_options = {"ttft": 1.0, "tbt": 0.5, "model": MODEL, **options}
    state: Any = SimpleNamespace(
        config=SimpleNamespace(block_size=SIZE, most_blocks=sys.maxsize, max_num_batched_tokens=16),
        objective=StepObjective(given_options["ttft"], given_options["tbt"]),
        model=given_options["model"],
        promised={},
        running={RequestClass.ONLINE: []},
    )
    return Pressure(state, NOW, capacity, compact_blocks)


@settings(max_examples=examples(150), deadline=None)
@given(queues, st.integers(0, 9))
def test_columns_say_what_requests_say(requests: list[Request], hidden: int) -> None:
    state = pressure(compact_blocks=hidden)
    queue = _transposed(requests, state)
    for index, request in enumerate(requests):
        times = request.times
        missed = Promise("", 1.0, 0.5).is_missed(NOW, times.arrival, times.first_token, times.last_token)
        assert queue.hopeful[index] == (not missed)
        assert queue.pending[index] == pending_time(NOW, times.arrival, times.last_token)
        assert missed == (queue.slack[index] < 0.0)
        blocks = len(request.token_ids) // SIZE + 1
        assert queue.kv[index] == 2 * blocks
        offered = hidden and not request.cache_map.blocks
        assert queue.compact[index] == (blocks if offered else 0)
        assert queue.missing[index] == max(1, len(request.token_ids) - request.cache_map.num_parked_tokens)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(queues)
def test_savable_is_the_latency_model_to_a_grain(requests: list[Request]) -> None:
    """Prompts are rounded up: a request called savable is savable, and one with a grain of slack is called so."""
    state = pressure()
    queue = _transposed(requests, state)
    base = MODEL.predict(BatchFeatures())
    for index, (request, savable) in enumerate(zip(requests, _savable(queue, state), strict=True)):
        stored, missing = request.cache_map.num_parked_tokens, int(queue.missing[index])
        exact = seconds_to_token(MODEL, base, BatchFeatures(), stored, missing, 16)
        longer = seconds_to_token(MODEL, base, BatchFeatures(), stored, missing + GRAIN, 16)
        if savable:
            assert exact <= queue.slack[index] + 1e-9
        elif queue.hopeful[index]:
            assert longer >= queue.slack[index] - 1e-9
    assert _savable(queue, pressure(model=None)) is queue.hopeful


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=20), st.integers(0, 120))
def test_late_requests_out_of_reach_change_nothing(rows: list[tuple[int, bool]], capacity: int) -> None:
    kv, savable = np.array([row[0] for row in rows], int), np.array([row[1] for row in rows], bool)
    values = goodput_values(np.ones(len(rows)), savable, 1.0, 0.0)
    near = _in_reach(kv, savable, capacity)
    assert near.tolist() == sorted(near)
    everybody = choose(Columns(values, kv, np.zeros_like(kv)), capacity)
    some = choose(Columns(values[near], kv[near], np.zeros_like(near)), capacity)
    assert {near[i] for i in some.kv} == set(everybody.kv)
    assert some.value == pytest.approx(everybody.value) and some.units == everybody.units


@settings(max_examples=examples(100), deadline=None)
@given(queues, st.sampled_from([0.0, 0.4]), st.integers(1, 80))
def test_what_is_chosen_fits_and_starts_best_first(requests: list[Request], tail: float, capacity: int) -> None:
    state = pressure(capacity)
    for select in (select_apt, select_goodput):
        starts = select(requests, state, tail)
        kv = dict(zip(map(id, requests), _transposed(requests, state).kv, strict=True))
        assert len({id(start.request) for start in starts}) == len(starts)
        assert sum(kv[id(start.request)] for start in starts) <= capacity
        assert all(start.kind is CacheKind.KV for start in starts), "no scratch, no hidden state"
        if select is select_goodput and tail == 0.0:
            flags = [start.savable for start in starts]
            assert flags == sorted(flags, reverse=True), "late ones go last"


def test_without_an_objective_everybody_has_hope() -> None:
    requests = [waiting(0, 0.0, 8), waiting(1, 9.0, 8)]
    state = pressure(ttft=math.inf, tbt=math.inf)
    assert [start.savable for start in select_goodput(requests, state)] == [True, True]
    late = pressure(ttft=1e-3)
    assert not any(start.savable for start in select_apt(requests, late))
