"""Rotary embedding of a checkpoint, read from its config; torch-free (for tensors see `rotary.py`).

Both spellings are read: `rope_parameters` (transformers 5) and the older `rope_theta` + `rope_scaling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelLoadError

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0  # defaults of Gemma 3
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` elements of every head, in the half-split ("neox") layout.

    `original_max_position` is the context length of the pretraining; `attention_factor` multiplies cos and sin.
    `short_factor` / `long_factor` (rotary_dim / 2 numbers each) belong to longrope. A sequence must keep one set for
    its lifetime, or cached keys would disagree with new ones; the set is therefore selected once, by the engine's
    longest context. `dynamic` equals `default` up to `max_position_embeddings`, which no context exceeds.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def rope_from_config(config: Mapping[str, Any], family: str, head_dim: int, max_position: int) -> RopeSpec:
    """Read the rotary embedding. Raises ModelLoadError for an unsupported kind or field."""
    # Fields missing in the modern spelling are taken from the old one: files converted by hand mix both.
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelLoadError("rope_parameters per layer type are not supported")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if family == "phi3" and kind in ("su", "yarn"):  # names of longrope in the first Phi-3 releases
        kind = "longrope"
    if kind not in _KINDS:
        raise ModelLoadError(f"rope type {kind!r} is not supported (supported: {', '.join(_KINDS)})")
    theta = given.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10_000.0
    share = given.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if share is None:
        share = config.get("rotary_pct", 0.25) if family == "gpt_neox" else 1.0
    rotary_dim = int(head_dim * _number("partial_rotary_factor", share))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ModelLoadError(f"a rotary dimension of {rotary_dim} in heads of {head_dim} is not supported")
    base = RopeSpec(theta=_number("rope_theta", theta), rotary_dim=rotary_dim)
    return base if kind == "default" else _scaled(base, kind, given, config, max_position)


def ropes_of_layer_types(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config whose windowed layers have their own rotary embedding into two that `rope_from_config` reads: for
    layers without a window and with one. Raises ModelLoadError for an unsupported spelling."""
    given = config.get("rope_parameters") or {}
    if set(given) - {"full_attention", "sliding_attention"}:
        raise ModelLoadError("rope_parameters must be given by layer type for this model")
    thetas = (config.get("rope_theta") or _GLOBAL_THETA, config.get("rope_local_base_freq") or _LOCAL_THETA)
    full, local = (
        {**config, "rope_parameters": given.get(kind), "rope_theta": theta}
        for kind, theta in zip(("full_attention", "sliding_attention"), thetas, strict=True)
    )
    return full, {**local, "rope_scaling": None}  # scaling applies only to layers that see the whole context


def _scaled(base: RopeSpec, kind: str, given: Mapping[str, Any], config: Mapping[str, Any], max_pos: int) -> RopeSpec:
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = int(_number("original_max_position_embeddings", original or max_pos))
    factor = given.get("factor")
    if factor is None:
        if kind not in ("yarn", "longrope"):
            raise ModelLoadError(f"rope type {kind!r} lacks 'factor' in config.json")
        factor = max_pos / original
    required = {"llama3": ("low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
    for name in required.get(kind, ()):
        if given.get(name) is None:
            raise ModelLoadError(f"rope type {kind!r} lacks {name!r} in config.json")
    return replace(
        base,
        kind=kind,
        factor=_number("factor", factor),
        original_max_position=original,
        attention_factor=_optional("attention_factor", given),
        low_freq_factor=_optional("low_freq_factor", given) or 1.0,
        high_freq_factor=_optional("high_freq_factor", given) or 4.0,
        beta_fast=_optional("beta_fast", given) or 32.0,
        beta_slow=_optional("beta_slow", given) or 1.0,
        mscale=_optional("mscale", given),
        mscale_all_dim=_optional("mscale_all_dim", given),
        truncate=bool(given.get("truncate", True)),
        short_factor=_factors("short_factor", given, base.rotary_dim) if kind == "longrope" else (),
        long_factor=_factors("long_factor", given, base.rotary_dim) if kind == "longrope" else (),
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelLoadError(f"rope field {name!r} in config.json must be a positive number, not {value!r}")
    return float(value)


def _optional(name: str, given: Mapping[str, Any]) -> float | None:
    value = given.get(name)
    return None if value is None else _number(name, value)


def _factors(name: str, given: Mapping[str, Any], rotary_dim: int) -> tuple[float, ...]:
    values = given[name]
    if not isinstance(values, list) or len(values) != rotary_dim // 2:
        raise ModelLoadError(f"rope field {name!r} in config.json must be a list of {rotary_dim // 2} numbers")
    return tuple(_number(name, value) for value in values)
