"""Inverse frequencies of all supported rotary embeddings, as float32 tensors.

The arithmetic is float32 on purpose: checkpoints are trained and evaluated with it, and at position 100,000 a more
exact frequency is a different angle. Papers: RoPE (Su et al.), YaRN (Peng et al.), LongRoPE (Ding et al.).
"""

import math

import torch
from torch import Tensor

from engine.models.rope import RopeSpec


def inverse_frequencies(rope: RopeSpec, max_model_len: int) -> Tensor:
    """Return radians per position, [rotary_dim / 2] float32 on the CPU; `max_model_len` selects longrope factors."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        factors = rope.long_factor if max_model_len > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    return plain


def attention_scaling(rope: RopeSpec) -> float:
    """Return the factor of cos and sin."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and interpolate between them."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # over the context of the pretraining
    weight = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - weight) * plain / rope.factor + weight * plain
    blend = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blend)
    return torch.where(turns > rope.high_freq_factor, plain, blend)


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Keep dimensions that turn more than beta_fast times, interpolate those below beta_slow, with a ramp between."""
    low, high = (_turning_dim(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _turning_dim(rope: RopeSpec, turns: float) -> float:
    """Return the (fractional) frequency index that makes `turns` turns over the pretraining context."""
    span = math.log(rope.original_max_position / (turns * 2 * math.pi))
    return rope.rotary_dim * span / (2 * math.log(rope.theta))
