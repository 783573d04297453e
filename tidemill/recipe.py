"""How the rows of a table become requests, and how results become columns."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError
from tidemill.tables import Row, json_line, looks_like_values, parse_json, read_rows

CHAT = "/v1/chat/completions"
STATUS, ERROR = "status", "error"
OK, CUT, FAILED = "ok", "cut off", "failed"
"""Values of the column `status`; "cut off" means that the answer reached the token limit."""
CUT_SCHEMA = "the answer was cut off at the token limit; raise it, or bound the schema (enum, maxLength, maximum)"
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_ID = re.compile(r"\d+-[0-9a-f]{32}")
MAX_LISTED = 30
"""Columns of a row that an error names."""
_PASSING = frozenset({408, 409, 425, 429})
"""Statuses after which the same request may succeed."""


class RowRequest(NamedTuple):
    """A request for one row: the endpoint and the JSON body."""

    url: str
    body: dict[str, Any]

    def digest(self) -> str:
        """Return a digest of the request: rows with equal requests may exchange their answers."""
        text = json.dumps([self.url, self.body], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Make requests from rows and columns from results.

    prompt: text of the user message; `{column}` is replaced by the row's value, `{{` and `}}` are braces. None: every
    row is a request already, as in OpenAI's batch files. `model` replaces the model of such rows, and `map_model`
    has replacements by name.
    schema: JSON Schema of the answer; each of its properties becomes a column.
    body: further fields of the request body.
    answer: name of the column of the answer if there is no schema.
    prefix: put before the names of all added columns.

    Raises ConfigError if the prompt or the schema is invalid, or if two added columns have the same name.
    """

    prompt: str | None = None
    system: str | None = None
    schema: Mapping[str, Any] | None = None
    model: str | None = None
    max_tokens: int | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    answer: str = "answer"
    map_model: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    _parts: tuple[tuple[str, str | None], ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.prompt is not None:
            object.__setattr__(self, "_parts", _parse(self.prompt))
            if self.map_model:
                raise ConfigError("a map of models needs ready-made requests; with a prompt, name the model")
        elif self.system is not None or self.schema is not None:
            raise ConfigError("a system message or a schema needs a prompt; ready-made requests hold their own")
        properties = {} if self.schema is None else self.schema.get("properties")
        if not isinstance(properties, Mapping) or (self.schema is not None and not properties):
            raise ConfigError('the schema must be an object with properties, {"type": "object", "properties": {...}}')
        for name in (STATUS, ERROR):
            if name in properties:
                raise ConfigError(f"the schema has a property {name!r}, which is a column of the output; rename it")
            if self.schema is None and name == self.answer:
                raise ConfigError(f"the answer cannot be the column {name!r}, which the output has; choose another")

    @property
    def names_no_column(self) -> bool:
        """Whether the prompt is the same for all rows."""
        return self.prompt is not None and not any(name is not None for _, name in self._parts)

    def columns(self) -> dict[str, str]:
        """Return the added columns and their JSON Schema types; "json" for values of several types."""
        if self.schema is None:
            kinds = {self.answer: "json"}
        else:
            kinds = {name: _type_of(each) for name, each in self.schema["properties"].items()}
        return {self.prefix + name: kind for name, kind in {**kinds, STATUS: "string", ERROR: "string"}.items()}

    def check_columns(self, names: Collection[str]) -> None:
        """Raise ConfigError if a column of the input has the name of an added one."""
        if taken := [name for name in self.columns() if name in names]:
            raise ConfigError(
                f"the input already has a column {taken[0]!r}, which the answers need; rename it, or give a prefix "
                "for the added columns, e.g. --prefix llm_"
            )

    def kept(self, row: Row) -> Row:
        """Return the columns of an input row that the output repeats."""
        return {"custom_id": row.get("custom_id")} if self.prompt is None else row

    def request(self, row: Row) -> RowRequest:
        """Return the request for a row. Raise ConfigError if the row lacks a column or is no request."""
        limits = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        model = {} if self.model is None else {"model": self.model}
        if self.prompt is None:
            url, body = row.get("url"), row.get("body")
            if not isinstance(url, str) or not isinstance(body, dict):
                raise ConfigError(
                    "the row is not a request with `url` and `body`; give a prompt, e.g. 'Classify: {text}'"
                )
            return _checked(RowRequest(url, with_model({**body, **limits, **self.body}, self.model, self.map_model)))
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": self._text(row)}]
        form: dict[str, Any] = {}
        if self.schema is not None:
            named = {"name": "row", "schema": self.schema, "strict": True}
            form = {"response_format": {"type": "json_schema", "json_schema": named}}
        return _checked(RowRequest(CHAT, {**model, "messages": messages, **form, **limits, **self.body}))

    def _text(self, row: Row) -> str:
        pieces = []
        for literal, name in self._parts:
            pieces.append(literal)
            if name is None:
                continue
            if name not in row:
                raise ConfigError(f"the prompt names the column {name!r}; the row has {_listed(row)}")
            value = row[name]
            pieces.append(value if isinstance(value, str) else "" if value is None else _text(value))
        return "".join(pieces)

    def result(self, line: Mapping[str, Any] | None) -> Row:
        """Return the added columns for a line of an output or error file; None: there is no result yet."""
        if line is None:
            return self.failed("no result; run the command again")
        problem = failure(line)
        if problem is not None:
            return self.failed(problem)
        answer, cut = _answer(line["response"]["body"])
        if self.schema is None:
            return self._added({self.answer: answer, STATUS: CUT if cut else OK})
        try:
            values = parse_json(answer)
            return self._added({**{name: values.get(name) for name in self.schema["properties"]}, STATUS: OK})
        except (ValueError, TypeError, AttributeError):
            reason = CUT_SCHEMA if cut else f"the answer is not an object: {answer}"
            return self.failed(reason)

    def failed(self, reason: str) -> Row:
        """Return the added columns of a row without an answer."""
        return self._added({STATUS: FAILED, ERROR: reason})

    def _added(self, values: Row) -> Row:
        return {**dict.fromkeys(self.columns()), **{self.prefix + name: value for name, value in values.items()}}


def is_id(custom_id: Any) -> bool:
    """Return whether an id has the form of those that a run gives to its requests."""
    return isinstance(custom_id, str) and _ID.fullmatch(custom_id) is not None


def failure(line: Mapping[str, Any]) -> str | None:
    """Return why a line of an output or error file holds no answer, or None if it holds one."""
    if is_answer(line):
        return None
    response = line.get("response") or {}
    status = response.get("status_code")
    body = response.get("body")
    error = line.get("error") or (body.get("error") if isinstance(body, Mapping) else None)
    if isinstance(error, Mapping) and error.get("message"):
        return f"{error['message']} ({error.get('code') or status})"
    return f"the response is no answer: {json_line(body or error).decode()[:200].strip()} ({status})"


def is_answer(line: Mapping[str, Any]) -> bool:
    """Return whether a line of an output file holds an answer."""
    response = line.get("response") or {}
    try:
        return response.get("status_code") == 200 and bool(_answer(response["body"]))
    except (LookupError, TypeError, AttributeError):
        return False


def is_final(line: Mapping[str, Any]) -> bool:
    """Return whether the same request would get the same result again: an answer, or a refusal of the request."""
    status = (line.get("response") or {}).get("status_code")
    return is_answer(line) or (isinstance(status, int) and 400 <= status < 500 and status not in _PASSING)


def _parse(prompt: str) -> tuple[tuple[str, str | None], ...]:
    """Return pairs of a text and the column behind it, if any."""
    parts, at = list[tuple[str, str | None]](), 0
    for found in _BRACES.finditer(prompt):
        if found[0] in ("{", "}", "{}"):
            raise ConfigError("the prompt: braces hold the name of a column, e.g. {text}; write {{ and }} for braces")
        literal = prompt[at : found.start()]
        parts.append((literal, found[1]) if found[1] else (literal + found[0][0], None))
        at = found.end()
    return (*parts, (prompt[at:], None))


def _checked(request: RowRequest) -> RowRequest:
    if request.body.get("stream"):
        raise ConfigError("a batch has no streams; leave `stream` out")
    return request


def _type_of(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return kind if isinstance(kind, str) else "json"


def _answer(body: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the answer of a response body and whether it was cut off at the token limit."""
    if "choices" in body:
        if len(body["choices"]) > 1:  # all of `n`
            answers = [_answer({"choices": [each]}) for each in body["choices"]]
            return [text for text, _ in answers], any(cut for _, cut in answers)
        choice = body["choices"][0]
        message = choice.get("message")
        text = choice.get("text") if message is None else message.get("content") or message.get("refusal")
        calls = None if message is None else message.get("tool_calls")
        return calls if text is None and calls else text, choice.get("finish_reason") == "length"
    if isinstance(body.get("data"), Sequence) and body["data"] and "embedding" in body["data"][0]:
        return body["data"][0]["embedding"], False
    if isinstance(body.get("output"), Sequence):
        parts = [part for item in body["output"] for part in item.get("content") or ()]
        return "".join(part.get("text", "") for part in parts), body.get("status") == "incomplete"
    if isinstance(body.get("content"), Sequence):
        return "".join(part.get("text", "") for part in body["content"]), body.get("stop_reason") == "max_tokens"
    return body, False


def _text(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _listed(row: Row) -> str:
    more = [f"{len(row) - MAX_LISTED} more"] if len(row) > MAX_LISTED else []
    return ", ".join([*map(repr, islice(row, MAX_LISTED)), *more]) or "no columns"


def with_model(body: Mapping[str, Any], model: str | None, models: Mapping[str, str]) -> dict[str, Any]:
    """Return a request body for `model`, or else for the model that `models` has for the body's model."""
    new = model or models.get(str(body.get("model")))
    return {**body, "model": new} if new else dict(body)


class Item(NamedTuple):
    """A row with its request, or with the reason why there is none."""

    row: Row
    """The columns that the output repeats."""
    custom_id: str
    request: RowRequest | None
    problem: str | None = None


@dataclass(slots=True)
class SourceRows:
    """limit: maximum number of rows that are read. encoding: see `read_rows`."""

    path: Path
    recipe: Recipe
    limit: int | None = None
    encoding: str | None = None
    total: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of the output."""
    first: RowRequest | None = None
    warnings: list[str] = field(default_factory=list)
    _digest: bytes = b""

    def check(self) -> None:
        """Read all rows. Raise ConfigError if no row has a request, or if the output cannot have its columns."""
        problem = ""
        for item in self:
            self.total += 1
            self.columns |= dict.fromkeys(item.row, "")
            self.first = self.first or item.request
            problem = problem or f"row {self.total}: {item.problem}"
            if self.path.suffix.lower() == ".parquet":
                json_line(item.row)  # bytes that are not text
        if not self.total:
            raise ConfigError(f"{self.path}: the table has no rows")
        has_header = self.path.name.lower().removesuffix(".gz").endswith((".csv", ".tsv"))
        if self.first is None:
            raise ConfigError(f"{problem}{'; the first line must name the columns' if has_header else ''}")
        if has_header and looks_like_values(self.columns):
            self.warnings.append(f"{self.path}: the names of the columns look like values; is the header missing?")
        self.recipe.check_columns(self.columns)
        self.columns |= self.recipe.columns()
        if self.recipe.names_no_column:
            self.warnings.append("the prompt names no column, so all rows get the same request; write e.g. {text}")

    def __iter__(self) -> Iterator[Item]:
        """Yield all rows. Raise ConfigError at the end if they differ from those of the first pass."""
        seen: Counter[str] = Counter()
        content = blake2b()
        for row in islice(read_rows(self.path, self.encoding), self.limit):
            content.update(repr(row).encode("utf-8", "surrogatepass"))
            kept = self.recipe.kept(row)
            try:
                request = self.recipe.request(row)
                digest = request.digest()
            except ConfigError as error:
                yield Item(kept, "", None, error.message)
            except RecursionError:
                yield Item(kept, "", None, "the request is nested too deeply")
            else:
                seen[digest] += 1
                yield Item(kept, f"{seen[digest] - 1}-{digest}", request)
        if self._digest and self._digest != content.digest():
            raise ConfigError(
                f"{self.path}: the file has changed during the run; run the same command again, which keeps all answers"
            )
        self._digest = content.digest()
