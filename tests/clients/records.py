"""docs/reference/clients.md: the results of the clients that ran, merged with the rows of the other clients."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "clients.md"
INTRO = """<!-- written by make clients -->
# Tested clients

Each client ran unchanged against a live server: the packaged model, or a scripted model where the model must call a
tool. `make clients` runs them all and writes this page. Configuration: [Connect clients](../guides/clients.md).
"""
USES, REFUSED, SUITES = "## Served", "## Refused with a reason", "## Test suites of other projects"
_HEADS = {
    USES: ("client", "version", "what was run", "result"),
    REFUSED: ("client", "request", "answer"),
    SUITES: ("suite", "version", "run", "passed", "the rest"),  # rows written by hand
}

_records: list[tuple[str, str, str, str]] = []


def record(client: str, version: str, what: str, result: str) -> None:
    """Note that a use of a client ended: `result` is `passed`, `refused: REASON` or `failed: REASON`."""
    _records.append((client, version, what, result))


def write_page() -> None:
    """Replace the rows of the clients that ran; do nothing when none did."""
    if _records:
        PAGE.write_text(render(PAGE.read_text() if PAGE.exists() else "", _records))


def render(old: str, records: list[tuple[str, str, str, str]]) -> str:
    """Return the page: the rows of `records`, and those of `old` for every other client."""
    ran = {client for client, *_ in records}
    tables: dict[str, list[tuple[str, ...]]] = {title: [] for title in _HEADS}
    for title, rows in tables.items():
        section = old.partition(title)[2].partition("\n## ")[0]
        for line in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]:
            cells = tuple(line.split(" | "))
            if cells[0] not in ran:
                rows.append(cells)
    for client in ran:
        mine = [(version, what, result) for name, version, what, result in records if name == client]
        tables[USES].append((client, mine[0][0], *_summary(mine)))
        tables[REFUSED] += [
            (client, _cell(what), _cell(result.removeprefix("refused: ")))
            for _, what, result in mine
            if result.startswith("refused: ")
        ]
    parts = [INTRO]
    for title, rows in tables.items():
        lines = [_row(_HEADS[title]), "|" + "---|" * len(_HEADS[title]), *map(_row, sorted(rows))]
        parts.append(f"{title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _summary(steps: list[tuple[str, str, str]]) -> tuple[str, str]:
    """Return the cells of the uses and of their result."""
    uses = [what for _, what, result in steps if not result.startswith("refused")]
    failed = [f"{what}: {result}" for _, what, result in steps if result.startswith("failed")]
    return _cell("; ".join(uses)), _cell("FAILED " + "; ".join(failed) if failed else f"{len(uses)} of {len(uses)}")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
