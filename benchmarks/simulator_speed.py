"""`python -m benchmarks simulator-speed`: simulated requests per second of one core."""

import argparse
import math
import time
from collections.abc import Sequence

from benchmarks.experiments.machine import MachineSpec, build_machine
from engine.api import EngineRequest, SamplingParams
from engine.core import EngineCore
from engine.virtual import Arrival, VirtualDriver

REQUESTS, RUNNING = 1024, 64
OUTPUT_TOKENS = 200
RUNS = 3


def measure_speed() -> float:
    """Return the simulated requests per second of CPU time at 64 running requests of 200 output tokens each."""
    machine = build_machine(MachineSpec("llama-2-7b", "a100-80gb", RUNNING))
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS)
    arrivals = [Arrival(0.0, EngineRequest(f"r{i}", (1,) * 128, sampling)) for i in range(REQUESTS)]
    driver = VirtualDriver(EngineCore(machine.config, model=machine.predictor), machine.runner(0), arrivals)
    began = time.process_time()
    driver.run(math.inf)
    return REQUESTS / (time.process_time() - began)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the median, the lowest and the highest of three runs."""
    argparse.ArgumentParser(prog="python -m benchmarks simulator-speed", description=__doc__).parse_args(argv)
    low, median, high = sorted(measure_speed() for _ in range(RUNS))
    print(
        f"{median:.0f} simulated requests/s of one core ({low:.0f} to {high:.0f}, {RUNS} runs of 1,024 requests; "
        f"{RUNNING} running, {OUTPUT_TOKENS} output tokens each)"
    )
