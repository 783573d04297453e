"""Rotary embedding of a checkpoint, read from its config; torch-free (for tensors see `torch_ops`).

Both spellings are read: `rope_parameters` (transformers 5) and the older `rope_theta` + `rope_scaling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine.errors import ModelLoadError

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0  # defaults of Gemma 3
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_EXTENDING = ("linear", "dynamic", "yarn", "longrope")  # llama3: max_position_embeddings is the scaled number already
_PHI3_ORIGINAL = 4096  # default of its config


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` elements of every head, in the half-split ("neox") layout.

    `original_max_position` is the context length of the pretraining; `attention_factor` multiplies cos and sin.
    `short_factor` / `long_factor` (rotary_dim / 2 numbers each) belong to longrope. A sequence must keep one set for
    its lifetime, or cached keys would disagree with new ones; the set is therefore selected once per request, by its
    prompt and `max_tokens` (`short_context`). `dynamic` equals `default` up to the original context, which no context
    exceeds.
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

    @property
    def short_context(self) -> int:
        """Longest sequence that uses the short factors of longrope; 0: there is one set of frequencies."""
        return self.original_max_position if self.kind == "longrope" else 0


class Ropes(NamedTuple):
    """Rotary embedding of all layers, or of those without a window, and of the others if it differs; the last four
    fields are those of `ModelShape`."""

    rope: RopeSpec
    local: RopeSpec | None
    positions: int
    longest: int | None
    limited_by: str
    notes: tuple[str, ...]


def ropes_from_config(
    config: Mapping[str, Any], family: str, head_dim: int, max_position: int, has_local: bool
) -> Ropes:
    """Read the rotary embeddings and the context that they allow. Raises ModelLoadError.

    `has_local`: layers with a window have a rotary embedding of their own.
    """
    if has_local:  # these families give the number of positions after scaling
        full, local = (rope_from_config(each, family, head_dim, max_position) for each in ropes_of_layer_types(config))
        if local.short_context or full.short_context:
            raise ModelLoadError("longrope by layer type is not supported")
        return Ropes(full, local, max_position, None, "", ())
    rope = rope_from_config(config, family, head_dim, max_position)
    positions = scaled_positions(rope.kind, rope.factor, rope.original_max_position, max_position)
    switches = rope.kind == "dynamic"
    notes = _notes(config, rope, max_position, max_position if switches else positions)
    longest, limited_by = (max_position, switch_of_angles("dynamic", max_position)) if switches else (None, "")
    return Ropes(rope, None, positions, longest, limited_by, notes)


def rope_from_config(config: Mapping[str, Any], family: str, head_dim: int, max_position: int) -> RopeSpec:
    """Read the rotary embedding. Raises ModelLoadError for an unsupported kind or field."""
    given: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
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
    scaling = config.get("rope_scaling") or {}  # applies only to layers that see the whole context
    each = [{**(given.get(kind) or {})} for kind in ("full_attention", "sliding_attention")]
    full, local = (
        {**config, "rope_parameters": {**own, **more}, "rope_theta": theta, "rope_scaling": None}
        for own, more, theta in zip(each, (scaling, {}), thetas, strict=True)
    )
    return full, local


def scaled_positions(kind: str, factor: float | None, original: float, max_position: int) -> int:
    """Return the number of positions of a model, of which config.json may give the one before or after scaling."""
    return max(max_position, int(original * (factor or 1.0))) if kind in _EXTENDING else max_position


def switch_of_angles(kind: str, tokens: int) -> str:
    """Describe a rotary embedding whose frequencies depend on the length of the sequence beyond `tokens`."""
    return f"{kind} rotary embedding, whose angles change after {tokens} tokens"


def _notes(config: Mapping[str, Any], rope: RopeSpec, max_position: int, positions: int) -> tuple[str, ...]:
    """Return notes on a scaled context and on a value of config.json that transformers does not use either."""
    notes: list[str] = []
    if positions > max_position:
        scaling = f"{rope.kind} scaling of the rotary embedding by {rope.factor:g}"
        notes.append(f"{scaling}: {positions} positions instead of {max_position}")
    scaled, lost = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if scaled and not (scaled.get("rope_theta") or config.get("rope_theta")) and lost.get("rope_theta"):
        notes.append(
            "config.json has rope_scaling and rope_parameters, and rope_scaling counts, as in transformers: "
            f"rope_theta {lost['rope_theta']} is not used; move rope_scaling into rope_parameters"
        )
    return tuple(notes)


def _original(kind: str, given: Mapping[str, Any], config: Mapping[str, Any], max_position: int) -> object:
    """Return the context length of the pretraining, as transformers reads it."""
    if kind == "dynamic":
        return max_position
    outer = config.get("original_max_position_embeddings")
    if config.get("model_type") == "phi3" and kind == "longrope":
        return outer or _PHI3_ORIGINAL
    return outer or given.get("original_max_position_embeddings") or max_position


def _scaled(base: RopeSpec, kind: str, given: Mapping[str, Any], config: Mapping[str, Any], max_pos: int) -> RopeSpec:
    original = int(_number("original_max_position_embeddings", _original(kind, given, config, max_pos)))
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
        mscale=_optional("mscale", given) if given.get("mscale") else None,
        mscale_all_dim=_optional("mscale_all_dim", given) if given.get("mscale_all_dim") else None,
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
