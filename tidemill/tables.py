"""Tables of rows in files: JSON Lines, a JSON array, CSV, TSV or Parquet, chosen by the suffix of the path.

Every row is a dict from column to value. Files are read and written as a stream, except for a JSON array; a written
file appears by an atomic rename. Text files may be compressed (`.csv.gz`). Parquet needs pyarrow
(the extra `files`).
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from engine.errors import ConfigError
from gateway.commands.outputs import check_replaceable, replacing
from tidemill.cells import Row, json_line, parse_json
from tidemill.csv_tables import check_header, open_text, read_csv, write_csv
from tidemill.parquet_tables import find_arrow, read_parquet, write_parquet

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
