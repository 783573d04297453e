"""CSV and TSV files as people have them: any delimiter, encoding and odd header; what is written reads back equal."""

import csv
import io
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, TextIO

from engine.errors import ConfigError
from tidemill.cells import Row, cell, clean

MAX_CELL = 2**31 - 1
"""Longest cell, characters."""
DELIMITERS = ";\t|,"
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
    except LookupError as error:
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
    return (cells for cells in reader if cells)


def _reader(file: TextIO, delimiter: str | None) -> tuple[str, Any]:
    """Return the delimiter and a reader that stands before the header."""
    sample = file.read(SAMPLE_CHARS)
    file.seek(0)
    told = re.match(r"sep=(.)\r?\n", sample)  # of Excel
    if told is not None and delimiter is None:
        file.readline()
        delimiter = told[1]
    delimiter = delimiter or _delimiter_of(sample)
    return delimiter, csv.reader(file, delimiter=delimiter)


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
