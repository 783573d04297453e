"""Interface of the operations of layers and cache: Triton kernels, or their twins in torch_ops."""

from typing import Protocol

from torch import Tensor

from engine.models.decoder import Ops
from engine.triton_kernels.work import DecodeWork, PrefillWork


class Kernels(Ops, Protocol):
    """Operations with the shapes and contracts of `engine.triton_kernels`."""

    def embed_tokens(
        self,
        ids: Tensor,
        source: Tensor,
        last_tokens: Tensor,
        positions: Tensor,
        embedding: Tensor,
        scale: float | None,
        learned: Tensor | None,
        offset: int,
    ) -> Tensor: ...

    def accept_tokens(
        self, tokens: Tensor, best: Tensor | None, rows: Tensor, sampled: Tensor, last_tokens: Tensor
    ) -> None: ...

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
        v_table: Tensor | None,
        *,
        layer: int,
        scratch_base: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        pair: int = 0,
    ) -> None: ...

    def decode_attention(
        self,
        q: Tensor,
        pool: Tensor,
        k_table: Tensor,
        v_table: Tensor | None,
        work: DecodeWork,
        partial: Tensor,
        partial_lse: Tensor,
        arrived: Tensor,
        out: Tensor,
        *,
        layer: int,
        scratch_base: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        pair: int = 0,
    ) -> None: ...

    def prefill_attention(
        self,
        q: Tensor,
        pool: Tensor,
        k_table: Tensor,
        v_table: Tensor | None,
        work: PrefillWork,
        partial: Tensor,
        partial_lse: Tensor,
        out: Tensor,
        *,
        layer: int,
        scratch_base: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        pair: int = 0,
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

    def token_mask(self, logits: Tensor, places: Tensor, bits: Tensor) -> None: ...

    def penalise(self, logits: Tensor, places: Tensor, rows: Tensor, history: Tensor, penalties: Tensor) -> None: ...

    def count_tokens(self, history: Tensor, rows: Tensor, places: Tensor, tokens: Tensor) -> None: ...

    def draw(
        self,
        logits: Tensor,
        greedy: Tensor,
        uniform: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
    ) -> Tensor: ...

    def lora_add(self, x: Tensor, y: Tensor, slots: Tensor, table: Tensor, partial: Tensor) -> None: ...

    def unit_copy(self, source: Tensor, target: Tensor, pairs: Tensor) -> None: ...


def triton_kernels() -> Kernels:
    """Return the Triton kernels. Raises ImportError if Triton is not installed."""
    from engine.triton_kernels import kernels

    return kernels
