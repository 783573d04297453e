"""The plan of a run, complete before the run starts: a value that can be sent to worker processes."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from loadgen import InputError
from loadgen.client import Target
from loadgen.prompts import PromptMaker, Source, output_fields
from loadgen.traces import Trace

OfflineMode = Literal["none", "batch", "flex"]
FIRST_OFFLINE = 1 << 24
"""First index of offline requests, so that their prompts differ from those of all online requests."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a run, seconds: warm-up, measurement, cool-down, drain."""

    warmup: float = 0.0
    cooldown: float = 0.0
    drain: float = 60.0
    horizon: float | None = None  # end of the schedule; None: the end of the last request

    def __post_init__(self) -> None:
        if min(self.warmup, self.cooldown, self.drain) < 0:
            raise InputError("--warmup, --cooldown and --drain must not be negative")
        if self.horizon is not None and self.warmup + self.cooldown >= self.horizon:
            raise InputError("--warmup and --cooldown leave nothing to measure; reduce them or extend --duration")

    def measured(self, ended_at: float) -> tuple[float, float]:
        """Return start and end of the measure window of a run that ended at `ended_at`, rounded to 1 µs as records."""
        end = ended_at if self.horizon is None else min(self.horizon, ended_at)
        return round(self.warmup, 6), round(max(self.warmup, end - self.cooldown), 6)


@dataclass(frozen=True, slots=True)
class Job:
    """A batch job."""

    lines: Trace
    submit_at: float = 0.0  # seconds after the start
    completion_window: str = "24h"


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run, or of one worker's part."""

    target: Target
    online: Trace | None = None  # absolute times unless `closed_loop`
    closed_loop: bool = False  # start each online request when a slot is free
    max_concurrency: int | None = None  # maximum number of open online requests; None: unlimited
    jobs: tuple[Job, ...] = ()
    offline_mode: OfflineMode = "none"
    offline_concurrency: int = 64  # open flex requests
    offline_tier: str | None = "flex"  # service tier of flex requests
    wait_offline: bool = False  # run until the offline work is done, instead of stopping it after the drain
    poll_every: float = 1.0
    windows: Windows = field(default_factory=Windows)
    source: Source | None = None
    seed: int = 0
    salt: int = 0
    ignore_eos: bool = True
    continuous_usage: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    offline_body: dict[str, Any] = field(default_factory=dict)  # additional fields of flex requests
    worker: int = 0
    workers: int = 1

    def maker(self) -> PromptMaker:
        """Return the prompt maker of this run."""
        if self.source is None:
            raise InputError("the plan has no prompt source")
        return PromptMaker(self.source, "chat" if self.target.chat else "completions", self.seed, self.salt)

    def body(self, maker: PromptMaker, trace: Trace, row: int, index: int) -> dict[str, Any]:
        """Return the body of request `index`, row `row` of `trace`, without the stream and tier fields."""
        prompt = maker.fields(index, int(trace.input_tokens[row]), trace.content_of(row))
        length = output_fields(int(trace.output_tokens[row]), ignore_eos=self.ignore_eos)
        return {"model": self.target.model, **prompt, **length, "temperature": 0.0, **self.extra_body}

    def stream_fields(self) -> dict[str, Any]:
        """Return the body fields that request a stream with usage."""
        options = {"include_usage": True}
        if self.continuous_usage:
            options["continuous_usage_stats"] = True
        return {"stream": True, "stream_options": options}

    def share(self, worker: int, workers: int) -> "Plan":
        """Return the part of the plan for a worker process. Only worker 0 runs batch jobs."""
        bound = self.max_concurrency
        return replace(
            self,
            worker=worker,
            workers=workers,
            max_concurrency=None if bound is None else _part(bound, worker, workers),
            offline_concurrency=_part(self.offline_concurrency, worker, workers),
        )

    def rows(self, count: int) -> range:
        """Return the rows that this worker sends from a trace of `count` requests."""
        return range(self.worker, count, self.workers)

    @property
    def offline_lines(self) -> int:
        """Total number of lines of all jobs."""
        return sum(len(job.lines) for job in self.jobs)


def _part(total: int, worker: int, workers: int) -> int:
    return total // workers + (1 if worker < total % workers else 0)


def joined(jobs: tuple[Job, ...]) -> list[tuple[Trace, int]]:
    """Return all offline lines as (trace, row), in the order of the jobs, for flex mode."""
    return [(job.lines, int(row)) for job in jobs for row in np.arange(len(job.lines))]
