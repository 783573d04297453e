"""K and V of requests that wait in 8 bits, in half their room: which blocks, what it costs, faults, and nobody else."""

import math
import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hybrid_scheduling import VOCAB, actions, check_solo, four_that_grow, make
from test_int8_cache import plan
from test_int8_cache import random as numbers
from test_parked import DEAR_COPIES, KV, Shelf, where
from test_placement import BLOCK, all_costs, past
from test_swap_faults import decoder, requests_of, solo

from engine.api import FinishReason, RequestClass
from engine.build import scheduler_config
from engine.cache.blocks import CacheAction, CacheKind
from engine.cache.cache import Cache
from engine.cache.placement import Place, RestoreCosts, release_units
from engine.cache.pool import BlockPool
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.execution.compressed import CompressedUnits, scale_bytes
from engine.execution.cpu.device import TorchDevice
from engine.execution.cuda.device import CudaDevice
from engine.execution.runner import Runner
from engine.models import torch_ops
from engine.models.byte_cells import dequantize, quantize
from engine.profiling.cache_costs import CacheTiers, measure_cache_costs
from engine.request import Request, RequestStatus
from engine.scheduling.output import SchedulerOutput
from predictor.costs import NOT_MEASURED
from predictor.limits import Limits
from predictor.model import LatencyModel

CONVERTS = LatencyModel(intercept=0.01, prefill_tokens=1e-3, transferred=1e-5, restored=1e-8)
COMPRESS, EXPAND, KV8 = CacheAction.COMPRESS, CacheAction.EXPAND, CacheKind.KV8
CHEAP = RestoreCosts(recompute=1.0, restore=0.0, copy=BLOCK / 2, convert=0.1)


# --- which blocks ----------------------------------------------------------------------------------------------------


def test_half_the_room_is_had_before_anything_is_lost_or_copied() -> None:
    assert release_units([past(4)], 3, 100, CHEAP) == [(0, Place.COMPRESS, 3)]
    assert release_units([past(4)], 6, 100, CHEAP) == [(0, Place.DROP, 2), (0, Place.COMPRESS, 2)]
    assert release_units([past(3), past(2, KV8)], 5, 0, CHEAP) == [(0, Place.DROP, 2), (0, Place.COMPRESS, 1)]
    assert release_units([past(3)], 6, 0, CHEAP) == [(0, Place.DROP, 3)]
    dear = replace(CHEAP, convert=2.0)
    assert release_units([past(4)], 3, 100, dear) == [(0, Place.DROP, 2)], "what costs more is not done"
    assert release_units([past(4, KV8)], 3, 0, CHEAP) == [(0, Place.DROP, 3)], "no smaller than 8 bits"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=2), st.data(), all_costs, st.floats(0.0, 0.5))
def test_enough_comes_free_at_hardly_more_than_the_least_cost(
    blocks: list[int], data: st.DataObject, costs: RestoreCosts, convert: float
) -> None:
    costs, pasts = replace(costs, convert=convert), [past(count) for count in blocks]
    units = data.draw(st.integers(1, 2 * sum(blocks)))
    moves = release_units(pasts, units, 100, costs)
    assert moves == sorted(moves)
    for index, one in enumerate(pasts):
        assert sum(move.blocks for move in moves if move.past == index) <= one.num_blocks
    assert sum(move.blocks * pasts[move.past].freed_units(move.place) for move in moves) >= units
    ways = {Place.DROP: (2, BLOCK * costs.recompute), Place.HOST: (2, 2 * costs.copy)}
    ways |= {Place.COMPRESS: (1, BLOCK * convert)}
    best = min(
        sum(ways[place][1] for place in choice if place is not None)
        for choice in product((None, *Place), repeat=sum(blocks))
        if sum(ways[place][0] for place in choice if place is not None) >= units
    )
    found = sum(move.blocks * ways[move.place][1] for move in moves)
    least, most = best, 2 * best + max(cost for _, cost in ways.values())
    assert least - 1e-9 <= found <= most + 1e-9


