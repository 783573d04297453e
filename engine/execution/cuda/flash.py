"""Attention of prompts' chunks by FlashAttention-3, through torch, where it is installed and quicker than our kernel.

In a paired pool K and V of a layer are two views of the same memory, a unit's layers apart, so that one block table
serves both: its pages are slices. torch's `varlen_attn_out` takes them as they lie. What it does not know (softcaps,
sinks, cells of 8 bits, K and V of two widths) our kernel does; and all, where the trial of the start is for it
(`engine.execution.cuda.flash_trial`). Of Hopper alone. Twin: `prefill_attention` of engine.models.torch_ops. Knows
nothing of requests.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.execution.cuda.buffers import HeadSizes
from engine.execution.pool import UnitPool
from engine.triton_kernels import configs

PACKAGE = "flash_attn_interface"
"""The module that a build of FlashAttention-3 installs."""
_ARCH = 90
VarlenAttention = Callable[..., object]
"""torch's `varlen_attn_out`."""


class _Step(NamedTuple):
    """Chunks [n] of a step: where the first one's queries begin and each one's end (`ends [n + 1]`), tokens of their
    contexts (`lengths [n]`), and their block tables `[n, max_blocks]`; all int32, on the device."""

    ends: Tensor
    lengths: Tensor
    tables: Tensor


class FlashPrefill:
    """By `attend`, over `cells` [slices, block_size, kv_heads, head_dim] of a pool whose V lie `pair` slices behind
    their K."""

    def __init__(self, attend: VarlenAttention, cells: Tensor, pair: int, max_model_len: int) -> None:
        self._attend, self._cells, self._pair, self._longest = attend, cells, pair, max_model_len
        self._step: _Step | None = None

    def begin(self, chunks: Tensor, table: Tensor) -> None:
        """From now on calls are of `chunks [n, 4]` as in `PrefillWork`, whose queries lie one behind the other; `table
        [rows, max_blocks]`. Launched once a step, in its graph."""
        first, rows = chunks[:1, 1], chunks[:, 0]
        ends = torch.cat((first, first + chunks[:, 2].cumsum(0, dtype=torch.int32)))
        self._step = _Step(ends, chunks[:, 2] + chunks[:, 3], table.index_select(0, rows))

    def __call__(self, q: Tensor, out: Tensor, *, layer: int, scale: float, window: int) -> None:
        """As `prefill_attention`: q and out [tokens, heads, head_dim]; what is of no chunk stays as it is in `out`."""
        step = self._step
        assert step is not None, "no step was begun"
        count = len(self._cells) - 2 * self._pair  # of both views; no entry lies behind
        k, v = (self._cells[first : first + count] for first in (layer, layer + self._pair))
        self._attend(
            out, q, k, v, step.ends, None, len(q), self._longest, scale=scale, enable_gqa=True, seqused_k=step.lengths,
            window_size=(window - 1 if window else -1, 0), block_table=step.tables,
        )  # fmt: skip


def refusal(pool: UnitPool, heads: HeadSizes, softcap: float) -> str | None:
    """Why prompts' chunks are our kernel's at any rate; None if they need not be."""
    if not configs.is_cuda(pool.device) or configs.device_arch(pool.device) != _ARCH:
        return "FlashAttention-3 is for compute capability 9.0"
    if not pool.paired or pool.bytes is not None or pool.dtype not in (torch.float16, torch.bfloat16):
        return "FlashAttention-3 reads K and V in 16 bits and by one table"
    if softcap or heads.head_dim % 8 or heads.head_dim != heads.value_dim:
        return "FlashAttention-3 does not know such heads in torch"
    return None if importlib.util.find_spec(PACKAGE) else "FlashAttention-3 is not installed"


def load() -> VarlenAttention:
    """torch's function, which goes to FlashAttention-3 in this process from now on. Raises what either's import does.
    Not imported before: torch loads its compiler with it, which takes seconds."""
    found: VarlenAttention = importlib.import_module("torch.nn.attention.varlen").varlen_attn_out
    importlib.import_module("torch.nn.attention").activate_flash_attention_impl("FA3")
    return found
