"""The load generator: it measures any OpenAI-style server from outside."""


class InputError(ValueError):
    """A flag, a file or a workload is invalid; the message names it and gives the reason."""


class ServerError(RuntimeError):
    """The server cannot be measured: it is not reachable, has no model, or refused a probe."""
