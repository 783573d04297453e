"""`python -m benchmarks.gpu`: kernels and engine on a GPU, in one table (see docs/benchmarks/performance.md)."""
