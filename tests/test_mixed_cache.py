"""Tables that mix K and V with blocks of both in 8 bits: torch's attention and the native kernels read them as one."""

import math

import numpy as np
import pytest
import torch
from native_build import library_of
from test_attention import LAYERS
from test_attention import Bench as AttentionBench
from test_native_model import LENGTH, load, team_of

from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cpu.native.library import Level, StepError
from engine.execution.cpu.native.linear import Native
from engine.execution.pool import UnitPool
from engine.models.byte_cells import dequantize, quantize
from engine.models.decoder import Decoder
from engine.scheduling.output import ReplacedEntry, SchedulerOutput
from predictor.limits import Limits

pytestmark = pytest.mark.timeout(900)  # the first test may have to build the library

BLOCK = 16


def rounded(x: torch.Tensor) -> torch.Tensor:
    return dequantize(*quantize(x), x.dtype)


def narrow(units: tuple[int, ...]) -> CacheEntry:
    return CacheEntry(CacheKind.KV8, Tier.DEVICE, units[:1])


class MixedBench(AttentionBench):
    """Blocks of the past go to 8 bits between steps, here and in the reference; V's units hold NaN then."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(heads, kv_heads, head_dim, dtype, num_rows=6)
        self.pool = UnitPool(
            self.pool.num_units, num_layers=LAYERS, block_size=8, num_kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype, device=self.pool.device, preempted_int8=True,
        )  # fmt: skip
        self.pool.units[: self.pool.num_units] = math.nan

    def compress(self, row: int, blocks: list[int]) -> None:
        held, rows = self.pool.compressed, self.rows
        assert held is not None
        for block in blocks:
            units = int(rows.k_table[row, block]), int(rows.v_table[row, block])
            held.compress(np.array([units]))
            rows.apply(SchedulerOutput(0, (), replaced=(ReplacedEntry(row, block, narrow(units)),)))
            self.pool.units[units[1]] = math.nan
            self.free.append(units[1])
            for layer, kept in enumerate(self.reference.past[row]):
                k, v = (x.clone() for x in kept)
                for x in (k, v):
                    x[8 * block : 8 * block + 8] = rounded(x[8 * block : 8 * block + 8])
                self.reference.past[row][layer] = (k, v)


@pytest.mark.parametrize("shape", [(9, 3, 16), (14, 2, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_widens_the_blocks_in_8_bits_alone(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    bench = MixedBench(*shape, dtype)
    bench.step({0: 5, 1: 70, 2: 17, 3: 8})
    bench.compress(1, [0, 3, 7])
    bench.compress(3, [0])
    bench.step({0: 1, 1: 1, 2: 4, 3: 1})
    bench.compress(2, [0, 1])
    bench.step({0: 9, 1: 100, 3: 1})
    bench.compress(1, list(range(8, 21)))
    bench.step({0: 1, 1: 1, 2: 1, 3: 20})
    assert not bench.pool.units[bench.rows.v_table[0, :2]].isnan().any()


def pools_of(level: Level, name: str, dtype: str) -> tuple[TorchDevice, NativeDevice]:
    """The same model in torch's operators and in native kernels, on pools of NaN that may be mixed."""
    spec, weights = load(name, dtype)
    limits = Limits(6, 200, LENGTH, num_units=2 * 6 * -(-LENGTH // BLOCK), block_size=BLOCK)
    library = library_of(level)
    decoder = Decoder(spec, weights)
    native = Native(library, level, team_of(library, 2))
    torchs = TorchDevice(decoder, limits, preempted_int8=True)
    natives = NativeDevice(decoder, native, limits, preempted_int8=True)
    order = np.random.default_rng(0).permutation(limits.num_units).reshape(2, 6, -1)
    tokens = np.random.default_rng(1).integers(3, spec.vocab_size, torchs.rows.tokens.shape)
    for device in (torchs, natives):
        device.pool.units[: limits.num_units] = math.nan
        device.rows.tokens[:], device.rows.num_blocks[:] = tokens, order.shape[2]
        device.rows.k_table[:, : order.shape[2]], device.rows.v_table[:, : order.shape[2]] = order
        device.rows.sampling.greedy[:] = False  # logits are wanted, not greedy tokens
    return torchs, natives


def compress(device: TorchDevice, row: int, blocks: list[int]) -> None:
    """What was V's is NaN: nobody may read it."""
    rows, held = device.rows, device.pool.compressed
    assert held is not None
    units = np.stack((rows.k_table[row, blocks], rows.v_table[row, blocks]), axis=1)
    held.compress(units)
    device.pool.units[units[:, 1]] = math.nan
    replaced = [ReplacedEntry(row, b, narrow(tuple(pair))) for b, pair in zip(blocks, units.tolist(), strict=True)]
    rows.apply(SchedulerOutput(0, (), replaced=tuple(replaced)))


def run(device: TorchDevice, *chunks: tuple[int, int, int]) -> torch.Tensor:
    with torch.inference_mode():
        return device.forward(np.array([(*chunk, 1) for chunk in chunks], dtype=np.int64))[0].float().clone()


STEPS = (
    ([(0, 0, 40), (1, 0, 64), (2, 0, 33), (3, 0, 5)], [(0, [0]), (1, [0, 2, 3]), (2, [0, 1])]),
    ([(0, 40, 1), (1, 64, 20), (2, 33, 5), (3, 5, 1)], [(0, [1]), (1, [1])]),
    ([(0, 41, 70), (1, 84, 1), (2, 38, 2), (3, 6, 1)], [(1, [4])]),
    ([(0, 111, 1), (1, 85, 9), (2, 40, 1), (3, 7, 40)], []),
)
"""Tiles of queries, short chunks and decodes, and what goes to 8 bits behind each step."""


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("name", ["llama-gqa2", "opt"])
def test_native_kernels_read_what_torch_reads(level: Level, name: str) -> None:
    """And both come near what the same steps give where all stays as it is, but not quite there."""
    dtype = "float32" if level < Level.BF16 else "bfloat16"
    mixed, exact = pools_of(level, name, dtype), pools_of(level, name, dtype)[1]
    allowed, lost = (5e-3, 0.0) if dtype == "float32" else (0.15, 0.0)
    for chunks, narrowed in STEPS:
        results = [run(device, *chunks) for device in mixed]
        assert (results[0] - results[1]).abs().max() < allowed, chunks
        whole = run(exact, *chunks)
        apart = torch.nn.functional.kl_div(
            results[1].log_softmax(-1), whole.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        assert apart[3].abs() < 1e-6, "a row without 8 bits runs as ever"
        assert apart.max() < 0.01, "KL of the answers, in nats"
        lost = max(lost, float((results[1] - whole).abs().max()))
        for device in mixed:
            for row, blocks in narrowed:
                compress(device, row, blocks)
    assert lost > 1e-4, "8 bits were read"


@pytest.mark.parametrize("level", Level)
def test_what_is_not_finite_in_8_bits_stays_visible(level: Level) -> None:
    """To those who see it."""
    _, native = pools_of(level, "llama-gqa2", "float32" if level < Level.BF16 else "bfloat16")
    run(native, (0, 0, 32), (1, 0, 32))
    compress(native, 0, [0])
    compress(native, 1, [0])
    assert native.pool.compressed is not None
    native.pool.compressed.scales[-1 - native.rows.k_table[0, 0], 1, 0, 3] = math.nan
    for chunks in ([(0, 32, 1), (1, 32, 1)], [(0, 33, 30), (1, 33, 30)]):
        first, second = run(native, *chunks)
        assert first.isnan().all() and second.isfinite().all()


def test_a_block_in_8_bits_is_of_the_past_and_of_the_pool() -> None:
    level = Level.AVX2
    _, native = pools_of(level, "llama-gqa2", "float32")
    run(native, (0, 0, 24))
    for units in ((-1, -2), (-1, 3), (-1 - native.pool.num_units,) * 2):
        native.rows.k_table[0, 0], native.rows.v_table[0, 0] = units
        with pytest.raises(StepError):
            run(native, (0, 24, 1))
    native.rows.k_table[0, :2], native.rows.v_table[0, :2] = (0, -3), (1, -3)
    with pytest.raises(StepError):
        run(native, (0, 24, 1))  # would be written to
    spec, weights = load("llama-gqa2")
    limits = Limits(6, 200, LENGTH, num_units=2 * 6 * -(-LENGTH // BLOCK), block_size=BLOCK)
    plain = NativeDevice(Decoder(spec, weights), native._native.native, limits)
    plain.rows.num_blocks[0] = 2
    plain.rows.tokens[0] = 5
    plain.rows.k_table[0, :2], plain.rows.v_table[0, :2] = (-1, 1), (-1, 2)
    with pytest.raises(StepError):
        run(plain, (0, 16, 1))