def test_a_block_gives_up_half_its_room_in_place() -> None:
    pool = BlockPool(8)
    block = pool.allocate(KV, online=True)
    assert block is not None
    pool.publish(block, b"shared")
    small = pool.compress(block, 4, 3)
    assert small.entry.kind is KV8 and small.entry.units == block.entry.units[:1]
    assert pool.find(b"shared") is None, "nobody is offered what is rounded now"
    assert (pool.num_free_units, pool.num_deferred_units) == (6, 1), "a step in flight may read V"
    pool.complete_step(3)
    pool.check_integrity([small])
    spare = pool.allocate(KV8, online=True)
    assert spare is not None
    whole = pool.expand(small, spare)
    assert whole.entry.kind is KV and whole.entry.units == small.entry.units + spare.entry.units
    pool.check_integrity([whole])
    pool.release(whole, -1)
    assert pool.num_free_units == 6, "its unit is written by step 4"
    pool.complete_step(4)
    assert pool.num_free_units == 8


def shelf_of(host: int = 0, model: LatencyModel | None = None) -> Shelf:
    shelf = Shelf(host, model, scratch=0)
    shelf.config = replace(shelf.config, preempted_int8=True)
    shelf.cache = Cache(shelf.config, model)
    shelf.pool, shelf.host, shelf.parked = shelf.cache.device, shelf.cache.host, shelf.cache.parked
    return shelf


def forms(request: Request) -> str:
    """d, h: K and V on the device and the host; 8, H: those in 8 bits."""
    narrow = {"d": "8", "h": "H"}
    blocks = zip(where(request), request.cache_map.blocks, strict=True)
    return "".join(narrow[place] if block.entry.kind is KV8 else place for place, block in blocks)


def test_a_past_is_compressed_from_its_tail_then_dropped_and_comes_back_whole() -> None:
    shelf = shelf_of()
    request = shelf.park([KV] * 5, 18)
    shelf.parked.reclaim(2, 0, online=True)
    assert forms(request) == "ddd88" and shelf.pool.num_free_units == 32
    assert request.cache_map.num_parked_tokens == 18 and request.cache_map.parked_in_step == 0
    shelf.parked.reclaim(4, 1, online=True)
    assert forms(request) == "8888" and request.cache_map.num_parked_tokens == 16, "what was narrow already went"
    shelf.parked.reclaim(2, 2, online=True)
    assert forms(request) == "88" and request.cache_map.num_parked_tokens == 8
    shelf.check()
    claim = shelf.cache.claim(request)
    assert (claim.widened_tokens, claim.units) == (8, 2 + 2 * 3)
    shelf.cache.take(request, claim, 2)
    request.move_to(RequestStatus.RUNNING)
    assert forms(request) == "dd"
    done = [operation.action for operation in shelf.cache.tiers.take_operations()]
    assert done == [COMPRESS] * 2 + [EXPAND] * 2, "what was called off is not done"
    shelf.cache.tiers.complete_step(2)
    shelf.check()


def test_what_a_step_compresses_it_does_not_copy_and_a_later_one_does() -> None:
    shelf = shelf_of(40, CONVERTS)
    request = shelf.park([KV] * 2, 8)
    shelf.parked.reclaim(1, 0, online=True)
    assert forms(request) == "d8"
    shelf.parked.reclaim(1, 0, online=True)
    assert forms(request) == "88"
    assert len(shelf.cache.tiers.take_operations()) == 2
    shelf.parked.reclaim(1, 1, online=True)
    assert forms(request) == "8H"
    shelf.check()
    shelf.parked.forget(request)
    shelf.cache.tiers.complete_step(1)
    assert shelf.pool.num_free_units == 40 == shelf.host.num_free_units
    shelf.check()


