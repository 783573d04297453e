"""Tables of cheap cases: one test that runs each case, in place of a test for each case."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: the chosen cases run by default, the others with the slow tests."""
    picked = list(chosen)
    return [case if case in picked else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)


def for_each(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test once for each case, with the arguments of `pytest.mark.parametrize`, and name the case that fails.

    For cases of a few milliseconds that do not need fixtures of their own. A case may skip itself; the test is skipped
    if all cases skip."""
    cases, single = list(table), isinstance(names, str)

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def arguments(case: Any) -> dict[str, Any]:
            return {names: case} if single else dict(zip(names, case, strict=True))  # type: ignore[dict-item, arg-type]

        def judge(error: BaseException, case: Any, skips: list[BaseException]) -> None:
            if not isinstance(error, pytest.skip.Exception):
                error.add_note(f"case: {names} = {case!r}")
                raise error
            skips.append(error)
            if len(skips) == len(cases):
                raise error

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            skips: list[BaseException] = []
            for case in cases:
                try:
                    test(**fixtures, **arguments(case))
                except (Exception, pytest.skip.Exception) as error:
                    judge(error, case, skips)

        @functools.wraps(test)
        async def run_async(**fixtures: Any) -> None:
            skips: list[BaseException] = []
            for case in cases:
                try:
                    await test(**fixtures, **arguments(case))
                except (Exception, pytest.skip.Exception) as error:
                    judge(error, case, skips)

        wrapper = run_async if inspect.iscoroutinefunction(test) else run
        signature, given = inspect.signature(test), {names} if single else set(names)
        left = [each for name, each in signature.parameters.items() if name not in given]
        wrapper.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return wrapper

    return decorate
