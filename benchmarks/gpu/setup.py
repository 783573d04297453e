"""Where the check runs, how large it is, how time is taken, and the limits of the machine; tiny sizes on a CPU are
for its own tests."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.table import Row
from engine.models.spec import ModelSpec, spec_from_config
from engine.models.weights import DummyTensors, ModelWeights, build_weights
from engine.triton_kernels import Kernels, triton_kernels, twins

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6}

SHAPES: dict[str, dict[str, object]] = {
    "8B": _LLAMA
    | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 16384, "rope_theta": 500000.0,
    },
    "Qwen2.5-0.5B": _QWEN2
    | {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 16384, "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": _QWEN3
    | {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 16384,
        "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 16384, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
        "swiglu_limit": 7.0, "attention_bias": True, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201088,
        "max_position_embeddings": 16384, "rope_theta": 150000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip

_TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 512, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setup:
    """`tiny`: sizes for a test of the check itself; its figures mean nothing."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def config(self, name: str) -> dict[str, object]:
        """Return the configuration of a shape; if tiny, of two small layers of it."""
        config = SHAPES[name] | {"eos_token_id": None, "torch_dtype": "bfloat16"}
        kinds = {"layer_types": kinds[:2]} if isinstance(kinds := config.get("layer_types"), list) else {}
        return config | _TINY | kinds if self.tiny else config

    def spec(self, name: str) -> ModelSpec:
        """Return the model of a shape, without end tokens."""
        return spec_from_config(self.config(name))

    def weights(self, spec: ModelSpec) -> ModelWeights:
        """Random weights."""
        with torch.inference_mode():
            return build_weights(spec, DummyTensors(0, self.dtype, self.device))

    def kernels(self) -> Kernels:
        return triton_kernels() if self.device.type == "cuda" else twins

    def release(self) -> None:
        """Give back what earlier models and graphs of this process held, so that free memory can be asked for."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 20, rounds: int = 5) -> float:
        """Median time of one call: of `rounds` rounds of `repeats` calls, back to back."""
        repeats, rounds = self.size(repeats, 1), self.size(rounds, 1)
        work()
        self.synchronize()
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(repeats):
                work()
            self.synchronize()
            taken.append((time.perf_counter() - began) / repeats)
        return statistics.median(taken)


def cuda_setup() -> Setup | None:
    """The first CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    return Setup(torch.device("cuda", 0), torch.bfloat16, tiny=False)


def tiny_setup() -> Setup:
    return Setup(torch.device("cpu"), torch.float32, tiny=True)


# --- the machine's own limits, against which everything else is held

_H200_BANDWIDTH = 4.3e12
"""Bytes/s of the device for which targets and floors of the table were worked out."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`bandwidth`: bytes/s read plus written by a large copy; `flops`: of a large matmul; `to_host`: bytes/s of a
    pinned copy from the device."""

    bandwidth: float
    flops: float
    to_host: float

    def scaled(self, rate: float) -> float:
        """A rate that is bound by memory, stated for an H200, on this machine."""
        return rate * self.bandwidth / _H200_BANDWIDTH

    def step_seconds(self, weight_bytes: float, flops: float, kv_bytes: float) -> float:
        """The floor of a step: weights read once or the GEMMs computed, then the cache read."""
        return max(weight_bytes / self.bandwidth, flops / self.flops) + kv_bytes / self.bandwidth


def measure_limits(setup: Setup) -> Limits:
    num_bytes = setup.size(2**32, 2**20)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    copy = setup.seconds(lambda: target.copy_(source))
    host_bytes = setup.size(2**28, 2**16)
    host = torch.zeros(host_bytes, dtype=torch.uint8, pin_memory=setup.device.type == "cuda")
    fetch = setup.seconds(lambda: host.copy_(target[:host_bytes], non_blocking=True))
    width = setup.size(8192, 64)
    a = torch.randn(width, width, device=setup.device, dtype=setup.dtype)
    matmul = setup.seconds(lambda: a @ a)
    return Limits(2 * num_bytes / copy, 2 * width**3 / matmul, host_bytes / fetch)


def check_limits(setup: Setup) -> Iterator[Row]:
    limits = measure_limits(setup)
    yield Row("copy bandwidth", "TB/s", limits.bandwidth / 1e12, anchor="4.3 (H200)")
    yield Row("bf16 matmul 8192", "TFLOP/s", limits.flops / 1e12, anchor="790 (H200)")
    yield Row("pinned copy to the host", "GB/s", limits.to_host / 1e9, anchor="~50 (H100)")
