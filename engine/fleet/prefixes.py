"""Estimate which prompt prefixes each engine has in its prefix cache, from the requests routed to it.

The record holds as many blocks as the cache, drops the least recently used ones first, and is cleared when the process
ends. If the estimate is wrong, the engine computes the prompt.
"""

from collections.abc import Sequence

MAX_BLOCKS = 512
"""Maximum hashed blocks of a prompt; hashing more would block the event loop for too long."""


def prefix_chain(token_ids: Sequence[int], salt: bytes, block_size: int) -> list[int]:
    """Return a hash per full block of a prompt, each over the block and all blocks before it.

    The block of the last token is left out because it is always computed. Return [] if `block_size` is 0.
    """
    chain: list[int] = []
    previous = hash(salt)
    if block_size:
        for end in range(block_size, min(len(token_ids), MAX_BLOCKS * block_size + 1), block_size):
            previous = hash((previous, tuple(token_ids[end - block_size : end])))
            chain.append(previous)
    return chain


class PrefixMemory:
    """The blocks of one engine in least recently used order."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def num_hits(self, chain: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that are recorded."""
        for index, block in enumerate(chain):
            if block not in self._blocks:
                return index
        return len(chain)

    def add(self, chain: Sequence[int], max_blocks: int) -> None:
        """Record a prompt. Its last block is dropped first, because blocks behind a gap cannot match."""
        for block in reversed(chain):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > max_blocks:
            del self._blocks[next(iter(self._blocks))]

    def clear(self) -> None:
        """Forget all blocks, because the cache is empty."""
        self._blocks.clear()
