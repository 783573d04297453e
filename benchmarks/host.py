"""The host's time of a step of the GPU path, by parts (plan, schedule, launch, collect, update); the device is idle.

The real core, runner and buffers take steps of decodes ahead, as served; only the forward pass is left out, so any
machine will do. Rounds of online and offline requests in turn, medians: times are of the machine it runs on, and of
whatever runs beside it.
"""

import argparse
import random
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from benchmarks.gpu.loop import BLOCK, scheduler_config
from benchmarks.gpu.setup import tiny_setup
from benchmarks.machine import describe
from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.core import EngineCore
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.forward import Forward
from engine.execution.runner import Runner
from engine.machine.processes import settle
from engine.scheduling.offline import whole
from engine.scheduling.output import Collect, SchedulerOutput

PROMPT, WARM = (100, 400), 60
_KINDS = {"online": RequestClass.ONLINE, "offline": RequestClass.OFFLINE}

Times = dict[str, list[float]]


class _IdleForward:
    """A forward pass of which nothing runs."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, *_args: object, **_options: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return getattr(self._forward, name)


def rehearse(kind: str, rows: int, steps: int) -> Times:
    """Processor time (s) of every part of `steps` steps in which `rows` requests of this class decode; also "step",
    their sum, and "outputs", how many a step gave."""
    setup, rng = tiny_setup(), random.Random(0)
    spec = setup.spec("Qwen2.5-0.5B")
    most = WARM + steps + 8
    context = PROMPT[1] + most
    config = scheduler_config(rows, 16 * rows, context, rows * (context // BLOCK + 1))
    device = CudaDevice(spec, setup.weights(spec), setup.kernels(), config.limits, graphs=False)
    device._forward = device._graphs._forward = _IdleForward(device._forward)  # type: ignore[assignment]
    runner, core = Runner(device), EngineCore(config)
    for index in range(rows):
        prompt = tuple(rng.randrange(100) for _ in range(rng.randrange(*PROMPT)))
        sampling = SamplingParams(most, temperature=0.0)
        offline = kind == "offline"
        core.add_request(EngineRequest(f"r{index}", prompt, sampling, _KINDS[kind], final_only=offline), 0.0)
    parts: Times = defaultdict(list)
    in_flight: deque[tuple[SchedulerOutput, Collect]] = deque()
    clock = time.thread_time  # not of whoever shares the core
    step = 0
    while step < WARM + steps:
        began = clock()
        plan = whole(core.plan_offline(began)) if core.has_offline else None
        planned = clock()
        output = core.schedule(planned, plan)
        scheduled = clock()
        assert output is not None, "requests are left but none can run"
        in_flight.append((output, runner.launch(output)))
        launched = clock()
        if len(in_flight) <= config.pipeline_depth:
            continue
        output, collect = in_flight.popleft()
        result = collect()
        collected = clock()
        given = core.update(output, result, collected)
        ended = clock()
        step += 1
        if step > WARM:
            assert len(output.chunks) == rows, "the benchmark's steps are not full"
            marks = (began, planned, scheduled, launched, collected, ended)
            for name, first, last in zip(PARTS, marks[:-1], marks[1:], strict=True):
                parts[name].append(last - first)
            parts["step"].append(ended - began)
            parts["outputs"].append(len(given))
    return parts


PARTS = ("plan", "schedule", "launch", "collect", "update")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks host", description=__doc__)
    parser.add_argument("--rows", type=int, default=256, help="requests that decode in a step (default: 256)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a round (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each class, in turn (default: 3)")
    options = parser.parse_args(argv)
    settle()  # as an engine process does
    print(f"host time of a step, {options.rows} decodes; {describe()}")
    found: dict[str, Times] = {kind: defaultdict(list) for kind in _KINDS}
    for _ in range(options.rounds):
        for kind, whole_times in found.items():
            for name, values in rehearse(kind, options.rows, options.steps).items():
                whole_times[name] += values
    for kind, times in found.items():
        shown = ", ".join(f"{name} {median(times[name]) * 1e3:.3f} ({min(times[name]) * 1e3:.3f})" for name in PARTS)
        print(f"  {kind:8} ms, median (least): {shown}; step {median(times['step']) * 1e3:.3f}")
        print(f"  {'':8} outputs a step: {sum(times['outputs']) / len(times['outputs']):.1f}")


if __name__ == "__main__":
    main()
