"""Update the forecast while batches run, and move batches that may miss their window to the engine's urgent lane."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from engine.api import Lane
from engine.panics import as_error
from gateway.batch.feed import Job
from gateway.batch.forecast import Forecast
from gateway.batch.lengths import LineLengths
from gateway.http.errors import log_unexpected

JUDGE_SECONDS = 2.0
"""Minimum time between two updates of all jobs."""
SLICE_SECONDS = 0.0005
"""Maximum time that an update holds the event loop."""


class LaneUpdater:
    """Apply the forecast to the jobs in progress.

    `set_lane` moves the lines of a batch in the engine to another lane; `offer` requeues a job in the feed order.
    """

    def __init__(
        self,
        forecast: Forecast,
        jobs: Mapping[str, Job],
        clock: Callable[[], float],
        set_lane: Callable[[str, Lane], None],
        offer: Callable[[Job], None],
    ) -> None:
        self._forecast = forecast
        self._jobs = jobs
        self._clock = clock
        self._set_lane = set_lane
        self._offer = offer
        self._changed = asyncio.Event()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.update()
            except BaseException as raised:
                log_unexpected(as_error(raised))
            await asyncio.sleep(JUDGE_SECONDS)

    def changed(self) -> None:
        """Schedule an update of all jobs: a line has ended, or time has passed."""
        self._changed.set()

    def begin(self, job: Job, lengths: LineLengths) -> None:
        """Forecast a job that has just begun, in O(log n) for n jobs."""
        job.lengths = lengths
        self._forecast.add(job.batch, lengths, self._clock())
        self._apply(job)
        self._changed.set()

    async def update(self) -> None:
        """Update the forecast of all jobs, and apply it."""
        jobs = [job for job in self._jobs.values() if job.lengths is not None and not job.settled.is_set()]
        known = [(job.batch, job.lengths) for job in jobs if job.lengths is not None]
        await _in_slices(self._forecast.steps(known, self._clock()))
        await _in_slices(map(self._apply, jobs))

    def _apply(self, job: Job) -> None:
        """Move a job, including its lines in the engine, to the lane that its outlook asks for."""
        outlook = self._forecast.outlooks.get(job.batch.id)
        if outlook is not None and outlook.at_risk is not job.at_risk:
            job.at_risk = outlook.at_risk
            self._set_lane(job.batch.id, job.lane)
            self._offer(job)


async def _in_slices(steps: Iterable[object]) -> None:
    """Run all steps; yield to the event loop after every SLICE_SECONDS."""
    begun = time.perf_counter()
    for _ in steps:
        if time.perf_counter() - begun >= SLICE_SECONDS:
            await asyncio.sleep(0)
            begun = time.perf_counter()
