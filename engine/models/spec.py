"""Description of a decoder-only checkpoint, read from its Hugging Face config; torch-free.

One `ModelSpec` covers Llama 2/3.x, Mistral, Qwen2/2.5, Qwen3, Phi-3, Gemma 2, Gemma 3 (text), OPT and GPT-NeoX/Pythia;
they differ in data only. Of mixtures of experts it covers Qwen3-MoE, Mixtral and gpt-oss.
"""

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine.errors import ConfigError, ModelLoadError
from engine.models.families import Family, family_of, is_set
from engine.models.packing import SETTINGS_FILES, Packing, packing_from_config, settings_beside
from engine.models.rope import RopeSpec, ropes_from_config
from engine.models.stored_tensors import NO_GGUF, has_own_head, quantized_tensor, stored_type

T = TypeVar("T")

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_GATED = {"silu": "silu", "gelu_tanh": "gelu_tanh_gated"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_FULL_LAYERS = 28  # default number of Qwen layers before those with a window
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Properties of a model that cache, scheduler and reports need, for any implementation. Sizes are in elements.

    Attributes:
        num_layers: Number of attention layers.
        vocab_size: Width of the logits.
        architecture: Class named in the config.
        packing: Storage format of quantized linear layers.
        max_position_embeddings: Number of positions, after the rotary embedding was scaled.
        windows: Number of tokens visible to a query, itself included, per attention layer; None: all. Empty: no layer
            has a window.
        longest: Longest context that is computed exactly, if shorter than all positions.
        limited_by: Property of the model that causes `longest`.
        short_context: Longest prompt plus output that uses longrope's short factors; 0: there is one set.
        notes: Differences between the config and the other files that users should know.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    dtype: str
    architecture: str
    packing: Packing | None = field(default=None, kw_only=True)
    windows: tuple[int | None, ...] = field(default=(), kw_only=True)
    longest: int | None = field(default=None, kw_only=True)
    limited_by: str = field(default="", kw_only=True)
    short_context: int = field(default=0, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True, compare=False)

    @property
    def num_parameters(self) -> int:
        """Number of distinct parameters (a tied head counts once)."""
        raise NotImplementedError

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def hidden_ratio(self) -> float:
        """r, the size of a token's hidden state relative to its keys and values."""
        return self.hidden_size / (2 * self.kv_size)

    @property
    def state_bytes(self) -> int:
        """Upper bound of the recurrent state of a request in bytes; it is lost with the request's row."""
        return 0

    @property
    def max_context(self) -> int:
        """Longest context that is computed exactly."""
        return min(self.max_position_embeddings, self.longest or self.max_position_embeddings)

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Return the bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.kv_size * element_size


class ExpertSizes(NamedTuple):
    """Experts of every layer: their number, the number per token, their inner width, and whether the weights of a
    token's experts add up to 1 and are rounded to the model's type. `clamp`: gain of the gate's sigmoid, and limit
    of the gate and its factor; a usual gate has None."""

    total: int
    per_token: int
    width: int
    normalised: bool
    rounded: bool
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec(ModelShape):
    """A model of a native family.

    Attributes:
        scale: Factor of the scores; None: 1 / sqrt(head_dim).
        softcap: A score s becomes softcap · tanh(s / softcap).
        logit_softcap: The same for logits.
        local_rope: Rotary embedding of layers with a window, if it differs.
        embedding_scale: Factor of token embeddings, rounded to the model's type.
        intermediate_size: Inner width of the MLP, or of all experts together.
    """

    family: Family
    intermediate_size: int
    norm_eps: float
    activation: str  # "silu" or "gelu_tanh_gated" (of gated MLPs), "relu", "gelu" or "gelu_tanh"
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    rope: RopeSpec | None
    parallel_residual: bool
    tie_word_embeddings: bool
    scale: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    local_rope: RopeSpec | None = None
    embedding_scale: float | None = None
    experts: ExpertSizes | None = None

    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> RopeSpec | None:
        return self.local_rope if self.local_rope is not None and self.window_of(layer) else self.rope

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's matrices: qkv, out, up, down."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        up = ffn * (2 if self.family.gated_mlp else 1)
        return (self.q_size + 2 * self.kv_size, hidden), (hidden, self.q_size), (up, hidden), (hidden, ffn)

    @property
    def num_parameters(self) -> int:
        """Number of distinct parameters (a tied head counts once)."""
        hidden, family = self.hidden_size, self.family
        norm = hidden * (2 if family.norm == "layer" else 1)
        has_bias = self.qkv_bias, self.out_bias, self.mlp_bias, self.mlp_bias
        layer = sum(n * k + n * bias for (n, k), bias in zip(self.matrices, has_bias, strict=True))
        layer += 2 * self.head_dim * family.qk_norm + self.num_heads * (family.names.sinks is not None)
        if self.experts is not None:  # router, and the biases of all experts but one
            layer += self.experts.total * (hidden + self.mlp_bias) + (self.experts.total - 1) * hidden * self.mlp_bias
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        if family.position_offset is not None:
            embeddings += (self.max_position_embeddings + family.position_offset) * hidden
        norms = 2 if family.names.branch_norms is None else 4
        return embeddings + self.num_layers * (layer + norms * norm) + norm


def hidden_state_refusal(spec: ModelShape) -> str | None:
    """Return why hidden state saves no memory; None if it does: a unit of it, ceil(2r), replaces two of K and V
    (Apt-Serve §4)."""
    if 2 * spec.hidden_ratio <= 1:
        return None
    return (
        f"hidden state of {spec.hidden_size} values per token and layer exceeds the {spec.kv_size} values of K; "
        f"it would take {spec.hidden_ratio:.2f} of the memory of K and V; at most 0.5 is supported"
    )


def load_spec(folder: Path) -> ModelSpec:
    """Read `config.json` and the end tokens of the folder. Raises ModelLoadError, one line.

    As in transformers, a stored head that differs from the embedding is used although the config says tied.
    """
    spec = from_configs(folder, spec_from_config)
    names = spec.family.names
    embeddings = [f"{prefix}{names.embedding}" for prefix in names.prefixes]
    if not spec.tie_word_embeddings or not has_own_head(folder, names.head, embeddings):
        return spec
    note = "config.json says tie_word_embeddings, but the checkpoint has its own output head, which is used"
    return replace(spec, tie_word_embeddings=False, notes=(*spec.notes, note))


def from_configs(folder: Path, read: Callable[[dict[str, Any], dict[str, Any]], T]) -> T:
    """Return `read(config, generation config)` of a folder. Raises ModelLoadError, one line with the folder.

    A config without a type gets that of the stored tensors, one without a format of quantized layers that of a file
    beside it.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    if not path.is_file():
        if any(folder.glob("*.gguf")):
            raise ModelLoadError(f"{folder}: {NO_GGUF}")
        raise ModelLoadError(f"{folder} has no config.json: not a Hugging Face checkpoint folder")
    try:
        config = text_part(folder, read_json(path))
        if not (config.get("dtype") or config.get("torch_dtype")):
            config["dtype"] = stored_type(folder)
        if not (config.get("quantization_config") or config.get("compression_config")):
            config["quantization_config"] = _quantization_beside(folder)
        return read(config, read_json(generation) if generation.is_file() else {})
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error.message}") from None


TEXT_OF = "text_of"
"""Key of a config that `text_part` has made: the architecture of the wrapper."""
_OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config", "compression_config", "eos_token_id")


def text_part(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text part of a multimodal wrapper, with transformers' defaults for values that its
    config.json leaves out; any other config as it is. `folder` holds that config.json."""
    if not isinstance(config.get("text_config"), dict):
        return config
    transformers: Any = importlib.import_module("transformers")
    try:
        whole = library_config(folder)
    except Exception:  # configs raise various types; the caller refuses the whole config
        return config
    text = whole.get_text_config()
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if text is whole or causal is None:
        return config
    tied = config.get("tie_word_embeddings", config["text_config"].get("tie_word_embeddings"))
    part = {**text.to_dict(), **({} if tied is None else {"tie_word_embeddings": tied})}
    named = (config.get("architectures") or [type(whole).__name__])[0]
    kept = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    return {**part, **kept, "architectures": [causal.__name__], TEXT_OF: named}


_TUNED = "attn_temperature_tuning"


def library_config(folder: Path) -> Any:
    """Return the config of transformers for a folder. Raises various errors.

    The first Llama 4 checkpoints have a number where transformers takes only true or false.
    """
    transformers: Any = importlib.import_module("transformers")
    raw = read_json(folder / "config.json")
    text = raw.get("text_config") or raw
    if type(text.get(_TUNED)) is not int:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    text[_TUNED] = bool(text[_TUNED])
    return transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)


