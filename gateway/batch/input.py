"""Validate an input file in one pass: find its lines and the order to feed them, or its errors. Memory is bounded but
for 100 bytes per line for digests of ids and 24 bytes per line for the result.

Only the envelopes are validated: an invalid `body` becomes an error row later and does not fail the batch. The work is
CPU-bound Python, so it runs in a process of its own (`check_apart`): a thread would delay model steps through the GIL.
"""

import marshal
import os
import signal
from array import array
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import merge
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, NamedTuple

import orjson
from anyio import to_process

from engine.machine.processes import die_with_parent
from gateway.http.json_text import RoundedNumber, TooMuchJson, check_numbers, load_json
from gateway.models import ModelNames
from gateway.store.objects import InputError, LineRef

PREFIX_BYTES = 512
MAX_ERRORS = 100
MAX_CUSTOM_ID_CHARS = 512
READ_BYTES = 1024 * 1024
SPILL_LINES = 50_000
"""Lines whose prefix keys are sorted in memory."""
LOW_PRIORITY = 10
"""Niceness of the validation process, so that it yields to model steps and online requests."""
MAX_SHOWN_CHARS = 100
"""Maximum characters of a model name in an error message."""
_LineKey = tuple[bytes, int, int, int]
_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})


class RawLine(NamedTuple):
    """A line without its line end; `content` is None if the line is too long."""

    number: int
    start: int
    length: int
    content: bytes | None


