"""Shape of a checkpoint that runs transformers modules, read by a forward pass without data.

Cache requirements come from the tensors of that pass instead of the config. Models that would give wrong results are
refused with ModelLoadError. Code from a checkpoint is never run.
"""

import copy
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import ModelLoadError, first_line
from engine.models.attention import HeadSizes, Manner
from engine.models.packing import packing_from_config
from engine.models.rope import scaled_positions, switch_of_angles
from engine.models.spec import TEXT_OF, ModelShape, dtype_name, eos_tokens, from_configs, library_config, text_notes
from engine.models.transformers_calls import (
    ATTENTION,
    STATES,
    Attention,
    Call,
    Part,
    Recur,
    RecurrentState,
    candidates,
    causal_lm,
    nothing,
    quiet,
    run_model,
    take_over,
)

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_ATTENDING = _ATTENTION_TYPES | {"hybrid", "hybrid_sliding"}
_LAYER_TYPES = _ATTENDING | STATES | {"mlp", "moe"}
_STATE_BYTES = 4  # upper bound per element
_SWITCHING_ROPES = {"dynamic", "longrope"}  # frequencies depend on the longest context of a step; see `rope_by_token`
_COUNTS = re.compile("layers|pattern")  # config values that count layers, not tokens
_SCANS = {"chunk_size", "mamba_chunk_size"}  # config values that only set the scan length of recurrent layers
PROBED = 6  # tokens


@dataclass(frozen=True, slots=True)
class TransformersShape(ModelShape):
    """A model that runs transformers modules.

    Attributes:
        layers: Names of the attention modules in order.
        recurrent: Names of the modules with a state.
        state_size: Elements of the states of a request in all recurrent layers.
    """

    parameters: int
    layers: tuple[str, ...]
    recurrent: tuple[str, ...] = ()
    state_size: int = 0

    @property
    def num_parameters(self) -> int:
        return self.parameters

    @property
    def state_bytes(self) -> int:
        return self.state_size * _STATE_BYTES


class Seen(NamedTuple):
    """An attention call in a forward pass without data."""

    module: nn.Module
    sizes: HeadSizes
    manner: Manner


def load_shape(folder: Path) -> TransformersShape:
    """Read the shape of a checkpoint from its config. Raises ModelLoadError, one line, if it is unsupported."""
    return from_configs(folder, lambda raw, generation: _shape(config_of(folder, raw), raw, eos_tokens(generation)))


def config_of(folder: Path, raw: Mapping[str, Any]) -> Any:
    """Return the transformers config of a supported causal language model."""
    packing_from_config(raw)
    transformers = importlib.import_module("transformers")
    named = raw.get("model_type")
    if named not in transformers.CONFIG_MAPPING:
        own = " needs its own code (auto_map), which is never run" if raw.get("auto_map") else " is not known"
        raise ModelLoadError(f"model type {named!r}{own} (transformers {transformers.__version__})")
    with quiet():
        try:
            config = library_config(folder)
        except Exception as error:  # configs raise various types
            raise ModelLoadError(f"config.json: {first_line(error)}") from None
    if TEXT_OF in raw:
        config = config.get_text_config()
        config.tie_word_embeddings = bool(raw.get("tie_word_embeddings"))
    _check_kind(config, raw, transformers)
    if hasattr(config, "quantization_config"):  # weights are unpacked by this engine
        del config.quantization_config
    return config


def _check_kind(config: Any, raw: Mapping[str, Any], transformers: Any) -> None:
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name} is an encoder-decoder model; only decoders are supported")
    if config.get_text_config() is not config:
        raise ModelLoadError(f"{name} is a multimodal model; only text models are supported")
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if causal is None:
        raise ModelLoadError(f"{name} is not a causal language model of transformers {transformers.__version__}")
    architecture = (raw.get("architectures") or [causal.__name__])[0]
    if architecture != causal.__name__:
        raise ModelLoadError(f"architecture {architecture!r} is not supported; of {name}, only {causal.__name__} is")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise ModelLoadError(f"{name} has layers of the unsupported type {min(kinds)}")


