"""The HTTP gateway: OpenAI's API, streams, limits, metrics and the command line; knows nothing of blocks or torch."""
