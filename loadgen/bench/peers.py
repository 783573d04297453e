"""The same model and work in other engines, where they are installed: transformers' generate, in process, no HTTP."""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from statistics import median
from typing import Any

from loadgen.bench.figures import OUTPUT, PREFILL, PROMPT, REPEATS, Figures


def measure(config: dict[str, Any], threads: int) -> dict[str, Figures]:
    """Figures by peer, each in a process of its own so that one cannot slow another."""
    command = [sys.executable, "-m", "loadgen.bench.peers", json.dumps(config), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"transformers could not be measured: {done.stderr.strip().splitlines()[-1:]}")
        return {}
    return {"transformers generate (no HTTP)": Figures(**json.loads(done.stdout.splitlines()[-1]))}


def transformers_figures(config: dict[str, Any], threads: int) -> Figures:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()

    def seconds(batch: int, length: int, output: int) -> float:
        ids = torch.randint(5, 40_000, (batch, length))
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - start

    with torch.inference_mode():
        seconds(2, 16, 4)
        whole = [seconds(1, PROMPT, OUTPUT) for _ in range(REPEATS)]
        first = [seconds(1, PROMPT, 1) for _ in range(REPEATS)]
        prefill = [seconds(1, PREFILL, 1) for _ in range(REPEATS)]
        eight = [seconds(8, PROMPT, OUTPUT) for _ in range(REPEATS)]
        sixteen = [seconds(16, PROMPT, OUTPUT) for _ in range(REPEATS)]
    return Figures(
        one_stream=(OUTPUT - 1) / (median(whole) - median(first)),
        prefill=PREFILL / median(prefill),
        eight=8 * OUTPUT / median(eight),
        sixteen=16 * OUTPUT / median(sixteen),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(transformers_figures(json.loads(sys.argv[1]), int(sys.argv[2])))))
