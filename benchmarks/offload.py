"""Weights that stream: a random model of twice the memory that its weights may take serves a batch.

    python -m benchmarks offload [--budget MiB] [--rows N] [--output TOKENS] [--rounds N] [--folder DISK]

Three arms in this process, one after another: all weights in memory; streaming with as many rows in a step as there
are requests, which is what the engine does by itself; and streaming with a small fixed batch for each run over the
model, the next when the last one has ended (as FlexGen's policy does where nobody balances it). The stream's limit is
what reading the same bytes from the same folder takes and nothing else, measured before and after every round of an
arm, as a disk's speed changes by itself: a row of a step gives at most a token for it.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from benchmarks.live import CONFIG
from benchmarks.machine import describe
from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.build import build_engine, plan_launch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.cpu.weight_file import WeightFile
from engine.execution.offload import Offload

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
LAYER_BYTES, FIXED_BYTES = 23.6e6, 33.6e6  # of this shape in bfloat16
PROMPT, FLEXGEN_BATCH = 8, 4
PROFILE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Arm:
    """`batch`: requests that run at a time, and the next so many when all of them have ended."""

    name: str
    streams: bool
    batch: int
    requests: int


@dataclass(frozen=True, slots=True)
class Result:
    """`floor`: seconds that the stream of one step takes by itself; 0 where nothing streams."""

    tokens: int
    seconds: float
    floor: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def model_folder(folder: Path, layers: int, **changes: object) -> Path:
    """A configuration of so many layers; the weights are made up."""
    config = {**CONFIG, **SHAPE, "num_hidden_layers": layers, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def configuration(model: Path, arm: Arm, budget: float) -> EngineConfig:
    """`budget` in bytes."""
    return EngineConfig(
        model=str(model),
        device="cpu",
        load_format="dummy",
        offload_weights=f"{budget / 2**30:.6f}" if arm.streams else "off",
        profile_seconds=PROFILE_SECONDS,
        max_model_len=512,
        num_gpu_blocks_override=2048,
        enable_prefix_caching=False,
    )


@contextmanager
def stream_by_itself(disk: Path, offload: Offload | None) -> Iterator[Callable[[], float]]:
    """What measures the seconds that reading the layers of one step takes and nothing else; 0 where nothing streams."""
    if offload is None:
        yield lambda: 0.0
        return
    file, count = WeightFile(disk, offload.layer_bytes, len(offload.streamed)), len(offload.streamed)
    data = torch.randint(0, 256, (offload.layer_bytes,), dtype=torch.uint8)
    for place in range(count):
        file.keep(place, [(0, data)])
    try:
        yield lambda: median(file.seconds() for _ in range(3)) * count
    finally:
        file.close()


async def serve(engine: Engine, arm: Arm, output: int, number: int) -> tuple[int, float]:
    """The arm's requests from the first to the end of the last: tokens and seconds."""
    draw, tokens = np.random.default_rng(number), 0
    began = time.perf_counter()
    for first in range(0, arm.requests, arm.batch):
        requests = [
            EngineRequest(
                f"{arm.name}-{number}-{index}",
                tuple(draw.integers(2, 1000, PROMPT).tolist()),
                SamplingParams(max_tokens=output, temperature=0.0),
                RequestClass.OFFLINE,
                final_only=True,
            )
            for index in range(first, min(first + arm.batch, arm.requests))
        ]
        for stream in await engine.submit(requests):
            last = await anext(stream)
            if last.error is not None:
                raise last.error.to_error()
            tokens += len(last.token_ids)
    return tokens, time.perf_counter() - began


async def measure(model: Path, disk: Path, arm: Arm, budget: float, output: int, rounds: int) -> Result:
    """Load, serve in rounds, stop; the stream by itself around every round."""
    config = configuration(model, arm, budget)
    offload = plan_launch(config).offload
    if arm.streams and offload is None:
        raise SystemExit("the model fits in the budget: nothing streams")
    with stream_by_itself(disk, offload) as floor:
        engine = build_engine(config, say=lambda line: print(f"  {arm.name}: {line}", flush=True))
        await engine.start()
        try:
            floors, served = [floor()], []
            for number in range(rounds):
                served.append(await serve(engine, arm, output, number))
                floors.append(floor())
        finally:
            await engine.stop()
    around = mean((before + after) / 2 for before, after in pairwise(floors))
    return Result(sum(tokens for tokens, _ in served), sum(seconds for _, seconds in served), around)


def report(arms: Sequence[Arm], results: Sequence[Result]) -> str:
    """A line each; `of the limit`: tokens/s over those of a step that takes the stream's time alone."""
    lines = [f"{'arm':28} {'rows':>5} {'tokens/s':>9} {'stream, ms':>11} {'limit':>8} {'of the limit':>13}"]
    for arm, result in zip(arms, results, strict=True):
        line = f"{arm.name:28} {arm.batch:5d} {result.rate:9.1f}"
        if result.floor:
            limit = arm.batch / result.floor
            line += f" {result.floor * 1e3:11.0f} {limit:8.1f} {result.rate / limit:13.2f}"
        lines.append(line)
    by_name = dict(zip((arm.name for arm in arms), results, strict=True))
    ratio = by_name["streaming"].rate / by_name["streaming, fixed batches"].rate
    return "\n".join([*lines, f"streaming gives {ratio:.1f} x the tokens/s of fixed batches"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--budget", type=float, default=256.0, help="MiB that weights may take (default: 256)")
    parser.add_argument("--rows", type=int, default=32, help="requests of the batch (default: 32)")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer (default: 32)")
    parser.add_argument("--rounds", type=int, default=3, help="of each arm (default: 3)")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to stream from (default: a temporary one)")
    return parser.parse_args(argv)


def arms_for(rows: int) -> list[Arm]:
    return [
        Arm("in memory", False, rows, rows),
        Arm("streaming", True, rows, rows),
        Arm("streaming, fixed batches", True, min(FLEXGEN_BATCH, rows), min(FLEXGEN_BATCH, rows)),
    ]


async def compare(
    model: Path, disk: Path, arms: Sequence[Arm], budget: float, output: int, rounds: int
) -> list[Result]:
    return [await measure(model, disk, arm, budget, output, rounds) for arm in arms]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    budget = options.budget * 2**20
    layers = round((2 * budget - FIXED_BYTES) / LAYER_BYTES)
    print(f"offload: {describe()}; {layers} layers, about {2 * budget / 2**20:.0f} MiB; budget {options.budget:g} MiB")
    with tempfile.TemporaryDirectory() as name:
        arms, model = arms_for(options.rows), model_folder(Path(name), layers)
        disk = options.folder or Path(name) / "disk"
        os.environ["XDG_CACHE_HOME"] = str(disk)
        results = asyncio.run(compare(model, disk, arms, budget, options.output, options.rounds))
    print(report(arms, results))


if __name__ == "__main__":
    main()
