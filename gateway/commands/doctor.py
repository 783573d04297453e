"""`tidemill doctor`: this machine in a few lines, and what a configuration would run on it.

Knows the launch plan by its fields only; whatever touches torch is asked through it or imported here when needed.
"""

import importlib
import importlib.metadata
import os
import platform
from typing import Any

from engine.machine.facts import read_processor

_WHOSE = {"own": "layers of our own", "transformers": "modules of transformers"}
_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn")


def report_machine(tidemill_version: str) -> list[str]:
    """Python, processor, memory, GPUs and library versions, a line each."""
    processor = read_processor()
    features = " ".join(processor.shown_features) or "no vector features known"
    return [
        line("tidemill", tidemill_version),
        line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        line("cpu", processor.name),
        line("", f"{processor.cores} cores, {processor.threads} threads for this process; {features}"),
        line("memory", _memory()),
        *_gpus(),
        line("libraries", ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)),
    ]


def report_launch(plan: Any, name: str) -> list[str]:
    """What would run. `plan` is an engine.execution.plan.LaunchPlan."""
    tokens = plan.num_blocks * plan.limits.block_size
    whose = _WHOSE[plan.implementation]
    about = "about " if plan.device == "cuda" else ""
    return [
        line(
            "model",
            f"{name}: {plan.spec.architecture}, {plan.model.num_parameters:,} parameters, {whose}",
        ),
        line("", f"{plan.precision} on {plan.device}, weights {size(plan.weight_bytes)}"),
        line("cache", f"{about}{tokens:,} tokens ({plan.num_blocks:,} blocks of {plan.limits.block_size})"),
        line("context", f"{plan.limits.max_model_len:,} tokens"),
        *(line("adapter", f"{each.name}: {each}") for each in plan.adapters),
        *(line("note", note) for note in plan.notes),
    ]


def line(label: str, text: str) -> str:
    """A line of a report."""
    return f"{label:<10} {text}"


def size(num_bytes: int) -> str:
    """Bytes in a unit that people read."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size(total)} in the machine"


def _gpus() -> list[str]:
    cuda = importlib.import_module("torch").cuda
    if not cuda.is_available():
        return [line("gpu", "none that torch can use")]
    lines = []
    for index in range(cuda.device_count()):
        facts = cuda.get_device_properties(index)
        free, total = cuda.mem_get_info(index)
        memory = f"{size(total)}, {size(free)} free"
        lines.append(line("gpu", f"{facts.name}, {memory}, compute capability {facts.major}.{facts.minor}"))
    return lines


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
