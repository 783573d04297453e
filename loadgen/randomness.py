"""Independent random streams: one seed, and a stream for each purpose.

Changing how lengths are drawn must not move the arrivals of the same seed: each purpose has its own generator.
"""

import zlib

import numpy as np


def stream(seed: int, purpose: str, *more: int) -> np.random.Generator:
    """The generator of `purpose` ("arrivals", "lengths", "text", ...) under `seed`; `more` splits it further."""
    parts = [seed, zlib.crc32(purpose.encode()), *more]
    return np.random.default_rng([part & 0xFFFFFFFF for part in parts])
