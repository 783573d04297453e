"""Simulated offloading: weights and cache on the host, streamed through a device layer by layer (HybridServe §4.2).

A batch passes a layer in mini-batches. While the device computes one, the link loads the blocks of the next and, in
between, the weights of the next layer: two pipelines with two buffers each. All costs are those of the simulated device
for one layer. Blocks are of three kinds: K and V, activations (ACT, hidden state), and tokens that are computed again
from their ids. Torch-free; knows nothing of how blocks are divided between kinds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from loadgen.simulation.gpu import SimulatedDevice

Compact = Literal["none", "project", "tokens"]
"""Stand-in for K and V: none; ACT, from which K and V are projected again; token ids."""

BLOCK = 16
"""Tokens of a block."""
BUFFER_BYTES = 512 * 2**20
"""Bytes of a buffer of K and V."""


@dataclass(frozen=True, slots=True)
class OffloadDevice:
    """One layer of a model on a simulated device; sizes in bytes, times in seconds."""

    simulated: SimulatedDevice

    @property
    def layers(self) -> int:
        return self.simulated.model.num_layers

    @property
    def ratio(self) -> float:
        """r: the size of a token's hidden state over that of its K and V."""
        model = self.simulated.model
        return model.hidden_size / (2 * model.num_kv_heads * model.head_dim)

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer."""
        model = self.simulated.model
        return sum(rows * columns for rows, columns in model.linears()) * model.bytes_per_value

    @property
    def block_bytes(self) -> float:
        """K and V of one block in one layer."""
        return self.simulated.model.kv_bytes_per_token * BLOCK / self.layers

    def load_seconds(self, num_bytes: float) -> float:
        """Bytes over the link, one way."""
        return num_bytes / self.simulated.device.pcie

    def forward_seconds(self, requests: int, context: int) -> float:
        """One new token of each request: matrix products, and attention over `context` tokens of K and V in all."""
        return self.simulated.token_seconds(requests) / self.layers + self._attention(context, 0)

    def regenerate_seconds(self, tokens: int) -> float:
        """K and V of so many tokens from their hidden state."""
        return self.simulated.cache_work_seconds(restored_tokens=tokens) / self.layers

    def recompute_seconds(self, tokens: int, pairs: int) -> float:
        """The whole layer for so many tokens, with `pairs` query-key pairs: prefill, or token recomputation."""
        if not tokens:
            return 0.0
        return self.simulated.token_seconds(tokens) / self.layers + self._attention(0, pairs)

    def step_overhead(self, requests: int) -> float:
        """Seconds of a step beside its layers: the host's work, and the head for every request."""
        device = self.simulated.device
        return device.host_seconds + requests * device.sequence_seconds + self.simulated.head_seconds(requests)

    def _attention(self, context: int, pairs: int) -> float:
        step = self.simulated.step_seconds
        return (step(0, 0, 0, context, pairs) - step(0, 0, 0, 0, 0)) / self.layers


@dataclass(frozen=True, slots=True)
class Layout:
    """What lies on the device.

    resident      share of every layer's weights; the rest is streamed, once a step
    cache_bytes   what all weights leave free, for cache of all layers
    max_blocks    blocks of each kind in one mini-batch: the size of a buffer
    """

    resident: float
    cache_bytes: float
    max_blocks: int


def lay_out(device: OffloadDevice, compact: Compact, *, prefill_tokens: int, kept_tokens: int) -> Layout:
    """Divide the device's memory: buffers first, then weights, then cache.

    Two KV buffers of `BUFFER_BYTES`, two ACT buffers for as many blocks, and one buffer that K and V are regenerated
    into; two buffers for the streamed weights of a layer. `kept_tokens`: tokens with a hidden state on the device
    between layers. Weights go before cache: a byte of either saves one on the link, and prefill has no use for cache.
    Raises ValueError when the buffers do not fit.
    """
    simulated, model = device.simulated, device.simulated.model
    buffers = 2.0 * BUFFER_BYTES
    if compact == "project":
        buffers += 2.0 * device.ratio * BUFFER_BYTES
    if compact in ("project", "tokens"):
        buffers += BUFFER_BYTES
    widths = prefill_tokens * (4 * model.hidden_size + model.ffn_size) + kept_tokens * model.hidden_size
    embeddings = model.weight_bytes - device.layers * device.layer_bytes
    free = simulated.device.memory_bytes * simulated.utilization - buffers - embeddings
    free -= widths * model.bytes_per_value
    weights, double = device.layers * device.layer_bytes, 2 * device.layer_bytes
    blocks = int(BUFFER_BYTES // device.block_bytes)
    if free >= weights:
        return Layout(1.0, free - weights, blocks)
    if free < double:
        raise ValueError(f"{model.name} does not fit on {simulated.device.name}: no room for two layers and buffers")
    return Layout((free - double) / (weights - double), 0.0, blocks)


class Stage(NamedTuple):
    """One mini-batch in one layer: seconds to load its blocks, seconds to compute it."""

    load: float
    compute: float


class Timeline(NamedTuple):
    """Seconds of all layers, and the busy seconds of each pipeline."""

    seconds: float
    link_busy: float
    device_busy: float


def run_layers(stages: Sequence[Stage], layers: int, load_weights: float) -> Timeline:
    """The two pipelines over so many layers of the same stages.

    A stage computes when its blocks are there and the one before has ended; its blocks load when the stage before the
    last has given its buffer back. A layer's weights load in parts between the blocks of the layer before, and not
    before the layer before that has ended (two buffers); those of the first layer came during the last step.
    """
    part = load_weights / len(stages)
    link = last = before_last = 0.0
    for _ in range(layers):
        begun = last
        for load, compute in stages:
            ready = max(link, before_last) + load
            link = max(ready, begun) + part if part else ready
            before_last, last = last, max(ready, last) + compute
    total = sum(stage.load for stage in stages) + load_weights
    return Timeline(max(last, link), layers * total, layers * sum(stage.compute for stage in stages))
