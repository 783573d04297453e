"""Measures what running from hidden state, restoring it and swapping cost on a real runner, in its real type.

The same step with and without the work in question, each at its fastest: what disturbs a step only makes it slower, and
a difference of medians was sometimes below zero. Rows and units are handed out by hand, so the runner must be idle.
Torch-free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from engine.cache.cache_map import CacheEntry, CacheKind, Tier
from engine.engine import ModelRunner
from engine.request import SamplingParams
from engine.scheduling.output import CacheAction, CacheOperation, Chunk, NewRequest, SchedulerOutput
from predictor.costs import CacheCosts
from predictor.sweep import SweepLimits

REPEATS = 9
MAX_TOKENS = 1024
"""Tokens run from hidden state, or restored, in a measured step."""
MAX_UNITS = 256
"""Units copied in a measured step."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class CacheTiers:
    """What a runner offers beside KV on the device: blocks of scratch for hidden state, units of the host tier, and the
    bytes of a unit. Nothing by default."""

    scratch_blocks: int = 0
    host_units: int = 0
    unit_bytes: int = 0


KV_ONLY = CacheTiers()


def measure_cache_costs(
    runner: ModelRunner, limits: SweepLimits, tiers: CacheTiers, repeats: int = REPEATS
) -> CacheCosts:
    """Costs of what `tiers` offers and the pool has room to measure; the rest stays None. The runner is idle after."""
    bench = _Bench(runner, limits, repeats)
    run_hidden = restore = swap_out = swap_in = None
    blocks = min(
        tiers.scratch_blocks,
        (limits.num_units - 2) // 3,
        limits.max_model_len // limits.block_size,
        -(-MAX_TOKENS // limits.block_size),
    )
    if blocks > 0:
        run_hidden, restore = bench.run_hidden(blocks), bench.restore(blocks)
    units = min(tiers.host_units, limits.num_units - 2, MAX_UNITS)
    if units > 0:
        swap_out, swap_in = (bench.swap(units, action) for action in (CacheAction.SWAP_OUT, CacheAction.SWAP_IN))
    return CacheCosts(run_hidden, restore, swap_out, swap_in)


class _Bench:
    """Row 0 holds the one request of every step."""

    def __init__(self, runner: ModelRunner, limits: SweepLimits, repeats: int) -> None:
        self._runner = runner
        self._block_size = limits.block_size
        self._repeats = repeats
        self._step_ids = count()

    def run_hidden(self, blocks: int) -> float:
        """One decode over so many blocks, from hidden state and from KV; seconds per past token."""
        hidden, kv = _hidden(range(blocks)), _kv(range(2 * blocks))
        tokens = blocks * self._block_size - 1
        return max(0.0, self._fastest(hidden) - self._fastest(kv)) / tokens

    def restore(self, blocks: int) -> float:
        """Seconds per token; units 0 and 1 are those of the step's own request."""
        sources = _hidden(range(2, 2 + blocks))
        targets = _kv(range(2 + blocks, 2 + 3 * blocks))
        operations = [
            CacheOperation(CacheAction.RESTORE, source, target, index * self._block_size)
            for index, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
        return self._cost_of(operations) / (blocks * self._block_size)

    def swap(self, units: int, action: CacheAction) -> float:
        """Seconds per unit in one direction."""
        device = _hidden(range(2, 2 + units))
        operations = []
        for index, entry in enumerate(device):
            on_host = CacheEntry(entry.kind, Tier.HOST, (index,))
            source, target = (entry, on_host) if action is CacheAction.SWAP_OUT else (on_host, entry)
            operations.append(CacheOperation(action, source, target))
        return self._cost_of(operations) / units

    def _cost_of(self, operations: Sequence[CacheOperation]) -> float:
        own = _kv(range(2))
        return max(0.0, self._fastest(own, operations) - self._fastest(own))

    def _fastest(self, entries: tuple[CacheEntry, ...], operations: Sequence[CacheOperation] = ()) -> float:
        """The last token of a request that fills `entries`, decoded again and again; the first run warms up."""
        length = len(entries) * self._block_size
        new = NewRequest(0, "profile-cache", (0,) * length, length, GREEDY, entries)
        chunks = (Chunk(0, length - 1, 1, True),)
        times = []
        for _ in range(self._repeats + 1):
            output = SchedulerOutput(next(self._step_ids), chunks, (new,), (), (0,), operations=tuple(operations))
            times.append(self._runner.execute(output).latency)
        return min(times[1:])


def _hidden(units: Sequence[int]) -> tuple[CacheEntry, ...]:
    return tuple(CacheEntry(CacheKind.HIDDEN, Tier.DEVICE, (unit,)) for unit in units)


def _kv(units: Sequence[int]) -> tuple[CacheEntry, ...]:
    pairs = zip(units[::2], units[1::2], strict=True)
    return tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, pair) for pair in pairs)
