"""Fixtures of the tests, and the environment that they need."""

from fixtures import start_server, tokenizer

__all__ = ["start_server", "tokenizer"]
