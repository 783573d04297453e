"""Tiny random checkpoints of multimodal wrappers, in the layouts in which they are published."""

import re
from pathlib import Path
from typing import Any

import tiny_transformers
import torch

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 128, "pad_token_id": 0,
    "eos_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_DELTA = {"num_hidden_layers": 4} | tiny_transformers.DELTA
_QWEN_VISION = {"out_hidden_size": 32, "depth": 1, "num_heads": 2}
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"sliding_window": 16}, {}),
    "gemma4": ("gemma4_text", {}, {}),
    "llama4": (
        "llama4_text",
        {"num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2,
         "attention_chunk_size": 24, "floor_scale": 16, "attn_scale": 0.5, "initializer_range": 0.3},
        {"intermediate_size": 64, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "mistral3": ("mistral", {}, {}),
    "qwen3_5": ("qwen3_5_text", _DELTA, _QWEN_VISION),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        _DELTA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32},
        _QWEN_VISION,
    ),
}  # fmt: skip
"""Type of the text part, and sizes of text and vision, by type."""


def wrapper(name: str, folder: Path, **text: Any) -> Any:
    """Save a tiny random wrapper in files with an index, and return it in transformers."""
    import transformers

    title = "".join(part.capitalize() for part in re.split("_(?=[a-z])", name))
    inner, sizes, vision = WRAPPERS[name]
    config_of, model_of = (getattr(transformers, f"{title}{end}") for end in ("Config", "ForConditionalGeneration"))
    config = config_of(text_config={**TEXT, "model_type": inner, **sizes, **text}, vision_config={**VISION, **vision})
    torch.manual_seed(3)
    with torch.device("cpu"):
        model = model_of(config).eval()
    model.save_pretrained(folder, max_shard_size="50KB" if name == "llama4" else "1GB")
    return model


def causal(model: Any) -> Any:
    """Return what answers texts: the wrapper, or its text part, as that of Llama 4 in transformers 5.24 takes none."""
    part = getattr(model, "language_model", None)
    return part if hasattr(part, "lm_head") else model


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [T, vocabulary] of the whole wrapper for a text."""
    seen = torch.ones(1, len(ids))
    with torch.inference_mode():
        logits: torch.Tensor = causal(model)(input_ids=ids[None], attention_mask=seen, use_cache=False).logits
    return logits[0]


def tokens_of(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the greedy answer of the whole wrapper to a text."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(model, torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]
