"""Any order of arrivals, steps, quiet spells, failures and aborts on a pool that one prompt may fill: something can
always run (`Driver.launch` asserts it), and every answer is the solo run's."""

import dataclasses
import math

import hypothesis.strategies as st
import pytest
from core_rules import CoreRules
from driver import fake_driver, make_request, small_config
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from support.fuzz import FULL

from engine.api import EngineRequest, FinishReason, Lane, RequestClass
from engine.forms import Pooling
from engine.limits import UNLIMITED_QUEUE, most_blocks
from engine.scheduling.objective import StepObjective
from predictor.budget import BudgetParams, Promise
from predictor.model import LatencyModel

VOCAB, BLOCK, NUM_BLOCKS = 30, 4, 14
POOL_TOKENS = NUM_BLOCKS * BLOCK
PREFIXES = ([], [1] * 9, [1] * 24)
MODEL = LatencyModel(
    intercept=0.010, decodes=1e-4, prefill_tokens=1e-3, attention=1e-5, transferred=1e-3, restored=1e-4
)

policies = st.sampled_from(["fcfs", "no-preempt", "larry", "random", "srpt-oracle", "apt", "goodput", "goodput-strict"])
tenants = st.sampled_from(["", "", "a", "b"])
tiers = st.sampled_from([(0, 0), (0, 0), (24, 0), (200, 0), (0, 6), (30, 5)])
"""Host units, blocks that may be run from hidden state."""
objectives = st.builds(
    StepObjective,
    ttft=st.sampled_from([0.001, 0.1, 10.0]),
    tbt=st.sampled_from([0.001, 0.05]),
    budget=st.sampled_from([BudgetParams("hygen", 0.001), BudgetParams("hygen", 0.05), BudgetParams("tidemill", 0.02)]),
    wait=st.sampled_from([math.inf, math.inf, 0.0001, 0.02]),
)

PROMISES = (None, Promise("premium", 0.001, 0.05), None, Promise("agent", e2e=1e3), Promise("default", 9.0, 0.001, 1e3))


class LivenessMachine(CoreRules):
    """The clock jumps in quiet spells, so that back-offs end and objectives pass."""

    vocab = VOCAB

    @initialize(
        limit=st.sampled_from([1, 2, 8]),
        depth=st.integers(0, 1),
        seqs=st.integers(1, 5),
        tokens=st.integers(6, 64),
        policy=policies,
        tiers=tiers,
        objective=objectives,
        share=st.sampled_from([0.0, 0.1, 1.0]),
        window=st.sampled_from([0, 0, 1, 6, 17]),
    )
    def start(
        self, limit: int, depth: int, seqs: int, tokens: int, policy: str, tiers: tuple[int, int],
        objective: StepObjective, share: float, window: int = 0,
    ) -> None:  # fmt: skip
        host_units, scratch_blocks = tiers
        scratch_blocks = 0 if window else scratch_blocks
        held = most_blocks(window, BLOCK, (1 + depth) * tokens)
        self.longest = POOL_TOKENS * (3 if held <= NUM_BLOCKS else 1)
        config = small_config(
            NUM_BLOCKS, max_model_len=self.longest, window=window, max_num_seqs=seqs, max_num_batched_tokens=tokens,
            min_prefill_chunk=8, pipeline_depth=depth, max_queue_time=UNLIMITED_QUEUE, host_units=host_units,
            scratch_blocks=scratch_blocks, max_offline_preemptions=limit,
        )  # fmt: skip
        self.driver = fake_driver(config, VOCAB, online_policy=policy, model=MODEL, objective=objective)
        self.driver.core.set_offline_share(share)
        self.requests: dict[str, EngineRequest] = {}

    def _arrive(
        self, request_class: RequestClass, prefix: list[int], length: int, output: int, tenant: str,
        lane: Lane = Lane.BATCH, pooling: Pooling | None = None,
    ) -> None:  # fmt: skip
        name = str(len(self.requests))
        output = min(output, self.longest - 1)
        tail = [2 + len(self.requests) % 20] * (length * self.longest // POOL_TOKENS)
        prompt = [*prefix, *tail][: self.longest - output]
        request = make_request(name, prompt, output, request_class=request_class, lane=lane, tenant=tenant)
        if request_class is RequestClass.ONLINE:
            request = dataclasses.replace(request, promise=PROMISES[len(self.requests) % len(PROMISES)])
        request = dataclasses.replace(request, pooling=pooling)
        self.requests[name] = request
        self.driver.add(request)

    @rule(
        prefix=st.sampled_from(PREFIXES), length=st.integers(1, POOL_TOKENS), output=st.integers(1, 12), tenant=tenants
    )
    def chat(self, prefix: list[int], length: int, output: int, tenant: str) -> None:
        self._arrive(RequestClass.ONLINE, prefix, length, output, tenant)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, POOL_TOKENS),
        output=st.integers(1, 50),
        lane=st.sampled_from(Lane),
        tenant=tenants,
        pooling=st.sampled_from([None, None, Pooling.LAST]),
    )
    def line(
        self, prefix: list[int], length: int, output: int, lane: Lane, tenant: str, pooling: Pooling | None
    ) -> None:
        self._arrive(RequestClass.OFFLINE, prefix, length, output, tenant, lane, pooling)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: not self.driver.in_flight)
    @rule(seconds=st.sampled_from([0.5, 5.0, 100.0]))
    def quiet(self, seconds: float) -> None:
        self.driver.now += seconds

    @rule(objective=objectives, share=st.sampled_from([0.0, 1.0]))
    def tune(self, objective: StepObjective, share: float) -> None:
        """Change the budget and the breaker's share while requests run."""
        self.driver.core.set_objective(objective)
        self.driver.core.set_offline_share(share)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            chats = sum(request.request_class is RequestClass.ONLINE for request in self.requests.values())
            assert self.driver.stats().preemptions.get("tenant", 0) <= chats, "each is moved once at most"
            assert self.driver.stats().units_owned == 0, "what ended holds units"


def run_machine(examples: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    chosen = settings(max_examples=examples, stateful_step_count=50, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(LivenessMachine, settings=chosen)


@pytest.mark.parametrize("policy", ["apt", "goodput"])
def test_a_running_prompt_that_an_older_one_takes_the_memory_of_is_passed_over(policy: str) -> None:
    """Found by the machine with longer histories: the knapsack had chosen among those that wait, and it waits now."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "min_prefill_chunk": 4}
    config = small_config(14, max_model_len=56, max_queue_time=UNLIMITED_QUEUE, **limits)
    objective = StepObjective(ttft=0.1, tbt=0.05)
    driver = fake_driver(config, VOCAB, online_policy=policy, model=MODEL, objective=objective)
    for number, length in enumerate((18, 38, 32, 40)):
        driver.add(make_request(str(number), [2 + number] * length, 1))
    for _ in range(2):
        driver.step()
    lost = driver.stats().units_free
    driver.core.state.pool.shrink(lost)
    while not driver.stats().preemptions.get("memory"):
        assert driver.step()
    driver.core.state.pool.grow(lost)
    driver.run()
    assert {final.finish_reason for final in driver.finals.values()} == {FinishReason.LENGTH}


@pytest.mark.fuzz
@pytest.mark.timeout(600)
def test_something_can_always_run() -> None:
    run_machine(200 if FULL else 12)


@pytest.mark.manual
def test_something_can_always_run_10_000_times() -> None:
    run_machine(10_000)
