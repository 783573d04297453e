"""Tables of rows in files: JSON Lines, a JSON array, CSV, TSV or Parquet, chosen by the suffix of the path.

Every row is a dict from column to value. Files are read and written as a stream, except for a JSON array; a written
file appears by an atomic rename. Text files may be compressed (`.csv.gz`). A CSV file may have any delimiter, encoding
and odd header. Rows read back equal; a Parquet column is text if its values have no common type. Parquet needs pyarrow
(the extra `files`).
"""

import csv
import datetime
import gzip
import importlib
import io
import json
import math
import re
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from engine.errors import ConfigError
from engine.machine.extras import install_command
from gateway.http.json_text import escape_line_ends
from tidemill.files import check_replaceable, replacing

Row = dict[str, Any]


def clean(text: str) -> str:
    """Return the text with U+FFFD in place of lone surrogates, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_line(value: Any) -> bytes:
    """Return a value as a line of JSON. Dates become ISO 8601, numbers that JSON lacks null, bytes text.

    Raises ConfigError for bytes that are not UTF-8.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=_text, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, default=_text)
    return escape_line_ends(clean(text).encode()) + b"\n"


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """Parse JSON as `json_line` would write it again: NaN is null, and a number beyond a double is text.

    unique: refuse a name that an object has twice. Raises ValueError, also for a text that is nested too deeply.
    """
    hook = _unique if unique else None
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_float, object_pairs_hook=hook)
        if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():  # type: ignore[operator]
            value = json.loads(clean(json.dumps(value, ensure_ascii=False)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def cell(value: Any) -> str:
    """Return a value as text: nothing for None, JSON for structures."""
    if isinstance(value, str):
        return clean(value)
    if value is None:
        return ""
    if isinstance(value, bool | dict | list | tuple):
        return json_line(value).decode().rstrip("\n")
    return str(_text(value))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _text(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has."""
    if type(value).__name__ in ("NaTType", "NAType"):  # of pandas
        return None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ConfigError("a cell holds bytes that are not text; write to a .parquet file") from None
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return value.tolist()
    return clean(str(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_TEXT = (".jsonl", ".ndjson", ".json", *_DELIMITERS)
SUFFIXES = (*_TEXT, *(f"{each}.gz" for each in _TEXT), ".parquet")


def check_suffix(name: str) -> str:
    """Return the suffix of a table's file name or URL. Raise ConfigError if it names no known format."""
    suffix = next((each for each in reversed(SUFFIXES) if name.lower().endswith(each)), None)
    if suffix is None:
        advice = "; save the sheet as CSV" if name.lower().endswith((".xlsx", ".xls", ".ods")) else ""
        known = f"{', '.join((*_TEXT, '.parquet'))}, or e.g. .csv.gz"
        raise ConfigError(f"{name}: the format is unknown{advice}; the name must end in one of {known}")
    return suffix


def read_rows(path: Path, encoding: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file. Raise ConfigError, with the line where there is one, if it cannot be read.

    encoding: of a text file (default: as its byte order mark says, else UTF-8).
    """
    suffix = check_suffix(path.name).removesuffix(".gz")
    try:
        if suffix == ".parquet":
            yield from read_parquet(path)
        elif suffix in _DELIMITERS:
            delimiter = None if suffix == ".csv" else _DELIMITERS[suffix]
            yield from read_csv(lambda: _open(path, encoding, ""), str(path), delimiter)
        else:
            with _open(path, encoding, "\n") as file:
                yield from _read_json(file, path, suffix == ".json")
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: the compressed file is damaged: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeError:
        form = encoding or "UTF-8"
        advice = "give its encoding, e.g. --encoding latin-1 or cp1252, or save it as UTF-8"
        raise ConfigError(f"{path}: the file is not {form}; {advice}") from None


def _open(path: Path, encoding: str | None, newline: str) -> TextIO:
    is_packed = path.name.lower().endswith(".gz")
    raw = cast(BinaryIO, gzip.open(path)) if is_packed else path.open("rb")  # noqa: SIM115
    try:
        return open_text(raw, encoding, newline)
    except BaseException:
        raw.close()
        raise


def _read_json(file: TextIO, path: Path, may_be_array: bool) -> Iterator[Row]:
    """Yield the objects of lines, or of one array."""
    lines: Iterable[str] = file
    if may_be_array:
        text = file.read()
        if text.lstrip().startswith("["):
            yield from _checked(enumerate(_parsed(text, f"{path} is not JSON"), 1), f"{path}: value")
            return
        lines = io.StringIO(text, newline="\n")
    where = f"{path}: line"
    filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    yield from _checked(((i, _parsed(line, f"{where} {i} is not JSON")) for i, line in filled), where)


def _parsed(text: str, problem: str) -> Any:
    try:
        return parse_json(text, unique=True)
    except ValueError as error:
        raise ConfigError(f"{problem}: {error}") from None


def _checked(rows: Iterable[tuple[int, Any]], where: str) -> Iterator[Row]:
    for number, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{where} {number} is not a JSON object")
        yield row


def check_output(path: Path, columns: Iterable[str]) -> None:
    """Raise ConfigError if a table with these columns cannot be written to `path`."""
    suffix = check_suffix(path.name).removesuffix(".gz")
    if suffix == ".parquet":
        find_arrow()
    elif suffix in _DELIMITERS:
        check_header(list(columns), _DELIMITERS[suffix])
    check_replaceable(path)


def write_rows(
    path: Path,
    make_rows: Callable[[], Iterable[Row]],
    columns: Mapping[str, str],
    source: Path,
) -> None:
    """Write a table to `path`.

    Args:
        make_rows: returns the rows from the first one on; it is called several times for Parquet.
        columns: every column in its order, with a JSON Schema type, or "" or "json" where the values decide.
        source: the table that the rows come from; a Parquet file gives its columns their types.

    Raises ConfigError if the file cannot be written.
    """
    suffix = check_suffix(path.name)
    with replacing(path) as file:
        if suffix.endswith(".gz"):
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                _write_text(cast(BinaryIO, packed), make_rows(), columns, suffix.removesuffix(".gz"))
        elif suffix == ".parquet":
            write_parquet(file, make_rows, columns, source)
        else:
            _write_text(file, make_rows(), columns, suffix)


def _write_text(file: BinaryIO, rows: Iterable[Row], columns: Mapping[str, str], suffix: str) -> None:
    if suffix in _DELIMITERS:
        write_csv(file, rows, list(columns), _DELIMITERS[suffix])
    elif suffix == ".json":
        file.writelines((b",\n" if i else b"[\n") + json_line(row).rstrip(b"\n") for i, row in enumerate(rows))
        file.write(b"\n]\n" if file.tell() else b"[]\n")
    else:
        file.writelines(json_line(row) for row in rows)


MAX_CELL = 2**31 - 1
"""Longest cell, characters."""
DELIMITERS = ";\t|,"
_LAST = "\0the last line\0"
"""Put behind the lines of a file: within a quoted cell, `csv` does not tell the end of the file from the cell's."""
SAMPLE_CHARS, SAMPLE_LINES = 65_536, 20
"""The start of a file that shows its delimiter."""
_BOMS = (
    (BOM_UTF8, "utf-8-sig"),
    (BOM_UTF32_LE, "utf-32"),
    (BOM_UTF32_BE, "utf-32"),
    (BOM_UTF16_LE, "utf-16"),
    (BOM_UTF16_BE, "utf-16"),
)
MAX_NAME = 60
"""Length of a header cell, characters, from which it looks like a value."""


def open_text(raw: BinaryIO, encoding: str | None, newline: str) -> TextIO:
    """Return the text of a file. encoding: default: as its byte order mark says, else UTF-8."""
    head = raw.peek(4)[:4] if hasattr(raw, "peek") else raw.read(4)
    if not hasattr(raw, "peek"):
        raw.seek(0)
    marked = next((name for mark, name in _BOMS if head.startswith(mark)), "utf-8")
    try:
        return io.TextIOWrapper(raw, encoding if encoding and marked == "utf-8" else marked, newline=newline)
    except (LookupError, ValueError) as error:
        raise ConfigError(f"--encoding: {error}; use e.g. latin-1, cp1252 or utf-16") from None


def read_csv(open_file: Callable[[], TextIO], name: str, delimiter: str | None) -> Iterator[Row]:
    """Yield the rows of a file. `delimiter`: None: found from the first lines.

    Names of columns lose the blanks around them. A column without a name and without values is left out; one with
    values is named by its position. Raise ConfigError for a file that is no table.
    """
    csv.field_size_limit(MAX_CELL)
    with open_file() as file:
        delimiter, reader = _reader(file, delimiter)
        try:
            names = _names(next(_filled(reader), []), name, lambda: _used(open_file, delimiter))
            for cells in _filled(reader):
                if len(cells) != len(names):
                    counts = f"{len(cells)} cells, the first line {len(names)}"
                    advice = f"; quote cells that hold {delimiter!r}" if len(cells) > len(names) else ""
                    raise ConfigError(f"{name}: line {reader.line_num} has {counts}{advice}")
                yield {column: value for column, value in zip(names, cells, strict=True) if column is not None}
        except csv.Error as error:
            raise ConfigError(f"{name}: line {reader.line_num}: {error}") from None


def write_csv(file: BinaryIO, rows: Iterable[Row], columns: Sequence[str], delimiter: str) -> None:
    out = _Utf8(file)
    quoted = any(each in column for column in columns for each in DELIMITERS)  # so that no other delimiter is found
    header = csv.writer(
        out, delimiter=delimiter, lineterminator=_END, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
    )
    header.writerow(map(clean, columns))
    writer = csv.writer(out, delimiter=delimiter, lineterminator=_END)
    writer.writerows([cell(row.get(column)) for column in columns] for row in rows)


def check_header(columns: Sequence[str], delimiter: str) -> None:
    """Raise ConfigError for names of columns that a reader would find changed."""
    for names in ([name] for name in columns), [list(columns)]:
        for each in names:
            file = io.BytesIO()
            write_csv(file, [dict.fromkeys(each, "x")], each, delimiter)
            content = file.getvalue()
            chosen = None if delimiter == "," else delimiter
            try:
                found = [list(row) for row in read_csv(lambda: open_text(io.BytesIO(content), None, ""), "", chosen)]  # noqa: B023
            except ConfigError:
                found = []
            if found != [each]:
                listed = ", ".join(map(repr, each))
                raise ConfigError(f"a CSV file cannot hold the column {listed}; rename it, or write to a .jsonl file")


def looks_like_values(columns: Iterable[str]) -> bool:
    """Return whether the names of columns look like a row, so that the header is probably missing."""
    return any(len(name) > MAX_NAME or re.fullmatch(r"[-+]?\d+([.,]\d+)?", name) for name in columns)


_END = "\r\n"  # with it the writer quotes cells that hold a lone CR


class _Utf8:
    """A text file for `csv.writer` over a binary file. Lines end in LF."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.removesuffix(_END).encode() + b"\n")


def _filled(reader: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the rows that are not blank. Raise csv.Error if a quote opens a cell and none closes it."""
    for cells in reader:
        if cells and cells[-1].endswith(_LAST):
            if cells == [_LAST]:
                return
            open_cell = cells[-1].removesuffix(_LAST)[:MAX_NAME]
            raise csv.Error(f"the file ends in the cell that begins with {open_cell!r}; close its quote")
        if cells:
            yield cells


def _reader(file: TextIO, delimiter: str | None) -> tuple[str, Any]:
    """Return the delimiter and a reader that stands before the header."""
    sample = file.read(SAMPLE_CHARS)
    file.seek(0)
    told = re.match(r"sep=(.)\r?\n", sample)  # of Excel
    if told is not None and delimiter is None:
        file.readline()
        delimiter = told[1]
    delimiter = delimiter or _delimiter_of(sample)
    return delimiter, csv.reader(chain(file, [_LAST]), delimiter=delimiter)


def _delimiter_of(sample: str) -> str:
    """Return the delimiter that most lines have as often as the first line."""
    lines = [line for line in re.split(r"\r\n|\n|\r", re.sub(r'"(?:[^"]|"")*"', "x", sample)) if line]
    if len(sample) == SAMPLE_CHARS:
        lines = lines[:-1] or lines
    best, best_score = ",", (0.0, 0)
    for delimiter in DELIMITERS:
        counts = [line.count(delimiter) for line in lines[:SAMPLE_LINES]]
        if counts and counts[0]:
            score = counts.count(counts[0]) / len(counts), counts[0]
            if score > best_score:
                best, best_score = delimiter, score
    return best


def _names(header: Sequence[str], file: str, used: Callable[[], set[int]]) -> list[str | None]:
    """Return the names of columns, None for a column that is left out."""
    names: list[str | None] = [each.strip() for each in header]
    if not all(names):
        filled = used()
        names = [name or (f"column {i + 1}" if i in filled else None) for i, name in enumerate(names)]
    twice = [name for name, count in Counter(names).items() if name is not None and count > 1]
    if twice:
        raise ConfigError(f"{file}: two columns have the same name, {twice[0]!r}; rename one")
    return names


def _used(open_file: Callable[[], TextIO], delimiter: str) -> set[int]:
    """Return the positions of cells that hold text in a row below the header."""
    with open_file() as file:
        rows = islice(_filled(_reader(file, delimiter)[1]), 1, None)
        return {i for cells in rows for i, value in enumerate(cells) if value.strip()}


CHUNK_ROWS = 1000


def read_parquet(path: Path) -> Iterator[Row]:
    arrow = find_arrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise ConfigError(f"{path}: two columns have the same name, {twice[0]!r}; rename one")
            for batch in file.iter_batches(CHUNK_ROWS):
                yield from batch.to_pylist()
    except (arrow.ArrowException, ValueError, OverflowError) as error:  # e.g. of a date after the year 9999
        raise ConfigError(f"{path}: {error}") from None


def find_arrow() -> Any:
    """Return pyarrow. Raise ConfigError if it is missing."""
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(f"Parquet files need pyarrow; run {install_command('files')}") from None
    return importlib.import_module("pyarrow")


def write_parquet(
    file: BinaryIO, make_rows: Callable[[], Iterable[Row]], columns: Mapping[str, str], source: Path
) -> None:
    """Write rows; see `tidemill.tables.write_rows`. The rows are made up to three times."""
    arrow = find_arrow()
    known = {"string": arrow.string(), "integer": arrow.int64(), "number": arrow.float64(), "boolean": arrow.bool_()}
    types = {name: known[kind] for name, kind in columns.items() if kind in known}
    if source.suffix.lower() == ".parquet":
        schema = arrow.parquet.read_schema(source)
        types |= {field.name: field.type for field in schema if not columns.get(field.name, "x")}
    free = [name for name, kind in columns.items() if name not in types and kind in ("", "json")]
    types |= dict.fromkeys(columns.keys() - types.keys() - set(free), arrow.string())
    _infer(arrow, make_rows(), types, free)
    _check(arrow, make_rows(), types)
    schema = arrow.schema([(clean(name), types[name]) for name in columns])
    try:
        with arrow.parquet.ParquetWriter(file, schema) as writer:
            for chunk in _chunks(make_rows()):
                arrays = [_array(arrow, chunk, name, types[name]) for name in columns]
                writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
    except arrow.ArrowException as error:
        raise ConfigError(f"Parquet cannot hold the rows: {error}; write to a .jsonl file") from None


def _infer(arrow: Any, rows: Iterable[Row], types: dict[str, Any], names: Iterable[str]) -> None:
    """Add an Arrow type for each column in `names` that holds all of its values, text if there is none."""
    types |= dict.fromkeys(names, arrow.null())
    for chunk in _chunks(rows) if names else ():
        for name in names:
            try:
                found = arrow.array([row.get(name) for row in chunk]).type
                pair = [arrow.schema([("x", types[name])]), arrow.schema([("x", found)])]
                types[name] = arrow.unify_schemas(pair, promote_options="permissive").field(0).type
            except (arrow.ArrowException, OverflowError, UnicodeError):
                types[name] = arrow.string()
    types |= {name: arrow.string() for name in names if types[name] == arrow.null()}


def _check(arrow: Any, rows: Iterable[Row], types: dict[str, Any]) -> None:
    """Make text of each column whose values the type would change, e.g. a number beyond 64 bits."""
    for chunk in _chunks(rows):
        for name in [name for name, kind in types.items() if kind != arrow.string()]:
            try:
                found = _array(arrow, chunk, name, types[name]).to_pylist()
                values = [row.get(name) for row in chunk]
                equal = found == values or repr(found) == repr(values)  # NaN is no equal of itself
            except (arrow.ArrowException, OverflowError, UnicodeError, ValueError, TypeError):
                equal = False
            if not equal or _has_empty_struct(types[name]):
                types[name] = arrow.string()


def _array(arrow: Any, chunk: list[Row], name: str, kind: Any) -> Any:
    values = [row.get(name) for row in chunk]
    if kind == arrow.string():
        values = [None if value is None else cell(value) for value in values]
    return arrow.array(values, kind)


def _has_empty_struct(kind: Any) -> bool:
    children = [kind.field(i).type for i in range(kind.num_fields)]
    return (str(kind).startswith("struct") and not children) or any(map(_has_empty_struct, children))


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    for first in iterator:
        yield list(chain([first], islice(iterator, CHUNK_ROWS - 1)))
