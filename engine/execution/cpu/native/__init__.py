"""Whole steps of a model by a small C++ library of ours, one call per step; see src/abi.h. This file is torch-free."""

from pathlib import Path

LIBRARY = Path(__file__).parent / "libtidemill_cpu.so"


def is_built() -> bool:
    """Whether the library is there; whether it runs here shows only when it is loaded."""
    return LIBRARY.exists()
