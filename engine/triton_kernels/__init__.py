"""Triton kernels, one operation per file, each with a twin of the same signature in engine.execution.reference."""
