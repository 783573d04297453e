"""Measurement of cache operations on a real runner: decoding from hidden state, restoring KV, and swapping.

Steps with and without an operation alternate; its cost is the median difference of such pairs, which suppresses
outliers and drift. A cost below the noise is measured longer, then set to its lower bound: the time to move its bytes.
A cost of zero would let the scheduler treat the operation as free. Rows and units are assigned here, so the runner must
be idle. The module does not import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median

from engine.api import SamplingParams
from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.limits import Limits
from engine.machine.facts import BUS_RATE
from engine.scheduling.output import Chunk, ModelRunner, NewRequest, SchedulerOutput
from predictor.profile import FEW_TOKENS, MANY_TOKENS, MEMORY_RATE, Affine, CacheCosts, affine

REPEATS = 15
"""Number of step pairs; up to PATIENCE times as many if the difference is below the noise."""
PATIENCE = 3
MAX_UNITS = 256
"""Maximum number of units copied in a measured step."""
FEWER = 4
"""The smaller of two measured sizes is at most 1 / FEWER of the larger one, so that both determine a line."""
Measured = tuple[int, float]
"""(tokens, seconds)."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class CacheTiers:
    """Cache features of a runner beside KV on the device; none by default."""

    scratch_blocks: int = 0  # blocks of scratch for hidden state
    host_units: int = 0  # size of the host tier
    unit_bytes: int = 0
    copy_rate: float = BUS_RATE  # upper bound of copies between the tiers, bytes/s


KV_ONLY = CacheTiers()


