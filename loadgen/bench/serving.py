"""Serving speed over HTTP on the CPU: a random 134.5 M Llama, beside the machine's limits and beside transformers.

The model folder is made here (random weights, the packaged tokenizer), the server is started as a user would start it,
and the client runs on the same cores. Limits are measured in the same run: one stream against reading the weights once
per token, prefill against the matmul rate, batches against the bare linear layers of a step at that batch size.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from loadgen.bench import peers
from loadgen.bench.figures import OUTPUT, PREFILL, PROMPT, REPEATS, Figures, ratio
from loadgen.bench.live import CONFIG, make_model_folder, plan_for, run, server
from loadgen.bench.machine import describe
from loadgen.records import RequestRecord
from loadgen.workloads import fixed


async def at_once(url: str, count: int, prompt: int, output: int, seed: int) -> list[RequestRecord]:
    """`count` requests sent together, each answered with exactly `output` tokens."""
    lines = fixed(count, prompt, output)
    found = (await run(plan_for(url, seed, online=lines, closed_loop=True))).requests
    for record in found:
        if not record.ok or record.output_tokens != output:
            raise SystemExit(f"asked for {output} tokens, got {record.output_tokens} ({record.outcome} {record.error})")
    return found


async def batch_rate(url: str, streams: int, seed: int) -> float:
    """Output tokens per second of `streams` simultaneous requests, from the first sent to the last token."""
    found = await at_once(url, streams, PROMPT, OUTPUT, seed)
    begin = min(record.sent_at or 0.0 for record in found)
    return streams * OUTPUT / (max(record.chunk_at[-1] for record in found) - begin)


async def measure_server(url: str) -> Figures:
    await batch_rate(url, 4, 9000)
    one, prefill, eight, sixteen = [], [], [], []
    for repeat in range(REPEATS):
        (record,) = await at_once(url, 1, PROMPT, OUTPUT, 1 + repeat)
        one.append(1.0 / (record.tpot or 0.0))
        (record,) = await at_once(url, 1, PREFILL, 1, 50 + repeat)
        prefill.append(PREFILL / (record.ttft_sent or 0.0))
        eight.append(await batch_rate(url, 8, 100 + repeat))
        sixteen.append(await batch_rate(url, 16, 500 + repeat))
    return Figures(median(one), median(prefill), median(eight), median(sixteen))


def measure_limits(folder: Path, threads: int) -> tuple[Figures, dict[str, Any]]:
    """The best this machine could do, by the roofline of the linear layers alone."""
    command = [sys.executable, "-m", "loadgen.bench.limits", "--config", str(folder / "config.json")]
    found = json.loads(subprocess.run([*command, "--threads", str(threads)], capture_output=True, check=True).stdout)
    # A prompt's head is computed for its last token only.
    prefill_flops = PREFILL * (found["linear_flops_per_token"] - found["head_flops_per_token"])
    stack = found["linear_stack_seconds"]
    limits = Figures(
        one_stream=found["read_bandwidth"] / found["linear_bytes"],
        prefill=found["matmul_rate"] / prefill_flops * PREFILL,
        eight=8 / stack["8"],
        sixteen=16 / stack["16"],
    )
    return limits, found


def show(rows: dict[str, Figures]) -> None:
    print(f"{'':38} {'1 stream':>9} {'prefill 512':>12} {'8 x 128/64':>11} {'16 x 128/64':>12}   tok/s")
    for name, row in rows.items():
        digits = 2 if name.startswith("ratio") else 0
        cells = f"{row.one_stream:9.{digits}f} {row.prefill:12.{digits}f} {row.eight:11.{digits}f}"
        print(f"{name:38} {cells} {row.sixteen:12.{digits}f}")


def main(_argv: list[str] | None = None) -> None:
    threads = os.cpu_count() or 1
    print(f"serving: random 134.5 M Llama, bf16, {threads} threads, client on the same cores; {describe()}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        limits, found = measure_limits(folder, threads)
        with server(folder, threads, "--profile-dir", name, "--slo", "ttft_p99=60s,tbt_p99=1s") as url:
            ours = asyncio.run(measure_server(url))
        rows = {"tidemill, over HTTP": ours, "limit": limits, "ratio to the limit": ratio(ours, limits)}
        for peer, figures in peers.measure(CONFIG, threads).items():
            rows[peer] = figures
            rows[f"ratio to {peer}"[:38]] = ratio(ours, figures)
    print(f"read {found['read_bandwidth'] / 1e9:.1f} GB/s, matmul {found['matmul_rate'] / 1e9:.0f} GFLOP/s", end=", ")
    print(", ".join(f"linear layers at {n} rows {s * 1e3:.1f} ms" for n, s in found["linear_stack_seconds"].items()))
    show(rows)


if __name__ == "__main__":
    main()
