"""Faults of model steps: check the results, and log repeated faults with one traceback per cause."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from traceback import walk_tb

from engine.errors import EngineStepError
from engine.scheduling.output import UNMASKED_TOKEN, ModelRunnerOutput, SchedulerOutput

QUIET_SECONDS = 60.0
MAX_CAUSES = 64


def check_result(output: SchedulerOutput, result: ModelRunnerOutput, vocab_size: int) -> None:
    """Raise EngineStepError if a result does not match its step, before any of it is applied.

    A result must have the number of tokens that the step samples, and only tokens of the vocabulary.
    """
    expected, tokens = sum(chunk.sample for chunk in output.chunks), result.token_ids
    if result.step_id != output.step_id:
        raise EngineStepError(f"Step {output.step_id} was answered with the result of step {result.step_id}.")
    if len(tokens) != expected or (result.logprobs is not None and len(result.logprobs) != expected):
        raise EngineStepError(f"A step with {expected} samples was answered with {len(tokens)} tokens.")
    if tokens and not (min(tokens) >= UNMASKED_TOKEN and max(tokens) < vocab_size):
        raise EngineStepError("A step was answered with a token outside the vocabulary.")
    if any(not 0 <= number < len(output.chunks) or output.chunks[number].sample for number in result.pooled):
        raise EngineStepError("A step was answered with an embedding that no chunk requests.")
    if any(not 0 <= token < vocab_size for run in result.forced.values() for token in run):
        raise EngineStepError("A step was answered with a forced token outside the vocabulary.")


@dataclass(slots=True)
class _Cause:
    last: float
    last_line: float
    untold: int = 0


class FaultLog:
    """A log that groups faults by cause: the type of the exception and the line that raised it.

    The first fault is logged with its traceback, others as a count at most once a second. A cause that has been quiet
    for `QUIET_SECONDS` is logged with a traceback again.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._causes: dict[tuple[str, ...], _Cause] = {}

    def report(self, what: str, error: BaseException) -> None:
        """Log the fault `what` with its exception, or count it."""
        kind, now = type(error).__name__, self._clock()
        places = [f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(error.__traceback__)]
        key = (what, kind, *places[-1:])
        cause = self._causes.get(key)
        if cause is None or now - cause.last > QUIET_SECONDS:
            if len(self._causes) >= MAX_CAUSES:
                del self._causes[min(self._causes, key=lambda each: self._causes[each].last)]
            self._causes[key] = _Cause(now, now)
            self._log.error("%s", what, exc_info=error)
            return
        cause.last = now
        cause.untold += 1
        if now - cause.last_line >= 1.0:
            self._log.error("%s %d times more in %.1f s (%s)", what, cause.untold, now - cause.last_line, kind)
            cause.untold, cause.last_line = 0, now
