"""The cache of computed tokens: unit pools, cache maps and the prefix index. Torch-free."""
