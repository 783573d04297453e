"""The decoder against transformers' own forward pass, for every family; and the operations against plain arithmetic."""

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from dense_model import attend_with, dense_attend
from support.tables import for_each
from torch import Tensor
from torch.nn import functional

from engine.errors import ConfigError, ModelLoadError
from engine.models import torch_ops
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec, load_spec, resolve_max_model_len, spec_from_config
from engine.models.torch_ops import inverse_frequencies

LENGTH = 48


class DenseAttention:
    """`attend` over one request whose keys and values are simply kept; grouped heads, causal, with windows."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._past: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert k.shape == v.shape
        assert q.shape[1] == self._spec.num_heads // self._spec.num_kv_heads * k.shape[1]
        self._past[layer].append((k, v))
        keys, values = (torch.cat(past).float() for past in zip(*self._past[layer], strict=True))
        return dense_attend(self._spec, layer, q.float(), keys, values).to(q.dtype)


def decoder_of(name: str, *, dtype: str = "auto", folder: Path | None = None) -> Decoder:
    folder = folder or tiny_models.model_folder(name)
    spec = load_spec(folder)
    return Decoder(spec, load_weights(spec, folder, dtype=dtype))


def attention_of(decoder: Decoder) -> DenseAttention:
    return DenseAttention(decoder.spec)


def tokens_for(length: int = LENGTH) -> Tensor:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(7))


def logits_of(decoder: Decoder, tokens: Tensor, chunks: list[int]) -> Tensor:
    """Return the logits of every position, with the tokens fed in chunks of the given lengths."""
    attend, start, rows = attention_of(decoder), 0, []
    with torch.inference_mode():
        for length in chunks:
            positions = torch.arange(start, start + length)
            hidden = decoder.embed(tokens[start : start + length], positions)
            attended = attend_with(attend, decoder, positions)
            rows.append(decoder.logits(decoder.run(hidden, attended)))
            start += length
    assert start == len(tokens)
    return torch.cat(rows)


def reference_logits(name: str, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = tiny_models.reference_model(name)(tokens.unsqueeze(0)).logits[0]
    return logits


def worst_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the spread of the expected logits."""
    return float((found.float() - expected).abs().max() / expected.std())


