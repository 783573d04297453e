"""The device of torch's own operators, tuned for the CPU, correct on every torch device; native/: our own kernels."""
