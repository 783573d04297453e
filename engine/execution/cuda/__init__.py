"""The runner for CUDA: persistent device state, our Triton kernels, CUDA graphs, tokens that stay on the device."""
