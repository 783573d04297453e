"""Online policies: their orders, LARRY's sign and units, scanning past misfits, reservations, determinism."""

from types import SimpleNamespace
from typing import Any

import pytest
from driver import Driver, make_request
from integrity import check_core
from support.tables import mostly_slow

from engine.api import EngineRequest, RequestTimes, SamplingParams
from engine.colocation.waits import objective_of
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.limits import SchedulerConfig
from engine.request import Request
from engine.scheduling.objective import UNLIMITED
from engine.scheduling.policies import (
    ONLINE_POLICIES,
    larry,
    larry_score,
)
from engine.virtual import Arrival, VirtualDriver
from loadgen.simulation.gpu import SimulatedDevice, SimulatedRunner
from loadgen.simulation.policies import SIMULATED_POLICIES, find_policy, shortest_remaining
from predictor.model import LatencyModel
from predictor.slo import SLO

BLOCK = 16


def waiting(number: int, prompt: int, arrival: float, output: int = 10) -> Request:
    sampling = SamplingParams(max_tokens=100, min_tokens=output)
    return Request(EngineRequest(f"r{number}", (1,) * prompt, sampling), RequestTimes(arrival), number)


def state_of(queue: list[Request]) -> Any:
    return SimpleNamespace(waiting_online=queue, config=SimpleNamespace(block_size=BLOCK))


def sorted_by(policy: str, queue: list[Request]) -> list[Request]:
    order = find_policy(policy).order
    assert order is not None
    return order(state_of(queue), 1.0)


def names(requests: object) -> list[str]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


def test_larry_takes_small_requests_first_and_the_queue_length_weighs_memory() -> None:
    queue = [waiting(0, 800, 0.0), waiting(1, 80, 0.5)]
    long = state_of(queue * 10)
    small, large = larry_score(long, queue[1], 10.0, 1.0), larry_score(long, queue[0], 10.0, 1.0)
    assert small > large  # with the plus sign that the paper prints the larger one would win
    # blocks: 80 // 16 + 1 = 6 and 800 // 16 + 1 = 51
    assert (small, large) == (9.5 - 20 * 6, 10.0 - 20 * 51)
    assert names(larry(state_of(queue), 10.0)) == ["r1", "r0"]
    assert names(larry(state_of(queue), 10.0, alpha=2000.0)) == ["r0", "r1"]


def test_larry_becomes_fcfs_for_a_large_alpha() -> None:
    queue = [waiting(i, 900 - 100 * i, 0.1 * i) for i in range(5)]
    order = sorted_by("larry:1e6", queue)
    assert names(order) == [f"r{i}" for i in range(5)]
    order = sorted_by("larry:0", queue)
    assert names(order) == [f"r{i}" for i in reversed(range(5))]