class LinePlaces:
    """Number, offset and length of each line in feeding order, packed into 24 bytes for transfer between processes."""

    def __init__(self, places: Iterable[Sequence[int]] = ()) -> None:
        self._numbers = array("q", chain.from_iterable(places))

    def __len__(self) -> int:
        return len(self._numbers) // 3

    def rows(self, start: int, stop: int) -> list[LineRef]:
        """Return the lines with ranks from `start` to `stop` (exclusive)."""
        cut = self._numbers[3 * start : 3 * stop]
        return [LineRef(start + i, *cut[3 * i : 3 * i + 3]) for i in range(len(cut) // 3)]


@dataclass(slots=True)
class InputReport:
    """Result of a validation."""

    lines: LinePlaces = field(default_factory=LinePlaces)
    """Lines sorted by prefix key; empty if there are errors."""
    errors: list[InputError] = field(default_factory=list)
    model: str | None = None
    """Model named by the lines, if any."""


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    """Yield the lines of a file, numbered from 1, with one line in memory. Blank lines are counted but not yielded."""
    number, start, position = 1, 0, 0
    pending = bytearray()
    while data := file.read(READ_BYTES):
        for piece in _split(data):
            position += len(piece)
            if start + max_bytes >= position - 2:
                pending += piece
            if piece.endswith(b"\n"):
                yield from _line(number, start, position, pending, max_bytes)
                number, start, pending = number + 1, position, bytearray()
    yield from _line(number, start, position, pending, max_bytes)


def _split(data: bytes) -> Iterator[bytes]:
    """Yield the lines of `data` with their LF; unlike `splitlines`, do not split at a lone CR."""
    *whole, rest = data.split(b"\n")
    for piece in whole:
        yield piece + b"\n"
    if rest:
        yield rest


def _line(number: int, start: int, end: int, pending: bytearray, max_bytes: int) -> Iterator[RawLine]:
    if len(pending) < end - start:
        yield RawLine(number, start, end - start, None)
        return
    content = bytes(pending).rstrip(b"\r\n")
    if len(content) > max_bytes:
        yield RawLine(number, start, len(content), None)
    elif content.strip():
        yield RawLine(number, start, len(content), content)


class LineKeys:
    """Prefix keys of lines with number, offset and length. SPILL_LINES are in memory, others in sorted unnamed files in
    `folder` (None: the system's folder for temporary files). The caller must close it. Raises OSError."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._keys: list[_LineKey] = []
        self._files: list[IO[bytes]] = []

    def add(self, key: _LineKey) -> None:
        self._keys.append(key)
        if len(self._keys) == SPILL_LINES:
            file = TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._keys.sort()
            for each in self._keys:
                marshal.dump(each, file)
            file.seek(0)
            self._files.append(file)
            self._keys = []

    def sorted(self) -> Iterator[_LineKey]:
        self._keys.sort()
        return merge(self._keys, *map(_read_keys, self._files))

    def close(self) -> None:
        for file in self._files:
            file.close()


def _read_keys(file: IO[bytes]) -> Iterator[_LineKey]:
    with suppress(EOFError):
        while True:
            yield marshal.load(file)


class InputChecker:
    """Check an input file line by line.

    Args:
        max_lines: Maximum number of lines of a batch.
        max_line_bytes: Maximum length of a line.
        names: Names that the lines may use; None: any.
        folder: Folder for temporary files, see `LineKeys`.
    """

    def __init__(
        self,
        endpoint: str,
        max_lines: int,
        max_line_bytes: int,
        names: ModelNames | None = None,
        folder: str | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._seen: set[bytes] = set()  # digests: ids may be long, and memory is bounded
        self._names = names
        self._models: set[str] = set()
        self._unknown: set[str] = set()  # names that an error has reported
        self.keys = LineKeys(folder)
        self._num_lines = 0
        self.errors: list[InputError] = []

    def check(self, line: RawLine) -> bool:
        """Check a line; return False if no further line needs to be checked."""
        self._num_lines += 1
        if self._num_lines > self._max_lines:
            self.errors = [InputError("too_many_tasks", f"A batch has at most {self._max_lines} lines.", line.number)]
            return False
        found = self._check(line)
        if found is not None:
            self.errors.append(found)
        return len(self.errors) < MAX_ERRORS

    def _check(self, line: RawLine) -> InputError | None:
        if line.content is None:
            message = f"The line is longer than {self._max_line_bytes} bytes."
            return InputError("invalid_request", message, line.number)
        try:
            envelope = load_json(line.content)
            check_numbers(line.content, envelope)
        except TooMuchJson as error:
            return InputError("invalid_request", f"The line holds {error}.", line.number)
        except RoundedNumber as error:
            return InputError("invalid_request", f"A schema cannot be enforced: {error}.", line.number)
        except orjson.JSONDecodeError as error:
            return InputError("invalid_json_line", _why_not_json(line.content, error), line.number)
        if not isinstance(envelope, dict):
            return InputError("invalid_json_line", "The line is not a JSON object.", line.number)
        found = self._check_envelope(envelope, line.number)
        if found is None:
            key = prefix_key(envelope["body"])
            self.keys.add((key, line.number, line.start, line.length))
        return found

    def _check_envelope(self, envelope: dict[str, Any], number: int) -> InputError | None:
        def invalid(param: str, rule: str) -> InputError:
            return InputError("invalid_request", f"'{param}' must be {rule}.", number, param)

        unknown = next((name for name in envelope if name not in _ENVELOPE), None)
        if unknown is not None:
            return InputError("invalid_request", "The line has an unknown field.", number, unknown[:64])
        custom_id, body = envelope.get("custom_id"), envelope.get("body")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            return invalid("custom_id", f"a text of 1 to {MAX_CUSTOM_ID_CHARS} characters")
        if envelope.get("method") != "POST":
            return invalid("method", "'POST'")
        if envelope.get("url") != self._endpoint:
            message = f"'url' must be '{self._endpoint}', the endpoint of the batch."
            return InputError("url_mismatch", message, number, "url")
        if not isinstance(body, dict):
            return invalid("body", "a JSON object")
        if body.get("stream"):
            return invalid("body.stream", "left out or false")
        return self._check_model(body.get("model"), number) or self._check_unique(custom_id, number)

    def _check_model(self, model: Any, number: int) -> InputError | None:
        """Return an error if the line names another model. An invalid `model` is reported with the body, later."""
        if not isinstance(model, str):
            return None
        if self._names is not None and self._names.find(model) is None:
            return self._refuse_model(model, number)
        self._models = self._models or {model}
        if model in self._models:
            return None
        first, other = (name[:MAX_SHOWN_CHARS] for name in (*self._models, model))
        message = f"All lines of a batch must name the same model: lines before name '{first}', this one '{other}'."
        return InputError("model_mismatch", message, number, "body.model")

    def _refuse_model(self, model: str, number: int) -> InputError | None:
        """Return an error for the first line that names an unknown model."""
        if model in self._unknown:
            return None
        self._unknown.add(model)
        assert self._names is not None
        message = (
            f"This server has no model '{model[:MAX_SHOWN_CHARS]}'. It has: {self._names.summary()}. Change 'model' in "
            "the lines, or start the server with --served-model-name."
        )
        return InputError("model_not_found", message, number, "body.model")

    def _check_unique(self, custom_id: str, number: int) -> InputError | None:
        digest = blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            return InputError("duplicate_custom_id", "Another line has the same 'custom_id'.", number, "custom_id")
        self._seen.add(digest)
        return None

    def report(self) -> InputReport:
        if not self._num_lines:
            self.errors = [InputError("empty_file", "The input file has no lines.")]
        if self.errors:
            return InputReport(errors=self.errors)
        lines = LinePlaces(places for _, *places in self.keys.sorted())
        return InputReport(lines, model=next(iter(self._models), None))


def _why_not_json(content: bytes, error: orjson.JSONDecodeError) -> str:
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return "The file is UTF-16; it must be UTF-8."
    try:
        content.decode()
    except UnicodeDecodeError:
        return "The line is not valid UTF-8."
    return f"The line is not valid JSON: {error.msg} at column {error.colno}."


def check_input(
    file: BinaryIO,
    endpoint: str,
    max_lines: int,
    max_line_bytes: int,
    names: ModelNames | None = None,
    folder: str | None = None,
) -> InputReport:
    """Validate an input file; see `InputChecker`."""
    checker = InputChecker(endpoint, max_lines, max_line_bytes, names, folder)
    try:
        for line in read_lines(file, max_line_bytes):
            if not checker.check(line):
                break
        return checker.report()
    finally:
        checker.keys.close()


async def check_apart(
    path: str, endpoint: str, max_lines: int, max_line_bytes: int, names: ModelNames | None = None
) -> InputReport:
    """Run `check_input` in a child process, which a cancellation kills. Raises OSError if the file cannot be read, and
    anyio's errors if the process cannot start."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # keep the child from importing from the working directory
    return await to_process.run_sync(_check_file, path, endpoint, max_lines, max_line_bytes, names, cancellable=True)


def _check_file(path: str, endpoint: str, max_lines: int, max_line_bytes: int, names: ModelNames | None) -> InputReport:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)
    with open(path, "rb") as file:
        return check_input(file, endpoint, max_lines, max_line_bytes, names, str(Path(path).parent.parent / "tmp"))


def prefix_key(body: Mapping[str, Any]) -> bytes:
    """Return the first bytes of the prompt in a canonical form.

    Lines are fed in key order, because lines with equal prefixes can share cached blocks. The key is approximate;
    invalid bodies have one, too."""
    messages, prompt = body.get("messages"), body.get("prompt")
    text = _text(prompt) if messages is None else _conversation(messages)
    return text[:PREFIX_BYTES].encode()[:PREFIX_BYTES]


def _text(prompt: Any) -> str:
    """Return the prompt as text: a string, the first of a list, or token ids in decimal."""
    first = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else prompt
    if isinstance(first, list):
        return " ".join(str(token) for token in first[:PREFIX_BYTES] if isinstance(token, int))
    return first if isinstance(first, str) else ""


def _conversation(messages: Any) -> str:
    """Return roles and texts in their order, as a chat template would render them."""
    if not isinstance(messages, list):
        return ""
    parts: list[str] = []
    length = 0
    for message in messages[:PREFIX_BYTES]:
        if isinstance(message, dict):
            content = message.get("content")
            pieces = content[:PREFIX_BYTES] if isinstance(content, list) else [{"text": content}]
            texts = [message.get("role"), *(piece.get("text") for piece in pieces if isinstance(piece, dict))]
            found = [text[:PREFIX_BYTES] for text in texts if isinstance(text, str)]
            parts += found
            length += sum(map(len, found))
        if length >= PREFIX_BYTES:
            break
    return "\n".join(parts)
