"""Requests that run from blocks in 8 bits where memory is short: who gets room by it, faults, costs, and a start."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cuda_engine import make_runner
from driver import Driver, make_request
from native_build import library_of
from test_hybrid_scheduling import VOCAB, actions, check_solo, four_that_grow, make
from test_int8_cache import plan
from test_native_model import team_of
from test_preempted_int8 import COMPRESS, CONVERTS, EXPAND, KV8
from test_swap_faults import decoder, requests_of, solo

from engine.api import RequestClass
from engine.build import scheduler_config
from engine.cache.blocks import CacheAction
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cpu.native.library import Level
from engine.execution.cpu.native.linear import Native
from engine.execution.runner import Runner
from engine.profiling.cache_costs import CacheTiers, measure_cache_costs
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import SchedulerOutput
from gateway.telemetry.metrics import _pool_metrics
from predictor.limits import Limits

BOTH = {"preempted_int8": True, "running_int8": True}
READS = replace(CONVERTS, compact=1e-9)
DEAR = replace(CONVERTS, compact=1.0)


def most_at_once(driver: Driver, num_requests: int) -> int:
    """Step to the first preemption, or to the end; the most online requests that ran until then."""
    most = 0
    while len(driver.finals) < num_requests:
        driver.step()
        driver.core.check_integrity()
        stats = driver.core.stats()
        if sum(stats.preemptions.values()):
            break
        most = max(most, stats.running[RequestClass.ONLINE])
    return most


@pytest.mark.parametrize("policy", ["fcfs", "goodput", "apt"])
@pytest.mark.parametrize("blocks", [200, 330])
def test_nearly_twice_as_many_run_before_the_first_is_preempted(blocks: int, policy: str) -> None:
    """A burst of alike prompts of 25 blocks. A block that is written to stays whole, so that shorter ones gain less."""
    most, lost = {}, {}
    for int8 in (False, True):
        options = BOTH if int8 else {"preempted_int8": True}
        driver = make(blocks=blocks, rows=64, batch=256, policy=policy, model=READS, **options)
        driver.core.set_objective(StepObjective(ttft=500.0, tbt=500.0))
        requests = [make_request(str(index), [index] * 100, 20) for index in range(64)]
        driver.add(*requests)
        most[int8] = most_at_once(driver, len(requests))
        driver.run()
        check_solo(driver, *requests)
        lost[int8] = sum(driver.core.stats().preemptions.values())
        assert driver.core.stats().units_owned == 0
    assert most[True] >= 1.8 * most[False], most
    assert lost[True] < lost[False]


@pytest.mark.parametrize("depth", [0, 1])
def test_those_that_grow_are_narrowed_before_one_is_preempted(depth: int) -> None:
    driver, requests = make(depth, blocks=22, model=READS, **BOTH), four_that_grow()
    driver.add(*requests)
    driver.run()
    check_solo(driver, *requests)
    stats = driver.core.stats()
    assert not stats.preemptions.get("memory") and stats.cache_units["compress"] > 0
    assert "expand" not in stats.cache_units, "what is in 8 bits runs so"
    told = {sample.labels.get("operation"): sample.value for m in _pool_metrics(stats) for sample in m.samples}
    assert told["compress"] == stats.cache_units["compress"] and told["expand"] == 0
    read = [step.cache_work.compact_tokens for step in driver.steps]
    assert max(read) >= 4 * 10 and read[0] == 0, "and every step that reads it is charged"


def test_what_costs_more_than_computing_again_is_not_done() -> None:
    driver, requests = make(blocks=22, model=DEAR, **BOTH), four_that_grow()
    driver.add(*requests)
    driver.run()
    check_solo(driver, *requests)
    assert driver.core.stats().preemptions["memory"] > 0
    assert not any(step.cache_work.compact_tokens for step in driver.steps[:20])


def test_offline_work_narrows_no_chat() -> None:
    driver = make(blocks=16, model=READS, **BOTH)
    chat = make_request("chat", [1] * 24, 20)
    driver.add(chat)
    for _ in range(4):
        driver.step()
    lines = [make_request(f"line{index}", [index] * 16, 8, request_class=RequestClass.OFFLINE) for index in (2, 3)]
    driver.add(*lines)
    while len(driver.finals) < 3:
        driver.step()
        driver.core.check_integrity()
        held = driver.core._requests.get("chat")
        if held is not None and driver.core.stats().running[RequestClass.OFFLINE]:
            assert all(block.entry.kind is not KV8 for block in held.cache_map.blocks)
    check_solo(driver, chat, *lines)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("failing", range(2, 30, 3))
def test_a_step_that_fails_behind_a_conversion_leaves_nobody_a_doubtful_past(depth: int, failing: int) -> None:
    fail = frozenset({failing, failing + 9, failing + 10})
    driver = make(depth, blocks=18, model=READS, fail=fail, **BOTH)
    requests = four_that_grow()
    driver.add(*requests)
    driver.run()
    check_solo(driver, *requests)
    assert driver.core.stats().units_owned == 0


def test_random_loads_get_every_token_right() -> None:
    """Pools that are too small, with and without a host, prefixes and failures."""
    met: set[CacheAction] = set()
    for seed in range(40):
        rng = random.Random(seed)
        driver = make(
            seed % 2,
            blocks=14,
            host=rng.choice([0, 12, 60]),
            policy=rng.choice(["fcfs", "goodput", "apt"]),
            model=rng.choice([None, READS, DEAR]),
            enable_prefix_caching=seed % 3 > 0,
            fail=frozenset(rng.sample(range(60), rng.choice([0, 0, 3]))),
            **BOTH,
        )
        requests = []
        shared = [rng.randrange(VOCAB) for _ in range(12)]
        for index in range(12):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(4, 30))]
            prompt = shared + prompt[:18] if rng.random() < 0.4 else prompt
            line = RequestClass.OFFLINE if rng.random() < 0.5 else RequestClass.ONLINE
            requests.append(make_request(str(index), prompt, rng.randrange(4, 24), request_class=line))
            driver.add(requests[-1])
            for _ in range(rng.randrange(4)):
                driver.step()
                driver.core.check_integrity()
        driver.run()
        check_solo(driver, *requests)
        met |= set(actions(driver.steps))
    assert met >= {COMPRESS, EXPAND, CacheAction.SWAP_OUT, CacheAction.SWAP_IN}


@pytest.mark.timeout(900)  # the library may have to be built
@pytest.mark.parametrize(
    ("host", "by"), [(host, by) for host in (0, 6) for by in ("torch", "native", "the kernels' twins")]
)
def test_every_path_runs_them_and_hardly_a_token_changes(host: int, by: str) -> None:
    sizes = {"num_units": 24, "block_size": 4, "max_num_seqs": 8, "max_model_len": 64, "host_units": host}
    config = SchedulerConfig(**sizes, max_num_batched_tokens=64, unit_bytes=1, **BOTH)
    if by == "torch":
        device = TorchDevice(decoder(), config.limits, host_units=host, preempted_int8=True)
    elif by == "the kernels' twins":
        device = make_runner(decoder().spec, decoder().weights, config).device
    else:
        native = Native(library_of(Level.AVX2), Level.AVX2, team_of(library_of(Level.AVX2), 1))
        device = NativeDevice(decoder(), native, config.limits, host_units=host, preempted_int8=True)
    driver, requests = Driver(Runner(device), config, model=READS), requests_of()
    driver.add(*requests)
    driver.run()
    assert COMPRESS in actions(driver.steps) and driver.core.stats().failed_steps == 0
    assert any(step.replaced for step in driver.steps), "some ran so"
    same = [driver.outputs[request.request_id] == solo(index) for index, request in enumerate(requests)]
    assert sum(same) >= 3


def test_reading_it_is_measured() -> None:
    """A machine on which a block in 8 bits costs its step a second."""

    def latency(output: SchedulerOutput) -> float:
        return 0.5 + sum(entry.kind is KV8 for new in output.new_requests for entry in new.entries)

    limits = Limits(4, 64, 64, num_units=40, block_size=4)
    runner = SimpleNamespace(launch=lambda output: lambda: SimpleNamespace(latency=latency(output)))
    tiers = CacheTiers(unit_bytes=64, compresses=True, reads=True)
    costs = measure_cache_costs(runner, limits, tiers, repeats=1)
    assert costs.run_hidden == pytest.approx(0.25) and costs.restore is not None


def test_the_start_makes_room_for_scales_and_refuses_what_it_does_not_go_with() -> None:
    flags = {"dtype": "bfloat16", "num_gpu_blocks_override": None}
    (plain, _), (narrow, config) = plan(**flags), plan(**flags, kv_cache_dtype="running-int8")
    scheduler = scheduler_config(config, narrow)
    assert scheduler.preempted_int8 and scheduler.running_int8 and narrow.precision.endswith("preempted and running")
    assert 0.9 * plain.limits.num_units < narrow.limits.num_units < plain.limits.num_units
    with pytest.raises(ConfigError, match="does not go with --hidden-cache"):
        EngineConfig(kv_cache_dtype="running-int8", hidden_cache=True)
    with pytest.raises(ConfigError, match="--overload drop does not go with --kv-cache-dtype running-int8 yet"):
        EngineConfig(kv_cache_dtype="running-int8", overload="drop")
