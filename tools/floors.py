"""Print what serving needs at the lowest versions that pyproject.toml allows, torch apart: `make floors` tests it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path


def floors(pyproject: Path) -> Iterator[str]:
    """Requirements of pip, `name==version`. Raises ValueError for one without a floor."""
    for requirement in tomllib.loads(pyproject.read_text())["project"]["dependencies"]:
        found = re.match(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement)
        if found is None:
            raise ValueError(f"{requirement!r} has no floor")
        if found[1] != "torch":  # of its floor there is a build for few machines
            yield f"{found[1]}=={found[2]}"


if __name__ == "__main__":
    print(*floors(Path(__file__).parents[1] / "pyproject.toml"))