def _shape(config: Any, raw: Mapping[str, Any], ends: frozenset[int]) -> TransformersShape:
    with torch.device("meta"), quiet():
        try:
            model = causal_lm().from_config(_probed(config), attn_implementation=ATTENTION, trust_remote_code=False)
        except Exception as error:  # third-party code
            if isinstance(error, KeyError) and error.args == (ATTENTION,):
                raise ModelLoadError(f"{config.model_type} does not support custom attention") from None
            raise ModelLoadError(f"{config.model_type} fails in transformers: {first_line(error)}") from None
    settle(model, "batched_mm")  # the only expert implementation that runs without data
    seen, vocab_size = probe(model)
    names = {id(module): name for name, module in model.named_modules()}
    recurrent, states = _probe_states(model, seen)
    limit, reason = _context_limit(config, seen, _SCANS if recurrent else set())
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise ModelLoadError(f"{config.model_type}: the config does not set max_position_embeddings")
    # A cache cell is as wide as the widest K or V of any layer.
    kv_heads, width = max((each.sizes.kv_heads, each.sizes.widest) for each in seen)
    widest = max(each.sizes.kv_heads * each.sizes.widest for each in seen)
    if kv_heads * width < widest:
        kv_heads, width = 1, widest
    windows = [each.manner.window or each.manner.chunk for each in seen]
    return TransformersShape(
        hidden_size=int(getattr(config, "hidden_size", width * seen[0].sizes.heads)),
        num_layers=len(seen),
        num_heads=max(each.sizes.heads for each in seen),
        num_kv_heads=kv_heads,
        head_dim=width,
        vocab_size=vocab_size,
        max_position_embeddings=_scaled(config, positions),
        eos_token_ids=eos_tokens({"eos_token_id": config.eos_token_id}) | eos_tokens(raw) | ends,
        dtype=dtype_name(raw),
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=tuple(names[id(each.module)] for each in seen),
        longest=limit,
        limited_by=reason,
        short_context=short_context(config),
        packing=packing_from_config(raw),
        notes=text_notes(raw),
        windows=tuple(windows) if any(windows) else (),
        recurrent=recurrent,
        state_size=sum(state[0].numel() for parts in states.values() for state in parts.values()),
    )


