"""Errors the load generator reports to its user in one line, without a traceback."""


class InputError(ValueError):
    """A flag, a file or a workload that cannot be used; the message says which and why."""


class ServerError(RuntimeError):
    """The server cannot be measured at all (not reachable, no model, a refused probe)."""
