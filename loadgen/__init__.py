"""The load generator: it measures any OpenAI-style server from outside."""
