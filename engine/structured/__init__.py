"""Structured output: compile grammars within limits, and follow answers through them."""
