"""Implementations of the `tidemill` commands; `tidemill.cli` imports each when it runs."""
