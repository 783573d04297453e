"""What this machine could do at best: read bandwidth, matmul rate, and a model's bare linear layers.

`python -m benchmarks.limits --config config.json` prints one JSON object, measured now; benchmarks divide by it
in the same run. Knows nothing of caches, attention or scheduling.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.models.linear import make_linear
from engine.models.spec import ModelSpec, spec_from_config


def median_seconds(run: Callable[[], object], repeats: int, inner: int = 1) -> float:
    """Median over `repeats` of the mean of `inner` calls, after one warm-up call."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        times.append((time.perf_counter() - start) / inner)
    return sorted(times)[len(times) // 2]


def read_bandwidth(device: torch.device, size: int = 1 << 28) -> float:
    """Bytes per second of reading a buffer much larger than the caches."""
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)

    def run() -> None:
        buffer.sum().item()

    return size / median_seconds(run, 5)


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 2048) -> float:
    """FLOP per second of one large matrix product."""
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)

    def run() -> None:
        (left @ right)[0, 0].item()

    return 2 * size**3 / median_seconds(run, 7)


def linear_shapes(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """(count, out_features, in_features) of every linear layer of a step, as the decoder fuses them."""
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    up_width = (2 if spec.gated_mlp else 1) * spec.intermediate_size
    return [
        (spec.num_layers, (heads + 2 * kv_heads) * dim, spec.hidden_size),
        (spec.num_layers, spec.hidden_size, heads * dim),
        (spec.num_layers, up_width, spec.hidden_size),
        (spec.num_layers, spec.hidden_size, spec.intermediate_size),
        (1, spec.vocab_size, spec.hidden_size),
    ]


def linear_stack_seconds(spec: ModelSpec, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of the bare linear layers of one step at `rows` tokens, every layer with weights of its own."""
    stack = [
        make_linear(torch.randn(out, width, device=device).mul_(0.02).to(dtype), None)
        for count, out, width in linear_shapes(spec)
        for _ in range(count)
    ]
    inputs = {layer.in_features: torch.randn(rows, layer.in_features, device=device).to(dtype) for layer in stack}

    def run() -> None:
        for layer in stack:
            layer(inputs[layer.in_features])

    return median_seconds(run, 9, 3)


def measure(spec: ModelSpec, rows: Sequence[int], dtype: torch.dtype) -> dict[str, object]:
    """All limits as plain numbers: bytes/s, FLOP/s, seconds by rows; and the bytes and FLOPs of the linear layers."""
    device = torch.device("cpu")
    with torch.inference_mode():
        weights = sum(count * out * width for count, out, width in linear_shapes(spec))
        return {
            "read_bandwidth": read_bandwidth(device),
            "matmul_rate": matmul_rate(device, dtype),
            "linear_bytes": weights * dtype.itemsize,
            "linear_flops_per_token": 2 * weights,
            "head_flops_per_token": 2 * spec.vocab_size * spec.hidden_size,
            "linear_stack_seconds": {str(n): linear_stack_seconds(spec, n, dtype, device) for n in rows},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = spec_from_config(json.loads(args.config.read_text()))
    print(json.dumps(measure(spec, args.rows, getattr(torch, args.dtype))))


if __name__ == "__main__":
    main()
