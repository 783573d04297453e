"""Eight and four bits beside sixteen: `--quantization int8`, `int4`, `fp8` and `--kv-cache-dtype int8`.

Measures how far each distribution is from float32's and, in alternation, the time of steps. `fp8` is measured for the
distribution alone, by its twin on the CPU.

Divergence is KL(float32 || other) of the next token, teacher-forced, by torch's path: over texts that the demo model
knows, and over random tokens with random weights, a Gemma's with windows and caps among them. Steps are those of the
runner that `tidemill serve` would use, one model of random weights for each arm in this process, so that a busy machine
is busy for both: read the ratios. Those of one stream are measured with a model of 1.2 B parameters, whose weights pass
through memory in every step; `--only large` measures these alone.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.live import CONFIG, make_model_folder
from benchmarks.machine import describe
from engine.build import build_runner, plan_launch, resolve_model
from engine.config import EngineConfig
from engine.execution.cpu.device import mix
from engine.models.attention import HeadProjection, manners_of
from engine.models.byte_cells import INTEGERS, dequantize, quantize
from engine.models.checkpoint import load_weights
from engine.models.compact import make_float8
from engine.models.decoder import Decoder
from engine.models.linear import MakeLinear, make_linear, make_packed
from engine.models.quantized import make_quantized
from engine.models.spec import ModelSpec, load_spec
from engine.models.weights import LayerWeights, ModelWeights
from engine.profiling.calibration import ShapeRunner, StepShape
from engine.text.tokenizer import Tokenizer

CONTEXT, ROUNDS, LARGE_ROUNDS, DRAWN = 192, 15, 7, 300
SHAPES = {
    **{f"{rows} decodes": StepShape(rows, CONTEXT) for rows in (1, 4, 8, 16)},
    "16 of 1024": StepShape(16, 1024),
    "prefill 512": StepShape(chunks=((0, 512),)),
}
STEPS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8 layers": {"quantization": "int8"},
    "int4 layers": {"quantization": "int4"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}
LARGE = CONFIG | {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "tie_word_embeddings": False,
}
"""A TinyLlama of 1.2 B parameters, with the packaged tokenizer."""
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}
LARGE_STEPS = {name: STEPS[name] for name in ("bfloat16", "int8 layers", "int4 layers")}
LARGE_SHAPES = {
    **{f"{rows} decodes": StepShape(rows, CONTEXT) for rows in (1, 4, 16)},
    "prefill 128": StepShape(chunks=((0, 128),)),
}
GEMMA = CONFIG | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 48,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 128,
}
"""Attention of a Gemma 2: a scale, caps, and in every other layer a window shorter than the drawn text."""
BLOCKS = 1200  # of KV: room for the longest shape
QUESTIONS = (
    "What is the capital of France?",
    "What is TTFT?",
    "Write a short story about a mill.",
    "What is seven times eight?",
    "Who are you?",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """Weights, and the type of 8 bits that K and V are kept in, if they are."""

    weights: ModelWeights
    cell_type: torch.dtype | None = None


def dense_logits(
    spec: ModelSpec, weights: ModelWeights, ids: Tensor, keep: Callable[[Tensor], Tensor] = lambda cells: cells
) -> Tensor:
    """Return logits [length, vocab] float32. `keep` applies a cache's rounding to K and to V [length, kv_heads, d]."""
    length = len(ids)
    heads, decoder = HeadProjection(spec, weights), Decoder(spec, weights)
    manners = manners_of(spec, weights.layers)
    positions = torch.arange(length)
    rotary, past_by = heads.rotary(positions), positions[:, None] - positions

    def attend(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        q, k, v = heads.qkv(layer, x, rotary[index])
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, keep(k), keep(v)))
        hidden = (past_by < 0) | (past_by >= (manners[index].window or length))
        bias = torch.zeros(past_by.shape, dtype=x.dtype).masked_fill_(hidden, -torch.inf)
        mixed = mix(q, k, v, bias[None, None], manners[index])
        return mixed.squeeze(0).transpose(0, 1).reshape(length, -1)

    with torch.inference_mode():
        return decoder.logits(decoder.run(decoder.embed(ids, positions), attend)).float()


def logits_of(spec: ModelSpec, weights: ModelWeights, ids: list[int], cell_type: torch.dtype | None = None) -> Tensor:
    """Logits [length, vocab] of one sequence, whose K and V are kept as a cache of 8 bits has them, or as they are."""
    if cell_type is None:
        return dense_logits(spec, weights, torch.tensor(ids))

    def kept(cells: Tensor) -> Tensor:
        return dequantize(*quantize(cells), cells.dtype)

    return dense_logits(spec, weights, torch.tensor(ids), kept)


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


