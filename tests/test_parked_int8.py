"""K and V in 8 bits on the tiers behind the pool alone: what a stay there costs, its room, aborts and faults."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from driver import Driver
from test_int8_cache import BLOCK, plan, random
from test_swap_faults import decoder, requests_of, solo

from engine.api import FinishReason
from engine.build import resolve_model
from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.execution.cpu.device import TorchDevice
from engine.execution.disk import DiskTier, slot_bytes
from engine.execution.parked_form import ParkedForm
from engine.execution.runner import Runner
from engine.models.byte_cells import ByteSlices, slice_elements
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.spec import load_spec
from predictor.limits import Limits

SHAPE = (3, BLOCK, 2, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_unit_comes_back_within_half_a_step_as_the_cache_of_8_bits_has_it(dtype: torch.dtype) -> None:
    form = ParkedForm(*SHAPE, dtype, int8=True)
    unit, back = random(*SHAPE).to(dtype), torch.empty(SHAPE, dtype=dtype)
    unit[1, 2, 0, 5], unit[2, 3] = math.nan, 0.0
    parked = torch.full((form.elements,), 77, dtype=form.dtype)
    form.keep(unit.view(-1), parked)
    form.give_back(parked, back.view(-1))
    assert form.num_bytes == 3 * slice_elements(BLOCK, 2, 24, torch.int8)
    twin = ByteSlices(torch.empty(3, form.elements // 3, dtype=torch.int8), *SHAPE[1:])
    twin.write(torch.arange(3 * BLOCK), unit.flatten(0, 1))
    assert torch.equal(twin.read(torch.arange(3), dtype).view(SHAPE).nan_to_num(9.0), back.nan_to_num(9.0))
    assert back[1, 2, 0].isnan().all() and back.isnan().sum() == 24, "NaN stays visible, in its head alone"
    assert (back[2, 3] == 0).all()
    sound = ~back.isnan()
    step = unit.float().nan_to_num(0.0).abs().amax(-1, keepdim=True).expand(SHAPE) / 127
    error = (back.float() - unit.float()).abs()
    assert (error[sound] <= 0.51 * step[sound] + torch.finfo(dtype).eps * back.float().abs()[sound]).all()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("int8", [False, True])
def test_what_is_stored_already_is_kept_byte_for_byte(stored: torch.dtype, int8: bool) -> None:
    if int8 and stored == torch.bfloat16:
        return
    form = ParkedForm(*SHAPE, stored, int8=int8)
    unit = torch.randint(0, 99, (form.elements,), generator=torch.Generator().manual_seed(0)).to(stored)
    parked, back = torch.empty_like(unit), torch.empty_like(unit)
    form.keep(unit, parked)
    form.give_back(parked, back)
    assert torch.equal(back, unit) and torch.equal(parked, unit)


def test_the_demo_model_goes_on_from_a_parked_past_as_from_its_own() -> None:
    """KL divergence of the next tokens' distributions behind a past that was parked twice from the exact ones."""
    folder = resolve_model(EngineConfig())
    spec = load_spec(folder)
    weights = load_weights(spec, folder, dtype="float32", device="cpu", load_format="safetensors", seed=0)
    limits = Limits(1, 128, 128, num_units=16, block_size=BLOCK)
    ids = np.random.default_rng(3).integers(3, spec.vocab_size, 128)
    logits = []
    for parked in (False, True):
        device = TorchDevice(Decoder(spec, weights), limits, host_units=16, parked_int8=parked)
        device.rows.tokens[0, :128], device.rows.num_blocks[0] = ids, 8
        device.rows.k_table[0, :8], device.rows.v_table[0, :8] = np.arange(16).reshape(2, 8)
        device.rows.sampling.greedy[:] = False
        with torch.inference_mode():
            device.forward(np.array([(0, 0, 112, 0)]))
            before = device.pool.units[:16].clone()
            for _ in range(2):
                device.swap_out(np.array([(unit, 15 - unit) for unit in range(16)]))
                device.pool.units[:16] = math.nan
                device.swap_in(np.array([(15 - unit, unit) for unit in range(16)]))
            assert torch.equal(device.pool.units[:16], before) is not parked, "exact unless it is asked for"
            steps = [device.forward(np.array([(0, at, 1, 1)]))[0][0].float() for at in range(112, 128)]
        logits.append(torch.stack([step.clone() for step in steps]).log_softmax(-1))
    exact, rounded = logits
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert 0.0 < float(divergence.mean()) < 2e-3 and float(divergence.max()) < 1e-2