def mean_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences, relative to the spread of the expected logits."""
    return float((found.float() - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("name", tiny_models.CASES)
def test_logits_and_parameters_match_transformers(name: str) -> None:
    """As one prompt, and in chunks and decodes."""
    decoder, expected = decoder_of(name), reference_logits(name, tokens_for())
    assert expected.std() > 0.1
    for chunks in ([LENGTH], [17, 1, 19, 3, *[1] * 8]):
        assert worst_error(logits_of(decoder, tokens_for(), chunks), expected) < 1e-4
    model = tiny_models.reference_model(name)
    assert decoder.spec.num_parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("name", tiny_models.FAMILY_CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_running_layers_in_ranges_changes_nothing(name: str, dtype: str) -> None:
    decoder, tokens, positions = decoder_of(name, dtype=dtype), tokens_for(), torch.arange(LENGTH)
    with torch.inference_mode():
        start = decoder.embed(tokens, positions)
        kept = start.clone()
        whole = decoder.run(start, attend_with(attention_of(decoder), decoder, positions))
        attend = attend_with(attention_of(decoder), decoder, positions)
        part = decoder.run(start, attend, range(1))
        part = decoder.run(part, attend, range(1, 1))
        part = decoder.run(part, attend, range(1, decoder.spec.num_layers))
    assert torch.equal(whole, part)
    assert torch.equal(start, kept)


@pytest.mark.parametrize("name", [*tiny_models.FAMILY_CASES, "gemma2-uncapped", "llama3-rope"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_to_float32_as_transformers_is(name: str, dtype: str) -> None:
    """Root mean squares: the largest of some thousand rounding errors is a draw, and differs by half."""
    decoder, tokens = decoder_of(name, dtype=dtype), tokens_for()
    expected = reference_logits(name, tokens)
    found = logits_of(decoder, tokens, [LENGTH])
    assert found.dtype == decoder.weights.embedding.dtype == getattr(torch, dtype)
    model = copy.deepcopy(tiny_models.reference_model(name)).to(found.dtype)
    with torch.inference_mode():
        theirs = mean_error(model(tokens.unsqueeze(0)).logits[0], expected)
    assert mean_error(found, expected) < 1.2 * theirs < 0.05


def test_tied_head_shares_the_embedding_unless_packed() -> None:
    decoder = decoder_of("llama-mha-tied")
    hidden = torch.randn(2, 64)
    with torch.inference_mode():
        before = decoder.logits(hidden)
        decoder.weights.embedding.mul_(2.0)
        assert torch.allclose(decoder.logits(hidden), 2 * before, rtol=1e-4)


def test_old_and_new_spelling_of_rope_are_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = spec_from_config(tiny_models.llama_config(rope_theta=5e5, rope_scaling=scaling))
    new = spec_from_config(tiny_models.llama_config(rope_theta=None, rope_parameters={**scaling, "rope_theta": 5e5}))
    older = spec_from_config(tiny_models.llama_config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}))
    assert old == new == older
    assert old.rope is not None
    assert (old.rope.theta, old.rope.kind, old.rope.factor) == (5e5, "linear", 2.0)


def test_end_tokens_come_from_both_files() -> None:
    config = tiny_models.llama_config(eos_token_id=[2, 3])
    assert spec_from_config(config).eos_token_ids == {2, 3}
    assert spec_from_config(config, {"eos_token_id": 9}).eos_token_ids == {2, 3, 9}
    assert spec_from_config(tiny_models.llama_config(eos_token_id=None)).eos_token_ids == frozenset()


def test_contexts_are_limited_to_the_positions() -> None:
    plain = spec_from_config(tiny_models.llama_config())
    assert (resolve_max_model_len(plain, None), resolve_max_model_len(plain, 32)) == (256, 32)
    with pytest.raises(ConfigError, match="--max-model-len 257 exceeds the model's 256 positions"):
        resolve_max_model_len(plain, 257)


WINDOWS: tuple[tuple[str, dict[str, Any], tuple[int | None, ...]], ...] = (
    ("Mistral", {"sliding_window": 32}, (32, 32, 32)),
    ("Mistral", {}, (4096,) * 3),
    ("Gemma2", {"sliding_window": 32}, (32, None, 32)),
    ("Gemma3", {"sliding_window": 32, "sliding_window_pattern": 3}, (32, 32, None)),
    ("Gemma3", {"sliding_window": 32}, (32, 32, 32)),  # every sixth layer has none
    ("Qwen2", {"sliding_window": 32, "use_sliding_window": False}, ()),
    ("Qwen2", {"sliding_window": 32, "use_sliding_window": True}, ()),  # from the 29th layer on
    ("Qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 32)),
    (
        "Qwen3",
        {
            "sliding_window": 8,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", *["full_attention"] * 2],
        },
        (8, None, None),
    ),
)


@for_each(("family", "changes", "windows"), WINDOWS)
def test_windows_are_of_layers(family: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    spec = spec_from_config(named(family, **{"hidden_act": None if "Gemma" in family else "silu"} | changes))
    assert spec.windows == windows and spec.max_context == 256
    assert [spec.window_of(layer) for layer in range(3)] == list(windows or (None,) * 3)


def named(family: str, **changes: Any) -> dict[str, Any]:
    """A config of a family, without the key of Llama's activation."""
    model_type = {"Gemma3": "gemma3_text"}.get(family, family.lower())
    names = {"architectures": [f"{family}ForCausalLM"], "model_type": model_type, "ffn_dim": 96}
    return tiny_models.llama_config(**names | ({} if family == "Llama" else {"hidden_act": None}) | changes)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "'GemmaForCausalLM' is not supp"),
    ("Llama", {"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' is not supp"),
    ("Llama", {"architectures": None, "model_type": None}, "names neither 'architectures' nor 'model_type'"),
    ("Llama", {"architectures": ["XModel"], "auto_map": {"AutoModelForCausalLM": "x.XModel"}}, "needs its own code"),
    ("Llama", {"auto_map": {"AutoModelForCausalLM": "x.MyLlama"}}, "needs its own code"),
    ("Llama", {"quantization_config": {"quant_method": "hqq"}}, "quantized by hqq are not supported .*awq, .*gptq"),
    ("Llama", {"hidden_size": None}, "lacks 'hidden_size'"),
    ("Llama", {"hidden_size": 63}, "hidden_size 63 is not a multiple of num_attention_heads 4"),
    ("Llama", {"num_hidden_layers": "3"}, "'num_hidden_layers' must be a positive integer, not '3'"),
    ("Llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ("Llama", {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ("Llama", {"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
    ("Llama", {"eos_token_id": "</s>"}, "eos_token_id must be an integer"),
    ("Llama", {"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported"),
    ("Llama", {"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' lacks 'factor'"),
    ("Llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
    ("Llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type are not supported"),
    ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "'factor' in config.json must be a positive"),
    ("Llama", {"partial_rotary_factor": 0.2}, "rotary dimension of 3"),
    ("OPT", {"do_layer_norm_before": False}, "do_layer_norm_before=false"),
    ("OPT", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32"),
    ("OPT", {"_remove_final_layer_norm": True}, "final layer norm"),
    ("OPT", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("OPT", {"activation_function": "silu"}, "activation 'silu' is not supported in OPTForCausalLM"),
    ("Gemma3", {"use_bidirectional_attention": True}, "attention in both directions"),
    ("Gemma3", {"attn_logit_softcapping": 50.0}, "Gemma 3 with attn_logit_softcapping"),
    ("Gemma3", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' must be a positive number, not 0"),
    ("Gemma3", {"final_logit_softcapping": "30"}, "'final_logit_softcapping' must be a positive number"),
    ("Gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must be given by layer type"),
    ("Gemma3", {"sliding_window": 0}, "'sliding_window' must be a positive integer"),
    ("Gemma3", {"hidden_activation": "gelu"}, "activation 'gelu' is not supported in Gemma3ForCausalLM"),
    *(
        ("Qwen3", {"use_sliding_window": True, "hidden_act": "silu", "layer_types": types}, "'layer_types' must be")
        for types in (["sliding_attention"], ["mamba"] * 3, "full_attention")
    ),
]


@for_each(("family", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(family: str, changes: dict[str, Any], message: str) -> None:
    assert spec_from_config(named(family)).family.position_offset == (2 if family == "OPT" else None)
    with pytest.raises(ModelLoadError, match=message) as caught:
        spec_from_config(named(family, **changes))
    assert "\n" not in caught.value.message


def test_a_built_in_class_with_its_own_copy_of_the_code_is_served_without_it() -> None:
    """The first Phi-3 releases name their own copy of the class that is built in."""
    own = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert spec_from_config(named("Phi3", auto_map=own)).family.name == "phi3"


def test_gemmas_layers_with_a_window_turn_by_a_theta_of_their_own() -> None:
    """Of transformers' model and ours, in both spellings; what stretches contexts is for the other layers alone."""
    local = {"rope_local_base_freq": 1000.0, "sliding_window_pattern": 2, "rope_theta": 5e4}
    old = spec_from_config(named("Gemma3", **local, rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert old.rope is not None and old.local_rope is not None
    assert (old.rope.theta, old.rope.kind, old.rope.factor) == (5e4, "linear", 8.0)
    assert (old.local_rope.theta, old.local_rope.kind) == (1000.0, "default")
    assert [old.rope_of(layer) for layer in range(3)] == [old.local_rope, old.rope, old.local_rope]
    spec, model = load_spec(tiny_models.model_folder("gemma3")), tiny_models.reference_model("gemma3").model
    for rope, kind in ((spec.rope, "full_attention"), (spec.local_rope, "sliding_attention")):
        assert rope is not None
        expected = getattr(model.rotary_emb, f"{kind}_inv_freq")
        assert torch.allclose(inverse_frequencies(rope), expected, rtol=1e-6, atol=0.0)
    silent = spec_from_config(named("Gemma3", rope_theta=None))
    assert silent.rope is not None and silent.local_rope is not None
    assert (silent.rope.theta, silent.local_rope.theta) == (1e6, 1e4)


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float32])
@for_each("shape", [(1, 8), (5, 64), (33, 576), (3, 4, 16), (0, 64)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[1:], generator=generator).to(dtype)
    kept = x.clone()
    found = torch_ops.rms_norm(x, weight, 1e-5)
    expected = functional.rms_norm(x.double(), x.shape[-1:], None, 1e-5) * weight.double()
    assert found.dtype == dtype
    assert found.shape == x.shape
    assert torch.equal(x, kept)
    assert torch.allclose(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_rms_norm_of_zeros_tiny_and_non_finite_rows() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    x[1] = 1e-3
    x[2, 5] = float("nan")
    x[3] = 2.0
    found = torch_ops.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-6).float()
    assert torch.equal(found[0], torch.zeros(64))
    assert torch.allclose(found[1], torch.full((64,), 0.7071), rtol=1e-2)
    assert found[2].isnan().all()
    assert torch.allclose(found[3], torch.ones(64), rtol=1e-2)
