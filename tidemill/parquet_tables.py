"""Parquet files: what is written reads back equal, or as text where the values of a column have no common type."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import ConfigError
from engine.machine.extras import install_command
from tidemill.cells import Row, cell, clean

CHUNK_ROWS = 1000


def read_parquet(path: Path) -> Iterator[Row]:
    arrow = find_arrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"{path}: two columns have the same name, {twice[0]!r}; rename one")
            for batch in file.iter_batches(CHUNK_ROWS):
                yield from batch.to_pylist()
    except (arrow.ArrowException, ValueError) as error:
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
