"""Engines that can stand side by side on one machine: how each is found, started and spoken to.

A peer is found by a flag or an environment variable that names its virtual environment (or its binary) and is started
behind its own server with OpenAI's completions: as many threads, the same checkpoint, the same type, no prefix cache.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine import __version__
from loadgen.bench import live

SEQUENCES = 64
"""Most requests in one step, for every engine that has such a limit."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One server. `command` makes its command line from a folder with the checkpoint and a port."""

    name: str
    version: str
    command: Callable[[Path, int], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"
    strict: bool = False
    """It refuses the fields that force a length; the checkpoint has no end anyway."""
    offline: dict[str, Any] | None = None
    """What a request of the lower class says in its body; None for an engine without classes."""
    open: tuple[str, ...] = live.OPEN
    """Its metrics of requests that run or wait."""

    def settings(self) -> dict[str, Any]:
        """How a plan of the load generator differs for this engine."""
        return {"ignore_eos": not self.strict, **({"offline_body": self.offline} if self.offline else {})}


def start_all(engines: Sequence[Engine], folder: Path, stack: ExitStack) -> Iterator[tuple[Engine, live.Served]]:
    """Starts the servers one after the other, until the stack is closed. A peer that does not start is said and left
    out; what a server prints goes to a file beside the checkpoint's folder."""
    for engine in engines:
        log = folder.parent / f"{engine.name.split()[0]}.log"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **engine.environment}
        out = stack.enter_context(log.open("wb"))
        command = partial(engine.command, folder)
        try:
            served = live.serving(command, environment, engine.ready, folder=folder.parent, out=out)
            yield engine, stack.enter_context(served)
        except SystemExit as error:
            said = log.read_text(errors="replace").splitlines()[-12:]
            print(f"{engine.name}: {error}; its last lines:", *said, sep="\n  ", flush=True)
            if engine is engines[0]:
                raise


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where the peers are; the same threads and type for all."""
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every engine (default: all cores)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    for name, (_, what, fallback) in FINDERS.items():
        variable = f"TIDEMILL_BENCH_{name.upper()}"
        default = os.environ.get(variable, fallback)
        parser.add_argument(f"--{name}", default=default, metavar="PATH", help=f"{what}; '' for without (${variable})")


def found(args: argparse.Namespace) -> list[Engine]:
    """The peers that are installed where the flags say; one line for each that is not."""
    engines = []
    for name, (find, what, _) in FINDERS.items():
        where = getattr(args, name)
        if not where:
            print(f"{name}: not measured (--{name}: {what})")
            continue
        engine = find(where, args.threads, args.dtype)
        if engine.version:
            engines.append(engine)
        else:
            print(f"{name}: there is none in {where}")
    return engines


def tidemill(threads: int, dtype: str, *flags: str) -> Engine:
    """This server, as a user would start it."""

    def command(folder: Path, port: int) -> list[str]:
        own = [sys.executable, "-m", "gateway", "serve", str(folder), "--port", str(port)]
        same = ["--served-model-name", "model", "--dtype", dtype, "--max-num-seqs", str(SEQUENCES)]
        kept = ["--profile-dir", str(folder), "--state-dir", str(folder / "state"), "--no-enable-prefix-caching"]
        return [*own, *same, *kept, "--threads", str(threads), *flags]

    return Engine("tidemill", __version__, command, {"OMP_NUM_THREADS": str(threads)}, ready="/ready")


def vllm(where: str, threads: int, dtype: str) -> Engine:
    """vLLM's CPU build from its virtual environment, with Intel's OpenMP where the wheel brought it; classes are
    priorities (the lower value goes first)."""
    library = Path(where) / "lib" / "libiomp5.so"
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **({"LD_PRELOAD": str(library)} if library.exists() else {}),
    }

    def command(folder: Path, port: int) -> list[str]:
        own = [str(Path(where, "bin", "vllm")), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        same = ["--served-model-name", "model", "--dtype", dtype, "--max-num-seqs", str(SEQUENCES)]
        kept = ["--generation-config", "vllm", "--no-enable-prefix-caching", "--scheduling-policy", "priority"]
        return [*own, *same, *kept]

    counts = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    version = version_in(where, "vllm-cpu", "vllm")
    return Engine("vLLM", version, command, environment, offline={"priority": 10}, open=counts)


def transformers(where: str, threads: int, dtype: str) -> Engine:
    """`transformers serve` with continuous batching; it wants accelerate."""

    def command(folder: Path, port: int) -> list[str]:
        own = [str(Path(where, "bin", "python")), "-m", "transformers.cli.transformers", "serve", folder.name]
        same = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", dtype]
        return [*own, *same, "--continuous-batching"]

    version = version_in(where, "transformers") if version_in(where, "accelerate") else ""
    return Engine("transformers serve", version, command, {"OMP_NUM_THREADS": str(threads)}, strict=True)


def version_in(where: str, *names: str) -> str:
    """Name and version of the first of these packages that a virtual environment has; empty without one."""
    python = Path(where, "bin", "python")
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    for name in names if python.exists() else ():
        done = subprocess.run([str(python), "-c", code, name], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return f"{name} {done.stdout.strip()}"
    return ""


FINDERS: dict[str, tuple[Callable[[str, int, str], Engine], str, str]] = {
    "vllm": (vllm, "virtual environment with vllm-cpu", ""),
    "transformers": (transformers, "virtual environment with transformers[serving] and accelerate", sys.prefix),
}
"""By flag: how it is made from its place, threads and type; what the place is; where it is looked for by default."""
