"""Replays side by side: a few worker processes that each hold the machine and the scenarios."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import TypeVar

from benchmarks.experiments.machine import Machine
from benchmarks.experiments.replay import Scenario, Setting, replay
from loadgen.simulation.run import Metrics

Task = tuple[str, Setting]
Case = TypeVar("Case")
Found = TypeVar("Found")
_held: tuple[Machine, dict[str, Scenario], int] | None = None


def _hold(machine: Machine, scenarios: dict[str, Scenario], seed: int) -> None:
    global _held
    _held = machine, scenarios, seed


def _replay(task: Task) -> Metrics:
    assert _held is not None, "the worker was not set up"
    machine, scenarios, seed = _held
    name, setting = task
    return replay(machine, scenarios[name], setting, seed)


class Replays:
    """Replays settings on named scenarios of one seed; a context manager. One worker: in this process."""

    def __init__(self, machine: Machine, scenarios: dict[str, Scenario], seed: int, workers: int) -> None:
        self._arguments = machine, scenarios, seed
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Replays":
        if self._workers > 1:
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, context, initializer=_hold, initargs=self._arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def on(self, scenario: str, settings: Sequence[Setting]) -> list[Metrics]:
        """The metrics of each setting, in order."""
        if self._pool is not None:
            return list(self._pool.map(_replay, [(scenario, setting) for setting in settings]))
        machine, scenarios, seed = self._arguments
        return [replay(machine, scenarios[scenario], setting, seed) for setting in settings]


def each(run: Callable[[Case], Found], cases: Sequence[Case], workers: int) -> list[Found]:
    """`run` on each case, in order; its argument and result must be picklable. One worker: in this process."""
    if workers <= 1:
        return [run(case) for case in cases]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(run, cases))
