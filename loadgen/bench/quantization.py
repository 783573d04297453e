"""`--quantization int8` beside none: how far its distributions are from float32's, and what steps take, in alternation.

Divergence is KL(float32 || other) of the next token, teacher-forced, by torch's path: over texts that the demo model
knows, and over random tokens with random weights. Steps are those of the runner that `tidemill serve` would use, one
model of random weights for each arm in this process, so that a busy machine is busy for both: read the ratios.
"""

import tempfile
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from engine.build import build_runner, plan_launch, resolve_model
from engine.calibration import ShapeRunner
from engine.config import EngineConfig
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.heads import Heads
from engine.models.linear import MakeLinear, make_linear
from engine.models.quantized import make_quantized
from engine.models.spec import ModelSpec, load_spec
from engine.models.weights import LayerWeights, ModelWeights
from engine.text import Tokenizer
from loadgen.bench.live import CONFIG, make_model_folder
from loadgen.bench.machine import describe
from predictor.sweep import StepShape

CONTEXT, ROUNDS, DRAWN = 192, 15, 300
SHAPES = {
    **{f"{rows} decodes": StepShape(rows, CONTEXT) for rows in (1, 4, 8, 16)},
    "prefill 512": StepShape(chunks=((0, 512),)),
}
QUESTIONS = (
    "What is the capital of France?",
    "What is TTFT?",
    "Write a short story about a mill.",
    "What is seven times eight?",
    "Who are you?",
)


def logits_of(spec: ModelSpec, weights: ModelWeights, ids: list[int]) -> Tensor:
    """Logits [length, vocab] of one sequence, without a cache."""
    heads, decoder = Heads(spec, weights, len(ids)), Decoder(spec, weights)
    positions = torch.arange(len(ids))
    rotary = heads.rotary(positions)

    def attend(_index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in heads.qkv(layer, x, rotary))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.squeeze(0).transpose(0, 1).reshape(len(x), -1)

    with torch.inference_mode():
        return decoder.logits(decoder.run(decoder.embed(torch.tensor(ids), positions), attend)).float()


def answers(folder: Path, spec: ModelSpec, weights: ModelWeights) -> list[list[int]]:
    """The demo model's greedy answers to a few questions, as whole contexts."""
    tokenizer = Tokenizer.load(folder)
    texts = []
    for question in QUESTIONS:
        ids = list(tokenizer.encode_chat([{"role": "user", "content": question}]))
        for _ in range(40):
            ids.append(int(logits_of(spec, weights, ids)[-1].argmax()))
            if ids[-1] in spec.eos_token_ids:
                break
        texts.append(ids)
    return texts


def divergences(spec: ModelSpec, exact: ModelWeights, other: ModelWeights, texts: list[list[int]]) -> str:
    kl, same = [], []
    for ids in texts:
        p, q = (logits_of(spec, weights, ids).double().log_softmax(-1) for weights in (exact, other))
        kl.append((p.exp() * (p - q)).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
    every, equal = torch.cat(kl), torch.cat(same)
    return f"{every.mean():9.5f} {every.max():9.5f} {equal.mean():9.1%} {len(every):8d}"


def show_divergence(name: str, folder: Path, load_format: str) -> None:
    spec = load_spec(folder)

    def load(dtype: str, make: MakeLinear) -> ModelWeights:
        return load_weights(spec, folder, dtype=dtype, load_format=load_format, make=make)

    exact = load("float32", make_linear)
    if load_format == "dummy":
        ids = torch.randint(0, spec.vocab_size, (DRAWN,), generator=torch.Generator().manual_seed(0))
        texts = [[int(token) for token in ids]]
    else:
        texts = answers(folder, spec, exact)
    arms = {"bfloat16": load("bfloat16", make_linear), "int8 in float32": load("float32", make_quantized)}
    arms["int8 in bfloat16"] = load("bfloat16", make_quantized)
    for arm, weights in arms.items():
        print(f"{name:24} {arm:18} {divergences(spec, exact, weights, texts)}", flush=True)


def show_steps(folder: Path) -> None:
    arms = {}
    for quantization in ("none", "int8"):
        config = EngineConfig(
            model=str(folder), device="cpu", load_format="dummy", quantization=quantization, num_gpu_blocks_override=400
        )
        runner, plan = build_runner(config, plan_launch(config))
        arms[quantization] = ShapeRunner(runner, plan.limits, plan.spec.vocab_size)
        print(f"{quantization}: {plan.precision}, kernels {plan.kernels}, weights {plan.weight_bytes / 2**20:.0f} MiB")
    print(f"{'step':16} {'none ms':>9} {'int8 ms':>9} {'times as fast':>14}   medians of {ROUNDS} pairs")
    for name, shape in SHAPES.items():
        pairs = [[arm.measure(shape) for arm in arms.values()] for _ in range(ROUNDS + 1)][1:]
        before, after = (median(pair[index] for pair in pairs) * 1e3 for index in (0, 1))
        print(f"{name:16} {before:9.1f} {after:9.1f} {median(a / b for a, b in pairs):14.2f}", flush=True)


def main(_argv: list[str] | None = None) -> None:
    print(f"quantization: {describe()}")
    print(f"{'KL to float32, nats':24} {'':18} {'mean':>9} {'largest':>9} {'same top':>9} {'tokens':>8}", flush=True)
    show_divergence("demo model", resolve_model(EngineConfig()), "auto")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        show_divergence(f"random, {CONFIG['num_hidden_layers']} layers", folder, "dummy")
        show_steps(folder)


if __name__ == "__main__":
    main()
