"""The whole engine against transformers, on random checkpoints of every family: each token must be the reference's
best, up to the rounding of the type, given the tokens before it."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.loop import BLOCK, Loop, make_runner, scheduler_config
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.table import Row
from engine.api import EngineRequest, SamplingParams
from engine.models.checkpoint import load_weights
from engine.models.spec import load_spec

_VOCAB = 1000
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCAB, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "num_experts_per_tok": 2}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3MoeConfig", _EXPERTS | {"num_experts": 8, "moe_intermediate_size": 256}),
    "gpt-oss": ("GptOssConfig", _EXPERTS | {"num_local_experts": 8, "sliding_window": 128}),
    "Mixtral": ("MixtralConfig", _EXPERTS | {"num_local_experts": 8}),
    "Llama": ("LlamaConfig", {"num_key_value_heads": 2, "intermediate_size": 512}),
    "Qwen2, group of 7": (
        "Qwen2Config",
        {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1, "intermediate_size": 512},
    ),
    "Qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 512}),
    "OPT": ("OPTConfig", {"ffn_dim": 512, "word_embed_proj_dim": 256, "dropout": 0.0}),
    "GPT-NeoX": ("GPTNeoXConfig", {"intermediate_size": 512, "rotary_pct": 0.25}),
}
_SLACK = {torch.bfloat16: 0.15, torch.float16: 0.03, torch.float32: 1e-3}
"""How far below the best logit a token may be; logits have a spread of about one."""


def check_equality(setup: Setup) -> Iterator[Row]:
    """Compare in the type that serves, then in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in (setup.dtype, torch.float32)[: setup.size(2, 1)]:
        for name in list(_MODELS)[: setup.size(len(_MODELS), 2)]:
            yield compare(replace(setup, dtype=dtype), name)


def compare(setup: Setup, name: str) -> Row:
    """Requests with shared prefixes in a pool that is too small for all requests; random weights from one seed."""
    model = _reference(setup, name)
    config, kind = scheduler_config(8, 64, setup.size(512, 96), setup.size(60, 12)), str(setup.dtype)[6:]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model.save_pretrained(folder)
        spec = load_spec(Path(folder))
        weights = load_weights(spec, Path(folder), dtype=kind, device=setup.device)
        runner = make_runner(setup, spec, weights, config)
    loop = Loop(runner, config)
    requests = _requests(setup)
    loop.run(requests)
    worst, best, count = 0.0, 0, 0
    for request in requests:
        below = _below_best(model, request.prompt_token_ids, loop.tokens[request.request_id])
        worst, best, count = max(worst, max(below)), best + below.count(0.0), count + len(below)
    note = f"{best} of {count} tokens are the best; {sum(loop.core.state.counters.preemptions.values())} preemptions"
    title = f"engine against transformers, {name}, {kind}"
    return Row(title, "below", worst, _SLACK[setup.dtype], None, "", True, note)


def _reference(setup: Setup, name: str) -> Any:
    import transformers

    kind, changes = _MODELS[name]
    config = getattr(transformers, kind)(**(_COMMON | changes))
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1, generator=generator)
            if parameter.dim() == 1 and key.endswith("weight"):
                parameter.add_(1.0)
    return model.to(setup.device, setup.dtype).eval()


def _requests(setup: Setup) -> list[EngineRequest]:
    rng = np.random.default_rng(7)
    shared = rng.integers(3, _VOCAB, 2 * BLOCK).tolist()
    longest, outputs = setup.size(200, 30), setup.size(60, 6)
    requests = []
    for index in range(setup.size(12, 4)):
        prompt = rng.integers(3, _VOCAB, int(rng.integers(1, longest))).tolist()
        sampling = SamplingParams(max_tokens=outputs, temperature=0.0)
        prompt = shared + prompt if index % 2 else prompt
        requests.append(EngineRequest(f"r{index}", tuple(prompt), sampling))
    return requests


def _below_best(model: Any, prompt: tuple[int, ...], output: list[int]) -> list[float]:
    """For every output token, how far its logit is below the best one in a pass over the whole sequence."""
    ids = torch.tensor([[*prompt, *output]], device=model.device)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    below: list[float] = (logits.amax(dim=-1) - chosen).tolist()
    return below
