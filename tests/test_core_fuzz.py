"""The core against the solo run: random arrivals, aborts, failures, retries and shared prefixes on a full pool."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from core_rules import CoreRules
from driver import Driver, fake_driver, make_request, small_config
from fakes.runner import solo
from fakes.speculation import Oracle
from hypothesis import HealthCheck, given
from hypothesis.stateful import initialize, invariant, rule
from support.fuzz import fuzz, machine_test

from engine.api import EngineRequest, FinishReason, RequestClass
from engine.errors import QueueFullError
from engine.limits import UNLIMITED_QUEUE
from predictor.budget import Promise
from predictor.model import LatencyModel

VOCAB = 40
BLOCK = 4
PREFIXES = ([], list(range(8)), list(range(13)), [1] * 21)

request_shape = st.tuples(
    st.sampled_from(PREFIXES),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
    st.integers(1, 20),
    st.sampled_from([RequestClass.ONLINE, RequestClass.ONLINE, RequestClass.OFFLINE]),
    st.sampled_from([b"", b"tenant"]),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
    st.sampled_from([None, None, Promise("premium", 0.02, 0.005), Promise("agent", e2e=0.1), Promise("default", 9.0)]),
)
# (steps to wait before it arrives, shape, steps after which it is aborted or 0, retried after the abort)
arrival = st.tuples(st.integers(0, 4), request_shape, st.sampled_from([0, 0, 0, 1, 2, 3]), st.booleans())


def build(request_id: str, shape: tuple) -> EngineRequest:  # type: ignore[type-arg]
    prefix, tail, max_tokens, request_class, salt, stops, promise = shape
    request = make_request(
        request_id, [*prefix, *tail], max_tokens, request_class=request_class, salt=salt, stop_token_ids=stops
    )
    return replace(request, promise=promise if request_class is RequestClass.ONLINE else None)


# host units, blocks that may be run from hidden state, online policy, whether recomputing costs about as much as a
# copy
tiers = st.sampled_from([
    (0, 0, "fcfs", False), (200, 0, "fcfs", False), (60, 0, "fcfs", True), (24, 0, "apt", False),
    (0, 6, "apt", False), (30, 5, "apt", False), (40, 9, "goodput-strict", True), (200, 40, "goodput", False),
])  # fmt: skip
NO_STATES = (0, 0, 0)
states = st.sampled_from([NO_STATES, NO_STATES, (1, 0, 0), (3, 0, 0), (8, 0, 0), (40, 0, 0), (3, 4, 40), (5, 20, 120)])
"""Slots of snapshots of recurrent layers, on the device and on the host beside so many units."""
States = tuple[int, int, int]
Tiers = tuple[int, int, str, bool]
ALONE: Tiers = (0, 0, "fcfs", False)
LIKE_COPIES = LatencyModel(
    intercept=0.01, decodes=1e-3, prefill_tokens=1e-3, attention=4e-5, transferred=1.3e-3, restored=1e-4, compact=1e-4
)
"""Copying a block both ways takes as long as computing it again behind about ten tokens."""


def make_fuzz_driver(
    depth: int, num_blocks: int, seqs: int, chunk: int, prefix_caching: bool, tiers: Tiers = ALONE,
    states: States = NO_STATES, drafts: int = 0,
) -> Driver:  # fmt: skip
    host_units, scratch_blocks, policy, costed = ALONE if any(states) else tiers
    state_slots, host_state_slots, state_units = states
    config = small_config(
        num_blocks, max_model_len=num_blocks * BLOCK, max_num_seqs=seqs, max_num_batched_tokens=max(seqs, chunk),
        enable_prefix_caching=prefix_caching, pipeline_depth=depth, max_queue_time=UNLIMITED_QUEUE,
        host_units=host_units + state_units, scratch_blocks=scratch_blocks, state_slots=state_slots,
        host_state_slots=host_state_slots, state_bytes=3, snapshot_tokens=2 * BLOCK,
    )  # fmt: skip
    driver = fake_driver(config, VOCAB, online_policy=policy, model=LIKE_COPIES if costed else None)
    driver.core.state.speculation = Oracle(partial(solo, vocab_size=VOCAB), drafts) if drafts else None
    return driver


@pytest.mark.parametrize("depth", [0, 1])
@fuzz(120, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=st.lists(arrival, min_size=1, max_size=14),
    num_blocks=st.integers(14, 22),
    seqs=st.integers(1, 6),
    chunk=st.integers(1, 24),
    prefix_caching=st.booleans(),
    tiers=tiers,
    states=states,
    drafts=st.integers(0, 9),
)
def test_every_output_equals_the_solo_run(
    depth: int, arrivals: list[Any], num_blocks: int, seqs: int, chunk: int, prefix_caching: bool, tiers: Tiers,
    states: States, drafts: int,
) -> None:  # fmt: skip
    states = states if prefix_caching else NO_STATES
    driver = make_fuzz_driver(depth, num_blocks, seqs, chunk, prefix_caching, tiers, states, drafts)
    requests: dict[str, EngineRequest] = {}
    aborts: list[tuple[int, str, tuple | None]] = []  # type: ignore[type-arg]
    step = 0

    def arrive(request: EngineRequest) -> None:
        with suppress(QueueFullError):  # its promise cannot be kept
            driver.add(request)
            requests[request.request_id] = request

    def advance() -> None:
        nonlocal step
        driver.step()
        step += 1
        for due in [a for a in aborts if a[0] <= step]:
            aborts.remove(due)
            driver.abort(due[1])
            if due[2] is not None:
                arrive(build(f"{due[1]}-again", due[2]))

    for index, (wait, shape, abort_after, retry) in enumerate(arrivals):
        for _ in range(wait):
            advance()
        request = build(str(index), shape)
        arrive(request)
        if abort_after:
            aborts.append((step + abort_after, request.request_id, shape if retry else None))
    while aborts:
        advance()
    driver.run()
    for request_id, request in requests.items():
        expected = solo(request, VOCAB)
        if driver.finals[request_id].finish_reason is FinishReason.ABORT:
            assert driver.outputs[request_id] == expected[: len(driver.outputs[request_id])]
        else:
            assert driver.outputs[request_id] == expected


@pytest.mark.parametrize("request_class", RequestClass)
def test_drafts_behind_the_first_token_of_a_request_have_blocks(request_class: RequestClass) -> None:
    """The first step of a prompt of one token may hold drafts, which need a second block."""
    for seed in range(4, 12):
        driver = make_fuzz_driver(1, 14, 5, 24, False, drafts=seed)
        request = make_request("short", [seed], 20, request_class=request_class)
        driver.add(request)
        driver.run()
        assert driver.outputs["short"] == solo(request, VOCAB)


class CoreMachine(CoreRules):
    """Any order of arrivals, launches, completions, failures and aborts keeps every promise of the core."""

    vocab = VOCAB

    @initialize(
        depth=st.integers(0, 1), seqs=st.integers(1, 4), chunk=st.integers(4, 20), tiers=tiers, states=states,
        drafts=st.integers(0, 9),
    )  # fmt: skip
    def start(self, depth: int, seqs: int, chunk: int, tiers: Tiers, states: States, drafts: int) -> None:
        self.driver = make_fuzz_driver(depth, 14, seqs, chunk, True, tiers, states, drafts)
        self.requests: dict[str, EngineRequest] = {}

    @rule(shape=request_shape)
    def arrive(self, shape: tuple) -> None:  # type: ignore[type-arg]
        request = build(str(len(self.requests)), shape)
        with suppress(QueueFullError):  # its promise cannot be kept
            self.driver.add(request)
            self.requests[request.request_id] = request

    @invariant()
    def online_decodes_are_never_forgotten(self) -> None:
        """Every running online decode that memory did not stop is in the newest step (HyGen Algorithm 1, corrected)."""
        if not hasattr(self, "driver") or not self.driver.in_flight:
            return
        newest = self.driver.in_flight[-1]
        scheduler = self.driver.core.state
        if scheduler.quarantined:
            return  # suspects of a failed step, or the canary, have steps of their own
        for request in scheduler.running[RequestClass.ONLINE]:
            due = request.num_expected_tokens - request.num_computed_tokens == 1
            wanted = request.num_expected_tokens < request.max_total_tokens
            if due and wanted and request.num_placeholders == 0 and len(self.driver.in_flight) == 1:
                had_room = request.num_computed_tokens < len(request.cache_map.blocks) * BLOCK
                assert not had_room or request.last_step == newest.step_id or request.num_output_tokens == 0


TestCoreMachine = machine_test(CoreMachine, 40, 60)
