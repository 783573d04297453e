"""Snapshots: copies of a request's recurrent state, each at the end of a block and in one slot.

In a hybrid model, cached K and V are useless without the recurrent state at the same position, so a request can start
only behind a block that has both. A prompt gets lasting snapshots at these positions:

- multiples of `snapshot_tokens`, doubled until they use at most a quarter of the slots;
- its last full block, where the next turn continues if the chat template drops the model's thoughts;
- its branch point from an earlier prompt: blocks were cached there, but no state (as in Marconi, MLSys 2025).

While a request generates, one more state moves along with the end of its last block (`_passing`); these use at most
half of the slots. A state is published once its step is confirmed. When a slot is reused, the state of an online
request moves to a host slot if the copies take less time than computing the tokens between two snapshots.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from engine.api import RequestClass
from engine.cache.blocks import RECURRENT, BlockPool, CacheBlock, Tier, extend_hashes
from engine.cache.placement import restore_costs
from engine.limits import SchedulerConfig
from engine.request import Request
from predictor.features import LatencyPredictor

PROMPT_SHARE = 4
"""Multiples of `snapshot_tokens` use at most 1/PROMPT_SHARE of the slots per request."""


class _Saving(NamedTuple):
    """A copy of the state after `num_tokens` tokens, made by a step in flight. `lasts`: it is not a passing state."""

    num_tokens: int
    lasts: bool
    block: CacheBlock


class Snapshots:
    """The recurrent states of one engine.

    Attributes:
        pool: Device slots, one per state.
        host: Host slots; in `CacheMap.snapshot` they are numbered after the device's.
        _followers: Running requests that may keep a passing state.
        _copies: Copies on their way to the host, with the hashes to publish them under.
    """

    def __init__(self, config: SchedulerConfig, model: LatencyPredictor | None = None) -> None:
        self.pool = BlockPool(config.state_slots)
        self.host = BlockPool(config.host_state_slots, Tier.HOST)
        self._config = config
        self._model = model
        self._parked: list[tuple[int, int]] = []
        self._copies: dict[CacheBlock, bytes] = {}
        self._block_size = config.block_size
        self._interval = -(-config.snapshot_tokens // config.block_size) * config.block_size
        self._saving: dict[Request, list[_Saving]] = {}
        self._followers: set[Request] = set()
        self._passing: dict[Request, CacheBlock] = {}

    def reach(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Return how many of the first `num_blocks` blocks of a prefix a request can start behind."""
        return next((end for end in range(num_blocks, 0, -1) if self._find(hashes[end - 1])), 0)

    def copied_bytes(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Return the state bytes to copy from the host to start behind `num_blocks` blocks."""
        found = self._find(hashes[num_blocks - 1]) if num_blocks else None
        return 0 if found is None or found.on_device else self._config.state_bytes

    def start(self, request: Request, num_blocks: int, num_published: int, step_id: int) -> None:
        """Start a request in step `step_id` behind `num_blocks` blocks, of `num_published` cached ones."""
        cache_map = request.cache_map
        cache_map.branch = num_published * self._block_size if num_published > num_blocks else 0
        cache_map.snapshot = -1
        if num_blocks:
            block = self._find(cache_map.hashes[num_blocks - 1])
            assert block is not None, "a request starts without the state behind its prefix"
            self._touch(block, request.request_class is RequestClass.ONLINE, step_id)
            cache_map.snapshot = block.entry.units[0] + (0 if block.on_device else self.pool.num_units)

    def save(self, request: Request, start: int, step_id: int) -> list[tuple[int, int]]:
        """Return the states, as (number of tokens, slot), that step `step_id` must copy.

        The step computes the request's tokens from `start` on.
        """
        end, size = request.num_computed_tokens, self._block_size
        if end // size * size <= start:
            return []
        return [
            (num_tokens, saved.entry.units[0])
            for num_tokens, lasts in self._places(request, start, end)
            if (saved := self._save(request, num_tokens, lasts, step_id)) is not None
        ]

    def confirm(self, request: Request) -> None:
        """Publish the states up to the last confirmed token of a running request."""
        saving = self._saving.get(request)
        if not saving or saving[0].num_tokens > request.num_confirmed_tokens:
            return
        hashes = request.cache_map.hashes
        extend_hashes(hashes, request.token_ids, self._block_size, request.prefix_root)
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
        """Release the states of a request that leaves its row.

        Unconfirmed ones are dropped; the last passing one stays cached.
        """
        for saving in self._saving.pop(request, ()):
            self.pool.release(saving.block, saving.block.last_step)
        self._passing.pop(request, None)
        self._followers.discard(request)
        request.cache_map.snapshot, request.cache_map.branch = -1, 0

    def withdraw(self, hashes: Sequence[bytes]) -> None:
        """Withdraw the states stored under `hashes`, because their content is in doubt."""
        for pool in (self.pool, self.host):
            for block in filter(None, map(pool.find, hashes)):
                pool.withdraw(block)

    def take_parked(self) -> tuple[tuple[int, int], ...]:
        """Return the (device slot, host slot) copies that the step being launched makes before anything else."""
        parked, self._parked = self._parked, []
        return tuple(parked)

    def rewind(self, failed: Collection[int]) -> None:
        """Drop the host copies made by the failed steps."""
        for block in [block for block in self._copies if block.last_step in failed]:
            del self._copies[block]
            self.host.release(block, block.last_step)

    def complete_step(self, step_id: int) -> None:
        """Record that all steps up to `step_id` ended, and publish the host copies made."""
        for pool in (self.pool, self.host):
            pool.complete_step(step_id)
        for block in [block for block in self._copies if block.last_step <= step_id]:
            self.host.publish(block, self._copies.pop(block))
            self.host.release(block, block.last_step)

    def _places(self, request: Request, start: int, end: int) -> list[tuple[int, bool]]:
        """Return the positions in (`start`, `end`] at which to save a state, ascending, and whether each one lasts."""
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
        """Return a slot for a state, or None if the state is cached already or there is no room."""
        hashes, number = request.cache_map.hashes, num_tokens // self._block_size
        extend_hashes(hashes, request.token_ids, self._block_size, request.prefix_root)
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
        """Copy a state whose slot is reused to the host, if an online request used it and the copy pays."""
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
        """Mark a state as used in this step.

        Its slot is not reused before the step ends, and other states are evicted first.
        """
        pool = self.pool if block.on_device else self.host
        pool.acquire(block, online=online)
        pool.release(block, step_id)


def snapshots_of(config: SchedulerConfig, model: LatencyPredictor | None = None) -> Snapshots | None:
    """Return the snapshots of a core with these settings, or None if the settings have no slots for states."""
    return Snapshots(config, model) if config.state_slots else None
