"""How many modules of the engine know a representation of the cache by its name.

Who adds one reads these. All others ask its row, `CacheKind.form`.
"""

import ast
import pickle
from pathlib import Path

import pytest

import engine
from engine.cache.blocks import CacheKind

ENGINE = Path(engine.__file__).parent
TABLE = "cache/blocks.py"

# The policy that offers one, and the data plane: where it lies in block tables, its conversion, what that costs.
KNOW = {
    "execution/rows.py",
    "execution/runner.py",
    "profiling/cache_costs.py",
}


def named_members() -> dict[str, set[str]]:
    """The members of `CacheKind` that each module names, outside the table."""
    named: dict[str, set[str]] = {}
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "CacheKind":
                named.setdefault(path.relative_to(ENGINE).as_posix(), set()).add(node.attr)
    named.pop(TABLE)
    return named


def test_few_modules_name_another_form_than_k_and_v() -> None:
    assert {module for module, members in named_members().items() if members - {"KV"}} == KNOW


def test_a_module_that_names_a_form_is_counted() -> None:
    named = named_members()
    assert named["execution/rows.py"] == {"KV", "HIDDEN", "GONE"}
    assert len(named) <= 12


@pytest.mark.parametrize("kind", CacheKind)
def test_a_kind_is_found_by_its_value_and_crosses_a_process_as_itself(kind: CacheKind) -> None:
    assert CacheKind(kind.value) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind
