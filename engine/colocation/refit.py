"""Refits the latency model while the server runs, in a process of its own.

A fit that predicts unseen steps better than the current model replaces it, in memory and in the stored profile. The
profile is not replaced if steps take much longer than when the device was measured: the next start should not rely on a
busy neighbour or a throttled clock. Other fits are refused and counted. Torch-free.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.colocation.keeper import Colocation
from engine.machine.child import ChildError, run_child
from predictor.fitting import FEWEST, Refit, refit
from predictor.profile import Profile

log = logging.getLogger("tidemill.colocation")

LOOK_SECONDS, EVERY_SECONDS = 60.0, 1800.0
"""Seconds between two looks for new steps, and after a fit."""
NEW_STEPS = 500
"""Minimum number of new steps since the last fit."""


class ModelRefit:
    """Refit task. `profile`: source of the current model, stored at `path` (None: not stored)."""

    def __init__(
        self,
        colocation: Colocation,
        profile: Profile,
        path: Path | None = None,
        child: Callable[..., Any] = run_child,
    ) -> None:
        self.profile = profile
        self._colocation = colocation
        self._path = path
        self._child = child
        self._fitted_at = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-refit")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._colocation.model.num_observed - self._fitted_at >= NEW_STEPS:
                await self.refit()
                await asyncio.sleep(EVERY_SECONDS)

    async def refit(self) -> bool:
        """Fit once. Return whether the fit replaced the model."""
        keeper = self._colocation
        self._fitted_at = keeper.model.num_observed
        recent = keeper.model.recent_log()
        if len(recent) < FEWEST:
            return False
        try:
            found: Refit | None = await self._child(refit, keeper.model.model, self.profile.sweep, recent)
        except ChildError as failure:
            log.warning("the latency model could not be fitted anew (%s)", failure)
            return False
        if found is None:
            return False
        keeper.note_refit(found.better, found.error_before, found.error)
        errors = 100 * found.error, 100 * found.error_before
        if not found.better:
            log.info("a new fit of the latency model is refused: error %.1f %%, now %.1f %%", *errors)
            return False
        log.info("the latency model is fitted anew: error %.1f %% instead of %.1f %%", *errors)
        keeper.model.replace(found.model, found.error)
        if found.is_of_slow_device:
            log.info("the fit is not kept in the profile: the device is much slower than when it was measured")
            return True
        self.profile = replace(self.profile, model=found.model, held_out_mape=found.error)
        await self._keep()
        return True

    async def _keep(self) -> None:
        if self._path is None:
            return
        try:
            await asyncio.to_thread(self.profile.save, self._path)
        except OSError as error:
            log.warning("the new latency profile cannot be stored (%s)", error.strerror)
