"""What transformers' modules cost beside layers of our own: one random model by either, steps in alternation.

    python -m benchmarks modules [--experts FAMILY] [--rounds N] [--threads N]

A Llama of 134.5 M parameters in bfloat16, twice in this process, with the same threads, so that a busy machine is busy
for both: read the ratios, of the medians and of the fastest steps. With `--experts`, a mixture of experts whose experts
are run by layers of our own, or by transformers' grouped product; both have our attention and linear layers. Set
OMP_WAIT_POLICY=passive, as the server does where native kernels run.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.frame import Table
from benchmarks.live import CONFIG, make_model_folder
from benchmarks.machine import describe
from engine.build import build_runner, plan_launch
from engine.config import EngineConfig
from engine.machine.facts import read_processor
from engine.profiling.calibration import ShapeRunner
from engine.profiling.sweep import StepShape

SHAPES = {
    "1 decode": StepShape(1, 192),
    "8 decodes": StepShape(8, 192),
    "32 decodes": StepShape(32, 192),
    "prompt of 512": StepShape(chunks=((0, 512),)),
}
IMPLEMENTATIONS = ("own", "transformers")
_COMMON = {
    "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 384, "intermediate_size": 1024, "norm_topk_prob": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 1536, "sliding_window": None,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 32, "num_experts_per_tok": 4,
        "intermediate_size": 512, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
BLOCKS = 1200  # of KV: room for the longest shape
TABLE = Table({
    "step": "14", "own ms": "9.2f", "transformers ms": "15.2f", "times": "6.2f", "fastest own": "9.2f",
    "transformers": "12.2f", "times ": "6.2f",
})  # fmt: skip


def model_of(experts: str | None) -> Mapping[str, Any]:
    return CONFIG if experts is None else {"model_type": experts, **_COMMON, **EXPERTS[experts]}


def experts_runner(folder: Path, implementation: str, threads: int) -> ShapeRunner:
    """The runner of a mixture of experts, with experts of our own or those of transformers."""
    if implementation == "own":
        return runner_of(folder, "transformers", threads)
    with patch("engine.models.transformers_model.replace_experts"):
        return runner_of(folder, "transformers", threads)


def runner_of(folder: Path, implementation: str, threads: int) -> ShapeRunner:
    """The runner that `tidemill serve --model-impl` would use, of invented weights."""
    config = EngineConfig(
        model=str(folder), model_impl=implementation, device="cpu", load_format="dummy", threads=threads,
        num_gpu_blocks_override=BLOCKS,
    )  # fmt: skip
    runner, plan = build_runner(config, plan_launch(config))
    print(f"{implementation}: {plan.precision}, kernels {plan.kernels}, {plan.threads} threads", flush=True)
    return ShapeRunner(runner, plan.limits, plan.spec.vocab_size)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks modules", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each arm and shape (15)")
    parser.add_argument("--threads", type=int, default=read_processor().cores, help="of both arms (one per core)")
    parser.add_argument("--experts", choices=list(EXPERTS), help="compare experts of a model of this family")
    options = parser.parse_args(argv)
    print(f"modules: {describe()}")
    with tempfile.TemporaryDirectory() as name:
        make_model_folder(Path(name), model_of(options.experts))
        make = runner_of if options.experts is None else experts_runner
        arms = [make(Path(name), each, options.threads) for each in IMPLEMENTATIONS]
        print(TABLE.heading)
        for title, shape in SHAPES.items():
            rounds = [[arm.measure(shape) for arm in arms] for _ in range(options.rounds + 1)][1:]
            own, theirs = ([seconds * 1e3 for seconds in arm] for arm in zip(*rounds, strict=True))
            ratios = [one / other for one, other in zip(theirs, own, strict=True)]
            fastest = min(own), min(theirs), min(theirs) / min(own)
            print(TABLE.line(title, median(own), median(theirs), median(ratios), *fastest), flush=True)


if __name__ == "__main__":
    main()
