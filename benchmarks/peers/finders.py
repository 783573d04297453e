"""Where engines are found and how each is started: as many threads, the same checkpoint and type, no prefix cache.

A peer is found by a flag or an environment variable that names its virtual environment (or its binary).
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.engine import Engine
from engine import __version__

SEQUENCES = 64
"""Most requests in one step, for every engine that has such a limit."""
SLOTS, CONTEXT = 16, 2_048
"""llama.cpp keeps a part of its cache for each request that it may run: as many as are ever asked at once."""
SCRIPTS = Path(__file__).parent


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str] | None = None) -> None:
    """Add the places of all or the named peers; the same threads and type for all."""
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every engine (default: all cores)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    for name in FINDERS if names is None else names:
        _, what = FINDERS[name]
        variable = f"TIDEMILL_BENCH_{name.upper()}"
        default = os.environ.get(variable, "")
        parser.add_argument(f"--{name}", default=default, metavar="PATH", help=f"{what}; '' for without (${variable})")


def found(args: argparse.Namespace) -> list[Engine]:
    """The peers that are installed where the flags say; one line for each that is not."""
    engines = []
    for name, (find, what) in FINDERS.items():
        where = getattr(args, name, None)
        if where is None:
            continue
        if not where:
            print(f"{name}: not measured (--{name}: {what})")
            continue
        engine = find(where, args.threads, args.dtype)
        if engine.version:
            engines.append(engine)
        else:
            print(f"{name}: not measured, {where} is no {what}")
    return engines


def line_of(words: str, *flags: str, **values: object) -> Callable[..., list[str]]:
    """Return the function that makes a command line from a folder with the checkpoint and a port.

    `words`: a template with {folder}, {port}, {beside} (the folder's parent) and `values`; no value is split.
    """

    def command(folder: Path, port: int = 0) -> list[str]:
        known = {"folder": folder, "beside": folder.parent, "port": port, **values}
        return [*(word.format(**known) for word in words.split()), *flags]

    return command


def tidemill(threads: int, dtype: str, *flags: str) -> Engine:
    """This server, as a user would start it."""
    command = line_of(
        "env XDG_CACHE_HOME={folder} {python} -m gateway serve {folder} --port {port} --served-model-name model "
        "--dtype {dtype} --max-num-seqs {rows} --state-dir {folder}/state --no-enable-prefix-caching "
        "--threads {threads}",
        *flags, python=sys.executable, dtype=dtype, rows=SEQUENCES, threads=threads,
    )  # fmt: skip
    return Engine("tidemill", __version__, command, {"OMP_NUM_THREADS": str(threads)}, ready="/ready")


def vllm(where: str, threads: int, dtype: str, *flags: str, tokens: int | None = None, rows: int = SEQUENCES) -> Engine:
    """Return vLLM's CPU build in the virtual environment `where`, with Intel's OpenMP if the wheel brought it.

    Classes are priorities (the lower value goes first). `tokens` and `rows` limit a step; None: vLLM's default.
    """
    library = Path(where) / "lib" / "libiomp5.so"
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **({"LD_PRELOAD": str(library)} if library.exists() else {}),
    }
    step = [] if tokens is None else ["--max-num-batched-tokens", str(tokens), "--max-model-len", "2048"]
    command = line_of(
        "{where}/bin/vllm serve {folder} --host 127.0.0.1 --port {port} --served-model-name model --dtype {dtype} "
        "--max-num-seqs {rows} --generation-config vllm --no-enable-prefix-caching --scheduling-policy priority",
        *step, *flags, where=where, dtype=dtype, rows=rows,
    )  # fmt: skip
    counts = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    version = version_in(where, "vllm-cpu", "vllm")
    name = "vLLM" if tokens is None else f"vLLM {tokens}/{rows}"
    return Engine(name, version, command, environment, offline={"priority": 10}, open=counts)


def vllm_with_plugin(where: str, threads: int, dtype: str, slo: str) -> Engine:
    """Return the same vLLM with the scheduler of `integrations/vllm`, which must be installed there."""
    options = json.dumps({"tidemill": {"slo": slo, "fit_dir": ""}})
    flags = ["--scheduler-cls", "tidemill_vllm.Scheduler", "--additional-config", options]
    engine = vllm(where, threads, dtype, *flags)
    environment = {**engine.environment, "VLLM_PLUGINS": "tidemill"}
    version = f"{engine.version}, tidemill-vllm {version_in(where, 'tidemill-vllm') or 'missing'}"
    return replace(engine, name="tidemill-vllm in vLLM", version=version, environment=environment)


def openvino(where: str, threads: int, dtype: str) -> Engine:
    """openvino-genai's continuous batching, in process: no package of Python brings a server of it. The checkpoint is
    exported by optimum-intel."""
    prepare = line_of(
        "{where}/bin/optimum-cli export openvino --model {folder} --task text-generation-with-past "
        "--weight-format fp32 {beside}/openvino",
        where=where,
    )
    # Isolated (-I): modules beside the script would stand before packages of the same name.
    command = line_of(
        "{where}/bin/python -I {scripts}/openvino_worker.py {beside}/openvino --threads {threads} --dtype {dtype}",
        where=where, scripts=SCRIPTS, threads=threads, dtype=dtype,
    )  # fmt: skip
    version = version_in(where, "openvino-genai") if version_in(where, "optimum-intel") else ""
    return Engine("OpenVINO in process", version, command, prepare=prepare, http=False)


def llama(where: str, threads: int, dtype: str) -> Engine:
    """llama.cpp: its own server where there is one, else that of llama-cpp-python, which runs one request at a time."""
    place = Path(where)
    python, binary = sys.executable, place
    if place.is_dir():
        python, binary = str(place / "bin" / "python"), place / "bin" / "llama-server"
    prepare = line_of(
        "{python} -I {scripts}/write_gguf.py {folder} {beside}/model.gguf", python=python, scripts=SCRIPTS
    )
    if not binary.is_file():
        command = line_of(
            "{python} -m llama_cpp.server --model {beside}/model.gguf --model_alias model --host 127.0.0.1 "
            "--port {port} --n_threads {threads} --n_threads_batch {threads} --n_ctx {context} "
            "--interrupt_requests false --verbose false",
            python=python, threads=threads, context=CONTEXT,
        )  # fmt: skip
        version = version_in(where, "llama-cpp-python")
        return Engine("llama-cpp-python", version, command, prepare=prepare, ready="/v1/models", strict=True)
    cache = ["--cache-type-k", "f32", "--cache-type-v", "f32"] if dtype == "float32" else []
    command = line_of(
        "{binary} --model {beside}/model.gguf --alias model --host 127.0.0.1 --port {port} --threads {threads} "
        "--threads-batch {threads} --no-cache-prompt --cache-ram 0 --parallel {slots} --ctx-size {context}",
        *cache, binary=binary, threads=threads, slots=SLOTS, context=SLOTS * CONTEXT,
    )  # fmt: skip
    return Engine("llama.cpp", version_of(binary), command, prepare=prepare)


def version_of(binary: Path) -> str:
    """What llama.cpp's server says of itself; empty where it does not run."""
    try:
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    found = re.search(r"version: (.+)", done.stdout + done.stderr)
    return found[1] if found else ""


def version_in(where: str, *names: str) -> str:
    """Return name and version of the first package that a virtual environment has; empty without one."""
    python = Path(where, "bin", "python")
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    for name in names if python.exists() else ():
        done = subprocess.run([str(python), "-c", code, name], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return f"{name} {done.stdout.strip()}"
    return ""


FINDERS: dict[str, tuple[Callable[[str, int, str], Engine], str]] = {
    "vllm": (vllm, "virtual environment with vllm-cpu"),
    "openvino": (openvino, "virtual environment with openvino-genai and optimum-intel"),
    "llama": (llama, "llama-server or virtual environment with it or with llama-cpp-python[server]"),
}
"""By flag: how it is made from its place, threads and type; and a description of the place."""
