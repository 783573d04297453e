"""Complete plan of a run, made before it starts. A plain value that can be sent to worker processes."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from loadgen.client import Target
from loadgen.errors import InputError
from loadgen.prompts import PromptMaker, Source, output_fields
from loadgen.traces import Trace

OfflineMode = Literal["none", "batch", "flex"]
FIRST_OFFLINE = 1 << 24
"""Offline requests are numbered from here, so that their prompts differ from every online one."""


@dataclass(frozen=True, slots=True)
class Windows:
    """warm-up | measure | cool-down | drain, in seconds.

    `horizon`: the end of the schedule, None for "until all is done".
    """

    warmup: float = 0.0
    cooldown: float = 0.0
    drain: float = 60.0
    horizon: float | None = None

    def __post_init__(self) -> None:
        if min(self.warmup, self.cooldown, self.drain) < 0:
            raise InputError("windows cannot be negative")
        if self.horizon is not None and self.warmup + self.cooldown >= self.horizon:
            raise InputError("warm-up and cool-down leave nothing to measure")

    def measured(self, ended_at: float) -> tuple[float, float]:
        """Start and end of the measure window of a run that ended at `ended_at`, on the microsecond as records are."""
        end = ended_at if self.horizon is None else min(self.horizon, ended_at)
        return round(self.warmup, 6), round(max(self.warmup, end - self.cooldown), 6)


@dataclass(frozen=True, slots=True)
class Job:
    """One batch job: its lines, when it is submitted (s) and the window it is given."""

    lines: Trace
    submit_at: float = 0.0
    completion_window: str = "24h"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run. `online` has absolute times, unless `closed_loop`: then each request starts when a slot is free.

    `max_concurrency` bounds open online requests (None: no bound). `offline_concurrency` is the number of flex requests
    kept open; they say `offline_tier` and `offline_body` in theirs. `wait_offline`: the run lasts until the offline
    work is done instead of stopping it after the drain.
    """

    target: Target
    online: Trace | None = None
    closed_loop: bool = False
    max_concurrency: int | None = None
    jobs: tuple[Job, ...] = ()
    offline_mode: OfflineMode = "none"
    offline_concurrency: int = 64
    offline_tier: str | None = "flex"
    wait_offline: bool = False
    poll_every: float = 1.0
    windows: Windows = field(default_factory=Windows)
    source: Source | None = None
    seed: int = 0
    salt: int = 0
    ignore_eos: bool = True
    continuous_usage: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    offline_body: dict[str, Any] = field(default_factory=dict)
    worker: int = 0
    workers: int = 1

    def maker(self) -> PromptMaker:
        """The prompt maker of this run."""
        if self.source is None:
            raise InputError("the plan has no prompt source")
        return PromptMaker(self.source, "chat" if self.target.chat else "completions", self.seed, self.salt)

    def body(self, maker: PromptMaker, trace: Trace, row: int, index: int) -> dict[str, Any]:
        """The body of request `index`, row `row` of `trace`: model, prompt, length; not the stream or tier fields."""
        prompt = maker.fields(index, int(trace.input_tokens[row]), trace.content_of(row))
        length = output_fields(int(trace.output_tokens[row]), ignore_eos=self.ignore_eos)
        return {"model": self.target.model, **prompt, **length, "temperature": 0.0, **self.extra_body}

    def stream_fields(self) -> dict[str, Any]:
        """The fields that make an answer a stream with usage."""
        options = {"include_usage": True}
        if self.continuous_usage:
            options["continuous_usage_stats"] = True
        return {"stream": True, "stream_options": options}

    def share(self, worker: int, workers: int) -> "Plan":
        """What one of several worker processes does; batch jobs belong to worker 0."""
        bound = self.max_concurrency
        return replace(
            self,
            worker=worker,
            workers=workers,
            max_concurrency=None if bound is None else _part(bound, worker, workers),
            offline_concurrency=_part(self.offline_concurrency, worker, workers),
        )

    def rows(self, count: int) -> range:
        """The rows of a trace of `count` requests that this worker sends."""
        return range(self.worker, count, self.workers)

    @property
    def offline_lines(self) -> int:
        """Lines of all jobs together."""
        return sum(len(job.lines) for job in self.jobs)


def _part(total: int, worker: int, workers: int) -> int:
    return total // workers + (1 if worker < total % workers else 0)


def joined(jobs: tuple[Job, ...]) -> list[tuple[Trace, int]]:
    """Every offline line as (trace, row), job after job: what flex mode sends."""
    return [(job.lines, int(row)) for job in jobs for row in np.arange(len(job.lines))]
