"""Input files of batches: lines, their envelopes, and the validation of a file in one pass.

A bad body never hides its envelope: the line gets an error row, and the other lines run. The envelope of a line with a
body that must not be parsed is read from the ends of the line.

The validation finds the lines and the order to feed them, or errors. Only the envelopes are validated: an invalid
`body` becomes an error row later. The work is CPU-bound Python, so it runs in a process of its own (`check_apart`): a
thread would delay model steps through the GIL. Memory is bounded but for 100 bytes per line for digests of ids and 24
bytes per line for the result.
"""

import marshal
import os
import re
import signal
from array import array
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import merge
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, NamedTuple, TypeVar

import orjson
from anyio import to_process

from engine.errors import InvalidRequestError
from engine.machine.child import die_with_parent
from gateway.generate.validation import param_name
from gateway.http.errors import ApiError
from gateway.http.json_text import RoundedNumber, TooMuchJson, check_numbers, load_json
from gateway.models import ModelNames
from gateway.store.objects import InputError, LineRef

ResultT = TypeVar("ResultT")
BodyError = InvalidRequestError | ApiError
READ_BYTES = 1024 * 1024
EDGE_BYTES = 8 * 1024
"""Bytes at each end of a long line in which its envelope must be; a custom_id takes at most 3 KiB."""
FIELDS = ("custom_id", "method", "url")
_MEMBER = rb'"(?:custom_id|method|url)"\s*:\s*"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rb"\s*\{\s*((?:" + _MEMBER + rb'\s*,\s*){0,3})"body"\s*:', re.DOTALL)
_TAIL = re.compile(rb"((?:,\s*" + _MEMBER + rb"\s*){0,3})\}\s*\Z", re.DOTALL)
_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u[dD][89a-fA-F]..|.)", re.DOTALL)
_LONE = 6  # length of the escape of half a character


class HiddenEnvelope(ValueError):
    """The envelope is not at the ends of a line whose body must not be parsed."""


class RawLine(NamedTuple):
    """A line without its line end; `content` is None if the line is too long, and `edges` are its ends."""

    number: int
    start: int
    length: int
    content: bytes | None
    edges: tuple[bytes, bytes] = (b"", b"")


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    """Yield the lines of a file, numbered from 1, with one line in memory. Blank lines are counted but not yielded."""
    number, start = 1, 0
    while first := file.readline(max_bytes + 2):
        length, tail = len(first), first[-EDGE_BYTES:]
        while not tail.endswith(b"\n") and (more := file.readline(READ_BYTES)):
            length, tail = length + len(more), (tail + more)[-EDGE_BYTES:]
        content = first.rstrip(b"\r\n")
        if len(first) < length or len(content) > max_bytes:
            yield RawLine(number, start, length, None, (first[:EDGE_BYTES], tail))
        elif content.strip():
            yield RawLine(number, start, len(content), content)
        number, start = number + 1, start + length


def too_long(most: int) -> BodyError:
    return ApiError(413, f"The request body is larger than {most} bytes.")


def read_envelope(line: bytes) -> Any:
    """Return a line's fields, with an error as `body` if the body is not valid; other JSON is returned as it is.

    Raises orjson.JSONDecodeError or HiddenEnvelope if the envelope cannot be read."""
    try:
        envelope = load_json(line)
        check_numbers(line, envelope)
    except TooMuchJson as error:
        return _around(line, InvalidRequestError(f"The request body has {error}.", code="too_many_values"))
    except RoundedNumber as error:
        param = param_name(error.place[1:])
        message = f"'{param}' cannot be enforced: {error}."
        return {**envelope, "body": InvalidRequestError(message, param=param, code="invalid_value")}
    except orjson.JSONDecodeError as error:
        return _with_bad_text(line, error)
    return _with_checked_body(envelope) if isinstance(envelope, dict) else envelope


