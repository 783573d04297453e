"""The rows of a run's source with their requests: the same in each pass, or an error that says so."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError
from tidemill.cells import Row, json_line
from tidemill.csv_tables import looks_like_values
from tidemill.recipe import Recipe, Request
from tidemill.tables import read_rows


class Item(NamedTuple):
    """A row with its request, or with the reason why there is none."""

    row: Row
    """The columns that the output repeats."""
    custom_id: str
    request: Request | None
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
    first: Request | None = None
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
