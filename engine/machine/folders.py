"""This user's folders for caches and state, also for a user without a home folder (any uid in a container)."""

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from engine.errors import ConfigError

_BASES = {"cache": ("XDG_CACHE_HOME", ".cache"), "state": ("XDG_STATE_HOME", ".local/state")}


def user_folder(kind: str, flag: str) -> Path:
    """Return tidemill's folder for `cache` or `state`. Raise ConfigError, which names `flag`, without a home folder."""
    variable, below = _BASES[kind]
    base = os.environ.get(variable, "")
    if os.path.isabs(base):
        return Path(base) / "tidemill"
    home = _home()
    if home is None:
        raise ConfigError(f"this user has no home folder; set {flag} to a folder that it can write")
    return home / below / "tidemill"


def expand(path: str, flag: str) -> Path:
    """Return a path of a flag without `~`. Raise ConfigError for a user without a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{flag} {path}: this user has no home folder; use an absolute path") from None


def adopt(state: Path, environment: MutableMapping[str, str]) -> Path | None:
    """Use `state`/cache for caches and temporary files that have no other place to be; None if there is one.

    The variables also reach the libraries of this process and its children. The caller creates the folder.
    """
    cache, adopted = state / "cache", {}
    if (home := _home()) is None or not _may_write(home):
        adopted = {"HOME": str(cache), "XDG_CACHE_HOME": environment.get("XDG_CACHE_HOME") or str(cache)}
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        adopted["TMPDIR"] = tempfile.tempdir = str(cache)
    environment.update(adopted)
    return cache if adopted else None


def _home() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home if home.is_absolute() else None


def _may_write(path: Path) -> bool:
    """Return whether this process can write a folder, or create it."""
    here = next(each for each in (path, *path.parents) if each.exists())
    return os.access(here, os.W_OK | os.X_OK)
