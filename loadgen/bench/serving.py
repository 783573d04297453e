"""Serving speed over HTTP on the CPU: a random 134.5 M Llama, beside the machine's limits and beside transformers.

The model folder is made here (random weights, the packaged tokenizer), the server is started as a user would start it,
and the client runs on the same cores. Limits are measured in the same run: one stream against reading the weights once
per token, prefill against the matmul rate, batches against the bare linear layers of a step at that batch size.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson

from loadgen.bench import peers
from loadgen.bench.figures import OUTPUT, PREFILL, PROMPT, REPEATS, Figures, ratio
from loadgen.bench.machine import describe

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PACKAGED = Path(__file__).resolve().parents[2] / "engine" / "models" / "demo" / "weights"
"""Where the tokenizer comes from."""


def make_model_folder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PACKAGED / name, folder / name)


@contextmanager
def server(folder: Path, threads: int, *flags: str) -> Iterator[str]:
    """`tidemill serve` on a free port with further flags; yields its base URL. `threads` 0: its own choice."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gateway", "serve", str(folder), "--load-format", "dummy", "--port", str(port)]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    process = subprocess.Popen(
        [*command, "--served-model-name", "model", "--no-enable-prefix-caching", *flags], env=environment
    )
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(wait_ready(url, process))
        yield url
    finally:
        process.terminate()
        process.wait(30)


async def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(1800):
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit("the server was not ready within three minutes")


async def stream(session: aiohttp.ClientSession, url: str, prompt: list[int], output: int) -> list[float]:
    """One streamed completion of exactly `output` tokens; the times of its start and of every data line."""
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": output,
        "min_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times = [time.perf_counter()]
    async with session.post(f"{url}/v1/completions", data=orjson.dumps(body)) as answer:
        if answer.status != 200:
            raise SystemExit(await answer.text())
        last = b""
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                last = line
    usage = orjson.loads(last[6:])["usage"]
    if usage["completion_tokens"] != output:
        raise SystemExit(f"asked for {output} tokens, got {usage['completion_tokens']}")
    return times[:-1]


def prompt_of(length: int, salt: int) -> list[int]:
    return [(salt * 7919 + 31 * i) % 40_000 + 5 for i in range(length)]


async def batch_rate(session: aiohttp.ClientSession, url: str, streams: int, salt: int) -> float:
    """Output tokens per second of `streams` simultaneous requests, from the first sent to the last token."""
    start = time.perf_counter()
    await asyncio.gather(*[stream(session, url, prompt_of(PROMPT, salt + i), OUTPUT) for i in range(streams)])
    return streams * OUTPUT / (time.perf_counter() - start)


async def measure_server(url: str) -> Figures:
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await batch_rate(session, url, 4, 9000)
        one, prefill, eight, sixteen = [], [], [], []
        for repeat in range(REPEATS):
            times = await stream(session, url, prompt_of(PROMPT, 1 + repeat), OUTPUT)
            one.append((OUTPUT - 1) / (times[-1] - times[1]))
            times = await stream(session, url, prompt_of(PREFILL, 50 + repeat), 1)
            prefill.append(PREFILL / (times[1] - times[0]))
            eight.append(await batch_rate(session, url, 8, 100 + 20 * repeat))
            sixteen.append(await batch_rate(session, url, 16, 500 + 20 * repeat))
    return Figures(median(one), median(prefill), median(eight), median(sixteen))


def measure_limits(folder: Path, threads: int) -> tuple[Figures, dict[str, Any]]:
    """The best this machine could do, by the roofline of the linear layers alone."""
    command = [sys.executable, "-m", "engine.execution.roofline", "--config", str(folder / "config.json")]
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
