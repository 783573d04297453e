"""Fixtures of the tests, and the environment that they need."""

from fixtures import depth, one_thread, start_server, tokenizer

__all__ = ["depth", "one_thread", "start_server", "tokenizer"]
