"""Supported model families as data: defaults of their configs and names of their tensors. Torch-free.

A new family that recombines known parts needs a `Family` and a `TensorNames`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from engine.errors import ModelLoadError

Config = Mapping[str, Any]


Flag = bool | tuple[str, bool]
"""A property of a family: the same for all checkpoints, or the value of a key of the config with its default."""


def _nothing_to_check(_config: Config) -> None:
    return


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a family's tensors.

    Modules get `.weight` (and `.bias`) appended. Several modules in one field are stacked along the output dimension.
    Of `prefixes` and `head`, the first that the checkpoint contains is used. `branch_norms` normalise the outputs of
    attention and MLP before they are added. `interleaved_qkv`: the fused projection is [heads, 3, head_dim] instead of
    [3, heads, head_dim]. `sinks`: a score per head that takes part in the softmax without a value.
    """

    prefixes: tuple[str, ...]
    embedding: str
    input_norm: str
    qkv: tuple[str, ...]
    out: str
    post_norm: str
    up: tuple[str, ...]
    down: str
    final_norm: str
    head: tuple[str, ...] = ("lm_head",)
    positions: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    branch_norms: tuple[str, str] | None = None
    interleaved_qkv: bool = False
    sinks: str | None = None


_LLAMA_NAMES = TensorNames(
    prefixes=("model.", ""),
    embedding="embed_tokens",
    input_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    post_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    final_norm="norm",
)
_PHI3_NAMES = replace(_LLAMA_NAMES, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
_OPT_NAMES = TensorNames(
    prefixes=("model.decoder.", "decoder."),
    embedding="embed_tokens",
    positions="embed_positions",
    input_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    post_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
    final_norm="final_layer_norm",
)
_NEOX_NAMES = TensorNames(
    prefixes=("gpt_neox.", ""),
    embedding="embed_in",
    input_norm="input_layernorm",
    qkv=("attention.query_key_value",),
    interleaved_qkv=True,
    out="attention.dense",
    post_norm="post_attention_layernorm",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="final_layer_norm",
    head=("embed_out", "lm_head"),
)
_GEMMA_NAMES = replace(
    _LLAMA_NAMES,
    post_norm="pre_feedforward_layernorm",
    branch_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)


class ExpertNames(NamedTuple):
    """Names of a mixture of experts: modules of a layer, linear layers of an expert (gate, up, down), config keys.

    `rounded`: the weights of a token's experts are rounded to the model's type. `fused`: each part is a tensor of all
    experts [experts, in, out] and has a bias; gate and up are one part, whose outputs alternate.
    """

    router: str
    experts: str
    parts: tuple[str, ...]
    count_key: str
    width: str
    rounded: bool = False
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `*_default` applies if the config has no value.

    Attributes:
        window: "none", "always", "switched", or "patterned": all layers except each `pattern_default`-th.
        position_offset: Offset of learned positions; None without them.
        centered_norms: Norm weights are stored minus 1, and a norm is rounded once, after its weight.
        float_norms: A norm is rounded once, after its weight.
        scaled_embedding: Embeddings are multiplied by the square root of their width.
        query_scalar_default: Scores are divided by the square root of `query_pre_attn_scalar` instead of the head
            width; its default.
        softcaps: Default softcaps of scores and of logits; None if the family has none.
        local_rope: Layers with a window have their own rotary embedding.
        experts: Names of the experts that replace the MLP in every layer; None without experts.
        normalised: Whether the weights of a token's experts add up to 1.
        clamp: Defaults of `swiglu_alpha` and `swiglu_limit`; None for a usual gate.
    """

    name: str
    architecture: str
    names: TensorNames
    norm: str = "rms"
    eps_key: str = "rms_norm_eps"
    eps_default: float = 1e-6
    intermediate_key: str = "intermediate_size"
    activation_key: str = "hidden_act"
    activation_default: str = "silu"
    gated_mlp: bool = True
    gqa: bool = True
    kv_heads_default: int | None = None
    head_dim_key: bool = True
    head_dim_default: int | None = None
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: bool = False
    rope: bool = True
    position_offset: int | None = None
    parallel_residual: Flag = False
    tied_default: bool = False
    window: str = "none"
    window_default: int | None = None
    pattern_default: int = 0
    centered_norms: bool = False
    float_norms: bool = False
    scaled_embedding: bool = False
    query_scalar_default: float | None = None
    softcaps: tuple[float | None, float | None] | None = None
    local_rope: bool = False
    experts: ExpertNames | None = None
    normalised: Flag = True
    clamp: tuple[float, float] | None = None
    check: Callable[[Config], None] = field(default=_nothing_to_check, repr=False)


def _check_opt(config: Config) -> None:
    if not config.get("do_layer_norm_before", True):
        raise ModelLoadError("OPT with do_layer_norm_before=false (opt-350m) is not supported")
    projected = config.get("word_embed_proj_dim")
    if projected is not None and projected != config.get("hidden_size"):
        raise ModelLoadError(f"OPT with word_embed_proj_dim {projected} other than hidden_size is not supported")
    if config.get("_remove_final_layer_norm", False):
        raise ModelLoadError("OPT without its final layer norm (_remove_final_layer_norm) is not supported")
    if not config.get("layer_norm_elementwise_affine", True):
        raise ModelLoadError("OPT with layer_norm_elementwise_affine=false is not supported")


def _check_gemma(config: Config) -> None:
    if config.get("use_bidirectional_attention"):
        raise ModelLoadError("attention in both directions (use_bidirectional_attention) is not supported")


def _check_gemma3(config: Config) -> None:
    _check_gemma(config)
    if config.get("attn_logit_softcapping") is not None:  # the reference code reads it but caps no score
        raise ModelLoadError("Gemma 3 with attn_logit_softcapping is not supported")


def _check_qwen3_moe(config: Config) -> None:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelLoadError("Qwen3-MoE with layers without experts is not supported")


_LLAMA_BIAS = ("attention_bias", False)
_OPT_BIAS = ("enable_bias", True)
_ATTENTION_BIAS = ("attention_bias", True)

_GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    names=_GEMMA_NAMES,
    activation_key="hidden_activation",
    activation_default="gelu_pytorch_tanh",
    kv_heads_default=4,
    head_dim_default=256,
    qkv_bias=_LLAMA_BIAS,
    out_bias=_LLAMA_BIAS,
    tied_default=True,
    window="patterned",
    window_default=4096,
    pattern_default=2,
    centered_norms=True,
    scaled_embedding=True,
    query_scalar_default=256.0,
    softcaps=(50.0, 30.0),
    check=_check_gemma,
)
_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    qk_norm=True,
    pattern_default=6,
    softcaps=(None, None),
    local_rope=True,
    check=_check_gemma3,
)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        names=_LLAMA_NAMES,
        qkv_bias=_LLAMA_BIAS,
        out_bias=_LLAMA_BIAS,
        mlp_bias=("mlp_bias", False),
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        names=_LLAMA_NAMES,
        kv_heads_default=8,
        window="always",
        window_default=4096,
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        names=_LLAMA_NAMES,
        qkv_bias=True,
        window="switched",
        window_default=4096,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        names=_LLAMA_NAMES,
        head_dim_default=128,
        qkv_bias=_LLAMA_BIAS,
        out_bias=_LLAMA_BIAS,
        qk_norm=True,
        window="switched",
        window_default=4096,
    ),
    Family(name="phi3", architecture="Phi3ForCausalLM", names=_PHI3_NAMES, eps_default=1e-5, window="always"),
    _GEMMA2,
    _GEMMA3,
    Family(
        name="opt",
        architecture="OPTForCausalLM",
        names=_OPT_NAMES,
        norm="layer",
        eps_key="",  # not configurable
        eps_default=1e-5,
        intermediate_key="ffn_dim",
        activation_key="activation_function",
        activation_default="relu",
        gated_mlp=False,
        gqa=False,
        head_dim_key=False,
        qkv_bias=_OPT_BIAS,
        out_bias=_OPT_BIAS,
        mlp_bias=_OPT_BIAS,
        rope=False,
        position_offset=2,
        tied_default=True,
        check=_check_opt,
    ),
    Family(
        name="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        names=_NEOX_NAMES,
        norm="layer",
        eps_key="layer_norm_eps",
        eps_default=1e-5,
        activation_default="gelu",
        gated_mlp=False,
        gqa=False,
        head_dim_key=False,
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
        mlp_bias=True,
        parallel_residual=("use_parallel_residual", True),
    ),
)


_MLP = ("gate_proj", "up_proj", "down_proj")
_QWEN3_MOE = replace(
    next(family for family in FAMILIES if family.name == "qwen3"),
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    head_dim_default=None,
    experts=ExpertNames("mlp.gate", "mlp.experts", _MLP, "num_experts", "moe_intermediate_size", True),
    normalised=("norm_topk_prob", False),
    check=_check_qwen3_moe,
)
_MIXTRAL = replace(
    next(family for family in FAMILIES if family.name == "mistral"),
    name="mixtral",
    architecture="MixtralForCausalLM",
    window_default=None,
    experts=ExpertNames(
        "block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"), "num_local_experts",
        "intermediate_size",
    ),
)  # fmt: skip
_GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    names=replace(_LLAMA_NAMES, sinks="self_attn.sinks"),
    eps_default=1e-5,
    kv_heads_default=8,
    head_dim_default=64,
    qkv_bias=_ATTENTION_BIAS,
    out_bias=_ATTENTION_BIAS,
    mlp_bias=True,
    window="patterned",
    window_default=128,
    pattern_default=2,
    float_norms=True,
    experts=ExpertNames(
        "mlp.router", "mlp.experts", ("gate_up_proj", "down_proj"), "num_local_experts", "intermediate_size",
        rounded=True, fused=True,
    ),
    clamp=(1.702, 7.0),
)  # fmt: skip
MIXTURES = (_QWEN3_MOE, _MIXTRAL, _GPT_OSS)
"""Families with experts. Their native layers run on a GPU; on a CPU transformers' modules run them."""


def is_set(flag: Flag, config: Config) -> bool:
    """Return the value of a property for a config."""
    return flag if isinstance(flag, bool) else bool(config.get(*flag))


def family_of(config: Config) -> Family:
    """Return the family of a config. Raises ModelLoadError if it is unsupported or needs its own code."""
    named = config.get("architectures") or []
    architecture = named[0] if isinstance(named, list) and named else None
    model_type = config.get("model_type")
    if architecture is None and model_type is None:
        raise ModelLoadError("config.json names neither 'architectures' nor 'model_type'")
    family = next(
        (f for f in (*FAMILIES, *MIXTURES) if architecture in (f.architecture, None) and model_type in (f.name, None)),
        None,
    )
    # The config may name its own copy of a built-in class (the first Phi-3 releases do); that code is never run.
    own_code = str((config.get("auto_map") or {}).get("AutoModelForCausalLM", architecture)).rpartition(".")[2]
    if config.get("auto_map") and (family is None or own_code != family.architecture):
        raise ModelLoadError(f"{architecture or model_type} needs its own code (auto_map), which is never run")
    if family is None:
        supported = ", ".join(f.architecture for f in FAMILIES)
        raise ModelLoadError(f"architecture {architecture or model_type!r} is not supported (supported: {supported})")
    return family
