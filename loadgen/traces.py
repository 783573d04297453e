"""Traces of arrival times and lengths, and their operators: `window, thin, stretch, repeat, jitter, scale`.

A trace is columnar and immutable; operators return a new one. Files, optionally gzipped, are read in these formats,
detected by column or key names: native CSV and JSONL, Azure CSV, BurstGPT CSV, Mooncake JSONL, ShareGPT JSON, prompt
JSONL. Token counts of text without counts are estimates, and a note says so.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from loadgen import InputError
from loadgen.stats import stream

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Segment = tuple[int, int]
"""(stream id, tokens): a run of prompt tokens. Equal ids have equal tokens up to the shorter length."""

PREFIX_BLOCK = 512
"""Number of tokens per hash id in a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a prompt. With `text` or `messages`, the token count in the trace is an estimate."""

    segments: tuple[Segment, ...] = ()  # shared runs of tokens; the rest of the prompt is unique
    text: str | None = None  # sent as it is
    messages: tuple[tuple[str, str], ...] = ()  # (role, text), sent as they are


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    arrived_at: Floats  # float64[n], seconds from the start, sorted; zeros unless `timed`
    input_tokens: Ints  # int64[n]
    output_tokens: Ints  # int64[n]
    content: tuple[Content, ...] = ()  # one per request, or empty
    timed: bool = True  # False: lengths only
    span: float = 0.0  # seconds that the trace covers
    notes: tuple[str, ...] = ()  # changes and estimates, for the report

    def __len__(self) -> int:
        return len(self.arrived_at)

    @property
    def rate(self) -> float:
        """Requests/s over the span; 0 for a trace without times."""
        return len(self) / self.span if self.span > 0 else 0.0

    def content_of(self, index: int) -> Content:
        """Return the content of a request; empty if the trace has lengths only."""
        return self.content[index] if self.content else Content()

    def take(self, index: NDArray[np.int64]) -> "Trace":
        """Return the requests at `index`, in that order, with their times."""
        content = tuple(self.content[i] for i in index) if self.content else ()
        return replace(
            self,
            arrived_at=self.arrived_at[index],
            input_tokens=self.input_tokens[index],
            output_tokens=self.output_tokens[index],
            content=content,
        )

    def at(self, times: Floats) -> "Trace":
        """Return a trace at absolute `times` with the lengths and contents of this one, repeated as needed."""
        if len(self) == 0:
            raise InputError("the trace is empty")
        taken = self.take(np.arange(len(times), dtype=np.int64) % len(self))
        return replace(taken, arrived_at=times, timed=True, span=float(times[-1]) if len(times) else 0.0)

    def noted(self, *notes: str) -> "Trace":
        """Return the same trace with additional notes."""
        return replace(self, notes=(*self.notes, *notes))


def build(
    arrived_at: Floats | None,
    input_tokens: Ints,
    output_tokens: Ints,
    content: tuple[Content, ...] = (),
    notes: tuple[str, ...] = (),
) -> Trace:
    """Build a trace from columns. Rows are sorted by time (stable) and times shifted to start at 0."""
    if arrived_at is None or len(arrived_at) == 0:
        zeros = np.zeros(len(input_tokens))
        return Trace(zeros, input_tokens, output_tokens, content, arrived_at is not None, 0.0, notes)
    if not np.isfinite(arrived_at).all():
        raise InputError("an arrival time is not a finite number")
    order = np.argsort(arrived_at, kind="stable")
    moved = arrived_at - arrived_at.min()
    trace = Trace(moved, input_tokens, output_tokens, content, True, float(moved.max()), notes)
    return trace.take(order.astype(np.int64))


def window(trace: Trace, start: float, end: float) -> Trace:
    """Return the requests with start <= arrived_at < end, with times relative to `start`."""
    if not 0 <= start < end:
        raise InputError("window needs 0 <= start < end")
    index = np.flatnonzero((trace.arrived_at >= start) & (trace.arrived_at < end)).astype(np.int64)
    kept = trace.take(index)
    return replace(kept, arrived_at=kept.arrived_at - start, span=max(0.0, min(end, trace.span) - start))


def thin(trace: Trace, keep: float, seed: int) -> Trace:
    """Keep each request with probability `keep`, which preserves the shape over time and the bursts."""
    if not 0 < keep <= 1:
        raise InputError(f"thin needs a share in (0, 1], not {keep:g}; use stretch for a higher rate")
    kept = stream(seed, "thin").random(len(trace)) < keep
    return trace.take(np.flatnonzero(kept).astype(np.int64))


def stretch(trace: Trace, factor: float) -> Trace:
    """Multiply every time by `factor`; above 1 is slower."""
    if not (math.isfinite(factor) and factor > 0):
        raise InputError("stretch needs a positive factor")
    return replace(trace, arrived_at=trace.arrived_at * factor, span=trace.span * factor)


def jitter(trace: Trace, width: float, seed: int) -> Trace:
    """Add uniform noise in [0, width) seconds to every time and sort again, e.g. to undo times rounded down."""
    if not (math.isfinite(width) and width >= 0):
        raise InputError("jitter needs a width >= 0")
    moved = trace.arrived_at + stream(seed, "jitter").uniform(0.0, 1.0, len(trace)) * width
    order = np.argsort(moved, kind="stable").astype(np.int64)
    return replace(replace(trace, arrived_at=moved).take(order), span=trace.span + width)


def scale(trace: Trace, inputs: float, outputs: float | None = None) -> Trace:
    """Multiply input and output lengths, to at least one token each; shared segments are scaled as inputs."""
    outputs = inputs if outputs is None else outputs
    if not (0 < inputs < math.inf and 0 < outputs < math.inf):
        raise InputError("scale needs positive factors")
    content = tuple(
        replace(item, segments=tuple((name, max(1, round(size * inputs))) for name, size in item.segments))
        for item in trace.content
    )
    return replace(
        trace,
        input_tokens=_scaled(trace.input_tokens, inputs),
        output_tokens=_scaled(trace.output_tokens, outputs),
        content=content,
    )


def _scaled(lengths: Ints, factor: float) -> Ints:
    scaled: Ints = np.maximum(1, np.rint(lengths * factor)).astype(np.int64)
    return scaled


def to_rate(trace: Trace, rate: float, seed: int, by: str = "thin") -> Trace:
    """Return the trace at `rate` requests/s, by "thin" (drop requests at random) or "stretch" (scale the times)."""
    if trace.rate <= 0:
        raise InputError("the trace has no times; choose an arrival process with --arrival")
    if by == "stretch":
        return stretch(trace, trace.rate / rate)
    if rate > trace.rate * (1 + 1e-9):
        raise InputError(
            f"the trace has {trace.rate:.3g} requests/s; thinning cannot reach {rate:g}, use --rate-by stretch"
        )
    return thin(trace, min(1.0, rate / trace.rate), seed)


def apply(trace: Trace, operators: str, seed: int) -> Trace:
    """Apply operators of the command line, left to right, e.g. `window=0:600,thin=0.5,stretch=2,scale=0.5:1`."""
    table: dict[str, Callable[..., Trace]] = {
        "window": window,
        "thin": lambda t, keep: thin(t, keep, seed),
        "stretch": stretch,
        "jitter": lambda t, width: jitter(t, width, seed),
        "scale": scale,
    }
    for part in filter(None, (piece.strip() for piece in operators.split(","))):
        name, _, values = part.partition("=")
        if name not in table:
            raise InputError(f"unknown trace operator {name!r}; use {', '.join(table)}")
        try:
            trace = table[name](trace, *[float(value) for value in values.split(":")]).noted(part)
        except (TypeError, ValueError) as error:
            raise InputError(f"operator {part!r}: {error}") from None
    return trace


CHARACTERS_PER_TOKEN = 4.0
DEFAULT_OUTPUT = 128
MOONCAKE_STAMP = 3.0
ENOUGH_STAMPS = 10
MAX_TOKENS = 1 << 31
Row = Mapping[str, Any]
Reader = Callable[[Sequence[Row]], Trace]
Item = tuple[Content, int, int, float | None]
"""(prompt, prompt tokens, output tokens, arrival time in seconds or None)."""
T = TypeVar("T")

ESTIMATED = "input lengths are estimates (4 characters per token); the text is sent, and usage gives the true counts"


def read(path: Path, kind: str | None = None) -> Trace:
    """Read a trace of format `kind`, detected if None. Raise InputError, naming file and line, if it is invalid."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    name = path.name.removesuffix(".gz")
    try:
        return parse(text, name.rsplit(".", 1)[-1].lower(), kind)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse(text: str, suffix: str, kind: str | None = None) -> Trace:
    """Parse a trace from text; `suffix` is csv, jsonl or json."""
    if suffix == "json":
        if kind not in (None, "sharegpt"):
            raise InputError(f"a .json file must be ShareGPT, not {kind}; use .jsonl or .csv for other formats")
        return _sharegpt(_load_json(text))
    rows: Sequence[Row] = list(csv.DictReader(text.splitlines())) if suffix == "csv" else _json_lines(text)
    if not rows:
        raise InputError("the file has no rows")
    kind = kind or recognise(rows[0])
    if kind not in READERS:
        raise InputError(f"unknown format {kind!r}: use {', '.join(READERS)}")
    return READERS[kind](rows)