def text_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note for a config that `text_part` has made."""
    named = config.get(TEXT_OF)
    return () if named is None else (f"the text part of {named} is served; requests with images are refused",)


def _quantization_beside(folder: Path) -> Mapping[str, Any] | None:
    """Return the settings of quantized layers beside config.json; None if no layer is quantized.

    Raises ModelLoadError if nothing describes the layers.
    """
    if (tensor := quantized_tensor(folder)) is None:
        return None
    for name in SETTINGS_FILES:
        if (folder / name).is_file():
            return settings_beside(read_json(folder / name))
    missing = f"config.json has no quantization_config, and there is no {' or '.join(SETTINGS_FILES)}"
    raise ModelLoadError(f"tensor {tensor} is quantized, but {missing}: download it beside config.json")


def resolve_max_model_len(spec: ModelShape, requested: int | None) -> int:
    """Return the longest context of the engine: `requested`, or the model's limit. Raises ConfigError if above it."""
    if requested is None or requested <= spec.max_context:
        return requested or spec.max_context
    limit = f"the model's {spec.max_position_embeddings} positions"
    if spec.max_context < spec.max_position_embeddings:
        limit = f"the model's {spec.limited_by}; longer contexts would not be exact"
    raise ConfigError(f"--max-model-len {requested} exceeds {limit}")


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Translate config.json and generation_config.json. Raises ModelLoadError for an unsupported property."""
    packing = packing_from_config(config)
    family = family_of(config)
    family.check(config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", family.kv_heads_default or heads) if family.gqa else heads
    if heads % kv_heads:
        raise ModelLoadError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _head_dim(config, family, hidden, heads)
    max_position, num_layers = _size(config, "max_position_embeddings"), _size(config, "num_hidden_layers")
    experts = _experts(config, family)
    ffn = _size(config, family.intermediate_key) if experts is None else experts.width
    if packing is not None:
        packing.check((hidden, heads * head_dim, ffn), (kv_heads * head_dim,))
    ropes = ropes_from_config(config, family.name, head_dim, max_position, family.local_rope) if family.rope else None
    softcaps = family.softcaps or (None, None)
    return ModelSpec(
        family=family,
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn * (1 if experts is None else experts.total),
        experts=experts,
        vocab_size=_size(config, "vocab_size"),
        max_position_embeddings=ropes.positions if ropes else max_position,
        longest=ropes.longest if ropes else None,
        limited_by=ropes.limited_by if ropes else "",
        notes=(*text_notes(config), *(ropes.notes if ropes else ())),
        short_context=ropes.rope.short_context if ropes else 0,
        norm_eps=_eps(config, family),
        activation=_activation(config, family),
        qkv_bias=is_set(family.qkv_bias, config),
        out_bias=is_set(family.out_bias, config),
        mlp_bias=is_set(family.mlp_bias, config),
        rope=ropes.rope if ropes else None,
        local_rope=ropes.local if ropes else None,
        scale=_scale(config, family),
        softcap=_softcap(config, "attn_logit_softcapping", softcaps[0]) if family.softcaps else None,
        logit_softcap=_softcap(config, "final_logit_softcapping", softcaps[1]) if family.softcaps else None,
        embedding_scale=hidden**0.5 if family.scaled_embedding else None,
        parallel_residual=is_set(family.parallel_residual, config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tied_default)),
        windows=_windows(config, family, num_layers),
        eos_token_ids=eos_tokens(config) | eos_tokens(generation or {}),
        dtype=dtype_name(config),
        packing=packing,
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path.name}: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} is not a JSON object")
    return value


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelLoadError(f"config.json lacks {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config.json: {key!r} must be a positive integer, not {value!r}")
    return value


def _experts(config: Mapping[str, Any], family: Family) -> ExpertSizes | None:
    if family.experts is None:
        return None
    count = _size(config, family.experts.count_key, config.get("num_local_experts"))  # its name in transformers 5
    width = _size(config, family.experts.width)
    per_token, normalised = _size(config, "num_experts_per_tok"), is_set(family.normalised, config)
    clamp = family.clamp
    if clamp is not None:
        clamp = _positive(config, "swiglu_alpha", clamp[0]), _positive(config, "swiglu_limit", clamp[1])
    return ExpertSizes(count, per_token, width, normalised, family.experts.rounded, clamp)


def _head_dim(config: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if family.head_dim_key:
        value = config.get("head_dim") or family.head_dim_default
        if value is not None:
            return _size({"head_dim": value}, "head_dim")
    if hidden % heads:
        raise ModelLoadError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _eps(config: Mapping[str, Any], family: Family) -> float:
    value = config.get(family.eps_key) if family.eps_key else None
    value = family.eps_default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ModelLoadError(f"config.json: {family.eps_key!r} must be a number, not {value!r}")
    return float(value)


def _activation(config: Mapping[str, Any], family: Family) -> str:
    name = config.get(family.activation_key) or family.activation_default
    known = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if known is not None and family.gated_mlp:
        known = _GATED.get(known)
    if known is None or (known == "silu" and not family.gated_mlp):
        raise ModelLoadError(f"activation {name!r} is not supported in {family.architecture}")
    return known


def _scale(config: Mapping[str, Any], family: Family) -> float | None:
    if family.query_scalar_default is None:
        return None
    return 1.0 / math.sqrt(_positive(config, "query_pre_attn_scalar", family.query_scalar_default))


def _softcap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Return the softcap; None if the config sets null, or has no value and there is no default."""
    return None if config.get(key, default) is None else _positive(config, key, default)


