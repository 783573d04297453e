"""Limits of a step, of the cache and of the queue: what the scheduler and the data plane must keep within.

The module does not import torch.
"""

import math
import re
import sys
from dataclasses import dataclass, replace

from engine.errors import ConfigError
from predictor.features import EVERYTHING, Reach

BLOCK_SIZE = 16
"""Tokens per cache block."""
SNAPSHOT_TOKENS = 512
"""Distance in prompt tokens between two snapshots of recurrent state."""
UNITS_PER_BLOCK = 2
"""Cache units per block of K and V."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Token counts, ascending, to which steps are padded (sizes of the CUDA graphs): decode-only steps and steps with
    prompts. A step larger than the last size is not padded; nor is any step if the tuple is empty.

    jump: Padded token count beyond which layers multiply otherwise, and steps take longer at once; 0: none.
    """

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    jump: int = 0

    def __str__(self) -> str:
        sizes = "; ".join(" ".join(map(str, sizes)) for sizes in (self.decode, self.mixed) if sizes)
        return f"{sizes}, jump {self.jump}" if self.jump else sizes


NO_PADDING = Padding()


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacity of a step and of the cache.

    Attributes:
        max_num_seqs: Requests per step.
        max_num_batched_tokens: Tokens per step.
        max_model_len: Tokens of a context.
        num_units: Cache units, UNITS_PER_BLOCK per KV block.
        block_size: Tokens per KV block.
        padding: Sizes to which steps are padded.
        window: See `SchedulerConfig`. With a window, a context may be longer than the cache.
        reach: Part of a context that the layers read.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_units: int
    block_size: int = 16
    padding: Padding = NO_PADDING
    window: int = 0
    reach: Reach = EVERYTHING

    @property
    def held(self) -> "Limits":
        """The same limits with `max_model_len` reduced to a context that fits the cache as a whole."""
        return replace(self, max_model_len=min(self.max_model_len, self.num_units // UNITS_PER_BLOCK * self.block_size))

    def units(self, context: int) -> int:
        """Return the units for a context of `context` tokens."""
        return -(-context // self.block_size) * UNITS_PER_BLOCK

    def max_decodes(self, context: int) -> int:
        """Return the number of decodes of `context` tokens that fit one step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens, self.num_units // self.units(context))


DEFAULT_QUEUE = "10x"
UNLIMITED_QUEUE = "none"
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|x)")


@dataclass(frozen=True, slots=True)
class QueueTime:
    """`--max-queue-time`: the expected wait above which an online request is refused. Both limits apply.

    The default exceeds the objective because users prefer a late answer to none.
    """

    seconds: float = math.inf
    objectives: float = math.inf  # multiple of the TTFT objective

    @classmethod
    def parse(cls, text: str) -> "QueueTime":
        """Parse `10x` (times the TTFT objective), a time like `500ms`, `5s` or `2m`, or `none`.

        Raise ConfigError for any other text.
        """
        if text.strip() == UNLIMITED_QUEUE:
            return cls()
        found = _FORM.fullmatch(text.strip())
        number = float(found.group(1)) if found else 0.0
        if found is None or not 0.0 < number < math.inf:
            raise ConfigError(f"--max-queue-time must be a time like 5s, a multiple like 10x, or none, not '{text}'")
        if found.group(2) == "x":
            return cls(objectives=number)
        return cls(seconds=number * _UNITS[found.group(2)])

    def longest(self, ttft: float) -> float:
        """Return the maximum wait, seconds. `ttft` is the TTFT objective, infinite if there is none."""
        return min(self.seconds, self.objectives * ttft)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The resolved settings of the scheduler core.

    Attributes:
        num_units: Units of the device pool; a KV block takes two.
        host_units: Units of the host tier; 0: no host tier.
        unit_bytes: Bytes per unit on every tier.
        scratch_blocks: Maximum blocks per step that run from hidden state; 0: no hidden state.
        rho: Seconds that one token run from hidden state adds to a step with `compact_tokens` such tokens.
        split: Blocks of K and V, and of hidden state, in a full streamed cache; new blocks have this proportion. None:
            the cache is not streamed, or never holds hidden state.
        window: Tokens of the longest attention window that a kernel reads; 0: all. Blocks before the window are freed
            while the request runs, so a request can be longer than the pool.
        state_slots: Slots on the device for snapshots of recurrent state; 0: no snapshots.
        host_state_slots: Slots in host memory for snapshots of recurrent state.
        state_bytes: Maximum bytes of one recurrent state.
        snapshot_tokens: Distance in prompt tokens between snapshots, see `engine.cache.snapshots`.
        pipeline_depth: Maximum steps in flight when `schedule` is called.
        ahead_seconds: If finite, a step is scheduled ahead only behind steps with a shorter expected time, see
            `engine.loop.planner`.
        min_prefill_chunk: Minimum tokens per step for the oldest prompt. If they would delay decodes, the chunk
            shrinks to one block at least.
        max_offline_preemptions: After so many evictions an offline request is evicted last and waits 1, 2, 4 ...
            seconds before it restarts beside online requests.
        short_context: Longest prompt plus output that uses longrope's short factors; 0: the model has one set.
        max_queue_time: An online request with a longer expected wait is refused (429), see `QueueTime`.
    """

    num_units: int
    max_model_len: int
    host_units: int = 0
    unit_bytes: int = 0
    scratch_blocks: int = 0
    split: tuple[int, int] | None = None
    rho: float = 0.0
    window: int = 0
    state_slots: int = 0
    host_state_slots: int = 0
    state_bytes: int = 0
    snapshot_tokens: int = SNAPSHOT_TOKENS
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    enable_prefix_caching: bool = True
    pipeline_depth: int = 0
    ahead_seconds: float = math.inf
    min_prefill_chunk: int = 64
    max_offline_preemptions: int = 8
    short_context: int = 0
    max_queue_time: str = DEFAULT_QUEUE
    seed: int = 0

    @property
    def compact_tokens(self) -> int:
        """Maximum tokens per step that run from hidden state."""
        return self.block_size * self.scratch_blocks

    @property
    def paired(self) -> bool:
        """Whether every device block holds K and V (two units each)."""
        return not self.scratch_blocks

    @property
    def most_blocks(self) -> int:
        """Maximum blocks that a request holds at the same time."""
        tokens = most_unconfirmed(self.max_num_batched_tokens, self.pipeline_depth, self.ahead_seconds)
        return most_blocks(self.window, self.block_size, tokens)

    @property
    def limits(self) -> Limits:
        """The limits of a step."""
        return Limits(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            self.num_units,
            self.block_size,
            window=self.window,
        )

    def __post_init__(self) -> None:
        require_positive(self, "num_units", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens")
        QueueTime.parse(self.max_queue_time)
        if self.window:
            assert not self.scratch_blocks, "only blocks of K and V are given back"


def most_unconfirmed(step_tokens: int, pipeline_depth: int, ahead_seconds: float) -> int:
    """Return the maximum tokens of one request in all steps in flight.

    Steps scheduled ahead can be full if `ahead_seconds` is infinite; otherwise they hold one decode token per request.
    """
    return (1 + pipeline_depth) * step_tokens if ahead_seconds == math.inf else step_tokens + pipeline_depth


def most_blocks(window: int, block_size: int, num_tokens: int) -> int:
    """Return the maximum blocks of a request that computes up to `num_tokens` tokens beyond its confirmed ones.

    A window covers a part of one block at each end, and a block behind the window is freed one block later.
    """
    return -(-(window + num_tokens) // block_size) + 3 if window else sys.maxsize


def require_positive(config: object, *names: str) -> None:
    """Raise ConfigError if a setting that is given is below 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
