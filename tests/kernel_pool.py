"""Helpers of the kernel cases: their device, a poisoned paged cache, and the comparison of results.

Interpreted kernels (TRITON_INTERPRET=1) run on the CPU, others on the GPU. bfloat16 is left to the GPU: products of the
interpreter are wrong in it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from engine.models.attention import PoolView
from engine.models.byte_cells import is_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
"""Types of activations."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BYTE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3}
NAN = float("nan")
SPARE = 3


def _loop_over_runtime_bounds() -> None:
    """Triton's interpreter before 3.9 turns loop bounds, arrays of one element, into integers as NumPy 2.4 forbids."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    _loop_over_runtime_bounds()


def typed(cases: Sequence[Any], first: int = 0) -> list[tuple[Any, torch.dtype]]:
    """Every case in every type; in the interpreter, which takes its time, each in one type, in turn."""
    if INTERPRETED:
        return [(case, DTYPES[(first + number) % len(DTYPES)]) for number, case in enumerate(cases)]
    return [(case, dtype) for case in cases for dtype in DTYPES]


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def index(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@dataclass(frozen=True)
class PagedCache:
    """`slots(table, row, position)` spells the layout out once more, apart from kernels and twins. `pair`: the layers
    of a pool in which V lies in the unit behind K, 0: of another; twins find V by its table in both."""

    pool: Tensor
    k_table: Tensor
    v_table: Tensor
    layer: int
    scratch_base: int
    pair: int = 0

    @property
    def view(self) -> PoolView:
        """As kernels are given it."""
        v_table = None if self.pair else self.v_table
        return PoolView(self.pool, self.k_table, v_table, self.scratch_base, self.pair)

    @property
    def twin_view(self) -> PoolView:
        """With a table of V in any case."""
        return PoolView(self.pool, self.k_table, self.v_table, self.scratch_base)

    def slots(self, table: Tensor, row: int, length: int) -> list[int]:
        entries, size = table[row].tolist(), self.pool.shape[1]
        starts = [t + self.layer if t >= 0 else self.scratch_base + (-t - 1) for t in entries]
        return [starts[position // size] * size + position % size for position in range(length)]

    @property
    def is_bytes(self) -> bool:
        return is_bytes(self.pool.dtype)

    def double(self) -> "PagedCache":
        return self if self.is_bytes else replace(self, pool=double(self.pool))


def paged_cache(
    lengths: list[int],
    *,
    seed: int,
    dtype: torch.dtype,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    table_dtype: torch.dtype = torch.int32,
    layers: int = 3,
    value_dim: int = 0,
    spare: int = 0,
    paired: bool = False,
) -> PagedCache:
    """A pool of NaN in which only the first lengths[row] tokens of each table row are numbers, in layer 1.

    Units are scattered; every third entry is scratch; entries behind the last block name a unit of NaN. With
    `value_dim` V is of that width, and cells are as wide as the wider of the two and `spare` numbers more. `paired`:
    without scratch, and every V lies in the unit behind its K, which has an odd number.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = max(-(-length // block_size) for length in lengths) + 2
    entries = 2 * len(lengths) * blocks
    units = torch.randperm(entries + SPARE, generator=generator)[:entries] * layers
    scratch = -1 - torch.randperm(entries, generator=generator)
    chosen = torch.where(torch.arange(entries) % 3 == 1, scratch, units).reshape(2, len(lengths), blocks)
    if paired:
        chosen[0] = (2 * torch.randperm(entries // 2, generator=generator).reshape(chosen[0].shape) + 1) * layers
        chosen[1] = chosen[0] + layers
    num_units = entries + SPARE
    value_dim = value_dim or head_dim
    cell = kv_heads * max(head_dim, value_dim) + spare
    cells = torch.full((num_units * layers + entries, block_size, cell), NAN, dtype=dtype).to(DEVICE)
    pool = heads_of(cells, kv_heads, head_dim)
    # A table is a view into a wider one: its rows are apart.
    tables = torch.full((2, len(lengths), blocks + 5), units[-1].item(), dtype=table_dtype)
    tables[:, :, :blocks] = chosen
    tables = tables.to(DEVICE)[:, :, : blocks + 1]
    cache = PagedCache(pool, tables[0], tables[1], 1, num_units * layers, layers if paired else 0)
    for row, length in enumerate(lengths):
        for table, width in ((cache.k_table, head_dim), (cache.v_table, value_dim)):
            numbers = random(generator, length, kv_heads, width, dtype=dtype)
            cells.flatten(0, 1)[cache.slots(table, row, length), : kv_heads * width] = numbers.flatten(1)
    return cache


def heads_of(cells: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """[slices, block_size, kv_heads, head_dim] of cells [slices, block_size, elements]: a view."""
    return cells[..., : kv_heads * head_dim].unflatten(2, (kv_heads, head_dim))


def double(pool: Tensor) -> Tensor:
    """The pool in float64, with the content of its cells beyond the heads that it shows."""
    slices, block_size, kv_heads, head_dim = pool.shape
    cells = pool.as_strided((slices, block_size, pool.stride(1)), (pool.stride(0), pool.stride(1), 1))
    return heads_of(cells.double(), kv_heads, head_dim)


def fused_heads(generator: torch.Generator, count: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[count, heads, dim] as a view into the columns of a wider projection."""
    return random(generator, count, (heads + 2) * dim, dtype=dtype)[:, dim : (heads + 1) * dim].unflatten(
        1, (heads, dim)
    )


def assert_same(actual: Tensor, expected: Tensor, dtype: torch.dtype, from_bytes: bool = False) -> None:
    """Equal within the rounding of `dtype`, NaN where NaN is expected and nowhere else."""
    tolerance = (BYTE_TOLERANCE if from_bytes else TOLERANCE)[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
