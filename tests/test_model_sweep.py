"""Compare docs/reference/models.md with each type (slow), and check that it lists no wrong type."""

import re
from importlib.metadata import version
from pathlib import Path

import model_sweep
import pytest
import tiny_transformers

TEXT = model_sweep.PAGE.read_text()
ROWS = {each.model_type: each.outcome for each in model_sweep.read_page()}
SAME_VERSION = f"transformers {version('transformers')}," in TEXT


def test_the_table_has_no_wrong_row_and_eighty_that_are_exact() -> None:
    assert set(ROWS.values()) <= {model_sweep.EXACT, model_sweep.REFUSED, model_sweep.UNTRIED}
    assert list(ROWS.values()).count(model_sweep.EXACT) >= 80
    if SAME_VERSION:
        assert sorted(ROWS) == tiny_transformers.causal_types()


def test_the_page_is_what_its_findings_write() -> None:
    found = re.search(r"transformers ([\d.]+),", TEXT)
    assert found and model_sweep.page(model_sweep.read_page(), found[1]) == TEXT


@pytest.mark.manual
@pytest.mark.timeout(3600)
def test_every_type_is_exact_or_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """With another version of transformers a type may have become another; it must not be wrong."""
    for model_type in tiny_transformers.causal_types():
        (folder := tmp_path / model_type).mkdir()
        with subtests.test(model_type=model_type):
            found = model_sweep.examine(model_type, folder)
            assert found.outcome != model_sweep.WRONG, found.detail
            if SAME_VERSION:
                assert found.outcome == ROWS[model_type], found.detail
