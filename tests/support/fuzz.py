"""Sizes of random tests: a quarter of the examples by default, all of the examples in `make test-all`."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings
from hypothesis.stateful import RuleBasedStateMachine

FULL = bool(os.environ.get("TEST_ALL") or os.environ.get("FUZZ"))


def mark_random_tests(items: list[pytest.Item]) -> None:
    """Mark every property test `fuzz`, so that `make test-all` runs it at full size."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.fuzz)


def examples(full: int) -> int:
    """Return the number of examples of this run."""
    return full if FULL else max(1, full // 4)


def fuzz(full: int, **options: Any) -> Callable[[Any], Any]:
    """Set the number of examples of a `given` test and mark it `fuzz`."""

    def decorate(test: Any) -> Any:
        return pytest.mark.fuzz(settings(max_examples=examples(full), deadline=None, **options)(test))

    return decorate


def machine_test(machine: type[RuleBasedStateMachine], full: int, steps: int, **options: Any) -> Any:
    """Return the test class of a state machine, marked `fuzz`."""
    test = machine.TestCase
    test.settings = settings(max_examples=examples(full), stateful_step_count=steps, deadline=None, **options)
    test.pytestmark = [pytest.mark.fuzz]  # type: ignore[attr-defined]
    return test
