"""What a step of an engine may hold."""

from dataclasses import dataclass, replace

from predictor.reach import EVERYTHING, Reach

UNITS_PER_BLOCK = 2
"""Cache units that a block of K and V takes."""


@dataclass(frozen=True, slots=True)
class Padding:
    """The numbers of tokens that steps are padded to, ascending, as CUDA graphs have it: of decodes alone, and with
    prompts. A step beyond the last one, and every step where there are none, runs in its own size."""

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "; ".join(" ".join(map(str, sizes)) for sizes in (self.decode, self.mixed) if sizes)


NO_PADDING = Padding()


@dataclass(frozen=True, slots=True)
class Limits:
    """Requests and tokens of a step, tokens of a request's context, and cache units: two to a block of KV, which is
    `block_size` tokens. `padding`: what steps are padded to. `window`: see `SchedulerConfig`; with one, a context may
    be longer than the cache. `reach`: what layers read of a context.
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
        """The same for contexts that the cache holds whole."""
        return replace(self, max_model_len=min(self.max_model_len, self.num_units // UNITS_PER_BLOCK * self.block_size))

    def units(self, context: int) -> int:
        """Units that a request of `context` tokens needs."""
        return -(-context // self.block_size) * UNITS_PER_BLOCK

    def max_decodes(self, context: int) -> int:
        """How many decodes of `context` tokens one step can hold."""
        return min(self.max_num_seqs, self.max_num_batched_tokens, self.num_units // self.units(context))
