"""Which prompts an engine of several is expected to have in its prefix cache: those that it was given last.

A record of what was routed, not of the cache: it holds as many blocks as the cache does, those not used for longest are
forgotten first, and all of them when the process ends, unless it could write what it had to a disk before. Where it is
wrong a prompt is computed, and nothing is lost.
"""

from collections.abc import Sequence

MAX_BLOCKS = 512
"""Of a prompt: hashing more would hold up the event loop for longer than it saves."""


def prefix_chain(token_ids: Sequence[int], salt: bytes, block_size: int) -> list[int]:
    """A hash for each full block of a prompt and all before it, but for the block of its last token, which always
    runs. No chain is known where `block_size` is 0."""
    chain: list[int] = []
    previous = hash(salt)
    if block_size:
        for end in range(block_size, min(len(token_ids), MAX_BLOCKS * block_size + 1), block_size):
            previous = hash((previous, tuple(token_ids[end - block_size : end])))
            chain.append(previous)
    return chain


class PrefixMemory:
    """The blocks of one engine, the least recently used first."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def num_hits(self, chain: Sequence[int]) -> int:
        """How many blocks from the beginning of a prompt are there."""
        for index, block in enumerate(chain):
            if block not in self._blocks:
                return index
        return len(chain)

    def add(self, chain: Sequence[int], max_blocks: int) -> None:
        """The engine is given a prompt; its last block goes first, as nothing is found behind a gap."""
        for block in reversed(chain):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > max_blocks:
            del self._blocks[next(iter(self._blocks))]

    def clear(self) -> None:
        """Its cache is empty."""
        self._blocks.clear()
