"""Judges the jobs in progress while they run: which will miss their completion window, and go first in the engine."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from engine.api import Lane
from gateway.batch.feed import Job
from gateway.batch.forecast import Forecast
from gateway.http.errors import log_unexpected
from gateway.store.objects import Lengths

JUDGE_SECONDS = 2.0
"""Least time between two judgements of all jobs."""
SLICE_SECONDS = 0.0005
"""Time of the event loop that a judgement takes in one go."""


class Judge:
    """`set_lane` tells the engine the lane of a batch whose lines it holds; `offer` tells the feed order that the lane
    of a job has changed."""

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
                await self._judge()
            except Exception as error:
                log_unexpected(error)
            await asyncio.sleep(JUDGE_SECONDS)

    def changed(self) -> None:
        """A line has ended, or time has passed: judge all jobs soon."""
        self._changed.set()

    def begin(self, job: Job, lengths: Lengths) -> None:
        """Judge one job that has just begun, in O(log n) for n jobs."""
        job.lengths = lengths
        self._forecast.add(job.batch, lengths, self._clock())
        self._apply(job)
        self._changed.set()

    async def _judge(self) -> None:
        jobs = [job for job in self._jobs.values() if job.lengths is not None and not job.settled.is_set()]
        known = [(job.batch, job.lengths) for job in jobs if job.lengths is not None]
        await _in_slices(self._forecast.steps(known, self._clock()))
        await _in_slices(map(self._apply, jobs))

    def _apply(self, job: Job) -> None:
        """Move the lines of a job, those in the engine too, to the lane of its outlook."""
        outlook = self._forecast.outlooks.get(job.batch.id)
        if outlook is not None and outlook.at_risk is not job.at_risk:
            job.at_risk = outlook.at_risk
            self._set_lane(job.batch.id, job.lane)
            self._offer(job)


async def _in_slices(steps: Iterable[object]) -> None:
    """Take all steps; give the event loop a round whenever SLICE_SECONDS have passed."""
    begun = time.perf_counter()
    for _ in steps:
        if time.perf_counter() - begun >= SLICE_SECONDS:
            await asyncio.sleep(0)
            begun = time.perf_counter()
