"""OpenVINO's continuous batching as a worker (see in_process.py), run by the Python of its own virtual environment.

There is no server of it among Python packages, so it is measured without HTTP: tokenizer, scheduler and model in one
process, all requests of a line added at once, then one step after the other. Greedy, never ended before its length.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

import openvino
import openvino_genai

SEQUENCES, STEP_TOKENS, CACHE_GIB = 64, 512, 1


def precision_of(dtype: str) -> str:
    """Return the precision that the processor has: without bfloat16 OpenVINO computes in float32."""
    known = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "bf16" if dtype == "bfloat16" and "BF16" in known else "f32"


def make_pipeline(folder: str, threads: int, precision: str) -> Any:
    """The cache is of the model's type: its default would be 8 bits, less than any other engine keeps."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = SEQUENCES, STEP_TOKENS
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    settings = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": str(threads),
        "ENABLE_CPU_PINNING": False,
    }
    return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)


def answer(pipeline: Any, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All requests together: of each the prompt's tokens, and how many tokens came when."""
    begin = time.perf_counter()
    found, handles = [], []
    tokenizer = pipeline.get_tokenizer()
    for number, body in enumerate(bodies):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = body["max_tokens"], True, False
        config.set_eos_token_id(0)  # the checkpoint names no end, and -1 is refused though ends are ignored
        ids = tokenizer.encode(body["prompt"]).input_ids
        handles.append(pipeline.add_request(number, ids, config))
        found.append({"input": ids.shape[1], "at": [], "tokens": []})
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter() - begin
        for row, handle in zip(found, handles, strict=True):
            while handle.can_read():
                row["at"].append(now)
                row["tokens"].append(sum(len(output.generated_ids) for output in handle.read().values()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the model in OpenVINO's form")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no line of ours
    precision = precision_of(args.dtype)
    pipeline = make_pipeline(args.folder, args.threads, precision)
    about = f"OpenVINO runs in process, without HTTP, weights and cache computed in {precision}"
    print(json.dumps({"ready": about}), file=out, flush=True)
    for line in sys.stdin:
        found = answer(pipeline, json.loads(line)["requests"])
        print(json.dumps({"requests": found}), file=out, flush=True)


if __name__ == "__main__":
    main()
