"""`for_each` runs every case, and a failure names its case."""

import pytest
from support.tables import for_each

SEEN: list[tuple[int, str]] = []


@for_each("number", [1, 2])
@for_each(("letter", "size"), [("a", 1), ("b", 2)])
def test_every_case_runs_beside_fixtures(number: int, letter: str, size: int, request: pytest.FixtureRequest) -> None:
    SEEN.append((number, letter * size))
    if request.node.name and len(SEEN) == 4:
        assert SEEN == [(1, "a"), (1, "bb"), (2, "a"), (2, "bb")]


@for_each("number", [1, 2])
async def test_async_cases_run(number: int) -> None:
    assert number


def test_a_failure_names_its_case_and_skips_count_only_together() -> None:
    @for_each("number", [1, 2, 3])
    def odd(number: int) -> None:
        if number == 1:
            pytest.skip("one")
        assert number != 3

    with pytest.raises(AssertionError) as caught:
        odd()
    assert caught.value.__notes__ == ["case: number = 3"]
    with pytest.raises(pytest.skip.Exception):
        for_each("number", [1, 1])(odd.__wrapped__)()