@pytest.mark.parametrize("alpha", [1.0, 500.0])
def test_the_served_policy_starts_requests_by_the_papers_score(alpha: float) -> None:
    """As `tidemill serve --online-policy larry` builds it: its default SLO and maximum wait, and a latency model."""
    served = EngineConfig(online_policy=f"larry:{alpha:g}")
    objective = objective_of(SLO.parse(served.slo), UNLIMITED)
    limits = {"max_queue_time": served.max_queue_time, "enable_prefix_caching": False}
    config = SchedulerConfig(num_units=400, max_model_len=1024, block_size=BLOCK, max_num_seqs=1, **limits)  # type: ignore[arg-type]
    runner = SimulatedRunner(SimulatedDevice.named("qwen2.5-0.5b", "a100-40gb"), noise=0.0)
    model = LatencyModel(intercept=0.01, prefill_tokens=1e-5, decodes=1e-4, token_limit=512)
    driver = Driver(runner, config, online_policy=served.online_policy, objective=objective, model=model)
    queued: dict[str, tuple[float, int]] = {}
    expected = []
    for prompt in (380, 60, 250, 120, 30, 200, 90, 310):
        request_id = f"{len(queued)}"
        queued[request_id] = (driver.now, prompt // BLOCK + 1)
        driver.add(make_request(request_id, (1,) * prompt, 3))
        driver.now += 0.05
    while queued:
        now, number = driver.now, len(driver.steps)
        assert driver.launch()
        for new in driver.steps[number].new_requests:
            scores = {name: alpha * (now - at) - len(queued) * blocks for name, (at, blocks) in queued.items()}
            expected.append(max(scores, key=scores.__getitem__))
            del queued[new.request_id]
        driver.complete()
    assert started(driver) == expected
    driver.run()


def test_srpt_orders_by_the_true_remaining_output() -> None:
    queue = [waiting(0, 10, 0.0, output=50), waiting(1, 10, 0.0, output=5), waiting(2, 10, 0.0, output=20)]
    assert names(shortest_remaining(state_of(queue), 0.0)) == ["r1", "r2", "r0"]
    queue[0].token_ids += [0] * 48  # it was preempted with two tokens to go
    assert names(shortest_remaining(state_of(queue), 0.0)) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("name", ["shortest", "larry:", "larry:-1", "larry:nan", "larry:inf", "fcfs:1", ""])
def test_unknown_policies_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        find_policy(name)


def simulated_driver(policy: str, num_units: int = 60, **options: object) -> Driver:
    config = SchedulerConfig(num_units=num_units, max_model_len=512, enable_prefix_caching=False, max_num_seqs=16)
    runner = SimulatedRunner(SimulatedDevice.named("qwen2.5-0.5b", "a100-40gb"), noise=0.0)
    return Driver(runner, config, online_policy=policy, **options)


def started(driver: Driver) -> list[str]:
    return [new.request_id for output in driver.steps for new in output.new_requests]


def test_only_policies_that_scan_start_a_request_behind_a_misfit() -> None:
    for policy, expected in (("fcfs", ["a"]), ("larry", ["a", "small"]), ("srpt-oracle", ["a"])):
        driver = simulated_driver(policy)
        driver.add(make_request("a", (1,) * 300, 40))
        driver.step()
        driver.add(
            make_request("large", (1,) * 350, 4), make_request("small", (1,) * 20, 4 if policy != "srpt-oracle" else 40)
        )
        driver.step()
        assert started(driver) == expected, policy
        driver.run()
        assert set(driver.finals) == {"a", "large", "small"}


def test_no_preempt_never_preempts_where_fcfs_does() -> None:
    preemptions = {}
    for policy in ("fcfs", "no-preempt"):
        driver = simulated_driver(policy)
        driver.add(*(make_request(f"r{i}", (1,) * 60, 150) for i in range(6)))
        driver.run()
        assert all(len(tokens) == 150 for tokens in driver.outputs.values())
        preemptions[policy] = sum(driver.stats().preemptions.values())
    assert preemptions["no-preempt"] == 0 < preemptions["fcfs"]


@pytest.mark.parametrize("policy", mostly_slow([*ONLINE_POLICIES, *SIMULATED_POLICIES], ["fcfs", "goodput", "random"]))
def test_every_policy_finishes_everything_and_repeats_itself(policy: str) -> None:
    simulated = SimulatedDevice.named("qwen2.5-0.5b", "a100-40gb")

    def run() -> list[list[float]]:
        config = SchedulerConfig(num_units=120, max_model_len=512, enable_prefix_caching=False, max_num_seqs=8)
        core = EngineCore(config, online_policy=find_policy(policy))
        arrivals = [
            Arrival(0.002 * i, make_request(f"r{i}", (1,) * (20 + 37 * i % 300), 5 + 11 * i % 90)) for i in range(60)
        ]
        records = VirtualDriver(core, SimulatedRunner(simulated, seed=3), arrivals).run(1e6).online
        check_core(core)
        assert not core.has_requests and all(record.ended is not None for record in records)
        return [record.token_times for record in records]

    assert run() == run()
