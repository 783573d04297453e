"""Plain torch twins of the Triton kernels: the same signatures, float32 inside, written to be obviously right."""
