"""Offline throughput by the script of nano-vllm's benchmark."""

import random
from collections.abc import Iterator

import torch

from benchmarks.gpu.loop import BLOCK, Loop, make_runner, scheduler_config
from benchmarks.gpu.setup import Setup, measure_limits
from benchmarks.gpu.table import Row
from engine.api import EngineRequest, RequestClass, SamplingParams

_TARGETS = {"Qwen3-0.6B": (27.0, 36.3), "Qwen2.5-0.5B": (90.0, 184.0), "8B": (11.0, 13.3)}
_MEMORY_SHARE = 0.8  # share of the memory beside the weights, for the cache


def lengths_of(setup: Setup, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and output lengths: 256 requests of 100-1024 tokens each way."""
    rng, (low, high) = random.Random(seed), (setup.size(100, 4), setup.size(1024, 9))
    return [(rng.randint(low, high), rng.randint(low, high)) for _ in range(setup.size(256, 4))]


def check_serving(setup: Setup) -> Iterator[Row]:
    scaled = measure_limits(setup).scaled
    for name, (target, floor) in _TARGETS.items():
        rate = _rate(setup, name, lengths_of(setup)) / 1e3
        anchor = "10.0 (A800)" if name == "Qwen3-0.6B" else "24.1 (A800)" if name == "Qwen2.5-0.5B" else ""
        yield Row(f"256 requests, in/out 100-1024, {name}", "k tok/s", rate, scaled(target), scaled(floor), anchor)
    size = setup.size(1000, 8)
    rate = _rate(setup, "8B", [(size, size)] * setup.size(256, 3)) / 1e3
    yield Row("offline 1000/1000, 8B", "k tok/s", rate, scaled(9.7), scaled(12.1), "17.7 (TensorRT-LLM, FP8)")


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
