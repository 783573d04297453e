# ruff: noqa: F401 - the module is its imports
"""Wrappers of all kernels in one module. Importing it needs Triton."""

from engine.triton_kernels.attention import decode_attention, prefill_attention
from engine.triton_kernels.cache import hidden_gather, hidden_write, rope_cache_write, unit_copy
from engine.triton_kernels.draw import count_tokens, draw, penalise, token_mask
from engine.triton_kernels.experts import clamped_swiglu, grouped_product, route_experts, sum_experts
from engine.triton_kernels.lora import lora_add
from engine.triton_kernels.norms import (
    add_layer_norm,
    add_rms_norm,
    add_rms_norm_rounded,
    gelu_tanh_and_mul,
    silu_and_mul,
    silu_and_mul_rounded,
)
from engine.triton_kernels.step_tokens import accept_tokens, begin_step, embed_tokens, softcap
