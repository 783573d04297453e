"""Print the size of the product and what is larger than the house rules wish."""

import ast
import subprocess
from pathlib import Path

FILE_LIMIT, FUNCTION_LIMIT = 350, 40


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.split() if Path(name).exists()]


def long_functions(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION_LIMIT:
                found.append(f"  {size:4d} lines  {path}:{node.lineno} {node.name}")
    return found


def main() -> None:
    files = tracked("*.py")
    tests = [path for path in files if path.parts[0] == "tests"]
    product = [path for path in files if path.parts[0] in {"gateway", "engine", "predictor", "loadgen"}]
    lines = {path: path.read_text().count("\n") for path in files}
    print(
        f"product {sum(lines[p] for p in product)} lines in {len(product)} files, tests {sum(lines[p] for p in tests)}"
    )
    for path in product:
        if lines[path] > FILE_LIMIT:
            print(f"  {lines[path]:4d} lines  {path}")
        print("\n".join(long_functions(path)), end="\n" if long_functions(path) else "")


if __name__ == "__main__":
    main()
