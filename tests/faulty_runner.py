"""Runners that fail on purpose: under one request, or for a while under every request."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput


class Work(NamedTuple):
    """Tokens [start, end) of a request in a step."""

    request_id: str
    start: int
    end: int


class FaultyRunner:
    """`inner` never sees a step for which `fails(step_id, its work)`: a request for its result raises an error.

    `failures`: the work of the steps whose error was taken notice of, `steps`: of all.
    """

    def __init__(
        self, inner: Any, fails: Callable[[int, list[Work]], bool], error: Callable[[str], BaseException] = RuntimeError
    ) -> None:
        self._inner, self._error = inner, error
        self._fails = fails
        self._owners: dict[int, str] = {}
        self.failures: list[list[Work]] = []
        self.steps: list[list[Work]] = []

    def launch(self, output: SchedulerOutput) -> Collect:
        for new in output.new_requests:
            self._owners[new.row] = new.request_id
        work = [Work(self._owners[row], start, start + length) for row, start, length, _ in output.chunks]
        self.steps.append(work)
        if not self._fails(output.step_id, work):
            collect: Collect = self._inner.launch(output)
            return collect

        def fail() -> ModelRunnerOutput:
            self.failures.append(work)
            raise self._error("illegal memory access")

        return fail


def poison(bad: Collection[str], at: int = 0) -> Callable[[int, list[Work]], bool]:
    """Every step fails that computes token number `at` (or a later one) of one of the `bad` requests."""
    return lambda _step, work: any(each.request_id in bad and each.end > at for each in work)
