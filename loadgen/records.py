"""Records of requests and batch jobs, and their JSON Lines form.

Times are seconds since the start of the run on one monotonic clock; token times are one per chunk. The simulator fills
the same records on its virtual clock.
"""

import gzip
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

Class = Literal["online", "offline"]
Outcome = Literal["ok", "http_error", "stream_error", "cut", "empty", "timeout", "connection", "unfinished"]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class RequestRecord:
    """One request. `sent_at`, `first_token_at`, `ended_at` are None when it never came to that.

    `chunk_at[i]` is when chunk i arrived and `chunk_tokens[i]` how many tokens it carried. `output_tokens` is the
    server's count when it sent one, else the counted tokens; `input_tokens` and `cached_tokens` are the server's.
    """

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
    input_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    chunk_at: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    lag: float | None = None
    """Seconds between `scheduled_at` and the moment the client was ready to send (a wait for a slot not included)."""
    retry_after: float = 0.0
    """Seconds after which a refused request may come again, as the server says; not kept."""

    @property
    def ok(self) -> bool:
        """Whether the whole answer arrived."""
        return self.outcome == "ok"

    @property
    def ttft(self) -> float | None:
        """Time to first token from the intended arrival: no coordinated omission."""
        return None if self.first_token_at is None else self.first_token_at - self.scheduled_at

    @property
    def ttft_sent(self) -> float | None:
        """Time to first token from the moment the request was sent."""
        if self.first_token_at is None or self.sent_at is None:
            return None
        return self.first_token_at - self.sent_at

    @property
    def prompt_tokens(self) -> int:
        """Prompt length counted by the server, or the requested length if unknown."""
        return self.input_asked if self.input_tokens is None else self.input_tokens

    @property
    def e2e(self) -> float | None:
        """Last token minus intended arrival."""
        return self.chunk_at[-1] - self.scheduled_at if self.chunk_at else None

    @property
    def tpot(self) -> float | None:
        """(last - first) / (tokens - 1); None for fewer than two tokens."""
        counted = sum(self.chunk_tokens)
        return (self.chunk_at[-1] - self.chunk_at[0]) / (counted - 1) if counted > 1 else None

    def gaps(self) -> Floats:
        """Gaps between consecutive tokens: a chunk of k tokens is one gap and k - 1 zeros (float64[tokens - 1])."""
        tokens = np.asarray(self.chunk_tokens, dtype=np.int64)
        if tokens.sum() < 2:
            return np.empty(0)
        stamps = np.repeat(np.asarray(self.chunk_at), tokens)
        return np.diff(stamps)


@dataclass(slots=True)
class JobPoll:
    """What one poll of a batch job said. `tokens` is the job's usage so far, None when the server does not say."""

    at: float
    status: str
    completed: int
    failed: int
    tokens: int | None = None


@dataclass(slots=True)
class JobRecord:
    """One batch job: creation time, polls and results. `unexecuted`: lines that were not run before the job ended."""

    index: int
    lines: int
    created_at: float | None = None
    polls: list[JobPoll] = field(default_factory=list)
    status: str = "not created"
    error: str = ""
    completion_window: float = 86400.0
    output_lines: int = 0
    error_lines: int = 0
    unexecuted: int = 0
    missing: int = 0
    duplicated: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output_asked: int = 0

    def first(self, *states: str) -> float | None:
        """Time of the first poll that saw one of `states`."""
        return next((poll.at for poll in self.polls if poll.status in states), None)


@dataclass(slots=True)
class ClientSample:
    """The client at one moment: CPU seconds used so far and open requests, of one worker process."""

    at: float
    cpu: float
    online_open: int
    offline_open: int
    worker: int = 0


@dataclass(slots=True)
class Records:
    """Everything one run observed. `ended_at`: when the run stopped waiting."""

    requests: list[RequestRecord] = field(default_factory=list)
    jobs: list[JobRecord] = field(default_factory=list)
    samples: list[ClientSample] = field(default_factory=list)
    ended_at: float = 0.0
    interrupted: bool = False

    @property
    def last_event(self) -> float:
        """When the last answer or job ended (the end of the run when nothing did)."""
        ends = [record.ended_at for record in self.requests if record.ended_at is not None]
        ends += [job.polls[-1].at for job in self.jobs if job.polls]
        return max(ends, default=self.ended_at)


def to_line(record: RequestRecord) -> bytes:
    """One line of `requests.jsonl`, times rounded to a microsecond."""
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


def from_line(line: bytes) -> RequestRecord:
    """The inverse of `to_line`; names added by a later version are ignored."""
    row = orjson.loads(line)
    row["service_class"] = row.pop("class")
    known = {item.name for item in fields(RequestRecord)}
    return RequestRecord(**{key: value for key, value in row.items() if key in known})


def save(records: Iterable[RequestRecord], path: Path) -> None:
    """Writes `requests.jsonl.gz`."""
    with gzip.open(path, "wb", compresslevel=4) as stream:
        stream.writelines(map(to_line, records))


def load(path: Path) -> list[RequestRecord]:
    """Reads `requests.jsonl.gz`."""
    with gzip.open(path, "rb") as stream:
        return [from_line(line) for line in stream]
