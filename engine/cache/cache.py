"""The cache of one engine: decides where the computed tokens (K, V, hidden state) of each request are stored.

A running request *extends* its map. A waiting request *claims* the blocks that it could start from and *takes* them. A
request that leaves its row *vacates* it. Changes of units become the step's cache operations.

If every layer of the model has a window, blocks before the window of the next token are freed during computation and
not taken from a prefix. If layers are recurrent, a cached prefix ends at its last block with a snapshot.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from engine.api import RequestClass
from engine.cache.blocks import (
    COMPACT,
    CacheAction,
    CacheBlock,
    CacheEntry,
    CacheKind,
    CacheOperation,
    count_compact,
    count_gone,
    count_units,
    extend_hashes,
    gone_block,
)
from engine.cache.parked import ParkedPasts
from engine.cache.placement import HostSplit, next_is_act
from engine.cache.tiers import Tiers
from engine.limits import UNITS_PER_BLOCK, SchedulerConfig
from engine.request import Request
from predictor.features import LatencyPredictor

if TYPE_CHECKING:  # only an engine with recurrent layers has them
    from engine.cache.snapshots import Snapshots


class Claim(NamedTuple):
    """The cached blocks that a waiting request would start from.

    Attributes:
        hits: Blocks from the prefix indexes, on either tier. The request's own parked blocks follow them.
        num_tokens: Tokens in hits and parked blocks.
        num_compact: Compact blocks among these that no running request has.
        units: Device units needed besides those already on the device.
        copied_bytes: Bytes to copy from the host (see `Tiers.copied_bytes`).
        goes_on: Step in flight that copies the next block of the prefix to the host, where it can be claimed later.
        num_published: Blocks of the prefix that are cached, including those behind the last snapshot.
    """

    hits: list[CacheBlock]
    num_tokens: int
    num_compact: int
    units: int
    copied_bytes: int = 0
    goes_on: int | None = None
    num_published: int = 0


class Cache:
    """All tiers of one engine and the parked blocks on them. `snapshots`: needed if `config` has slots for states."""

    def __init__(
        self, config: SchedulerConfig, model: LatencyPredictor | None, snapshots: "Snapshots | None" = None
    ) -> None:
        assert (snapshots is None) == (config.state_slots == 0), "slots for states and their store belong together"
        self.tiers = Tiers(config, model)
        self.device, self.host = self.tiers.device, self.tiers.host
        self.parked = ParkedPasts(config, self.tiers, model)
        self.snapshots = snapshots
        self._split = None if config.split is None else HostSplit(*config.split)
        self._compact: Counter[CacheBlock] = Counter()
        """Number of running requests per compact block."""
        self._config = config

    @property
    def num_compact(self) -> int:
        """Return the distinct compact blocks of running requests.

        All may be in the next step, which has `scratch_blocks` for them; a shared block needs scratch once.
        """
        return len(self._compact)

    @property
    def compact_room(self) -> int:
        """Return how many more blocks may run from compact form."""
        return self._config.scratch_blocks - self.num_compact

    def units_for(self, request: Request, num_offline: int) -> int:
        """Return the units that a request could get now.

        Several offline requests leave the cached online prefixes alone, up to a quarter of the pool, for the next turns
        of chats. A single offline request may take all, so that it can complete (E4).
        """
        device = self.device
        if request.request_class is RequestClass.ONLINE or num_offline <= 1:
            return device.num_available_units
        return device.num_available_units - min(device.num_cached_online_units, device.num_units // 4)

    def find_prefix(self, request: Request) -> list[CacheBlock]:
        """Return the cached blocks that this request could start behind, leaving at least one token to compute."""
        return self._startable(request, self._find_published(request))

    def _startable(self, request: Request, found: list[CacheBlock]) -> list[CacheBlock]:
        """Cut a prefix at its last block with a snapshot if layers are recurrent."""
        return found if self.snapshots is None else found[: self.snapshots.reach(request.cache_map.hashes, len(found))]

    def _find_published(self, request: Request) -> list[CacheBlock]:
        config, cache_map = self._config, request.cache_map
        if not config.enable_prefix_caching or request.starts_over:
            return []
        extend_hashes(cache_map.hashes, request.token_ids, config.block_size, request.prefix_root)
        usable = (len(request.token_ids) - 1) // config.block_size
        return self.tiers.find(cache_map.hashes[:usable])

    def claim(self, request: Request) -> Claim:
        """Return the blocks that `request` could start from now.

        A prefix on the device is preferred to the request's own parked blocks, and these to a prefix on the host.
        """
        block_size, parked = self._config.block_size, request.cache_map.blocks
        published = self._find_published(request)
        found = self._startable(request, published)
        hits, goes_on = self._usable(found), None if parked else self._goes_on(request, len(published))
        if parked:
            hits = _on_device(hits)
        if parked and count_compact(hits) + count_compact(parked[len(hits) :]) > self._config.scratch_blocks:
            hits = []  # together they exceed the scratch area; the request's own blocks alone have fitted before
        parked, hits = parked[len(hits) :], self.without_gone(hits)
        num_tokens, num_compact = len(hits) * block_size, sum(map(self._is_new_compact, (*hits, *parked)))
        num_blocks = request.num_missing_blocks(block_size, len(hits) + len(parked), count_gone(hits))
        of_kind = max(0, min(self._share(request, num_blocks), self.compact_room - num_compact))
        units = of_kind * COMPACT.form.units + (num_blocks - of_kind) * UNITS_PER_BLOCK
        if parked:
            num_tokens = request.cache_map.num_parked_tokens
        elsewhere = [block for block in (*hits, *parked) if not block.on_device]
        copied_bytes = self.tiers.copied_bytes(elsewhere)
        if self.snapshots is not None:
            copied_bytes += self.snapshots.copied_bytes(request.cache_map.hashes, len(hits))
        units += count_units(elsewhere)
        return Claim(hits, num_tokens, num_compact, units, copied_bytes, goes_on, len(published))

    def make_way(
        self, request: Request, claim: Claim, length: int, reserve: int, step_id: int, *, online: bool
    ) -> bool:
        """Return whether an online request can start. Move parked blocks for its first `length` new tokens, if needed.

        Later chunks move the rest: no step waits for the copies of a whole prompt. A hit held only by a victim becomes
        idle when the victim is preempted; taking the hit then uses an available unit.

        Args:
            reserve: Units that must stay available or movable.
            online: Whether parked blocks of waiting online requests may be moved, too.
        """
        device, movable = self.device, self.parked.num_units(online=online, but=request)
        if claim.units + device.num_idle_units(claim.hits) + reserve > device.num_available_units + movable:
            return False
        units = self._first_units(request, claim, length)
        missing = units + device.num_idle_units(claim.hits) - device.num_available_units
        if 0 < missing <= movable:
            self.parked.reclaim(missing, step_id, online=online, but=request, spared=frozenset(claim.hits))
        return units + device.num_idle_units(claim.hits) <= device.num_available_units

    def _first_units(self, request: Request, claim: Claim, length: int) -> int:
        """Return the units of a claim that its first `length` new tokens and the blocks from the host need."""
        if self._mixes(request) or claim.num_compact:
            return claim.units
        known = (*claim.hits, *request.cache_map.blocks[len(claim.hits) :])
        missing = -(-(claim.num_tokens + length) // self._config.block_size) - len(known)
        elsewhere = count_units(block for block in known if not block.on_device)
        return min(claim.units, elsewhere + UNITS_PER_BLOCK * max(0, missing))

    def _goes_on(self, request: Request, num_found: int) -> int | None:
        """Return the step that copies the first missing block of a prefix to the host, or None."""
        hashes = request.cache_map.hashes
        if request.starts_over or not (len(request.token_ids) - 1) // self._config.block_size > num_found < len(hashes):
            return None
        return self.tiers.saving_step(hashes[num_found])

    @contextmanager
    def holding(self, claim: Claim) -> Iterator[None]:
        """Protect the claimed host blocks from eviction while room is made for the claim."""
        held = [block for block in claim.hits if not block.on_device]
        for block in held:
            self.tiers.pool(block).acquire(block, online=True)
        try:
            yield
        finally:
            for block in reversed(held):
                self.tiers.pool(block).release(block, block.last_step)

    def take(self, request: Request, claim: Claim, step_id: int) -> None:
        """Give the claimed blocks to a starting request and bring host blocks back in this step. Room must exist."""
        online = request.request_class is RequestClass.ONLINE
        request.cache_map.num_gone = count_gone(claim.hits)
        for block in claim.hits[request.cache_map.num_gone :]:
            self.tiers.pool(block).acquire(block, online=online)
        hits = [b if b.on_device else self.tiers.fetch(b, step_id, online=online) for b in claim.hits]
        self.parked.resume(request, hits, step_id)
        for block in request.cache_map.blocks:
            self._run(request, block)
        request.cache_map.num_published = len(_on_device(claim.hits))
        if self.snapshots is not None:
            self.snapshots.start(request, len(claim.hits), claim.num_published, step_id)
        request.num_computed_tokens = request.num_confirmed_tokens = claim.num_tokens

    def extend(
        self,
        request: Request,
        length: int,
        step_id: int,
        *,
        num_offline: int,
        from_online: bool,
        growing: bool = False,
    ) -> int:
        """Allocate blocks for `length` more tokens of a running request. Return the number of tokens with room.

        `from_online`: parked blocks of online requests may be moved for it. `growing`: the tokens belong to the answer
        and come one at a time, not from a claim.
        """
        cache_map, block_size = request.cache_map, self._config.block_size
        start, online = request.num_computed_tokens, request.request_class is RequestClass.ONLINE
        missing = -(-(start + length) // block_size) - len(cache_map.blocks)
        if missing > 0 and not self._mixes(request):
            units = missing * UNITS_PER_BLOCK
            if units <= min(self.device.num_free_units, self.units_for(request, num_offline)):
                cache_map.blocks += self.device.take_free(CacheKind.KV, missing, online=online)
                return length
        while len(cache_map.blocks) * block_size < start + length:
            kind = self._next_kind(request, growing)
            size = kind.form.units
            wanted = size * (-(-(start + length) // block_size) - len(cache_map.blocks))
            room = self.units_for(request, num_offline)
            if wanted > room:
                self.parked.reclaim(wanted - room, step_id, online=from_online)
                room = self.units_for(request, num_offline)
            block = self.tiers.allocate(kind, step_id, online=online) if room >= size else None
            if block is None:
                break
            self._run(request, block)
            cache_map.blocks.append(block)
        return min(length, len(cache_map.blocks) * block_size - start)

    def grow_each(self, requests: Sequence[Request]) -> bool:
        """Append a block to each running request of a class, as `extend` does. Return False if free units lack."""
        if len(requests) * UNITS_PER_BLOCK > self.device.num_free_units:
            return False
        if any(map(self._mixes, requests)):
            return False
        online = requests[0].request_class is RequestClass.ONLINE
        new = self.device.take_free(CacheKind.KV, len(requests), online=online)
        for request, block in zip(requests, new, strict=True):
            request.cache_map.blocks.append(block)
        return True

    def restore(self, request: Request, max_tokens: int, step_id: int, *, reserve: int) -> list[tuple[int, CacheEntry]]:
        """Convert compact blocks of a request to K and V while more than `reserve` units are available.

        At most `max_tokens` tokens are converted. K and V are then projected once instead of in every step, and later
        blocks are stored as K and V too. Returns the indices of the converted blocks with their new entries.
        """
        block_size, blocks = self._config.block_size, request.cache_map.blocks
        replaced: list[tuple[int, CacheEntry]] = []
        for index, source in enumerate(blocks):
            if (len(replaced) + 1) * block_size > max_tokens:
                break
            if not source.entry.kind.form.compact:
                continue
            if self.device.num_available_units < UNITS_PER_BLOCK + reserve:
                break
            online = request.request_class is RequestClass.ONLINE
            target = self.tiers.allocate(CacheKind.KV, step_id, online=online)
            assert target is not None, "available units could not be had"
            operation = CacheOperation(CacheAction.RESTORE, source.entry, target.entry, index * block_size)
            self.tiers.operations.append(operation)
            replaced.append((index, target.entry))
            blocks[index] = target
            self.device.release(source, step_id)
            self._rest(request, source)
            request.cache_map.kind = CacheKind.KV
        return replaced

    def vacate(self, request: Request) -> None:
        """Take the blocks of a request that leaves its row.

        `ParkedPasts.park` decides which blocks the request keeps for now. The other full blocks stay in the prefix
        index until they are evicted.
        """
        cache_map = request.cache_map
        for block in cache_map.blocks if cache_map.num_compact else ():
            self._rest(request, block)
        # Tail first: the head of a prefix is the most valuable part and must be evicted last.
        for block in reversed(self.parked.park(request)):
            self.device.release(block, request.last_step)
        if self.snapshots is not None:
            self.snapshots.leave(request)
        cache_map.num_published = cache_map.num_gone = 0
        request.num_computed_tokens = request.num_confirmed_tokens = 0

    def rewind(self, requests: Iterable[Request], failed: set[int]) -> None:
        """Drop the host copies and parked blocks written by the failed steps."""
        self.tiers.rewind(failed)
        if self.snapshots is not None:
            self.snapshots.rewind(failed)
        for request in requests:
            if request.cache_map.num_parked_tokens and request.cache_map.parked_in_step in failed:
                self.parked.forget(request)

    def publish(self, request: Request) -> None:
        """Offer the full, confirmed blocks of a running request to later requests and free those behind its window."""
        self._offer(request)
        if self.snapshots is not None:
            self.snapshots.confirm(request)
        if self._config.window:
            self._give_up_unseen(request)

    def _offer(self, request: Request) -> None:
        cache_map, config = request.cache_map, self._config
        num_full = request.num_confirmed_tokens // config.block_size
        if num_full <= cache_map.num_published or not config.enable_prefix_caching or request.starts_over:
            return
        extend_hashes(cache_map.hashes, request.token_ids, config.block_size, request.prefix_root)
        for index in range(cache_map.num_published, num_full):
            self.device.publish(cache_map.blocks[index], cache_map.hashes[index])
        cache_map.num_published = num_full

    def _give_up_unseen(self, request: Request) -> None:
        """Free the blocks behind the window of the last confirmed token.

        Steps in flight do not see these blocks either.
        """
        cache_map = request.cache_map
        first, end = cache_map.num_gone, self._num_unseen(request.num_confirmed_tokens)
        if end <= first:
            return
        given_up, cache_map.num_gone = cache_map.blocks[first:end], end
        cache_map.blocks[first:end] = [gone_block() for _ in given_up]
        for block in reversed(given_up):  # of a prefix, the tail is evicted first
            self.device.release(block, request.last_step)

    def _num_unseen(self, num_tokens: int) -> int:
        """Return the number of blocks that no token after the first `num_tokens` sees."""
        config = self._config
        return max(0, (num_tokens - config.window + 1) // config.block_size) if config.window else 0

    def without_gone(self, hits: list[CacheBlock]) -> list[CacheBlock]:
        """Replace blocks that lie before the window of a request starting behind `hits` by placeholders."""
        num_gone = self._num_unseen(len(hits) * self._config.block_size)
        return [*(gone_block() for _ in range(num_gone)), *hits[num_gone:]] if num_gone else hits

    def withdraw(self, request: Request) -> None:
        """Remove the blocks computed by this request from the prefix index, because their content is in doubt."""
        cache_map = request.cache_map
        hashes = cache_map.hashes[: len(cache_map.blocks)]
        given_up = filter(None, map(self.device.find, hashes[: cache_map.num_gone]))
        self.tiers.withdraw([*given_up, *cache_map.blocks[cache_map.num_gone :]], hashes)
        if self.snapshots is not None:
            self.snapshots.withdraw(hashes)

    def complete_step(self, step_id: int) -> None:
        """Record that all steps up to `step_id` ended."""
        self.tiers.complete_step(step_id)
        if self.snapshots is not None:
            self.snapshots.complete_step(step_id)

    def recount(self, running: Iterable[Request]) -> None:
        """Recount the compact blocks of all running requests."""
        self._compact = Counter()
        for request in running:
            self._compact.update(b for b in request.cache_map.blocks if b.entry.kind.form.compact)

    def balance(self) -> None:
        """Compute the host's split between kinds for the step being built."""
        self.parked.balance(self.num_compact)

    def _usable(self, hits: list[CacheBlock]) -> list[CacheBlock]:
        """Return the hits before the first compact block that the scratch area has no room for."""
        room = self.compact_room
        for index, block in enumerate(hits):
            room -= self._is_new_compact(block)
            if room < 0:
                return hits[:index]
        return hits

    def _next_kind(self, request: Request, growing: bool) -> CacheKind:
        """Return the kind of a request's next block. A map mixes kinds when the scratch area is full, and in a streamed
        cache."""
        if not self._mixes(request) or self.compact_room <= 0:
            return CacheKind.KV
        if self._split is not None:
            num_compact = request.cache_map.num_compact
            is_act = next_is_act(request.cache_map.num_live - num_compact, num_compact, self._split)
            return COMPACT if is_act else CacheKind.KV
        return self.parked.next_kind(request) if growing else COMPACT

    def _mixes(self, request: Request) -> bool:
        """Return whether a block of a request may be compact."""
        return request.cache_map.kind.form.compact if self._split is None else self._split.act > 0

    def _share(self, request: Request, num_blocks: int) -> int:
        """Return how many of `num_blocks` new blocks of a request are compact, if there is scratch for them."""
        if not self._mixes(request):
            return 0
        return num_blocks if self._split is None else num_blocks * self._split.act // sum(self._split)

    def _is_new_compact(self, block: CacheBlock) -> bool:
        """Return whether the block is compact and no running request has it, so that it needs further scratch."""
        return block.entry.kind.form.compact and block not in self._compact

    def _run(self, request: Request, block: CacheBlock) -> None:
        """Count a block that a running request gained."""
        if block.entry.kind.form.compact:
            request.cache_map.num_compact += 1
            self._compact[block] += 1

    def _rest(self, request: Request, block: CacheBlock) -> None:
        """Count a block that a running request lost."""
        if block.entry.kind.form.compact:
            request.cache_map.num_compact -= 1
            self._compact[block] -= 1
            if not self._compact[block]:
                del self._compact[block]


def _on_device(hits: list[CacheBlock]) -> list[CacheBlock]:
    """Return the hits before the first block on the host."""
    return list(takewhile(lambda block: block.on_device, hits))
