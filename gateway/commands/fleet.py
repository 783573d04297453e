"""`tidemill fleet restart`: restart the engines of a running server, one after another."""

import os
import signal

from engine.errors import ConfigError
from gateway.store.opening import holder, state_path

RESTART = signal.SIGUSR1


def restart(state_dir: str | None) -> str:
    """Signal the server that holds the state folder and return a message. Raise ConfigError if there is no server."""
    root = state_path(state_dir, os.environ)
    pid = holder(root)
    if pid is None:
        raise ConfigError(f"no server of this version uses --state-dir {root}; set the --state-dir of the server")
    try:
        os.kill(pid, RESTART)
    except OSError as error:
        raise ConfigError(
            f"cannot signal process {pid}: {error.strerror}; run the command as the server's user"
        ) from None
    return f"process {pid} restarts its engines, one after another; its log and /ready show the progress"
