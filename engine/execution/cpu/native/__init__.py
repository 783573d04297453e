"""Native kernels: a C++ library that runs whole steps, one call per step (see src/abi.h). This file is torch-free."""

from pathlib import Path

LIBRARY = Path(__file__).parent / "libtidemill_cpu.so"


def is_built() -> bool:
    """Return whether the library file exists; loading it shows whether it works on this machine."""
    return LIBRARY.exists()
