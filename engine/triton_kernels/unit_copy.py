# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Copy whole units within the pool, or between the pool and a staging buffer.

A unit is contiguous over all layers, so a batch of swaps needs one launch to the staging buffer and one transfer. Twin:
engine.models.torch_ops.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs


@triton.jit
def unit_copy_kernel(source, target, pairs, source_stride, target_stride, size, BLOCK: tl.constexpr):
    """Program (block of elements, pair)."""
    pair = tl.program_id(1).to(tl.int64)
    origin = tl.load(pairs + pair * 2).to(tl.int64)
    if origin < 0:
        return
    goal = tl.load(pairs + pair * 2 + 1).to(tl.int64)
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + origin * source_stride + elements, mask=elements < size)
    tl.store(target + goal * target_stride + elements, values, mask=elements < size)


def unit_copy(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """target[pairs[i, 1]] = source[pairs[i, 0]]; a pair with a negative source is skipped.

    Shapes: source, target [units, elements of a unit], rows contiguous, one dtype; pairs [n, 2] int32 or int64. Source
    and target may be the same memory if no unit is both read and written.
    """
    assert source.dim() == target.dim() == 2 and source.shape[1] == target.shape[1], f"{source.shape}, {target.shape}"
    assert source.stride(1) == target.stride(1) == 1 and source.dtype == target.dtype, "contiguous units of one dtype"
    assert pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.is_contiguous(), f"pairs: [n, 2], not {pairs.shape}"
    assert pairs.dtype in (torch.int32, torch.int64), f"pairs: int32 or int64, not {pairs.dtype}"
    if len(pairs) == 0:
        return
    config, size = configs.copy_config(), source.shape[1]
    unit_copy_kernel[(-(-size // config.block_n), len(pairs))](
        source, target, pairs, source.stride(0), target.stride(0), size, BLOCK=config.block_n, **config.options
    )
