"""Whole steps of a model by a small C++ library of ours, one call per step; see src/abi.h."""