def _probed(config: Any) -> Any:
    """Return the config of a model whose shape is read without data: rotary embeddings of the type "dynamic" compare
    positions, and up to their `_context_limit` they are those of the default type."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "dynamic":
        return config
    probed = copy.deepcopy(config)
    probed.rope_parameters["rope_type"] = "default"
    return probed


def _context_limit(config: Any, seen: list[Seen], harmless: set[str]) -> tuple[int | None, str]:
    """Return the longest context that is not affected by windows, chunks or rotations that attention calls do not show,
    and the limiting property. `harmless`: config keys to ignore."""
    limits: list[tuple[int, str]] = []
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, Mapping))):
        kind = rope.get("rope_type")
        if kind in _SWITCHING_ROPES and not (kind == "longrope" and rope is ropes):
            original = int(config.max_position_embeddings)
            if kind != "dynamic":
                original = int(rope.get("original_max_position_embeddings") or original)
            limits.append((original, switch_of_angles(kind, original)))
    windows = {abs(each.manner.reach) for each in seen}
    types = getattr(config, "layer_types", None) or ()
    hidden = any(
        kind == "sliding_attention" and each.manner.window is None for kind, each in zip(types, seen, strict=False)
    )
    for key, value in config.to_dict().items():
        if ("window" not in key and "chunk_size" not in key) or isinstance(value, bool) or not isinstance(value, int):
            continue
        switched_off = key == "sliding_window" and not getattr(config, "use_sliding_window", True)
        if value < 1 or switched_off or key in harmless or _COUNTS.search(key) or (value in windows and not hidden):
            continue
        limits.append((value, f"{key} of {value} tokens"))
    return min(limits, default=(None, ""))


def short_context(config: Any) -> int:
    """Return the longest sequence with the short factors of longrope, which all layers share; 0: there is one set."""
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return int(original) if rope.get("rope_type") == "longrope" else 0


def _scaled(config: Any, positions: int) -> int:
    """Return the number of positions with the scaling that all layers share."""
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or positions
    return scaled_positions(str(rope.get("rope_type")), rope.get("factor"), original, positions)


def probe(model: Any) -> tuple[list[Seen], int]:
    """Return the attention calls of a forward pass of a few tokens, and the width of the logits.

    No weight is read, so the model may be on the meta device. Raises ModelLoadError.
    """
    seen: list[Seen] = []

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, manner: Manner) -> Tensor:
        seen.append(Seen(module, HeadSizes.seen(q, k, v), manner))
        return nothing(module, q, k, v, manner)

    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelLoadError(f"{model.config.model_type} takes no position_ids, so tokens cannot be packed")
    model.eval()
    logits = _probe(model, attention, None)
    name, layers = model.config.model_type, getattr(model.config, "num_hidden_layers", None)
    types = getattr(model.config, "layer_types", None)
    attending = layers if types is None else sum(kind in _ATTENDING for kind in types)
    if len(seen) != attending or len({id(each.module) for each in seen}) != len(seen):
        raise ModelLoadError(f"{name} attends {len(seen)} times in {layers} layers; its other state is not supported")
    if not seen:
        raise ModelLoadError(f"{name} has no attention layer; models without keys and values are not supported")
    return seen, logits.shape[-1]


def _probe_states(model: Any, seen: list[Seen]) -> tuple[tuple[str, ...], dict[int, dict[Part, Tensor]]]:
    """Return the names of the modules with a state, in call order, and the states of one request by that order.

    The modules are redirected (`take_over`). Raises ModelLoadError.
    """
    types = getattr(model.config, "layer_types", None) or ()
    expected = {index for index, kind in enumerate(types) if kind in STATES}
    if not expected:
        return (), {}
    found: dict[int, dict[Part, Tensor]] = {}
    tried = candidates(model, expected, {id(each.module) for each in seen})
    for index, module in enumerate(tried.values()):
        take_over(module, index)

    _probe(model, nothing, _noting(found))
    names, modules = list(tried), list(tried.values())
    layers = {getattr(modules[index], "layer_idx", None) for index, parts in found.items() if parts}
    if layers != expected:
        raise ModelLoadError(f"{model.config.model_type} has layers whose state is not found (such as {min(expected)})")
    return tuple(names[index] for index in found), dict(enumerate(found.values()))


def _noting(found: dict[int, dict[Part, Tensor]]) -> Recur:
    """Return a Recur for requests that begin; it stores their final states in `found`."""

    def recur(layer: int, call: Call, x: Tensor) -> Tensor:
        if layer in found:
            raise ModelLoadError("its layers share a module with a state")
        past = RecurrentState()
        output = call(x, past)
        found[layer] = past.parts
        return output

    return recur


def _probe(model: Any, attention: Attention, recur: Recur | None) -> Tensor:
    """Return the logits of a few tokens. Raises ModelLoadError."""
    device, name = model.get_input_embeddings().weight.device, model.config.model_type
    ids, keep = torch.zeros(PROBED, dtype=torch.int64, device=device), torch.tensor([PROBED - 1], device=device)
    with torch.inference_mode(), quiet():
        try:
            return run_model(model, ids, torch.arange(PROBED, device=device), attention, keep, recur)
        except ModelLoadError as error:
            raise ModelLoadError(f"{name} is not supported: {error.message}") from None
        except Exception as error:  # third-party code
            raise ModelLoadError(f"{name} fails in transformers: {first_line(error)}") from None


def settle(model: Any, experts: str) -> None:
    """Use matrix products of fixed shapes for mixtures of experts, and skip checks for padding tokens."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation(experts)
