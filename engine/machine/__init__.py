"""The machine: hardware facts, threads and child processes. Torch-free."""
