"""Tiny random checkpoints of every causal language model type that the installed transformers has."""

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import generated, prompts_of

from engine.models.transformers_model import load_model
from engine.models.transformers_shape import load_shape

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "sliding_window": 8,
    # mixtures of experts, by all their names
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "ffn_dim": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_head_dim": 12,
    # learned embeddings of other widths, codecs, states
    "word_embed_proj_dim": 64,
    "mamba_d_state": 8,
    "state_size": 8,
    "n_inner": None,
}

STATEFUL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_chunk_size": 16},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_chunk_size": 16},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_chunk_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "chunk_size": 16},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
}
"""What types with recurrent layers need to have some of either kind."""
_ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
}  # fmt: skip
UNLIKE: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gemma3n_text": {
        **_ALTERNATING, "laurel_rank": 8, "altup_num_inputs": 2, "intermediate_size": [64] * 6,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**_ALTERNATING, "global_head_dim": 32},
    "llama4_text": {
        "attention_chunk_size": 24, "floor_scale": 16, "attn_scale": 0.5, "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
    },
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14, "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 32, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 32,
            "ext_pw_out_channel": 32,
        },
    },
}  # fmt: skip
"""Sizes of types that SMALL does not fit."""
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


class Case:
    """A tiny checkpoint: transformers' model, ours, where it lies, and prompts with transformers' answers."""

    def __init__(self, model_type: str, folder: Path, lengths: Sequence[int], output: int, **shared: int) -> None:
        self.folder, self.output = folder, output
        self.reference = save(model_type, folder)
        self.shape = load_shape(folder)
        self.model = load_model(self.shape, folder, dtype="float32")
        self.prompts = prompts_of(self.shape.vocab_size, lengths, **shared)

    @functools.cached_property
    def answers(self) -> list[list[int]]:
        return [self.generated(prompt) for prompt in self.prompts]

    def generated(self, prompt: list[int]) -> list[int]:
        return generated(self.reference, prompt, self.output)


def causal_types() -> list[str]:
    """Every model type with a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config of the type, with the sizes of SMALL where it has them."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = kind()
        known = set(default.to_dict()) | set(kind.attribute_map)
        own = STATEFUL.get(model_type, {}) | UNLIKE.get(model_type, {})
        sizes = SMALL | DELTA | own
        wanted = {key: value for key, value in sizes.items() if key in known or key in own}
        if getattr(default, "sliding_window", None) is None:
            wanted.pop("sliding_window", None)
        if "qk_rope_head_dim" in known:  # latent attention: the width of a head is the rotated part
            wanted.pop("head_dim", None)
            wanted["num_key_value_heads"] = wanted["num_attention_heads"]
        return kind(**(wanted | changes))


def save_config(model_type: str, folder: Path) -> None:
    """The config alone, with the architecture that it would be saved with."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = tiny_config(model_type)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)


def save(model_type: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Write a random checkpoint; gives the model, float32, eager, in evaluation mode."""
    import transformers

    config = tiny_config(model_type, **changes)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1, generator=generator)
                if parameter.dim() == 1 and name.endswith("norm.weight"):
                    parameter.add_(1.0)
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(folder)
    return model.eval()
