"""Tiny random checkpoints of every supported family, as transformers saves them; no tokenizers, no network.

`model_folder(name)` builds the checkpoint of a case once per process and returns its folder; `llama_config()` is a
config.json for tests that need a spec or dummy weights only. Weights are seeded and large enough that attention,
biases and norms all matter to the logits.
"""

import atexit
import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# One thread: on models this small a second one only waits for the first, and for other tests' threads.
torch.set_num_threads(1)

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.0 + 0.5 * i for i in range(6)],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
}
_OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "tie_word_embeddings": True}
_GEMMA = {"head_dim": 24, "sliding_window": 17, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

# name -> (transformers' config class, what differs from _SMALL)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa2": ("LlamaConfig", {"num_key_value_heads": 2}),
    "llama-wide": ("LlamaConfig", {"num_key_value_heads": 2, "intermediate_size": 96}),
    "llama-mha-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-gqa3-odd-heads": ("LlamaConfig", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama-head80-biases": (
        "LlamaConfig",
        {"head_dim": 80, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": ("LlamaConfig", {"num_key_value_heads": 2, "rope_parameters": _LLAMA3}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-dynamic-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 32}),
    "mistral-window": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 17}),
    "qwen2-gqa7": (
        "Qwen2Config",
        {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2-yarn": ("Qwen2Config", {"num_key_value_heads": 2, "rope_parameters": _YARN}),
    "qwen2-window": (
        "Qwen2Config",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 96, "rms_norm_eps": 1e-5}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 4}),
    "phi3-longrope-partial": (
        "Phi3Config",
        {"num_key_value_heads": 2, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "gemma2": ("Gemma2Config", {**_GEMMA, "num_key_value_heads": 2, "query_pre_attn_scalar": 50}),
    "gemma2-uncapped": (
        "Gemma2Config",
        {
            **_GEMMA,
            "num_key_value_heads": 1,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": None,
            "num_hidden_layers": 5,
            "sliding_window_pattern": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "opt": ("OPTConfig", {**_OPT, "intermediate_size": None}),
    "opt-no-bias-untied": (
        "OPTConfig",
        {**_OPT, "intermediate_size": None, "enable_bias": False, "tie_word_embeddings": False},
    ),
    "neox": ("GPTNeoXConfig", {"rotary_pct": 0.25}),
    "neox-sequential-tied": (
        "GPTNeoXConfig",
        {"rotary_pct": 0.5, "use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False},
    ),
}

FAMILY_CASES = ("llama-gqa2", "mistral", "qwen2-gqa7", "qwen3", "phi3", "gemma2", "gemma3", "opt", "neox")
"""One case of each family, for tests in which the variants do not matter."""
FEW_FAMILIES = ("llama-gqa2", "gemma3", "opt", "neox")
"""Families whose layers differ most."""


def llama_config(**changes: Any) -> dict[str, Any]:
    """A config.json of a tiny Llama as a dict, with `changes`; a value of None removes the key."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **_SMALL,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Write `config` as the config.json of `folder`, which is made; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@functools.cache
def reference_model(name: str) -> Any:
    """transformers' own model of a case: float32, eager attention, in evaluation mode."""
    import transformers

    kind, changes = CASES[name]
    sizes = {key: value for key, value in {**_SMALL, **changes}.items() if value is not None or key in changes}
    if sizes.get("intermediate_size", 0) is None:
        del sizes["intermediate_size"]
    config = getattr(transformers, kind)(**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1, generator=generator)
            if parameter.dim() == 1 and key.endswith("weight") and not kind.startswith("Gemma"):
                parameter.add_(1.0)
    return model.eval()


def model_folder(name: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB") -> Path:
    """The saved checkpoint of a case (read-only: it is shared). `shard_size` as transformers spells it, e.g. "40KB"."""
    return _saved(name, dtype, shard_size)


def prompts_of(vocab_size: int, lengths: Sequence[int], shared: int = 26) -> list[list[int]]:
    """Return prompts of these lengths; every third one has the same beginning of up to `shared` tokens."""
    generator = torch.Generator().manual_seed(7)
    common, *own = (torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in (shared, *lengths))
    return [(common + prompt)[: len(prompt)] if index % 3 == 0 else prompt for index, prompt in enumerate(own)]


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of transformers' own model behind a prompt."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(ids, max_new_tokens=count, **options)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a copied checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tidemill-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def _saved(name: str, dtype: torch.dtype, shard_size: str) -> Path:
    import transformers

    folder = _root() / f"{name}-{str(dtype).removeprefix('torch.')}-{shard_size}"
    model = reference_model(name)
    if dtype != torch.float32:
        copy = type(model)(model.config)
        copy.load_state_dict(model.state_dict())
        model = copy.to(dtype)
    progress = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, max_shard_size=shard_size)
    if progress:
        transformers.utils.logging.enable_progress_bar()
    return folder
