"""Checkpoints: copies of what recurrent layers keep of a request, each at the end of a block of its tokens.

A hybrid's keys and values are no past without the state of its recurrent layers behind them, and a state cannot be had
from them: a prefix can be started behind only where both are. A state has one size, however long the prefix, and lies
in a slot; the pool of slots shares, evicts and defers them as it does blocks of K and V.

Of a prompt there is a checkpoint at multiples of `checkpoint_tokens` (each second, fourth ... of them where it would
take more than a quarter of the slots), at its last full block, which a chat whose template drops thoughts comes back
to, and where an earlier prompt left it, once that is known: blocks were there, but no state (Marconi, MLSys 2025, does
the same). While a request answers, the state at the end of its last block follows it (`_passing`): with that the next
turn of a chat, or the request itself when it lost its place, goes on. Passing ones have half of the slots at most.

A state is offered once the step that copied it is confirmed. With a host tier there are slots on the host, too: what a
chat may come back for goes there when its slot is given away, if the copies take less than computing the tokens between
two checkpoints, and a request starts from there as from the device. Knows nothing of layers, of queues and of time.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from engine.api import RequestClass
from engine.cache.blocks import RECURRENT, CacheBlock, Tier
from engine.cache.placement import restore_costs
from engine.cache.pool import BlockPool
from engine.cache.prefix import extend_hashes
from engine.config import SchedulerConfig
from engine.request import Request, RequestStatus
from predictor.model import LatencyPredictor

PROMPT_SHARE = 4
"""One part in so many of the slots is the most that multiples of `checkpoint_tokens` take of one request."""


class _Saving(NamedTuple):
    """A copy that a step in flight makes of the state behind `num_tokens` tokens."""

    num_tokens: int
    lasts: bool
    block: CacheBlock


class Checkpoints:
    """`pool`: of slots, one to a state; `host`: of those in host memory, whose numbers follow. `_followers`: running
    requests whose last state may be kept. `_copies`: on their way to the host, with the hashes they are offered by."""

    def __init__(self, config: SchedulerConfig, model: LatencyPredictor | None = None) -> None:
        self.pool = BlockPool(config.state_slots)
        self.host = BlockPool(config.host_state_slots, Tier.HOST)
        self._config = config
        self._model = model
        self._parked: list[tuple[int, int]] = []
        self._copies: dict[CacheBlock, bytes] = {}
        self._block_size = config.block_size
        self._interval = -(-config.checkpoint_tokens // config.block_size) * config.block_size
        self._saving: dict[Request, list[_Saving]] = {}
        self._followers: set[Request] = set()
        self._passing: dict[Request, CacheBlock] = {}

    def reach(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks of a prefix a request can start behind."""
        return next((end for end in range(num_blocks, 0, -1) if self._find(hashes[end - 1])), 0)

    def copied_bytes(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """What comes from the host for who starts behind so many blocks."""
        found = self._find(hashes[num_blocks - 1]) if num_blocks else None
        return 0 if found is None or found.on_device else self._config.state_bytes

    def start(self, request: Request, num_blocks: int, num_published: int, step_id: int) -> None:
        """The step `step_id` begins a request behind so many blocks, of `num_published` that there are."""
        cache_map = request.cache_map
        cache_map.branch = num_published * self._block_size if num_published > num_blocks else 0
        cache_map.checkpoint = -1
        if num_blocks:
            block = self._find(cache_map.hashes[num_blocks - 1])
            assert block is not None, "a request starts without the state behind its prefix"
            self._touch(block, request.request_class is RequestClass.ONLINE, step_id)
            cache_map.checkpoint = block.entry.units[0] + (0 if block.on_device else self.pool.num_units)

    def save(self, request: Request, start: int, step_id: int) -> list[tuple[int, int]]:
        """What the step `step_id`, which computes the request's tokens from `start` on, is to copy: the state behind so
        many tokens, and to which slot."""
        end, size = request.num_computed_tokens, self._block_size
        if end // size * size <= start:
            return []
        return [
            (num_tokens, saved.entry.units[0])
            for num_tokens, lasts in self._places(request, start, end)
            if (saved := self._save(request, num_tokens, lasts, step_id)) is not None
        ]

    def confirm(self, request: Request) -> None:
        """Offer the states up to the last confirmed token of a running request."""
        saving = self._saving.get(request)
        if not saving or saving[0].num_tokens > request.num_confirmed_tokens:
            return
        hashes = request.cache_map.hashes
        extend_hashes(hashes, request.token_ids, self._block_size, request.spec.prefix_root)
        while saving and saving[0].num_tokens <= request.num_confirmed_tokens:
            num_tokens, lasts, block = saving.pop(0)
            self.pool.publish(block, hashes[num_tokens // self._block_size - 1])
            self.pool.release(block, block.last_step)
            if (before := self._passing.pop(request, None)) is not None:
                self.pool.withdraw(before)
            if not lasts:
                self._passing[request] = block
        if not saving:
            del self._saving[request]

    def leave(self, request: Request) -> None:
        """A request leaves its row: the last state that passed stays, what is not confirmed goes."""
        for saving in self._saving.pop(request, ()):
            self.pool.release(saving.block, saving.block.last_step)
        self._passing.pop(request, None)
        self._followers.discard(request)
        request.cache_map.checkpoint, request.cache_map.branch = -1, 0

    def withdraw(self, hashes: Sequence[bytes]) -> None:
        """The states behind these blocks are in doubt."""
        for pool in (self.pool, self.host):
            for block in filter(None, map(pool.find, hashes)):
                pool.withdraw(block)

    def take_parked(self) -> tuple[tuple[int, int], ...]:
        """Slots that the step which is being launched copies to the host before anything else, and to which there."""
        parked, self._parked = self._parked, []
        return tuple(parked)

    def rewind(self, failed: Collection[int]) -> None:
        """The steps `failed` have failed: what they copied to the host is in doubt."""
        for block in [block for block in self._copies if block.last_step in failed]:
            del self._copies[block]
            self.host.release(block, block.last_step)

    def complete_step(self, step_id: int) -> None:
        """All steps up to `step_id` have ended: what they copied to the host is offered."""
        for pool in (self.pool, self.host):
            pool.complete_step(step_id)
        for block in [block for block in self._copies if block.last_step <= step_id]:
            self.host.publish(block, self._copies.pop(block))
            self.host.release(block, block.last_step)

    def check_integrity(self) -> None:
        """Assert that every slot is in one place, and that who holds one runs."""
        self.pool.check_integrity(each.block for saving in self._saving.values() for each in saving)
        self.host.check_integrity(self._copies)
        held = (*self._saving, *self._followers)
        assert all(request.status is RequestStatus.RUNNING for request in held), "a request that waits saves states"
        assert self._followers.issuperset(self._passing), "a state that passes is not counted"
        assert 2 * len(self._followers) <= self.pool.num_units, "states that pass have more than half of the slots"

    def _places(self, request: Request, start: int, end: int) -> list[tuple[int, bool]]:
        """Ends of blocks behind `start`, up to `end`, in their order; whether what is kept there lasts."""
        size, interval = self._block_size, self._interval
        while len(request.token_ids) > interval * max(1, self.pool.num_units // PROMPT_SHARE):
            interval *= 2
        lasting = set(range((start // interval + 1) * interval, end + 1, interval))
        lasting.update({request.cache_map.branch, (request.num_prompt_tokens - 1) // size * size})
        places = [(place, True) for place in sorted(lasting) if start < place <= end]
        last = end // size * size
        if end > request.num_prompt_tokens and last not in lasting:
            places.append((last, False))
        return places

    def _save(self, request: Request, num_tokens: int, lasts: bool, step_id: int) -> CacheBlock | None:
        """The slot for a state; None where there is one, and where there is no room."""
        hashes, number = request.cache_map.hashes, num_tokens // self._block_size
        extend_hashes(hashes, request.token_ids, self._block_size, request.spec.prefix_root)
        known = self._find(hashes[number - 1]) if number <= len(hashes) else None
        online = request.request_class is RequestClass.ONLINE
        if known is not None:
            self._touch(known, online, step_id)
            return None
        if not (lasts or self._may_follow(request)):
            return None
        if not self.pool.num_free_units and (lost := self.pool.next_evicted) is not None:
            self._park(lost, step_id)
        block = self.pool.allocate(RECURRENT, online=online)
        if block is not None:
            block.last_step = step_id
            self._saving.setdefault(request, []).append(_Saving(num_tokens, lasts, block))
        return block

    def _may_follow(self, request: Request) -> bool:
        if request not in self._followers and 2 * (len(self._followers) + 1) <= self.pool.num_units:
            self._followers.add(request)
        return request in self._followers

    def _park(self, block: CacheBlock, step_id: int) -> None:
        """Copy a state whose slot is given away to the host, if a chat may want it and that pays."""
        block_hash = block.block_hash
        assert block_hash is not None, "an unpublished state is cached"
        if not (block.online and self.host.num_units):
            return
        if (copy := self.host.find(block_hash)) is not None:
            self._touch(copy, True, step_id)
        elif self._pays and (target := self.host.allocate(RECURRENT, online=True)) is not None:
            target.last_step = step_id
            self._copies[target] = block_hash
            self._parked.append((block.entry.units[0], target.entry.units[0]))

    @property
    def _pays(self) -> bool:
        if self._model is None:
            return True
        computed = restore_costs(self._model, self._config).recompute_seconds(0, self._interval)
        return 2.0 * self._model.cache_work(transferred_bytes=self._config.state_bytes) < computed

    def _find(self, block_hash: bytes) -> CacheBlock | None:
        return self.pool.find(block_hash) or self.host.find(block_hash)

    def _touch(self, block: CacheBlock, online: bool, step_id: int) -> None:
        """It is used in this step: nobody gets its slot before that has ended, and others lose theirs first."""
        pool = self.pool if block.on_device else self.host
        pool.acquire(block, online=online)
        pool.release(block, step_id)
