"""Readers of public trace and prompt formats, optionally gzipped, and the writer of the native format.

Azure CSV, BurstGPT CSV, Mooncake JSONL, Vidur/Sarathi and Splitwise CSV, native CSV/JSONL, OpenAI batch JSONL,
ShareGPT JSON, prompt JSONL. The format is detected by column or key names. Token counts of text without counts are
estimates, and a note says so.
"""

import csv
import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson

from loadgen import InputError
from loadgen.traces import PREFIX_BLOCK, Content, Trace, build, jitter

CHARACTERS_PER_TOKEN = 4.0
DEFAULT_OUTPUT = 128
MOONCAKE_STAMP = 3.0
ENOUGH_STAMPS = 10
MAX_TOKENS = 1 << 31
Row = Mapping[str, Any]
Reader = Callable[[Sequence[Row]], Trace]
Item = tuple[Content, int, float | None]
"""(prompt, output tokens, arrival time in seconds or None)."""
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
    raise InputError(f"no known format has the columns {', '.join(sorted(map(str, keys)))}")


SIGNATURES: tuple[tuple[str, set[str]], ...] = (
    ("native", {"input_tokens", "output_tokens"}),
    ("azure", {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    ("burstgpt", {"Timestamp", "Request tokens", "Response tokens"}),
    ("mooncake", {"timestamp", "input_length", "output_length"}),
    ("vidur", {"num_prefill_tokens", "num_decode_tokens"}),
    ("splitwise", {"prompt_size", "token_size"}),
    ("openai-batch", {"custom_id", "body"}),
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


def _column(rows: Sequence[Row], name: str, convert: Callable[[Any], float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.empty(len(rows))
    for index, row in enumerate(rows):
        try:
            values[index] = convert(row[name])
        except (KeyError, TypeError, ValueError, OverflowError):
            bad = f"bad {name} {row[name]!r}" if name in row else f"no {name}, only {', '.join(map(str, row))}"
            raise InputError(f"row {index + 1}: {bad}") from None
    return values


def _count(value: Any) -> float:
    """Parse a number of tokens. Raise ValueError if it exceeds MAX_TOKENS."""
    found = float(value)
    if not abs(found) <= MAX_TOKENS:
        raise ValueError
    return found


def _each(rows: Sequence[Any], convert: Callable[[Any], T]) -> list[T]:
    """Apply `convert` to every row. Raise InputError, naming the row, if a row has an unexpected structure."""
    found = []
    for index, row in enumerate(rows):
        try:
            found.append(convert(row))
        except InputError as error:
            raise InputError(f"row {index + 1}: {error}") from None
        except (KeyError, IndexError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"row {index + 1}: {type(error).__name__}: {error}") from None
    return found


def _lengths(
    rows: Sequence[Row],
    times: np.ndarray[Any, np.dtype[np.float64]] | None,
    inputs: str,
    outputs: str,
    content: Sequence[Content] = (),
) -> Trace:
    """Build a trace, dropping rows without a prompt or an answer: failed requests in the public traces."""
    prompt, answer = (_column(rows, name, _count).astype(np.int64) for name in (inputs, outputs))
    keep = np.flatnonzero((prompt > 0) & (answer > 0))
    dropped = len(rows) - len(keep)
    notes = (f"{dropped} rows without prompt or answer dropped",) if dropped else ()
    kept = tuple(content[int(index)] for index in keep) if content else ()
    return build(None if times is None else times[keep], prompt[keep], answer[keep], kept, notes)


def _table(inputs: str, outputs: str, times: str, convert: Callable[[Any], float] = float) -> Reader:
    """Return the reader of a table with these columns; that of the times may be missing."""

    def read_rows(rows: Sequence[Row]) -> Trace:
        arrived = _column(rows, times, convert) if times in rows[0] else None
        return _lengths(rows, arrived, inputs, outputs, _hashed(rows, inputs))

    return read_rows


def _hashed(rows: Sequence[Row], inputs: str) -> tuple[Content, ...]:
    """Return prefix blocks of 512 tokens, the last one partial, from `hash_ids`; empty if the file has none."""
    if "hash_ids" not in rows[0]:
        return ()
    return tuple(_each(rows, lambda row: Content(segments=_segments(row.get("hash_ids") or [], int(row[inputs])))))


def _segments(ids: Any, tokens: int) -> tuple[tuple[int, int], ...]:
    listed = orjson.loads(ids) if isinstance(ids, str) else ids
    pairs = []
    for index, name in enumerate(listed):
        size = min(PREFIX_BLOCK, tokens - index * PREFIX_BLOCK)
        if size > 0:
            pairs.append((int(name), size))
    return tuple(pairs)


def _timestamp(text: str) -> float:
    """Parse `2023-11-16 18:15:46.6805900[+00:00]` as seconds since the epoch. datetime refuses its 100-ns digits."""
    stamp, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(stamp + rest[len(digits) :])
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{digits}") if dot and digits else 0.0)


def _mooncake(rows: Sequence[Row]) -> Trace:
    times = _column(rows, "timestamp", float) / 1000.0
    trace = _lengths(rows, times, "input_length", "output_length", _hashed(rows, "input_length"))
    if len(trace) >= ENOUGH_STAMPS and not (times % MOONCAKE_STAMP).any():
        # The published times are rounded down to 3 s; used as they are, they would form bursts.
        return jitter(trace, MOONCAKE_STAMP, seed=0).noted("arrival times rounded to 3 s are spread over these 3 s")
    return trace


def _texts(listed: Sequence[Item], notes: tuple[str, ...]) -> Trace:
    content = tuple(item for item, _, _ in listed)
    inputs = np.array([_estimate(item) for item in content], dtype=np.int64)
    outputs = np.array([size for _, size, _ in listed], dtype=np.int64)
    timed = bool(listed) and all(when is not None for _, _, when in listed)
    times = np.array([when or 0.0 for _, _, when in listed]) if timed else None
    return build(times, inputs, outputs, content, notes)


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


def _openai_batch(rows: Sequence[Row]) -> Trace:
    items = _each(rows, lambda row: (_content(row["body"]), _output_size(row["body"]) or DEFAULT_OUTPUT, None))
    return _texts(items, (ESTIMATED,))


def _prompts(rows: Sequence[Row]) -> Trace:
    return _texts(_each(rows, _prompt), (ESTIMATED,))


def _prompt(row: Row) -> Item:
    answer = row.get("canonical_solution") or row.get("completion")
    estimated = max(1, round(len(answer) / CHARACTERS_PER_TOKEN)) if isinstance(answer, str) else DEFAULT_OUTPUT
    when = float(row["arrived_at"]) if "arrived_at" in row else None
    return _content(row), _output_size(row) or estimated, when


def _sharegpt(rows: Sequence[Any]) -> Trace:
    items = [item for item in _each(rows, _conversation) if item is not None]
    if not items:
        raise InputError("no conversation with a question and an answer")
    notes = (ESTIMATED, "output lengths are estimates (4 characters per token)")
    return _texts(items, notes)


def _conversation(row: Any) -> Item | None:
    """Return the first question and answer, as other tools read this file, or None if they are missing."""
    turns = row.get("conversations", []) if isinstance(row, dict) else []
    if len(turns) < 2 or not (turns[0].get("value") and turns[1].get("value")):
        return None
    size = max(1, round(len(turns[1]["value"]) / CHARACTERS_PER_TOKEN))
    return Content(messages=(("user", str(turns[0]["value"])),)), size, None


READERS: dict[str, Reader] = {
    "native": _table("input_tokens", "output_tokens", "arrived_at"),
    "azure": _table("ContextTokens", "GeneratedTokens", "TIMESTAMP", _timestamp),
    "burstgpt": _table("Request tokens", "Response tokens", "Timestamp"),
    "mooncake": _mooncake,
    "vidur": _table("num_prefill_tokens", "num_decode_tokens", "arrived_at"),
    "sarathi": _table("num_prefill_tokens", "num_decode_tokens", "arrived_at"),
    "splitwise": _table("prompt_size", "token_size", "arrival_timestamp"),
    "openai-batch": _openai_batch,
    "sharegpt": _sharegpt,
    "prompts": _prompts,
}
