"""Model shapes and devices of simulations, by name. Torch-free, numbers only.

A shape is the arithmetic of a decoder-only transformer; a device is a set of peak rates with the share of each that
real kernels reach. The shares are calibrated once per device family on published step times of all linear layers of
Llama-2-7B, the rest is from data sheets.
"""

from dataclasses import dataclass

from predictor.reach import Reach

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model: sizes in elements. `gated`: a SwiGLU-style ffn (three matrices instead of two).

    `windows`: per layer the tokens visible to a query, including itself, or None for all; empty without windows.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    gated: bool
    vocab_size: int
    tied: bool = False
    max_model_len: int = 4096
    bytes_per_value: int = 2
    windows: tuple[int | None, ...] = ()

    @property
    def reach(self) -> Reach:
        """Reach of the layers: how much of a context they read."""
        return Reach.of(self.windows)

    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the matrices of one layer, as they are launched: QKV, output, ffn up, ffn down."""
        attention = self.num_heads * self.head_dim
        qkv = attention + 2 * self.num_kv_heads * self.head_dim
        up = self.ffn_size * (2 if self.gated else 1)
        hidden = self.hidden_size
        return ((hidden, qkv), (attention, hidden), (hidden, up), (self.ffn_size, hidden))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices, embedding and head included."""
        layers = self.num_layers * sum(rows * columns for rows, columns in self.linears())
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return (layers + embeddings) * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device: peak rates in bytes/s and FLOP/s (dense 16-bit) and the shares that kernels reach.

    memory_bytes          device memory
    bandwidth, flops      peaks of the data sheet
    pcie                  bytes/s between host and device, one way
    memory_efficiency     share of `bandwidth` that a matrix-vector product reaches
    flops_efficiency      share of `flops` that a large matrix product reaches
    attention_efficiency  share of `flops` that prefill attention reaches
    knee                  exponent p of (memory^p + compute^p)^(1/p): how sharply the two regimes meet
    launch_seconds        launch overhead of one kernel
    host_seconds          host overhead of one step; `sequence_seconds` of each sequence in it
    tile                  tokens to which a matrix product is padded
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    pcie: float
    memory_efficiency: float
    flops_efficiency: float
    attention_efficiency: float = 0.45
    knee: float = 2.2
    launch_seconds: float = 4e-6
    host_seconds: float = 5e-4
    sequence_seconds: float = 4e-6
    tile: int = 16


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, True, 32000),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, True, 32000),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, True, 128256, max_model_len=8192),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, True, 32000, max_model_len=8192),
        ModelShape("opt-6.7b", 32, 4096, 32, 32, 128, 16384, False, 50272, tied=True, max_model_len=2048),
        ModelShape("opt-13b", 40, 5120, 40, 40, 128, 20480, False, 50272, tied=True, max_model_len=2048),
        ModelShape("opt-30b", 48, 7168, 56, 56, 128, 28672, False, 50272, tied=True, max_model_len=2048),
        ModelShape("opt-66b", 64, 9216, 72, 72, 128, 36864, False, 50272, tied=True, max_model_len=2048),
        ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, True, 151936, tied=True, max_model_len=8192),
        ModelShape("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, True, 152064, max_model_len=8192),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, True, 152064, max_model_len=8192),
    )
}

DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec("a100-40gb", 40 * GIB, 1.555e12, 312e12, 25e9, 0.94, 0.655),
        DeviceSpec("a100-80gb", 80 * GIB, 2.039e12, 312e12, 25e9, 0.72, 0.655),
        DeviceSpec("a40", 45 * GIB, 0.696e12, 149.7e12, 25e9, 0.80, 0.67),
        DeviceSpec("h100", 80 * GIB, 3.35e12, 989e12, 50e9, 0.75, 0.68),
        DeviceSpec("h200", 139 * GIB, 4.8e12, 989e12, 50e9, 0.73, 0.68),
        DeviceSpec("rtx-4090", 24 * GIB, 1.008e12, 165e12, 25e9, 0.85, 0.75),
    )
}