def test_a_past_that_is_given_up_calls_its_conversion_off() -> None:
    shelf = shelf_of()
    request = shelf.park([KV] * 2, 8)
    shelf.parked.reclaim(2, 0, online=True)
    shelf.parked.forget(request)
    assert shelf.pool.num_free_units == 40 and not shelf.cache.tiers.operations
    shelf.check()


# --- the scheduler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_the_preempted_keep_what_they_have_computed_without_a_host(depth: int) -> None:
    computed = {}
    for int8 in (False, True):
        driver, requests = make(depth, preempted_int8=int8), four_that_grow()
        driver.add(*requests)
        driver.run()
        check_solo(driver, *requests)
        computed[int8] = sum(step.num_tokens for step in driver.steps)
    assert computed[True] < computed[False]
    units = driver.core.stats().cache_units
    assert units["compress"] > 0 and units["expand"] > 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("failing", range(2, 30, 3))
def test_a_step_that_fails_behind_a_conversion_leaves_no_doubtful_past(depth: int, failing: int) -> None:
    driver = make(depth, preempted_int8=True, fail=frozenset({failing, failing + 9, failing + 10}))
    requests = four_that_grow()
    driver.add(*requests)
    driver.run()
    check_solo(driver, *requests)


def test_random_loads_get_every_token_right() -> None:
    """Pools that are too small, with and without a host: 8 bits are made on the way down, and read on the way up."""
    met: set[CacheAction] = set()
    for seed in range(24):
        rng = random.Random(seed)
        driver = make(
            seed % 2,
            blocks=14,
            host=rng.choice([0, 12, 60]),
            policy=rng.choice(["fcfs", "goodput"]),
            model=rng.choice([None, DEAR_COPIES, CONVERTS]),
            preempted_int8=True,
            enable_prefix_caching=seed % 3 > 0,
        )
        requests = []
        for index in range(12):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(4, 30))]
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


# --- the runner ------------------------------------------------------------------------------------------------------

