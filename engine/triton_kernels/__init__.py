"""Triton kernels, one operation per file, each with a torch twin of the same signature."""
