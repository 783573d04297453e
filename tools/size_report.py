"""Print the size of each folder, the modules that the core imports, files over 700 and functions over 40 lines.

Exits with 1 if an optional feature has more lines in files of its own than `cap` of its row in features.toml.
"""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FILE_LIMIT, FUNCTION_LIMIT = 700, 40
ROOT = Path(__file__).resolve().parent.parent
FEATURES = ROOT / "docs" / "develop" / "features.toml"
PRODUCT = ("gateway", "engine", "predictor", "loadgen", "tidemill")


def main() -> int:
    lines = {path: path.read_text().count("\n") for path in tracked("*.py")}
    sizes, files = Counter[str](), Counter[str]()
    for path, count in lines.items():
        sizes[path.parts[0]] += count
        files[path.parts[0]] += 1
    for folder in (*PRODUCT, "benchmarks", "tests"):
        print(f"{folder:10} {sizes[folder]:6d} lines in {files[folder]} files")
    print(f"product    {sum(sizes[folder] for folder in PRODUCT)} lines")
    loaded = closure("engine.core")
    print(f"engine.core imports {len(loaded)} modules, {sum(lines[path] for path in loaded)} lines")
    for path, count in lines.items():
        if path.parts[0] in PRODUCT:
            print("".join(too_long(path, count)), end="")
    over = list(too_costly(FEATURES))
    print("".join(over), end="")
    return int(bool(over))


def too_costly(page: Path) -> Iterator[str]:
    """Yield a line for each optional feature whose own files have more lines than its cap."""
    for row in tomllib.loads(page.read_text())["feature"]:
        own = sum((ROOT / name).read_text().count("\n") for name in row["files"])
        if own > row["cap"]:
            yield f"  {row['name']}: {own} lines, cap {row['cap']} (docs/develop/features.toml)\n"


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.split() if Path(name).exists()]


def closure(module: str) -> set[Path]:
    """Return the product files that importing a module loads, imports inside functions left out."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        folder = Path(name.replace(".", "/"))
        path = folder / "__init__.py" if folder.is_dir() else Path(f"{folder}.py")
        if name.split(".")[0] not in PRODUCT or not path.exists() or path in found:
            continue
        found.add(path)
        waiting.append(name.rpartition(".")[0])
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def too_long(path: Path, count: int) -> Iterator[str]:
    """Yield a line for the file if it is too long, and one for each function that is too long."""
    if count > FILE_LIMIT:
        yield f"  {count:4d} lines  {path}\n"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION_LIMIT:
                yield f"  {size:4d} lines  {path}:{node.lineno} {node.name}\n"


if __name__ == "__main__":
    sys.exit(main())
