"""`tidemill fleet restart`: the engines of a server are started again, one after another."""

import os
import signal

from engine.errors import ConfigError
from gateway.store.opening import holder, state_path

RESTART = signal.SIGUSR1


def restart(state_dir: str | None) -> str:
    """Tell the server that holds the folder; returns what to say. Raises ConfigError where there is none."""
    root = state_path(state_dir, os.environ)
    pid = holder(root)
    if pid is None:
        raise ConfigError(f"no server of this version holds --state-dir {root}")
    try:
        os.kill(pid, RESTART)
    except OSError as error:
        raise ConfigError(f"the server, process {pid}, cannot be told: {error.strerror}") from None
    return f"process {pid} starts its engines again, one after another: its log and /ready say how far it is"
