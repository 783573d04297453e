"""Benchmarks that anyone can run from a checkout: `make bench`, `python -m benchmarks NAME`. Not in the wheel."""
