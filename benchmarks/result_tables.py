"""Write the tables of docs/benchmarks/performance.md from the result files `benchmarks/results/NAME.json`.

A result file holds `columns` (title, align) and `rows`. A row holds its cells and where they come from: the command
(an argument of `python -m benchmarks`, or a whole command), the commit (empty if not recorded), machine and date. The
page marks the place of a table with `<!-- results: NAME -->`; one without a file stays empty. FOLDER: take the files
`gpu-*.json` of `make gpu-check ARGS="--ordered FOLDER"` first, which are from this checkout.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "performance.md"
FOLDER = Path(__file__).with_name("results")
TABLE = re.compile(r"(?m)^(<!-- results: ([\w-]+) -->\n)(?:Measured by .*\n\n)?(?:\|.*\n)*")
"""A mark, and the table that follows it with its source."""
RULES = {"left": "---", "right": "---:"}


def read(name: str) -> dict[str, Any]:
    """Return a result file. Raises OSError if there is none."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def render(result: dict[str, Any]) -> str:
    """Return a result as a Markdown table, with the source of its rows above it; in a column if the sources differ."""
    columns, rows = result["columns"], result["rows"]
    sources = [", ".join(filter(None, (f"`{row['command']}`", row["commit"], row["date"]))) for row in rows]
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    above = f"Measured by {sources[0]} on {machines}.\n\n"
    cells = [row["cells"] for row in rows]
    if len(set(sources)) > 1:
        columns, above = [*columns, {"title": "command, date", "align": "left"}], ""
        cells = [[*row, source] for row, source in zip(cells, sources, strict=True)]
    heading, *body = [f"| {' | '.join(line)} |\n" for line in ([column["title"] for column in columns], *cells)]
    rule = f"|{'|'.join(RULES[column['align']] for column in columns)}|\n"
    return "".join([above, heading, rule, *body])


def fill(page: str) -> str:
    """Return the page with every marked table written anew."""

    def table(mark: re.Match[str]) -> str:
        return mark[1] + (render(read(mark[2])) if (FOLDER / f"{mark[2]}.json").exists() else "")

    return TABLE.sub(table, page)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks results", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    options = parser.parse_args(argv)
    for path in (path for folder in options.folders for path in folder.glob("gpu-*.json")):
        found = json.loads(path.read_text())
        rows = [{**row, "commit": row["commit"] or provenance(())["commit"]} for row in found["rows"]]
        (FOLDER / path.name).write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text()))
