"""Fixtures of the tests, and the environment that they need."""

from fixtures import cache_folder, depth, one_thread, postgres, postgres_server, start_server, tokenizer

__all__ = ["cache_folder", "depth", "one_thread", "postgres", "postgres_server", "start_server", "tokenizer"]
