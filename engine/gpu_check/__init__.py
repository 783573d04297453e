"""`python -m engine.gpu_check`: kernels and engine on a GPU, in one table (see docs/lab/performance.md)."""