def _positive(config: Mapping[str, Any], key: str, default: float | None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelLoadError(f"config.json: {key!r} must be a positive number, not {value!r}")
    return float(value)


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of every layer. For "switched" and "patterned" families, `layer_types` or the position of a
    layer decides whether it has one."""
    if family.window == "none" or (family.window == "switched" and not config.get("use_sliding_window", False)):
        return ()
    window = config.get("sliding_window", family.window_default)
    if window is None and family.window != "patterned":
        return ()
    window, types = _size({"sliding_window": window}, "sliding_window"), config.get("layer_types")
    if family.window == "always":
        return (window,) * num_layers
    if not types and family.window == "patterned":
        every = _size(config, "sliding_window_pattern", family.pattern_default)
        types = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    if not types:
        full = config.get("max_window_layers", _FULL_LAYERS)
        if isinstance(full, bool) or not isinstance(full, int):
            raise ModelLoadError(f"config.json: 'max_window_layers' must be an integer, not {full!r}")
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or set(map(str, types)) - _LAYER_TYPES:
        raise ModelLoadError("config.json: 'layer_types' must be full_attention or sliding_attention for every layer")
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()


def eos_tokens(config: Mapping[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ModelLoadError(f"eos_token_id must be an integer or a list of integers, not {value!r}")
    return frozenset(ids)


def dtype_name(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype {name!r} is not supported (supported: {', '.join(_DTYPES)})")
    return name
