"""`python -m benchmarks simulator-speed`: simulated requests per second of one core."""

import argparse
import math
import time
from collections.abc import Sequence

from benchmarks.experiments.machine import MachineSpec, build_machine
from engine.api import EngineRequest, SamplingParams
from engine.core import EngineCore
from engine.virtual import Arrival, VirtualDriver

RUNNING = 64
OUTPUT_TOKENS = 200
RUNS = 3


def measure_speed(requests: int = 1024) -> tuple[float, int]:
    """Return (simulated requests per second of CPU time, steps) at 64 running requests of 200 output tokens each."""
    spec = MachineSpec("llama-2-7b", "a100-80gb", RUNNING)
    machine = build_machine(spec)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS)
    arrivals = [Arrival(0.0, EngineRequest(f"r{i}", (1,) * 128, sampling)) for i in range(requests)]
    driver = VirtualDriver(EngineCore(machine.config, model=machine.predictor), machine.runner(0), arrivals)
    began = time.process_time()
    steps = driver.run(math.inf).steps
    return requests / (time.process_time() - began), steps


def main(argv: Sequence[str] | None = None) -> None:
    """Print the median, the lowest and the highest of three runs."""
    argparse.ArgumentParser(prog="python -m benchmarks simulator-speed", description=__doc__).parse_args(argv)
    low, median, high = sorted(measure_speed()[0] for _ in range(RUNS))
    print(
        f"{median:.0f} simulated requests/s of one core ({low:.0f} to {high:.0f}, {RUNS} runs of 1,024 requests; "
        f"{RUNNING} running, {OUTPUT_TOKENS} output tokens each)"
    )
