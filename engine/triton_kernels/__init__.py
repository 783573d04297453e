"""Triton kernels, one operation per file, each with a torch twin of the same signature in `twins`."""

from importlib import import_module
from types import ModuleType

Kernels = ModuleType
"""`engine.triton_kernels.kernels`, the twins, or a mix: the functions that a backend calls by name."""


def triton_kernels() -> Kernels:
    """Return the module of all kernels. Raises ImportError if Triton is not installed."""
    return import_module("engine.triton_kernels.kernels")
