"""Store the flight recordings of engine processes that ended or had a failed step."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from engine.api import EngineInfo
from engine.flight import file as flight_file
from engine.flight.recorder import AnyEntry

log = logging.getLogger("tidemill.engine")

FAILED_STEP = "failed_step"
REST = 10.0
"""Seconds after a recording in which failed steps are not recorded; the next recording includes them."""


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
        self._not_before = clock + REST
        facts = flight_file.Facts(cause, time.time(), clock, self._model, info.dtype, info.device)
        try:
            asyncio.get_running_loop().run_in_executor(None, self._save, facts, entries)
        except RuntimeError as error:
            log.error("the last steps could not be written: %s", error)

    def _save(self, facts: flight_file.Facts, entries: Sequence[AnyEntry]) -> None:
        try:
            path = flight_file.save(self._folder, facts, entries)
        except OSError as error:
            log.error("the last steps could not be written: %s", error)
        else:
            log.warning("the last %d entries of the engine are in %s", len(entries), path)