def measure_cache_costs(runner: ModelRunner, limits: Limits, tiers: CacheTiers, repeats: int = REPEATS) -> CacheCosts:
    """Measure the operations that `tiers` offers and the pool has room for; others stay None. The runner is idle after.

    Lower bounds: a swapped unit at `tiers.copy_rate`; at MEMORY_RATE, one read for a token from hidden state, and one
    read and two writes (K and V) for a restored token.
    """
    bench = _Bench(runner, limits, repeats)
    unit_bytes = max(1, tiers.unit_bytes)
    token_seconds = unit_bytes / limits.block_size / MEMORY_RATE
    run_hidden = restore = swap_out = swap_in = None
    longest = limits.max_model_len // limits.block_size

    def at_two_sizes(work: Callable[[int, float], Measured], blocks: int, floor: float) -> Affine:
        few = max(2, min(blocks // FEWER, -(-FEW_TOKENS // limits.block_size)))
        many = work(blocks, floor)
        return affine(many if few >= blocks else work(few, floor), many, floor)

    def in_rows(work: Callable[[Sequence[range], float], Measured]) -> Callable[[int, float], Measured]:
        return lambda blocks, floor: work(_shares(blocks, longest, limits.max_num_seqs), floor)

    blocks = min(tiers.scratch_blocks, (limits.num_units - 2) // 3, -(-MANY_TOKENS // limits.block_size))
    if min(blocks, longest) > 0:
        run_hidden = at_two_sizes(in_rows(bench.run_hidden), blocks, token_seconds)
        restore = at_two_sizes(bench.restore, min(blocks, longest), 3 * token_seconds)
    units = min(tiers.host_units, limits.num_units - 2, MAX_UNITS)
    if units > 0:
        floor = unit_bytes / tiers.copy_rate
        swap_out, swap_in = (bench.swap(units, action, floor) for action in (CacheAction.SWAP_OUT, CacheAction.SWAP_IN))
    return CacheCosts(
        run_hidden and run_hidden.token,
        restore and restore.token,
        swap_out,
        swap_in,
        run_hidden and run_hidden.fixed,
        restore and restore.fixed,
    )


def _shares(blocks: int, longest: int, max_rows: int) -> list[range]:
    """Split `blocks` into the fewest rows of at most `longest`, equal within one block, in at most `max_rows` rows."""
    rows = min(-(-blocks // longest), max_rows)
    each = [min(longest, blocks // rows + (row < blocks % rows)) for row in range(rows)]
    starts = [sum(each[:row]) for row in range(rows)]
    return [range(start, start + count) for start, count in zip(starts, each, strict=True)]


class _Bench:
    """Runs the measured steps. Rows from 0 on hold their requests: one, or more if the blocks exceed a context."""

    def __init__(self, runner: ModelRunner, limits: Limits, repeats: int) -> None:
        self._runner = runner
        self._block_size = limits.block_size
        self._repeats = repeats
        self._step_ids = count()

    def run_hidden(self, shares: Sequence[range], floor: float) -> Measured:
        """Compare a decode over each share of blocks from hidden state with one from KV; count past tokens."""
        hidden = self._decode([_hidden(share) for share in shares])
        kv = self._decode([_kv(range(2 * share.start, 2 * share.stop)) for share in shares])
        tokens = sum(len(share) * self._block_size - 1 for share in shares)
        return self._cost(hidden, kv, tokens, floor)

    def restore(self, blocks: int, floor: float) -> Measured:
        """Measure restoring blocks; count tokens. Units 0 and 1 belong to the step's own request."""
        sources = _hidden(range(2, 2 + blocks))
        targets = _kv(range(2 + blocks, 2 + 3 * blocks))
        operations = [
            CacheOperation(CacheAction.RESTORE, source, target, index * self._block_size)
            for index, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
        return self._cost_of(operations, blocks * self._block_size, floor)

    def swap(self, units: int, action: CacheAction, floor: float) -> float:
        """Return seconds per unit in one direction."""
        device = _hidden(range(2, 2 + units))
        operations = []
        for index, entry in enumerate(device):
            on_host = CacheEntry(entry.kind, Tier.HOST, (index,))
            source, target = (entry, on_host) if action is CacheAction.SWAP_OUT else (on_host, entry)
            operations.append(CacheOperation(action, source, target))
        return self._cost_of(operations, units, floor)[1] / units

    def _cost_of(self, operations: Sequence[CacheOperation], count: int, floor: float) -> Measured:
        own = [_kv(range(2))]
        return self._cost(self._decode(own, operations), self._decode(own), count, floor)

    def _cost(self, more: Callable[[], float], less: Callable[[], float], count: int, floor: float) -> Measured:
        """Return `count` and the additional seconds of `more` over `less`, at least `floor` × `count`."""
        more(), less()  # warm-up
        differences: list[float] = []
        for _ in range(PATIENCE):
            for index in range(self._repeats):
                # the order alternates so that a drift of the machine's speed favours neither
                first, second = (more, less) if index % 2 else (less, more)
                taken = {first: first(), second: second()}
                differences.append(taken[more] - taken[less])
            if median(differences) > floor * count:
                break
        return count, max(median(differences), floor * count)

    def _decode(
        self, rows: Sequence[tuple[CacheEntry, ...]], operations: Sequence[CacheOperation] = ()
    ) -> Callable[[], float]:
        """Return a function that runs a decode step over these entries, a request per row, and returns its seconds."""
        lengths = [len(entries) * self._block_size for entries in rows]
        new = tuple(
            NewRequest(row, f"profile-cache-{row}", (0,) * length, length, GREEDY, entries)
            for row, (entries, length) in enumerate(zip(rows, lengths, strict=True))
        )
        chunks = tuple(Chunk(row, length - 1, 1, True) for row, length in enumerate(lengths))
        released = tuple(range(len(rows)))

        def run() -> float:
            output = SchedulerOutput(next(self._step_ids), chunks, new, (), released, operations=tuple(operations))
            return self._runner.launch(output)().latency

        return run


def _hidden(units: Sequence[int]) -> tuple[CacheEntry, ...]:
    return tuple(CacheEntry(CacheKind.HIDDEN, Tier.DEVICE, (unit,)) for unit in units)


def _kv(units: Sequence[int]) -> tuple[CacheEntry, ...]:
    pairs = zip(units[::2], units[1::2], strict=True)
    return tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, pair) for pair in pairs)
