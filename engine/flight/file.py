"""Recordings of the flight recorder on disk: JSON Lines, one of facts, then one per entry.

A folder holds the last KEEP recordings.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.api import EngineInfo
from engine.errors import ConfigError
from engine.flight.recorder import AnyEntry

log = logging.getLogger("tidemill.engine")

KEEP = 8
SUFFIX = ".flight.jsonl"
FAILED_STEP = "failed_step"
QUIET_SECONDS = 10.0
"""Seconds after a recording in which failed steps are not recorded; the next recording includes them."""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """Header of a recording."""

    cause: str
    at: float  # wall-clock time, seconds
    clock: float  # the same moment on the monotonic clock of the entries
    model: str
    dtype: str
    device: str
    version: int = 1


class Recording(msgspec.Struct, frozen=True):
    """Content of a recording."""

    facts: Facts
    entries: list[AnyEntry]


_encoder = msgspec.json.Encoder()
_facts = msgspec.json.Decoder(Facts)
_entries = msgspec.json.Decoder(AnyEntry)


def save(folder: Path, facts: Facts, entries: Sequence[AnyEntry]) -> Path:
    """Write a recording and remove the oldest ones beyond KEEP; return its path. Raise OSError on failure."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(facts.at))
    path = folder / f"{stamp}-{int(facts.at * 1000) % 1000:03d}-{facts.cause}{SUFFIX}"
    temporary = path.with_suffix(".new")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(_encoder.encode_lines([facts, *entries]))
    temporary.replace(path)
    for old in sorted(folder.glob(f"*{SUFFIX}"))[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> Recording:
    """Read a recording. Raise ConfigError if the file cannot be read or is not a recording."""
    try:
        first, *lines = path.read_bytes().splitlines()
        return Recording(_facts.decode(first), [_entries.decode(line) for line in lines if line.startswith(b"[")])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not a flight recording: {error}") from None


class Flights:
    """The flight recordings of one model in a folder."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._model = model
        self._not_before = 0.0

    def keep(self, cause: str, info: EngineInfo, entries: Sequence[AnyEntry]) -> None:
        """Write the entries in a thread. An error is logged and loses only the recording."""
        clock = time.monotonic()
        if not entries or (cause == FAILED_STEP and clock < self._not_before):
            return
        self._not_before = clock + QUIET_SECONDS
        facts = Facts(cause, time.time(), clock, self._model, info.dtype, info.device)
        try:
            asyncio.get_running_loop().run_in_executor(None, self._save, facts, entries)
        except RuntimeError as error:
            log.error("the last steps could not be written: %s", error)

    def _save(self, facts: Facts, entries: Sequence[AnyEntry]) -> None:
        try:
            path = save(self._folder, facts, entries)
        except OSError as error:
            log.error("the last steps could not be written: %s", error)
        else:
            log.warning("the last %d entries of the engine are in %s", len(entries), path)
