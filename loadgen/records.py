"""Records of requests and batch jobs, and their JSON Lines form.

Times are seconds since the start of the run on a monotonic clock, or on the virtual clock of the simulator.
"""

import gzip
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from loadgen.stats import nearest_rank

Class = Literal["online", "offline"]
Outcome = Literal["ok", "http_error", "stream_error", "cut", "empty", "timeout", "connection", "unfinished"]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class RequestRecord:
    """Record of a request. Times are None if the event did not happen."""

    index: int
    service_class: Class
    scheduled_at: float
    input_asked: int
    output_asked: int
    sent_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome = "unfinished"
    status: int = 0
    error: str = ""
    finish_reason: str = ""
    input_tokens: int | None = None  # reported by the server
    output_tokens: int = 0  # reported by the server, else counted
    cached_tokens: int | None = None  # reported by the server
    chunk_at: list[float] = field(default_factory=list)  # arrival time of each chunk
    chunk_tokens: list[int] = field(default_factory=list)  # tokens of each chunk
    lag: float | None = None
    """Seconds between `scheduled_at` and the moment when the client was ready to send, without the wait for a slot."""
    retry_after: float = 0.0
    """The server's Retry-After for a refused request, seconds; not saved."""

    @property
    def ok(self) -> bool:
        """Whether the complete answer arrived."""
        return self.outcome == "ok"

    @property
    def ttft(self) -> float | None:
        """Time to first token since the scheduled arrival, which avoids coordinated omission."""
        return None if self.first_token_at is None else self.first_token_at - self.scheduled_at

    @property
    def ttft_sent(self) -> float | None:
        """Time to first token since sending."""
        if self.first_token_at is None or self.sent_at is None:
            return None
        return self.first_token_at - self.sent_at

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as reported by the server, else as requested."""
        return self.input_asked if self.input_tokens is None else self.input_tokens

    @property
    def e2e(self) -> float | None:
        """Time of the last token since the scheduled arrival."""
        return self.chunk_at[-1] - self.scheduled_at if self.chunk_at else None

    @property
    def tpot(self) -> float | None:
        """Time per output token, (last - first) / (tokens - 1); None for fewer than two tokens."""
        counted = sum(self.chunk_tokens)
        return (self.chunk_at[-1] - self.chunk_at[0]) / (counted - 1) if counted > 1 else None

    @property
    def normalized_ttft(self) -> float | None:
        """The TTFT per prompt token."""
        return None if self.ttft is None else self.ttft / max(1, self.prompt_tokens)

    @property
    def tbt_p99(self) -> float | None:
        """P99 of the gaps; None for fewer than two tokens."""
        gaps = self.gaps()
        return nearest_rank(gaps, 99) if gaps.size else None

    def gaps(self) -> Floats:
        """Return gaps between consecutive tokens, float64[tokens - 1]. A chunk of k tokens is a gap and k - 1 zeros."""
        tokens = np.asarray(self.chunk_tokens, dtype=np.int64)
        if tokens.sum() < 2:
            return np.empty(0)
        stamps = np.repeat(np.asarray(self.chunk_at), tokens)
        return np.diff(stamps)


@dataclass(slots=True)
class JobPoll:
    """State of a batch job at a poll."""

    at: float
    status: str
    completed: int
    failed: int
    tokens: int | None = None  # usage so far; None if the server does not report it


@dataclass(slots=True)
class JobRecord:
    index: int
    lines: int
    created_at: float | None = None
    polls: list[JobPoll] = field(default_factory=list)
    status: str = "not created"
    error: str = ""
    completion_window: float = 86400.0
    output_lines: int = 0
    error_lines: int = 0
    unexecuted: int = 0  # lines that the job's end prevented
    missing: int = 0
    duplicated: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output_asked: int = 0

    def first(self, *states: str) -> float | None:
        """Return the time of the first poll in one of `states`, or None."""
        return next((poll.at for poll in self.polls if poll.status in states), None)


@dataclass(slots=True)
class ClientSample:
    """CPU time and open requests of the client at one moment."""

    at: float
    cpu: float  # CPU seconds used so far
    online_open: int
    offline_open: int


@dataclass(slots=True)
class Records:
    """All observations of a run."""

    requests: list[RequestRecord] = field(default_factory=list)
    jobs: list[JobRecord] = field(default_factory=list)
    samples: list[ClientSample] = field(default_factory=list)
    ended_at: float = 0.0  # time when the run stopped waiting
    interrupted: bool = False

    @property
    def last_event(self) -> float:
        """Time when the last answer or job ended, or the end of the run if none did."""
        ends = [record.ended_at for record in self.requests if record.ended_at is not None]
        ends += [job.polls[-1].at for job in self.jobs if job.polls]
        return max(ends, default=self.ended_at)


def to_line(record: RequestRecord) -> bytes:
    """Return a line of `requests.jsonl`, with times rounded to 1 µs."""
    row = {key: _rounded(value) for key, value in asdict(record).items()}
    row["class"] = row.pop("service_class")
    del row["retry_after"]
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def save(records: Iterable[RequestRecord], path: Path) -> None:
    """Write `requests.jsonl.gz`."""
    with gzip.open(path, "wb", compresslevel=4) as stream:
        stream.writelines(map(to_line, records))
