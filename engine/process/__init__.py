"""The engine in its own process: the messages, the child process and its supervisor."""