SHAPE = (3, 4, 2, 24)
SIZE = math.prod(SHAPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_block_fits_in_one_unit_and_comes_back_within_half_a_step(dtype: torch.dtype) -> None:
    units = numbers(40, SIZE).to(dtype)
    units[7, 5] = math.nan
    before = units.clone()
    none, scales = torch.zeros((2, 40 * scale_bytes(*SHAPE[:3])), dtype=torch.uint8)
    held = CompressedUnits(units, scales, *SHAPE, none[:0])
    blocks = np.stack((np.arange(19), 39 - np.arange(19)), axis=1)  # more than a piece
    held.compress(blocks)
    units[20:] = 9.0  # V's units are somebody else's now
    elsewhere = np.stack((blocks[:, 0], 20 + np.arange(19)), axis=1)
    held.expand(elsewhere)
    for (k, v), (_, new) in zip(blocks.tolist(), elsewhere.tolist(), strict=True):
        for old, unit in ((k, k), (v, new)):
            expected = dequantize(*quantize(before[old].view(SHAPE)), dtype).flatten()
            assert torch.equal(units[unit].nan_to_num(3.0), expected.nan_to_num(3.0))
    assert units[7].isnan().sum() == 24, "NaN stays visible, in its head alone"
    assert held.scales[0].nbytes == scale_bytes(3, 4, 2)


def driver_of(host: int = 0, *, cuda: bool = False) -> Driver:
    """`cuda`: its device over the kernels' twins, which is a step ahead."""
    sizes = {"num_units": 24, "block_size": 4, "max_num_seqs": 8, "max_model_len": 64, "host_units": host}
    more = {"max_num_batched_tokens": 64, "unit_bytes": 1, "pipeline_depth": int(cuda)}
    config = SchedulerConfig(**sizes, **more, preempted_int8=True)
    model = CONVERTS if host else None
    tiers: dict[str, Any] = {"host_units": host, "preempted_int8": True}
    kernels: Any = torch_ops
    device: Any = TorchDevice(decoder(), config.limits, **tiers)
    if cuda:
        device = CudaDevice(decoder().spec, decoder().weights, kernels, config.limits, graphs=False, **tiers)
        device.warm_up()
    return Driver(Runner(device), config, model=model)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("host", [0, 6])
def test_requests_come_back_from_8_bits(host: int, cuda: bool) -> None:
    driver, requests = driver_of(host, cuda=cuda), requests_of()
    driver.add(*requests)
    driver.run()
    assert {COMPRESS, EXPAND} <= set(actions(driver.steps)) and driver.core.stats().failed_steps == 0
    same = [driver.outputs[request.request_id] == solo(index) for index, request in enumerate(requests)]
    assert sum(same) >= 3, "a stay in 8 bits changes hardly a greedy token"


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("fault", ["raises", "leaves NaN"])
def test_a_conversion_that_goes_wrong_costs_its_step_alone(
    fault: str, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, batches = CompressedUnits.compress, []

    def compress(held: CompressedUnits, blocks: np.ndarray) -> None:
        batches.append(blocks)
        if fault == "leaves NaN" or len(batches) == 1:
            held._units[blocks[:, 0]] = math.nan
        if fault == "raises" and len(batches) == 1:
            raise RuntimeError("no memory for it")
        whole(held, blocks)

    driver, requests = driver_of(cuda=cuda), requests_of()
    monkeypatch.setattr(CompressedUnits, "compress", compress)
    driver.add(*requests)
    driver.run()
    assert batches and driver.core.stats().failed_steps >= 1
    for request in requests:
        assert driver.finals[request.request_id].finish_reason is FinishReason.LENGTH
    same = [driver.outputs[request.request_id] == solo(index) for index, request in enumerate(requests)]
    assert sum(same) >= 3, "nothing of what was lost is read"
    assert driver.core.stats().units_owned == 0


# --- what is measured and said ---------------------------------------------------------------------------------------


def test_the_conversion_is_measured_and_charged() -> None:
    """A machine on which a converted block takes a second."""

    def latency(output: SchedulerOutput) -> float:
        return 0.5 + sum(op.action in (COMPRESS, EXPAND) for op in output.operations)

    limits = Limits(4, 64, 64, num_units=40, block_size=4)
    runner = SimpleNamespace(launch=lambda output: lambda: SimpleNamespace(latency=latency(output)))
    costs = measure_cache_costs(runner, limits, CacheTiers(unit_bytes=64, compresses=True), repeats=1)
    assert costs.restore == pytest.approx(0.25) and costs.run_hidden is None
    assert costs.covers(hidden=False, host=False, converts=True)
    assert not NOT_MEASURED.covers(hidden=False, host=False, converts=True)
    driver, requests = make(model=CONVERTS, preempted_int8=True), four_that_grow()
    driver.add(*requests)
    driver.run()
    converting = [step for step in driver.steps if actions([step])]
    for step in converting:
        assert step.cache_work.restored_tokens == 4 * len(step.operations)
    assert converting


def test_its_room_is_counted_and_what_it_does_not_go_with_is_said() -> None:
    flags = {"dtype": "bfloat16", "num_gpu_blocks_override": None, "swap_space": 0.01}
    (plain, _), (narrow, config) = plan(**flags), plan(**flags, kv_cache_dtype="preempted-int8")
    assert narrow.preempted_int8 and scheduler_config(config, narrow).preempted_int8 and not plain.preempted_int8
    assert narrow.precision.endswith("int8 preempted") and narrow.host_units < plain.host_units
    assert 0.9 * plain.num_blocks < narrow.num_blocks < plain.num_blocks, "scales lie beside the pool"
    with pytest.raises(ConfigError, match="units of 8 bits hold no hidden state"):
        EngineConfig(kv_cache_dtype="preempted-int8", hidden_cache=True)
    with pytest.raises(ConfigError, match="--overload drop does not go with --kv-cache-dtype preempted-int8 yet"):
        EngineConfig(kv_cache_dtype="preempted-int8", overload="drop")
