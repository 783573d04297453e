"""Compare docs/reference/models.md with each type (slow), and check that it lists no wrong type."""

import re
from pathlib import Path

import model_sweep
import pytest
import tiny_transformers
import transformers

TEXT = model_sweep.PAGE.read_text()
ROWS = {each.model_type: each.outcome for each in model_sweep.read_page()}
SAME_VERSION = f"transformers {transformers.__version__}," in TEXT


def test_the_table_has_no_wrong_row_and_eighty_that_are_exact() -> None:
    assert set(ROWS.values()) <= {model_sweep.EXACT, model_sweep.REFUSED, model_sweep.UNTRIED}
    assert list(ROWS.values()).count(model_sweep.EXACT) >= 80
    if SAME_VERSION:
        assert sorted(ROWS) == tiny_transformers.causal_types()


def test_the_page_is_what_its_findings_write() -> None:
    version = re.search(r"transformers ([\d.]+),", TEXT)
    assert version and model_sweep.page(model_sweep.read_page(), version[1]) == TEXT


@pytest.mark.manual
@pytest.mark.parametrize("model_type", tiny_transformers.causal_types())
def test_a_type_is_exact_or_refused(model_type: str, tmp_path: Path) -> None:
    """With another version of transformers a type may have become another; it must not be wrong."""
    found = model_sweep.examine(model_type, tmp_path)
    assert found.outcome != model_sweep.WRONG, found.detail
    if SAME_VERSION:
        assert found.outcome == ROWS[model_type], found.detail
