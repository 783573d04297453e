"""The operations of a layer, and of the cache, as one object: our Triton kernels, or their twins in torch.

Knows nothing of models.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from engine.triton_kernels.work import DecodeWork, PrefillWork


class Kernels(Protocol):
    """Shapes and contracts as in `engine.triton_kernels`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def silu_and_mul(self, x: Tensor) -> Tensor: ...

    def rope_cache_write(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor | None,
        positions: Tensor,
        rows: Tensor,
        pool: Tensor,
        k_table: Tensor,
        v_table: Tensor,
        *,
        layer: int,
        scratch_base: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None: ...

    def decode_attention(
        self,
        q: Tensor,
        pool: Tensor,
        k_table: Tensor,
        v_table: Tensor,
        work: DecodeWork,
        partial: Tensor,
        partial_lse: Tensor,
        out: Tensor,
        *,
        layer: int,
        scratch_base: int,
        scale: float,
    ) -> None: ...

    def prefill_attention(
        self,
        q: Tensor,
        pool: Tensor,
        k_table: Tensor,
        v_table: Tensor,
        work: PrefillWork,
        out: Tensor,
        *,
        layer: int,
        scratch_base: int,
        scale: float,
    ) -> None: ...

    def hidden_write(
        self, x: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
    ) -> None: ...

    def hidden_gather(
        self,
        out: Tensor,
        positions: Tensor,
        rows: Tensor,
        pool: Tensor,
        table: Tensor,
        *,
        layer: int,
        scratch_base: int,
    ) -> None: ...

    def unit_copy(self, source: Tensor, target: Tensor, pairs: Tensor) -> None: ...


_TRITON = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "add_layer_norm": "layer_norm",
    "silu_and_mul": "silu_and_mul",
    "rope_cache_write": "rope_cache_write",
    "decode_attention": "decode_attention",
    "prefill_attention": "prefill_attention",
    "hidden_write": "hidden_state",
    "hidden_gather": "hidden_state",
    "unit_copy": "unit_copy",
}


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Functions under the names of `Kernels`."""

    rms_norm: Any
    add_rms_norm: Any
    layer_norm: Any
    add_layer_norm: Any
    silu_and_mul: Any
    rope_cache_write: Any
    decode_attention: Any
    prefill_attention: Any
    hidden_write: Any
    hidden_gather: Any
    unit_copy: Any


def triton_kernels() -> Kernels:
    """The kernels. ImportError where Triton is not installed."""
    modules = {name: importlib.import_module(f"engine.triton_kernels.{module}") for name, module in _TRITON.items()}
    return _Bundle(**{name: getattr(module, name) for name, module in modules.items()})


def torch_kernels() -> Kernels:
    """Their twins: slow, obviously right, on any device."""
    from engine.execution import torch_ops
    from engine.execution.reference import attention, hidden_state, rope_cache, unit_copy

    return _Bundle(
        torch_ops.rms_norm,
        torch_ops.add_rms_norm,
        torch_ops.layer_norm,
        torch_ops.add_layer_norm,
        torch_ops.silu_and_mul,
        rope_cache.rope_cache_write,
        attention.decode_attention,
        attention.prefill_attention,
        hidden_state.hidden_write,
        hidden_state.hidden_gather,
        unit_copy.unit_copy,
    )
