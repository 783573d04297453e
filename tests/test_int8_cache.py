"""K and V in 8 bits: the loss by rounding, the pool in torch and in the native kernels, and the plan of a start."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from devices import pool_of
from native_build import library_of
from test_attention import LAYERS, Reference
from test_attention import Bench as AttentionBench
from test_native_model import LENGTH, load, team_of
from tiny_models import model_folder

from engine.api import SamplingParams
from engine.build import plan_launch, scheduler_config
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cpu.native.library import Level
from engine.execution.cpu.native.linear import Native
from engine.execution.cuda.device import CudaDevice
from engine.limits import Limits
from engine.models.byte_cells import INTEGERS, STEPS, dequantize, quantize, slice_elements
from engine.models.decoder import Decoder
from engine.scheduling.output import NewRequest, SchedulerOutput
from engine.triton_kernels import twins

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(900)]  # the first test may have to build the library

BLOCK = 16
KINDS = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_an_element_is_off_by_half_a_step_of_its_head_at_most(dtype: torch.dtype) -> None:
    x = (random(50, 3, 24) * torch.logspace(-9 if dtype != torch.float16 else -3, 3, 50)[:, None, None]).to(dtype)
    values, scales = quantize(x)
    assert (
        values.dtype == torch.int8 and scales.shape == (50, 3) and int(values.abs().amax(-1).min()) > 0.99 * STEPS - 1
    )
    error = (dequantize(values, scales, torch.float32) - x.float()).abs()
    assert (error <= scales.float()[..., None] * 0.5001).all()
    assert error.max() > 0


def test_what_is_not_finite_stays_visible_in_its_head_alone() -> None:
    x = random(4, 2, 8)
    x[0, 0, 3], x[1, 1, 0], x[2, 0] = math.nan, -math.inf, 0.0
    back = dequantize(*quantize(x), torch.float32)
    assert back[0, 0].isnan().all() and back[1, 1].isnan().all()
    assert back.isnan().sum() == 16 and (back[2, 0] == 0).all()


class Rounded(Reference):
    """The reference over K and V as 8 bits hold them."""

    def attend(self, row: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(row, layer, q, *(dequantize(*quantize(x), x.dtype) for x in (k, v)))


@pytest.mark.parametrize("shape", [(9, 3, 16), (14, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_paged_attention_reads_what_the_pool_holds(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    bench = AttentionBench(*shape, dtype, num_rows=6)
    _, kv_heads, head_dim = shape
    bench.pool = pool_of(bench.pool.num_units, LAYERS, 8, kv_heads, head_dim, dtype, cell_type=INTEGERS)
    assert bench.pool.bytes is not None
    bench.pool.bytes.scales[: bench.pool.zero_unit * bench.pool.num_layers] = math.nan
    bench.reference = Rounded()
    for wanted in ({0: 5, 1: 70, 2: 17}, {0: 1, 1: 1, 2: 4, 3: 8}, {0: 9, 1: 100, 3: 1}, {0: 1, 1: 1, 2: 1, 3: 1}):
        bench.step(wanted)


def devices(level: Level, name: str, dtype: str) -> tuple[TorchDevice, TorchDevice]:
    """The same model in torch's operators and in native kernels, on pools of NaN in 8 bits."""
    spec, weights = load(name, dtype)
    limits = Limits(6, 200, LENGTH, num_units=2 * 6 * -(-LENGTH // BLOCK), block_size=BLOCK)
    library = library_of(level)
    decoder = Decoder(spec, weights)
    native = Native(library, level, team_of(library, 2))
    pair = (
        TorchDevice(decoder, limits, cell_type=INTEGERS),
        NativeDevice(decoder, native, limits, cell_type=INTEGERS),
    )
    order = np.random.default_rng(0).permutation(limits.num_units).reshape(2, 6, -1)
    tokens = np.random.default_rng(1).integers(3, spec.vocab_size, pair[0].rows.tokens.shape)
    for device in pair:
        assert device.pool.bytes is not None
        device.pool.bytes.scales[: limits.num_units * spec.num_layers] = math.nan
        device.rows.tokens[:], device.rows.num_blocks[:] = tokens, order.shape[2]
        device.rows.k_table[:, : order.shape[2]], device.rows.v_table[:, : order.shape[2]] = order
    return pair


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("name", ["llama-gqa2", "opt"])
def test_native_kernels_keep_and_read_the_same_bytes(level: Level, name: str) -> None:
    """Tiles of queries, short chunks and decodes; a number just between two steps may fall to either."""
    dtype = "float32" if level < Level.BF16 else "bfloat16"
    ours, native = devices(level, name, dtype)
    allowed = 5e-3 if dtype == "float32" else 0.15
    for step in ([(0, 0, 40), (1, 0, 9), (2, 0, 3)], [(0, 40, 1), (1, 9, 60), (2, 3, 5)], [(0, 41, 70), (1, 69, 1)]):
        chunks = np.array([(*chunk, 1) for chunk in step], dtype=np.int64)
        for device in (ours, native):
            device.rows.sampling.greedy[:] = False  # logits are wanted, not greedy tokens
        with torch.inference_mode():
            results = [device.forward(chunks)[0].float() for device in (ours, native)]

        assert (results[0] - results[1]).abs().max() < allowed, step
    cells = [device.pool.bytes for device in (ours, native)]
    assert cells[0] is not None and cells[1] is not None
    apart = (cells[0].values.int() - cells[1].values.int()).abs()
    if dtype == "float32":
        assert apart.max() <= 2 and (apart > 0).float().mean() < 0.02
    written = ~cells[1].scales.isnan()  # torch's path clears the rest of blocks that are begun
    assert written.sum() > 500
    torch.testing.assert_close(cells[0].scales[written], cells[1].scales[written], rtol=0.05, atol=1e-3)


def test_a_cuda_device_keeps_and_reads_the_same() -> None:
    """Its path over the kernels' twins, on the CPU: prefills, chunks and decodes."""
    spec, weights = load("llama-gqa2", "float32")
    limits = Limits(6, 200, LENGTH, num_units=2 * 6 * -(-LENGTH // BLOCK), block_size=BLOCK)
    kernels: Any = twins
    ours = TorchDevice(Decoder(spec, weights), limits, cell_type=INTEGERS)
    cuda = CudaDevice(spec, weights, kernels, limits, graphs=False, cell_type=INTEGERS)
    tokens = tuple(np.random.default_rng(1).integers(3, spec.vocab_size, LENGTH).tolist())
    units = np.arange(2 * 7).reshape(7, 2).tolist()
    entries = tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, (k, v)) for k, v in units)
    new = NewRequest(0, "r", tokens, LENGTH, SamplingParams(max_tokens=1, temperature=0.0), entries)
    for device in (ours, cuda):
        device.rows.apply(SchedulerOutput(0, (), (new,), ()))
    for start, length in ((0, 40), (40, 30), (70, 1), (71, 1)):
        chunks = np.array([(0, start, length, 1)], dtype=np.int64)
        with torch.inference_mode():
            expected, got = (device.forward(chunks)[0][0].clone() for device in (ours, cuda))
        assert (expected - got).abs().max() < 5e-3


def plan(**flags: object):  # type: ignore[no-untyped-def]
    config = EngineConfig(device="cpu", kernels="torch", **flags)  # type: ignore[arg-type]
    return plan_launch(config), config


def test_a_server_has_nearly_twice_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.memory.cpu_cache_bytes", lambda _available: 64 * 2**20)
    (plain, _), (small, config) = plan(dtype="bfloat16"), plan(dtype="bfloat16", kv_cache_dtype="int8")
    assert 1.9 < small.num_blocks / plain.num_blocks < 2.0  # heads of 64: two bytes of 66 are the scale
    assert small.precision == "bfloat16, int8 cache"
    spec, size = small.spec, small.limits.block_size
    per_slice = slice_elements(size, spec.num_kv_heads, spec.head_dim, INTEGERS)
    assert scheduler_config(config, small).unit_bytes == spec.num_layers * per_slice


def test_what_it_does_not_go_with_is_said() -> None:
    with pytest.raises(ConfigError, match="--overload hidden"):
        EngineConfig(kv_cache_dtype="int8", overload="hidden")
    folder = model_folder("llama-gqa2")
    with pytest.raises(ConfigError, match="transformers' modules run"):
        plan(model=str(folder), model_impl="transformers", kv_cache_dtype="int8")
