"""Independent random streams of one seed, one per purpose, so that e.g. drawing other lengths keeps the arrivals."""

import zlib

import numpy as np


def stream(seed: int, purpose: str, *more: int) -> np.random.Generator:
    """Return the generator for `seed`, `purpose` ("arrivals", "lengths", "text", ...) and optional numbers `more`."""
    parts = [seed, zlib.crc32(purpose.encode()), *more]
    return np.random.default_rng([part & 0xFFFFFFFF for part in parts])