def envelope_of_edges(head: bytes, tail: bytes, error: BodyError) -> dict[str, Any] | None:
    """Return the fields at the ends of a line, with `error` as `body`; None if they cannot be read."""
    first, last = _HEAD.match(head.removeprefix(BOM_UTF8)), _TAIL.search(tail)
    if first is None or last is None:
        return None
    members = b",".join(part for part in (first[1].strip(b" \t\r\n,"), last[1].strip(b" \t\r\n,")) if part)
    try:
        return {**orjson.loads(b"{" + members + b"}"), "body": error}
    except orjson.JSONDecodeError:
        return None


def _around(line: bytes, error: BodyError) -> dict[str, Any]:
    envelope = envelope_of_edges(line[:EDGE_BYTES], line[-EDGE_BYTES:], error)
    if envelope is None:
        raise HiddenEnvelope(f"{error.message} Write custom_id, method and url before body.") from error
    return envelope


def _with_bad_text(line: bytes, error: orjson.JSONDecodeError) -> dict[str, Any]:
    """Read the envelope around half characters, such as JSON libraries write for a cut emoji, or around a body that is
    nested too deeply."""
    invalid = InvalidRequestError(f"The request body is not valid JSON: {error.msg}.", code="invalid_json")
    if "depth" in error.msg:
        return _around(line, invalid)
    if "surrogate" not in error.msg:
        raise error
    whole = load_json(_ESCAPES.sub(lambda match: rb"\ufffd" if len(match[0]) == _LONE else match[0], line))
    if not isinstance(whole, dict) or any("\ufffd" in str(whole.get(name)) for name in FIELDS):
        raise error
    return {**whole, "body": invalid}


def _with_checked_body(envelope: dict[str, Any]) -> dict[str, Any]:
    error, body = None, envelope.get("body")
    if body is not None and not isinstance(body, dict):
        error = InvalidRequestError("The request body must be a JSON object.", code="invalid_json")
    elif isinstance(body, Mapping) and body.get("stream"):
        error = InvalidRequestError("'stream' must be left out or false in a line of a batch.", param="stream")
    elif (extra := next((name for name in envelope if name not in (*FIELDS, "body")), None)) is not None:
        message = f"Unknown parameter beside 'body': '{extra[:64]}'."
        error = InvalidRequestError(message, param=extra[:64], code="unknown_parameter")
    return envelope if error is None else {**envelope, "body": error}


