"""Print the size of each folder beside its ceiling, and what is larger than the house rules wish.

Exits 1 where a folder is past its ceiling: a feature pays with deletions, or raises the ceiling in a change that says
why. The other limits are symptoms and only listed.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

FILE_LIMIT, FUNCTION_LIMIT = 350, 40
CEILINGS = {
    "gateway": 14_620,
    "engine": 42_000,
    "predictor": 3_500,
    "loadgen": 22_100,
}


def main() -> int:
    lines = {path: path.read_text().count("\n") for path in tracked("*.py")}
    sizes, files = Counter[str](), Counter[str]()
    for path, count in lines.items():
        sizes[path.parts[0]] += count
        files[path.parts[0]] += 1
    for folder, ceiling in CEILINGS.items():
        print(f"{folder:10} {sizes[folder]:6d} of {ceiling} lines in {files[folder]} files")
    product = sum(sizes[folder] for folder in CEILINGS)
    print(f"product    {product} lines in {sum(files[folder] for folder in CEILINGS)} files, tests {sizes['tests']}")
    for path, count in lines.items():
        if path.parts[0] in CEILINGS:
            print("".join(too_long(path, count)), end="")
    past = past_ceiling(sizes)
    print("".join(f"{folder} is past its ceiling of {CEILINGS[folder]} lines\n" for folder in past), end="")
    return int(bool(past))


def past_ceiling(sizes: Mapping[str, int]) -> list[str]:
    """The folders that have more lines than they may."""
    return [folder for folder, ceiling in CEILINGS.items() if sizes[folder] > ceiling]


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.split() if Path(name).exists()]


def too_long(path: Path, count: int) -> Iterator[str]:
    """The file if it is long, and its long functions."""
    if count > FILE_LIMIT:
        yield f"  {count:4d} lines  {path}\n"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION_LIMIT:
                yield f"  {size:4d} lines  {path}:{node.lineno} {node.name}\n"


if __name__ == "__main__":
    sys.exit(main())
