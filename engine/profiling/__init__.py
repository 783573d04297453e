"""Measures this model on this machine: what steps take, and what work on the cache costs."""
