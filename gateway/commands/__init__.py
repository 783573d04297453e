"""Implementations of the `tidemill` commands; `gateway.cli` imports each when it runs."""
