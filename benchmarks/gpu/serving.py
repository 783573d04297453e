"""Offline throughput: the script of nano-vllm's benchmark for the engine, and for transformers' `generate_batch`."""

import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.limits import measure_limits
from benchmarks.gpu.loop import BLOCK, Loop, make_runner, scheduler_config
from benchmarks.gpu.setup import SHAPES, Setup
from benchmarks.gpu.table import Row
from engine.api import EngineRequest, RequestClass, SamplingParams

_TARGETS = {"Qwen3-0.6B": (27.0, 36.3), "Qwen2.5-0.5B": (90.0, 184.0), "8B": (11.0, 13.3)}
_PEER = "Qwen3-0.6B"
_MEMORY_SHARE = 0.8  # of what is free beside the weights, for the cache


def lengths_of(setup: Setup, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and output lengths: 256 requests of 100-1024 tokens each way."""
    rng, (low, high) = random.Random(seed), (setup.size(100, 4), setup.size(1024, 9))
    return [(rng.randint(low, high), rng.randint(low, high)) for _ in range(setup.size(256, 4))]


def check_serving(setup: Setup) -> Iterator[Row]:
    scaled = measure_limits(setup).scaled
    for name, (target, floor) in _TARGETS.items():
        rate = _rate(setup, name, lengths_of(setup)) / 1e3
        anchor = "10.0 (A800)" if name == _PEER else "24.1 (A800)" if name == "Qwen2.5-0.5B" else ""
        yield Row(f"256 requests, in/out 100-1024, {name}", "k tok/s", rate, scaled(target), scaled(floor), anchor)
    size = setup.size(1000, 8)
    rate = _rate(setup, "8B", [(size, size)] * setup.size(256, 3)) / 1e3
    yield Row("offline 1000/1000, 8B", "k tok/s", rate, scaled(9.7), scaled(12.1), "17.7 (TensorRT-LLM, FP8)")


def check_peer(setup: Setup) -> Iterator[Row]:
    """The engine first, then transformers on the same device with the same requests (a quarter of them: it is slow)."""
    lengths = lengths_of(setup)[: setup.size(64, 2)]
    ours = _rate(setup, _PEER, lengths)
    theirs = _peer_rate(setup, lengths)
    note = f"{ours / 1e3:.3g} k against {theirs / 1e3:.3g} k tok/s, {len(lengths)} requests, {_PEER}"
    yield Row("engine over transformers' generate_batch", "x", ours / theirs, 3.0, note=note)


def _rate(setup: Setup, name: str, lengths: list[tuple[int, int]]) -> float:
    """Output tokens per second."""
    setup.release()
    spec = setup.spec(name)
    weights = setup.weights(spec)
    context = max(sum(pair) for pair in lengths) + 1
    wanted = sum(-(-sum(pair) // BLOCK) for pair in lengths)
    block_bytes = BLOCK * spec.kv_bytes_per_token(setup.dtype.itemsize)
    room = wanted
    if setup.device.type == "cuda":
        room = int(torch.cuda.mem_get_info(setup.device)[0] * _MEMORY_SHARE) // block_bytes
    config = scheduler_config(min(len(lengths), 256), setup.size(4096, 16), context, min(wanted, room))
    runner = make_runner(setup, spec, weights, config)
    rng = random.Random(1)
    requests = [
        EngineRequest(
            f"r{index}",
            tuple(rng.randrange(spec.vocab_size) for _ in range(prompt)),
            SamplingParams(max_tokens=output, temperature=0.0),
            RequestClass.OFFLINE,
            final_only=True,
        )
        for index, (prompt, output) in enumerate(lengths)
    ]
    loop = Loop(runner, config)
    seconds = loop.run(requests)
    assert sum(map(len, loop.tokens.values())) == sum(output for _, output in lengths), "tokens are missing"
    return sum(output for _, output in lengths) / seconds


def _peer_rate(setup: Setup, lengths: list[tuple[int, int]]) -> float:
    """Output tokens per second of transformers' continuous batching; outputs are all as long as the mean."""
    import transformers

    setup.release()
    tiny = setup.tiny
    changes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 128} if tiny else {}
    shape = {key: value for key, value in SHAPES[_PEER].items() if key not in ("architectures", "model_type")}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**(shape | changes)))
    model = model.to(setup.device, setup.dtype).eval()
    output = sum(pair[1] for pair in lengths) // len(lengths)
    generation = transformers.GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rng = random.Random(1)
    inputs = [[rng.randrange(3, model.config.vocab_size) for _ in range(prompt)] for prompt, _ in lengths]
    model.generate_batch(inputs[:1], generation_config=generation)  # whatever happens only once
    began = time.perf_counter()
    outputs = model.generate_batch(inputs, generation_config=generation)
    seconds = time.perf_counter() - began
    tokens = sum(len(result.generated_tokens) for result in outputs.values())
    assert tokens == len(lengths) * output, "transformers gave fewer tokens than asked for"
    return tokens / seconds
