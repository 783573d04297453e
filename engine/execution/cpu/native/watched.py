"""A runner that adapts its number of threads to measured step times (see `crew`)."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from engine.execution.cpu.native.crew import Crew, candidates, choose, measure
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.runner import Runner
from engine.limits import UNITS_PER_BLOCK, Limits
from engine.profiling.calibration import ShapeRunner
from engine.profiling.sweep import StepShape
from engine.scheduling.output import Collect, ModelRunner, ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger("tidemill.threads")

ROUNDS, SECONDS = 5, 3.0
DECODES, CONTEXT, PROMPT = 4, 64, 64


class ThreadWatch:
    """Sets the number of threads of each step by `resize`; steps must run one at a time."""

    def __init__(
        self,
        counts: tuple[int, ...],
        threads: int,
        resize: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resize, self._clock = resize, clock
        self._crew = Crew(counts, threads, self._tell)
        self._threads = threads
        resize(threads)

    def launch(self, launch: Callable[[SchedulerOutput], Collect], output: SchedulerOutput) -> Collect:
        """Launch a step, and record its time when it is collected. Steps without a prediction (calibration) are
        ignored."""
        predicted = output.predicted_latency if output.chunks else None
        self._use(self._crew.choose(1.0 + output.spare / predicted) if predicted else self._crew.threads)
        trial = self._threads != self._crew.threads
        collect = launch(output)

        def collected() -> ModelRunnerOutput:
            result = collect()
            if predicted:
                self._crew.observe(result.latency / predicted, self._clock())
            return replace(result, trial=True) if trial else result

        return collected

    def _use(self, threads: int) -> None:
        if threads != self._threads:
            self._threads = threads
            self._resize(threads)

    def _tell(self, before: int, after: int) -> None:
        logger.info("steps now use %d threads instead of %d, which is faster at present", after, before)


class NativeRunner(Runner[NativeDevice]):
    """A Runner of the native kernels. `watch` adapts the threads; None: their number is fixed."""

    watch: ThreadWatch | None = None

    def launch(self, output: SchedulerOutput) -> Collect:
        launch = super().launch
        return launch(output) if self.watch is None else self.watch.launch(launch, output)


def choose_threads(
    runner: ModelRunner,
    limits: Limits,
    vocab_size: int,
    most: int,
    resize: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, str]:
    """Return the best count up to `most` for this model, measured with a few steps, and a log line with the reason.

    The runner must be idle.
    """
    room = limits.num_units // UNITS_PER_BLOCK * limits.block_size
    context = min(CONTEXT, limits.max_model_len, room)
    decodes = max(1, min(DECODES, limits.max_num_seqs, room // context))
    prompt = min(PROMPT, context, limits.max_num_batched_tokens)
    shapes = {"decode": StepShape(decodes, context), "prefill": StepShape(chunks=((0, prompt),))}
    steps = ShapeRunner(runner, limits, vocab_size)

    def run(threads: int, kind: str) -> float:
        resize(threads)
        steps.measure(shapes[kind])  # warm-up: starts threads and fills caches
        return steps.measure(shapes[kind])

    times = measure(candidates(most), run, ROUNDS, SECONDS, clock)
    steps.close()
    chosen = choose(times)
    seen = ", ".join(f"{n}: {t.decode * 1e3:.1f} / {t.prefill * 1e3:.1f} ms" for n, t in times.items())
    return chosen, f"steps use {chosen} of {most} threads (decodes / prompt with {seen}); adapted while serving"