def divergences(spec: ModelSpec, exact: ModelWeights, other: Arm, texts: list[list[int]]) -> str:
    kl, same = [], []
    for ids in texts:
        arms = (Arm(exact), other)
        p, q = (logits_of(spec, arm.weights, ids, arm.cell_type).double().log_softmax(-1) for arm in arms)
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
    plain = load("bfloat16", make_linear)
    arms = {
        "bfloat16": Arm(plain),
        "int8 in float32": Arm(load("float32", make_quantized)),
        "int8 in bfloat16": Arm(load("bfloat16", make_quantized)),
        "int4 in bfloat16": Arm(load("bfloat16", make_packed)),
        "fp8 in bfloat16": Arm(load("bfloat16", make_float8)),
    }
    arms |= {"float32, int8 cache": Arm(exact, INTEGERS), "bfloat16, int8 cache": Arm(plain, INTEGERS)}
    for title, arm in arms.items():
        print(f"{name:24} {title:20} {divergences(spec, exact, arm, texts)}", flush=True)


def show_steps(
    folder: Path,
    steps: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, StepShape],
    rounds: int = ROUNDS,
    threads: int | None = None,
) -> None:
    """Print the time of steps, or with `threads` the time that processors spend in them."""
    clock = time.perf_counter if threads is None else time.process_time
    arms = {}
    for name, flags in steps.items():
        given: dict[str, Any] = {"model": str(folder), "device": "cpu", "load_format": "dummy"}
        config = EngineConfig(num_gpu_blocks_override=BLOCKS, threads=threads, **(given | dict(flags)))
        runner, plan = build_runner(config, plan_launch(config))
        arms[name] = ShapeRunner(runner, plan.limits, plan.spec.vocab_size)
        print(f"{name}: {plan.precision}, kernels {plan.kernels}, weights {plan.weight_bytes / 2**20:.0f} MiB")
    others = list(arms)[1:]
    print(f"{'step':16}" + "".join(f" {name + ' ms':>14}" for name in arms) + f"   times as fast: {', '.join(others)}")
    for name, shape in shapes.items():
        each_round = [[timed(arm, shape, clock) for arm in arms.values()] for _ in range(rounds + 1)][1:]
        times = [median(each[index] for each in each_round) * 1e3 for index in range(len(arms))]
        faster = [median(each[0] / each[index] for each in each_round) for index in range(1, len(arms))]
        print(f"{name:16}" + "".join(f" {ms:14.1f}" for ms in times) + "   " + ", ".join(f"{x:.2f}" for x in faster))


def timed(arm: ShapeRunner, shape: StepShape, clock: Callable[[], float]) -> float:
    """Return the seconds of a step by this clock."""
    begin = clock()
    arm.measure(shape)
    return clock() - begin


def show_large(threads: int | None) -> None:
    """Time steps of the large model, its 4 bits in groups of 32, and of 128 as an AWQ checkpoint has them."""
    with tempfile.TemporaryDirectory() as name:
        folder, stored = Path(name), Path(name) / "awq"
        stored.mkdir()
        make_model_folder(folder, LARGE)
        make_model_folder(stored, LARGE | AWQ)
        steps = LARGE_STEPS | {"int4 of 128": {"model": str(stored)}}
        show_steps(folder, steps, LARGE_SHAPES, LARGE_ROUNDS, threads)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks quantization")
    parser.add_argument("--only", choices=("large",), help="measure steps of the large model alone")
    parser.add_argument(
        "--threads", type=int, help="with --only large: threads of a step, whose processor time is measured"
    )
    print(f"quantization: {describe()}")
    options = parser.parse_args(argv)
    if options.only:
        return show_large(options.threads)
    print(f"{'KL to float32, nats':24} {'':20} {'mean':>9} {'largest':>9} {'same top':>9} {'tokens':>8}", flush=True)
    show_divergence("demo model", resolve_model(EngineConfig()), "auto")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        show_divergence(f"random, {CONFIG['num_hidden_layers']} layers", folder, "dummy")
        show_steps(folder, STEPS, SHAPES)
        make_model_folder(folder, GEMMA)
        show_divergence(f"random Gemma, {GEMMA['num_hidden_layers']} layers", folder, "dummy")
    return show_large(None)
