"""Tables of rows in files: JSON Lines, CSV, TSV or Parquet, chosen by the suffix of the path or URL.

Every row is a dict from column to value. Files are read and written as a stream; a written file appears by an atomic
rename. `https://` is read, `s3://`, `gs://` and `az://` are read and written. Parquet needs pyarrow, object stores need
obstore (the extra `files`), which takes credentials from the environment.
"""

import csv
import datetime
import importlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx

from engine.errors import ConfigError
from engine.machine.extras import install_command
from gateway.http.json_text import escape_line_ends

Row = dict[str, Any]
CHUNK_ROWS = 1000
MAX_CELL = 2**31 - 1
"""Longest cell of a CSV file, characters."""
SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def check_suffix(name: str) -> str:
    """Return the suffix of a table's file name or URL. Raise ConfigError if it names no known format."""
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{name}: the format is unknown; the name must end in one of {', '.join(SUFFIXES)}")
    return suffix


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file. Raise ConfigError, with the line where there is one, if it cannot be read."""
    suffix = check_suffix(path.name)
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path)
        elif suffix in _DELIMITERS:
            yield from _read_csv(path, _DELIMITERS[suffix])
        else:
            yield from _read_jsonl(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is not UTF-8; save it as UTF-8") from None


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}: line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}: line {number} is not a JSON object")
            yield row


def _read_csv(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(MAX_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        columns = next(reader, [])
        if len(set(columns)) < len(columns):
            raise ConfigError(f"{path}: two columns have the same name")
        try:
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(columns):
                    counts = f"{len(cells)} cells, the first line {len(columns)}"
                    raise ConfigError(
                        f"{path}: line {reader.line_num} has {counts}; quote cells that hold {delimiter!r}"
                    )
                yield dict(zip(columns, cells, strict=True))
        except csv.Error as error:
            raise ConfigError(f"{path}: line {reader.line_num}: {error}") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    arrow = _arrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(CHUNK_ROWS):
                yield from batch.to_pylist()
    except arrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: {error}") from None


def _arrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(f"Parquet files need pyarrow; run {install_command('files')}") from None
    return importlib.import_module("pyarrow")


def write_rows(path: Path, make_rows: Callable[[], Iterable[Row]], columns: Mapping[str, str], source: Path) -> None:
    """Write a table to `path`.

    Args:
        make_rows: returns the rows from the first one on; it is called twice for Parquet.
        columns: every column in its order, with a JSON Schema type or "" where the values decide.
        source: the table that the rows come from; a Parquet file gives its columns their types.

    Raises ConfigError if the file cannot be written.
    """
    suffix = check_suffix(path.name)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            if suffix == ".parquet":
                _write_parquet(file, make_rows, columns, source)
            elif suffix in _DELIMITERS:
                _write_csv(file, make_rows(), list(columns), _DELIMITERS[suffix])
            else:
                file.writelines(json_line(row) for row in make_rows())
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def json_line(value: Any) -> bytes:
    """Return a value as a line of JSON. Dates become ISO 8601, numbers that JSON lacks null, bytes text."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_text, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, default=_text)
    return escape_line_ends(text.encode("utf-8", "surrogatepass")) + b"\n"


