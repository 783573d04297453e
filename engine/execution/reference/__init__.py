"""Torch twins of the Triton kernels that have none in torch_ops: same signatures, written to be obviously right."""