def make(blocks: int = 12, disk: Path | None = None) -> Driver:
    sizes = {"num_units": 2 * blocks, "block_size": 4, "max_num_seqs": 8, "max_model_len": 64}
    more = {"disk_units": 60} if disk else {"host_units": 200}
    config = SchedulerConfig(**sizes, max_num_batched_tokens=64, unit_bytes=1, **more)
    runner = Runner(TorchDevice(decoder(), config.limits, host_units=more.get("host_units", 0), parked_int8=True))
    driver = Driver(runner, config)
    if disk is not None:
        runner.disk = DiskTier(disk, runner.device.pool, 60, bytes(16))
        driver.core.adopt(runner.disk.found)
    return driver


def test_aborts_and_nan_in_parked_pasts_cost_nobody_else() -> None:
    driver, requests = make(), requests_of()
    driver.add(*requests)
    runner = driver.runner
    assert isinstance(runner, Runner)
    out = None
    while out is None:
        driver.step()
        out = next((op for op in driver.steps[-1].operations if op.action is CacheAction.SWAP_OUT), None)
    slices = runner.device.pool.host_units
    slices.view(torch.int16).fill_(0x7FC0)  # every scale is NaN
    waiting = [id for id, request in driver.core._requests.items() if request.cache_map.num_parked_tokens]
    assert len(waiting) >= 1
    others = [request for request in requests if request.request_id not in waiting[1:]]
    for request_id in waiting[1:]:
        driver.abort(request_id)
    driver.run()
    assert driver.core.stats().failed_steps >= 1
    for request in others:
        assert driver.finals[request.request_id].finish_reason is FinishReason.LENGTH
    poisoned = waiting[0]
    assert driver.outputs[poisoned] == solo(int(poisoned)), "it is computed again, exactly"
    stats = driver.core.stats()
    assert (stats.host_units_used - stats.host_units_cached, stats.units_owned) == (0, 0)


def test_parked_requests_come_back_from_8_bits() -> None:
    driver, requests = make(), requests_of()
    driver.add(*requests)
    driver.run()
    done = [op.action for step in driver.steps for op in step.operations]
    assert CacheAction.SWAP_OUT in done and CacheAction.SWAP_IN in done
    assert driver.core.stats().failed_steps == 0
    same = [driver.outputs[request.request_id] == solo(index) for index, request in enumerate(requests)]
    assert sum(same) >= 3, "a stay in 8 bits changes hardly a greedy token"


def test_the_disk_keeps_8_bits_too(tmp_path: Path) -> None:
    driver = make(disk=tmp_path)
    runner = driver.runner
    assert isinstance(runner, Runner) and runner.disk is not None
    pool, disk = runner.device.pool, runner.disk
    assert disk._slot == slot_bytes(pool.parked.num_bytes) and pool.parked.num_bytes * 3 < pool.units[:1].nbytes
    pool.units[:2] = random(2, pool.units.shape[1])
    here, there, back = (
        CacheEntry(CacheKind.KV, tier, units)
        for tier, units in ((Tier.DEVICE, (0, 1)), (Tier.DISK, (5, 2)), (Tier.DEVICE, (7, 4)))
    )
    disk.write([CacheOperation(CacheAction.WRITE, here, there, key=b"k" * 16)])
    disk.read([CacheOperation(CacheAction.READ, there, back, key=b"k" * 16)])
    torch.testing.assert_close(pool.units[[7, 4]], pool.units[[0, 1]], rtol=0.0, atol=0.02)
    disk.read([CacheOperation(CacheAction.READ, there, back, key=b"l" * 16)])
    assert pool.units[[7, 4]].isnan().all()
    disk.close()


def test_a_start_has_nearly_twice_the_room_there() -> None:
    flags = {"dtype": "bfloat16", "swap_space": 0.5}
    (plain, _), (small, _) = plan(**flags), plan(**flags, kv_cache_dtype="parked-int8")
    assert 1.9 < small.host_units / plain.host_units < 2.0 and small.num_blocks == plain.num_blocks
    assert small.precision == "bfloat16, int8 parked" and not small.eight_bits
    with pytest.raises(ConfigError, match="--swap-space"):
        EngineConfig(kv_cache_dtype="parked-int8")
    with pytest.raises(ConfigError, match="hidden-cache"):
        EngineConfig(kv_cache_dtype="parked-int8", swap_space=1.0, hidden_cache=True)