PREFIX_BYTES = 512
MAX_ERRORS = 100
MAX_CUSTOM_ID_CHARS = 512
SPILL_LINES = 50_000
"""Lines whose prefix keys are sorted in memory."""
LOW_PRIORITY = 10
"""Niceness of the validation process, so that it yields to model steps and online requests."""
MAX_SHOWN_CHARS = 100
"""Maximum characters of a model name in an error message."""
_LineKey = tuple[bytes, int, int, int]


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
        self._models: dict[int | str, str] = {}  # the first name of each model
        self._unknown: dict[str, InputError] = {}
        self._num_unknown = 0
        self.keys = LineKeys(folder)
        self._num_lines = 0
        self.errors: list[InputError] = []

    def check(self, line: RawLine) -> bool:
        """Check a line; return False if no further line needs to be checked."""
        self._num_lines += 1
        if self._num_lines > self._max_lines:
            self.errors = [InputError("too_many_tasks", f"A batch has at most {self._max_lines} lines.", line.number)]
            return False
        if self._num_lines == 1 and (form := _other_form(line.content or line.edges[0])) is not None:
            self.errors = [InputError("invalid_json_line", form, line.number)]
            return False
        found = self._check(line)
        if found is not None:
            self.errors.append(found)
        return len(self.errors) < MAX_ERRORS

    def _check(self, line: RawLine) -> InputError | None:
        envelope: Any
        if line.content is None:
            envelope = envelope_of_edges(*line.edges, too_long(self._max_line_bytes))
            if envelope is None:
                message = f"The line is longer than {self._max_line_bytes} bytes and does not begin with custom_id."
                return InputError("invalid_request", message, line.number)
        else:
            try:
                envelope = read_envelope(line.content)
            except HiddenEnvelope as error:
                return InputError("invalid_request", str(error), line.number)
            except orjson.JSONDecodeError as error:
                return InputError("invalid_json_line", _why_not_json(line.content, error), line.number)
        if not isinstance(envelope, dict):
            return InputError("invalid_json_line", "The line is not a JSON object.", line.number)
        found = self._check_envelope(envelope, line.number)
        if found is None:
            body = envelope["body"]
            key = prefix_key(body) if isinstance(body, dict) else b""
            self.keys.add((key, line.number, line.start, line.length))
        return found

    def _check_envelope(self, envelope: dict[str, Any], number: int) -> InputError | None:
        def invalid(param: str, rule: str) -> InputError:
            return InputError("invalid_request", f"'{param}' must be {rule}.", number, param)

        custom_id, body = envelope.get("custom_id"), envelope.get("body")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            return invalid("custom_id", f"a text of 1 to {MAX_CUSTOM_ID_CHARS} characters")
        if envelope.get("method") != "POST":
            return invalid("method", "'POST'")
        if envelope.get("url") != self._endpoint:
            message = f"'url' must be '{self._endpoint}', the endpoint of the batch."
            return InputError("url_mismatch", message, number, "url")
        if body is None:
            return invalid("body", "a JSON object")
        model = body.get("model") if isinstance(body, dict) else None
        return self._check_model(model, number) or self._check_unique(custom_id, number)

    def _check_model(self, model: Any, number: int) -> InputError | None:
        """Return an error if the line names another served model. An invalid `model` is an error of the body, and so is
        an unknown one unless all lines have one."""
        if not isinstance(model, str):
            return None
        key: int | str = model
        if self._names is not None:
            found = self._names.find(model or self._names.first)
            if found is None:
                self._num_unknown += 1
                if len(self._unknown) < MAX_ERRORS:
                    self._unknown.setdefault(model, self._unknown_model(model, number))
                return None
            key = found.adapter
        first = next(iter(self._models.values()), model)
        self._models = self._models or {key: model}
        if key in self._models:
            return None
        message = (
            f"All lines of a batch must name the same model: lines before name '{first[:MAX_SHOWN_CHARS]}', this one "
            f"'{model[:MAX_SHOWN_CHARS]}'."
        )
        return InputError("model_mismatch", message, number, "body.model")

    def _unknown_model(self, model: str, number: int) -> InputError:
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
        elif self._num_unknown == self._num_lines:
            self.errors = list(self._unknown.values())
        if self.errors:
            return InputReport(errors=self.errors)
        lines = LinePlaces(places for _, *places in self.keys.sorted())
        return InputReport(lines, model=next(iter(self._models.values()), None))


_OTHER_FORMS: Mapping[bytes, str] = {
    BOM_UTF16_LE: "The file is UTF-16; it must be UTF-8.",
    BOM_UTF16_BE: "The file is UTF-16; it must be UTF-8.",
    b"\x1f\x8b": "The file is compressed with gzip; upload it uncompressed.",
    b"PK\x03\x04": "The file is a ZIP archive; upload the file within it.",
    b"[": "The file is a JSON array; it must be JSON Lines, with one object in each line.",
}


def _other_form(content: bytes) -> str | None:
    """Return the error of a file that is no JSON Lines, by its first bytes."""
    first = content.removeprefix(BOM_UTF8).lstrip()
    return next((text for start, text in _OTHER_FORMS.items() if first.startswith(start)), None)


def _why_not_json(content: bytes, error: orjson.JSONDecodeError) -> str:
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
    return await run_apart(_check_file, path, endpoint, max_lines, max_line_bytes, names)


async def run_apart(work: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Run a function in a child process, which a cancellation kills. Raises anyio's errors if it cannot start."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # keep the child from importing from the working directory
    return await to_process.run_sync(_in_child, work, *arguments, cancellable=True)


def _in_child(work: Callable[..., ResultT], *arguments: Any) -> ResultT:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    return work(*arguments)


def _check_file(path: str, endpoint: str, max_lines: int, max_line_bytes: int, names: ModelNames | None) -> InputReport:
    os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)
    with open(path, "rb", READ_BYTES) as file:
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
