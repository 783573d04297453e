"""Chained hashes of full blocks: the key under which equal prefixes of one tenant meet.

hash(i) = H(hash(i-1) ‖ tokens of block i), rooted in the tenant's salt, so equal hashes mean equal whole prefixes and
no tenant can meet another's blocks.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: bytes) -> None:
    """Append to `hashes` the chained hashes of the full blocks of `token_ids` that it does not hold yet."""
    start = len(hashes) * block_size
    if len(token_ids) - start < block_size:
        return
    parent = hashes[-1] if hashes else blake2b(salt, digest_size=DIGEST_BYTES).digest()
    data = memoryview(array("q", token_ids[start:])).cast("B")
    width = block_size * 8
    for offset in range(0, len(data) - width + 1, width):
        digest = blake2b(parent, digest_size=DIGEST_BYTES)
        digest.update(data[offset : offset + width])
        parent = digest.digest()
        hashes.append(parent)