def recognise(row: Row) -> str:
    """Return the format with these column names. Raise InputError if there is none."""
    keys = set(row)
    for kind, needed in SIGNATURES:
        if needed <= keys:
            return kind
    found = ", ".join(sorted(map(str, keys)))
    raise InputError(f"no known format has the columns {found}; name them arrived_at, input_tokens and output_tokens")


SIGNATURES: tuple[tuple[str, set[str]], ...] = (
    ("native", {"input_tokens", "output_tokens"}),
    ("azure", {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    ("burstgpt", {"Timestamp", "Request tokens", "Response tokens"}),
    ("mooncake", {"timestamp", "input_length", "output_length"}),
    ("sharegpt", {"conversations"}),
    ("prompts", {"prompt"}),
    ("prompts", {"messages"}),
)


def _load_json(text: str) -> list[Any]:
    try:
        loaded = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(loaded, list):
        raise InputError("a ShareGPT file must be a list of conversations")
    return loaded


def _json_lines(text: str) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InputError(f"line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise InputError(f"line {number}: not an object")
        rows.append(row)
    return rows


def _count(value: Any) -> int:
    """Parse a number of tokens. Raise ValueError if it exceeds MAX_TOKENS."""
    found = float(value)
    if not abs(found) <= MAX_TOKENS:
        raise ValueError(f"bad number of tokens {value!r}")
    return int(found)


def _each(rows: Sequence[Any], convert: Callable[[Any], T]) -> list[T]:
    """Apply `convert` to every row. Raise InputError, naming the row, if a row has an unexpected structure."""
    found = []
    for index, row in enumerate(rows):
        try:
            found.append(convert(row))
        except InputError as error:
            raise InputError(f"row {index + 1}: {error}") from None
        except KeyError as error:
            raise InputError(f"row {index + 1}: no {error.args[0]}, only {', '.join(map(str, row))}") from None
        except (IndexError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"row {index + 1}: {type(error).__name__}: {error}") from None
    return found


def _trace(items: Sequence[Item], *notes: str) -> Trace:
    """Build a trace, dropping rows without a prompt or an answer: failed requests in the public traces."""
    kept = [item for item in items if item[1] > 0 and item[2] > 0]
    if dropped := len(items) - len(kept):
        notes = (*notes, f"{dropped} rows without prompt or answer dropped")
    content = tuple(item[0] for item in kept)
    inputs, outputs = (np.array([item[column] for item in kept], dtype=np.int64) for column in (1, 2))
    times = None if any(item[3] is None for item in kept) else np.array([item[3] for item in kept], dtype=np.float64)
    return build(times, inputs, outputs, content if any(each != Content() for each in content) else (), notes)


def _table(inputs: str, outputs: str, times: str, convert: Callable[[Any], float] = float) -> Reader:
    """Return the reader of a table with these columns; that of the times may be missing."""

    def read_rows(rows: Sequence[Row]) -> Trace:
        timed = times in rows[0]

        def item(row: Row) -> Item:
            tokens = _count(row[inputs])
            prefix = Content(segments=_segments(row.get("hash_ids") or [], tokens))
            return prefix, tokens, _count(row[outputs]), convert(row[times]) if timed else None

        return _trace(_each(rows, item))

    return read_rows


def _segments(ids: Any, tokens: int) -> tuple[Segment, ...]:
    """Return the prefix blocks of 512 tokens, the last one partial, that `hash_ids` names."""
    listed = orjson.loads(ids) if isinstance(ids, str) else ids
    sizes = [min(PREFIX_BLOCK, tokens - index * PREFIX_BLOCK) for index in range(len(listed))]
    return tuple((int(name), size) for name, size in zip(listed, sizes, strict=True) if size > 0)


def _timestamp(text: str) -> float:
    """Parse `2023-11-16 18:15:46.6805900[+00:00]` as seconds since the epoch. datetime refuses its 100-ns digits."""
    stamp, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(stamp + rest[len(digits) :])
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{digits}") if dot and digits else 0.0)


def _mooncake(rows: Sequence[Row]) -> Trace:
    table = _table("input_length", "output_length", "timestamp", lambda value: float(value) / 1000.0)
    trace = table(rows)
    if len(trace) >= ENOUGH_STAMPS and not (trace.arrived_at % MOONCAKE_STAMP).any():
        # The published times are rounded down to 3 s; used as they are, they would form bursts.
        return jitter(trace, MOONCAKE_STAMP, seed=0).noted("arrival times rounded to 3 s are spread over these 3 s")
    return trace


def _estimate(content: Content) -> int:
    characters = len(content.text or "") + sum(len(text) for _, text in content.messages)
    return max(1, round(characters / CHARACTERS_PER_TOKEN))


def _content(body: Row) -> Content:
    """Return the prompt of a request body, text or messages. Raise InputError for token ids."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(messages, list):
        return Content(messages=tuple((str(m.get("role", "user")), _plain(m.get("content"))) for m in messages))
    if isinstance(prompt, str):
        return Content(text=prompt)
    raise InputError("the line has neither a text prompt nor messages")


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _output_size(row: Row) -> int | None:
    for name in ("output_tokens", "max_tokens", "max_completion_tokens"):
        if row.get(name) is not None:
            if not isinstance(row[name], int) or not 0 < row[name] <= MAX_TOKENS:
                raise InputError(f"bad {name} {row[name]!r}")
            return int(row[name])
    return None


def _prompts(rows: Sequence[Row]) -> Trace:
    return _trace(_each(rows, _prompt), ESTIMATED)


def _prompt(row: Row) -> Item:
    answer = row.get("canonical_solution") or row.get("completion")
    estimated = max(1, round(len(answer) / CHARACTERS_PER_TOKEN)) if isinstance(answer, str) else DEFAULT_OUTPUT
    when = float(row["arrived_at"]) if "arrived_at" in row else None
    content = _content(row)
    return content, _estimate(content), _output_size(row) or estimated, when


def _sharegpt(rows: Sequence[Any]) -> Trace:
    items = [item for item in _each(rows, _conversation) if item is not None]
    if not items:
        raise InputError("no conversation with a question and an answer")
    return _trace(items, ESTIMATED, "output lengths are estimates (4 characters per token)")


def _conversation(row: Any) -> Item | None:
    """Return the first question and answer, as other tools read this file, or None if they are missing."""
    turns = row.get("conversations", []) if isinstance(row, dict) else []
    if len(turns) < 2 or not (turns[0].get("value") and turns[1].get("value")):
        return None
    size = max(1, round(len(turns[1]["value"]) / CHARACTERS_PER_TOKEN))
    content = Content(messages=(("user", str(turns[0]["value"])),))
    return content, _estimate(content), size, None


READERS: dict[str, Reader] = {
    "native": _table("input_tokens", "output_tokens", "arrived_at"),
    "azure": _table("ContextTokens", "GeneratedTokens", "TIMESTAMP", _timestamp),
    "burstgpt": _table("Request tokens", "Response tokens", "Timestamp"),
    "mooncake": _mooncake,
    "sharegpt": _sharegpt,
    "prompts": _prompts,
}
