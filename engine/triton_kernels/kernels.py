# ruff: noqa: F401 - the module is its imports
"""Wrappers of all kernels in one module. Importing it needs Triton."""

from engine.triton_kernels.decode_attention import decode_attention
from engine.triton_kernels.draw import draw
from engine.triton_kernels.hidden_state import hidden_gather, hidden_write, unit_copy
from engine.triton_kernels.lora import lora_add
from engine.triton_kernels.norms import add_layer_norm, add_rms_norm, add_rms_norm_rounded
from engine.triton_kernels.penalties import count_tokens, penalise, token_mask
from engine.triton_kernels.prefill_attention import prefill_attention
from engine.triton_kernels.rope_cache_write import rope_cache_write
from engine.triton_kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul, silu_and_mul_rounded
from engine.triton_kernels.step_tokens import accept_tokens, begin_step, embed_tokens, softcap
