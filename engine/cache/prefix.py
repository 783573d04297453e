"""Chained hashes of full blocks: the keys of the prefix index.

hash(i) = H(hash(i-1) ‖ tokens of block i), rooted in the tenant's salt. Equal hashes mean equal whole prefixes, and
tenants cannot share blocks.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: bytes) -> None:
    """Append the chained hashes of the full blocks of `token_ids` that `hashes` does not contain yet."""
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
