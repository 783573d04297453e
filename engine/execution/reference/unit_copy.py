"""Torch twin of the unit copy kernel."""

from torch import Tensor


def unit_copy(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """target[pairs[i, 1]] = source[pairs[i, 0]]; negative sources are skipped. Shapes as in the kernel's wrapper."""
    real = pairs[pairs[:, 0] >= 0].long()
    target[real[:, 1]] = source[real[:, 0]]
