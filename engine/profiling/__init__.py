"""Measurement of step times and cache operations for this model on this machine."""
