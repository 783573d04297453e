"""What transformers' modules cost beside layers of our own: one random model by either, steps in alternation.

    python -m benchmarks modules [--rounds N] [--threads N]

A Llama of 134.5 M parameters in bfloat16, twice in this process, with the same threads, so that a busy machine is busy
for both: read the ratios, of the medians and of the fastest steps.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.frame import Table
from benchmarks.live import make_model_folder
from benchmarks.machine import describe
from engine.build import build_runner, plan_launch
from engine.config import EngineConfig
from engine.execution.cpu.transformers_device import TransformersDevice
from engine.machine.facts import read_processor
from engine.profiling.calibration import ShapeRunner
from engine.profiling.sweep import StepShape

SHAPES = {
    "1 decode": StepShape(1, 192),
    "8 decodes": StepShape(8, 192),
    "prompt of 512": StepShape(chunks=((0, 512),)),
}
IMPLEMENTATIONS = ("own", "transformers")
BLOCKS = 1200  # of KV: room for the longest shape
TABLE = Table({
    "step": "14", "own ms": "9.2f", "transformers ms": "15.2f", "times": "6.2f", "fastest own": "9.2f",
    "transformers": "12.2f", "times ": "6.2f",
})  # fmt: skip


def runner_of(folder: Path, implementation: str, threads: int) -> ShapeRunner:
    """The runner that `tidemill serve --model-impl` would use, of invented weights."""
    config = EngineConfig(
        model=str(folder), model_impl=implementation, device="cpu", load_format="dummy", threads=threads,
        num_gpu_blocks_override=BLOCKS,
    )  # fmt: skip
    runner, plan = build_runner(config, plan_launch(config))
    known = f", layers known {runner.device.known_layers}" if isinstance(runner.device, TransformersDevice) else ""
    print(f"{implementation}: {plan.precision}, kernels {plan.kernels}, {plan.threads} threads{known}", flush=True)
    return ShapeRunner(runner, plan.limits, plan.spec.vocab_size)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks modules", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each arm and shape (15)")
    parser.add_argument("--threads", type=int, default=read_processor().cores, help="of both arms (one per core)")
    options = parser.parse_args(argv)
    print(f"modules: {describe()}")
    with tempfile.TemporaryDirectory() as name:
        make_model_folder(Path(name))
        arms = [runner_of(Path(name), each, options.threads) for each in IMPLEMENTATIONS]
        print(TABLE.heading)
        for title, shape in SHAPES.items():
            rounds = [[arm.measure(shape) for arm in arms] for _ in range(options.rounds + 1)][1:]
            own, theirs = ([seconds * 1e3 for seconds in arm] for arm in zip(*rounds, strict=True))
            ratios = [one / other for one, other in zip(theirs, own, strict=True)]
            fastest = min(own), min(theirs), min(theirs) / min(own)
            print(TABLE.line(title, median(own), median(theirs), median(ratios), *fastest), flush=True)


if __name__ == "__main__":
    main()
