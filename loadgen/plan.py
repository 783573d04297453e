"""The server under test and the plan of a run, complete before the run starts: a value that another process can get.

Prompts have an exact number of tokens, as token ids or as text, without the model's tokenizer. Token ids are sent to
/v1/completions. Text consists of common words whose token counts were measured on the server (`loadgen.runner`). A
prompt is a function of (seed, salt, request); a shared prefix is a function of (seed, salt, segment id).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from loadgen import InputError, ServerError
from loadgen.stats import stream
from loadgen.traces import Content, Segment, Trace


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test."""

    base_url: str
    endpoint: str = "/v1/completions"  # path of online requests
    model: str = ""
    api_key: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 600.0  # of a request, seconds
    silent_tokens: bool = False  # a chunk without text counts as a token event if its usage grew

    @property
    def chat(self) -> bool:
        """Whether the endpoint is chat completions."""
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def url(self, path: str) -> str:
        """Return the URL of a path, which starts with /."""
        return self.base_url.rstrip("/") + path


def window_seconds(text: str) -> float:
    """Parse a completion window such as "24h", "30m", "90s" or "7d"; return seconds. Raise ServerError if invalid."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    if text[-1:] not in units or not text[:-1].replace(".", "", 1).isdigit():
        raise ServerError(f"invalid completion window {text!r}; use e.g. 90m, 24h or 7d")
    return float(text[:-1]) * units[text[-1]]


UNIQUE = -1
"""Stream id of the part of a prompt that is unique to a request."""

COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family group country hand part place case "
    "week company system program question work number night point home water room area money story fact month lot"
)
ANCHOR = "Text"
"""First word of every generated text. Templates strip leading space, which would change the first word's cost."""
WORDS = tuple(COMMON_WORDS.split())


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Random token ids in [low, high). The default range has ordinary tokens in nearly every vocabulary."""

    low: int = 16
    high: int = 250

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise InputError("--token-id-range needs 0 <= LOW < HIGH")

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        """Draw `count` token ids."""
        ids: list[int] = random.integers(self.low, self.high, count).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class WordCosts:
    """Token counts of words on a server."""

    words: tuple[str, ...]
    costs: tuple[int, ...]  # tokens of " " + `words[i]`
    overhead: int = 0  # tokens of the chat template, special tokens and the anchor

    def draw(self, count: int, random: np.random.Generator) -> str:
        """Draw text of `count` tokens; fewer, by less than the cheapest word, if no combination of words is exact."""
        cheap = min(self.costs)
        singles = [word for word, cost in zip(self.words, self.costs, strict=True) if cost == cheap]
        filler, spent = self._filler(count, cheap)
        picks = random.integers(0, len(singles), max(0, (count - spent) // cheap))
        return "".join([f" {singles[pick]}" for pick in picks]) + filler

    def _filler(self, count: int, cheap: int) -> tuple[str, int]:
        """Return a word that makes the remaining count a multiple of the cheapest cost, and its cost."""
        if count % cheap == 0:
            return "", 0
        for word, cost in zip(self.words, self.costs, strict=True):
            if cost <= count and (count - cost) % cheap == 0:
                return f" {word}", cost
        return "", 0


Source = TokenIds | WordCosts
Kind = Literal["completions", "chat"]


class PromptMaker:
    """Maker of the `prompt` or `messages` of a request body.

    `seed` and `salt` determine the text. A new salt per run avoids prefix cache hits on prompts of the last run.
    """

    def __init__(self, source: Source, kind: Kind, seed: int, salt: int) -> None:
        if kind == "chat" and isinstance(source, TokenIds):
            raise InputError("chat endpoints need text prompts; use --prompt-mode text")
        self.source = source
        self.kind = kind
        self._seed = seed
        self._salt = salt
        self._segment = lru_cache(maxsize=4096)(self._draw_segment)

    def fields(self, index: int, tokens: int, content: Content) -> dict[str, Any]:
        """Return the body fields with the prompt of request `index`: the text in `content`, or `tokens` tokens."""
        if content.messages:
            if self.kind == "completions":
                return {"prompt": "\n".join(text for _, text in content.messages)}
            return {"messages": [{"role": role, "content": text} for role, text in content.messages]}
        if content.text is not None:
            return self._wrap(content.text)
        return self._wrap(self._compose(index, tokens, content.segments))

    def _wrap(self, prompt: str | list[int]) -> dict[str, Any]:
        if self.kind == "chat":
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}

    def _compose(self, index: int, tokens: int, segments: Sequence[Segment]) -> str | list[int]:
        remaining = tokens
        if isinstance(self.source, WordCosts):
            remaining = max(0, tokens - self.source.overhead)
        pieces: list[str | list[int]] = []
        for name, size in segments:
            taken = min(size, remaining)
            if taken > 0:
                pieces.append(self._segment(name, size)[:taken] if self._ids else self._segment(name, taken))
            remaining -= max(0, taken)
        if remaining > 0:
            pieces.append(self.source.draw(remaining, stream(self._seed, "text", self._salt, UNIQUE, index)))
        if self._ids:
            return [token for piece in pieces for token in piece]  # type: ignore[misc]
        return ANCHOR + "".join(pieces)  # type: ignore[arg-type]

    @property
    def _ids(self) -> bool:
        return isinstance(self.source, TokenIds)

    def _draw_segment(self, name: int, size: int) -> str | list[int]:
        return self.source.draw(size, stream(self._seed, "segment", self._salt, name & 0xFFFFFFFF, name >> 32))


def output_fields(tokens: int, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the body fields that request `tokens` tokens, exactly with `ignore_eos`, else at most.

    Both endpoints use `max_tokens` because several servers do not support `max_completion_tokens`.
    """
    fields: dict[str, Any] = {"max_tokens": tokens}
    if ignore_eos:
        fields |= {"min_tokens": tokens, "ignore_eos": True}
    return fields


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
    lines: Trace
    completion_window: str = "24h"


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run."""

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
    source: Source = TokenIds()
    seed: int = 0
    salt: int = 0
    ignore_eos: bool = True
    continuous_usage: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    offline_body: dict[str, Any] = field(default_factory=dict)  # additional fields of flex requests

    def maker(self) -> PromptMaker:
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

    @property
    def draws_prompts(self) -> bool:
        """Whether a prompt must be generated because its trace has no text for it."""
        traces = [job.lines for job in self.jobs] + ([] if self.online is None else [self.online])
        return any(not trace.content or any(not (c.text or c.messages) for c in trace.content) for trace in traces)

    @property
    def offline_lines(self) -> int:
        """Total number of lines of all jobs."""
        return sum(len(job.lines) for job in self.jobs)
