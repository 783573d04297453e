"""Limits of a step of the engine."""

from dataclasses import dataclass, replace

from predictor.reach import EVERYTHING, Reach

UNITS_PER_BLOCK = 2
"""Cache units per block of K and V."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Token counts, ascending, to which steps are padded (sizes of the CUDA graphs): decode-only steps and steps with
    prompts. A step larger than the last size is not padded; nor is any step if the tuple is empty."""

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "; ".join(" ".join(map(str, sizes)) for sizes in (self.decode, self.mixed) if sizes)


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