def _text(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Utf8:
    """A text file for `csv.writer` over a binary file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.encode("utf-8", "surrogatepass"))


def _write_csv(file: BinaryIO, rows: Iterable[Row], columns: Sequence[str], delimiter: str) -> None:
    writer = csv.writer(_Utf8(file), delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)


def _cell(value: Any) -> str:
    """Return a value as text: nothing for None, JSON for structures."""
    if value is None:
        return ""
    if isinstance(value, bool | dict | list):
        return json_line(value).decode().rstrip("\n")
    return _text(value)


def _write_parquet(
    file: BinaryIO, make_rows: Callable[[], Iterable[Row]], columns: Mapping[str, str], source: Path
) -> None:
    arrow = _arrow()
    known = {"string": arrow.string(), "integer": arrow.int64(), "number": arrow.float64(), "boolean": arrow.bool_()}
    types = {name: known.get(kind, arrow.string()) for name, kind in columns.items() if kind}
    if source.suffix.lower() == ".parquet":
        types |= {
            field.name: field.type for field in arrow.parquet.read_schema(source) if not columns.get(field.name, "x")
        }
    free = [name for name in columns if name not in types]
    if free:
        types |= _inferred(arrow, make_rows(), free)
    schema = arrow.schema([(name, types[name]) for name in columns])
    text = [name for name in columns if types[name] == arrow.string()]
    try:
        with arrow.parquet.ParquetWriter(file, schema) as writer:
            for chunk in _chunks(make_rows()):
                rows = [row | {name: _cell(row[name]) for name in text if row.get(name) is not None} for row in chunk]
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
    except arrow.ArrowException as error:
        raise ConfigError(f"Parquet cannot hold the rows: {error}; write to a .jsonl file") from None


def _inferred(arrow: Any, rows: Iterable[Row], names: Sequence[str]) -> dict[str, Any]:
    """Return an Arrow type for each column that holds all of its values: text where the values have several types."""
    types = {name: arrow.null() for name in names}
    for chunk in _chunks(rows):
        for name in names:
            try:
                found = arrow.array([row.get(name) for row in chunk]).type
                pair = [arrow.schema([("x", types[name])]), arrow.schema([("x", found)])]
                types[name] = arrow.unify_schemas(pair, promote_options="permissive").field(0).type
            except (arrow.ArrowException, OverflowError):
                types[name] = arrow.string()
    return {name: arrow.string() if each == arrow.null() else each for name, each in types.items()}


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    for first in iterator:
        yield list(chain([first], islice(iterator, CHUNK_ROWS - 1)))


STORES = ("s3", "gs", "az")
WEB = ("https", "http")


def scheme_of(name: str) -> str:
    """Return the scheme of a URL that this module serves, or an empty string for a path."""
    scheme = name.partition("://")[0] if "://" in name else ""
    if scheme and scheme not in (*STORES, *WEB):
        raise ConfigError(f"{name}: the scheme is unknown; use one of {', '.join((*STORES, *WEB))}, or a path")
    return scheme


def fetch(url: str, target: Path) -> None:
    """Download a URL to a file. Raise ConfigError if it cannot be read."""
    try:
        with target.open("wb") as file:
            if scheme_of(url) in WEB:
                with httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as response:
                    response.raise_for_status()
                    file.writelines(response.iter_bytes())
            else:
                store, key = _store_of(url)
                file.writelines(_obstore().get(store, key).stream())
    except (httpx.HTTPError, OSError) as error:
        raise ConfigError(f"{url}: {error}") from None
    except Exception as error:
        if not _is_store_error(error):
            raise
        raise ConfigError(f"{url}: {error}") from None


def put(source: Path, url: str) -> None:
    """Upload a file to a URL of an object store. Raise ConfigError if it cannot be written."""
    store, key = _store_of(url)
    obstore = _obstore()
    try:
        with source.open("rb") as file, obstore.open_writer(store, key) as writer:
            shutil.copyfileobj(file, writer, 1 << 20)
    except Exception as error:
        if not _is_store_error(error):
            raise
        raise ConfigError(f"{url}: {error}") from None


def check_writable(url: str) -> None:
    """Raise ConfigError if nothing can be written to URLs of this kind."""
    if scheme_of(url) in WEB:
        raise ConfigError(f"{url}: the output must be a path or a URL of {', '.join(STORES)}")
    if scheme_of(url):
        _store_of(url)


def _store_of(url: str) -> tuple[Any, str]:
    """Return the store of a URL and the key within it."""
    parts = urlsplit(url)
    key = parts.path.lstrip("/")
    if not parts.netloc or not key:
        raise ConfigError(f"{url}: a URL looks like {parts.scheme}://BUCKET/KEY")
    _obstore()
    store: Any = importlib.import_module("obstore.store")
    return store.from_url(f"{parts.scheme}://{parts.netloc}"), key


def _is_store_error(error: Exception) -> bool:
    """Errors of obstore share a base class that is not an OSError; missing objects raise FileNotFoundError."""
    return isinstance(error, OSError) or type(error).__module__.startswith("obstore")


def _obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise ConfigError(f"object stores need obstore; run {install_command('files')}") from None
