"""Lines of a report: the machine, its libraries, and the model and cache of a launch plan.

The module imports torch only to find GPUs.
"""

import importlib
import importlib.metadata
import os
import platform
from typing import Any

from engine.machine.facts import read_processor

_IMPLEMENTATIONS = {"own": "native layers", "transformers": "transformers modules"}
_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn")


def report_machine(tidemill_version: str) -> list[str]:
    """Return lines for Python, the processor, memory, GPUs and library versions."""
    processor = read_processor()
    features = " ".join(processor.shown_features) or "vector features unknown"
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
    """Return lines for the model and its cache. `plan` is an engine.execution.plan.LaunchPlan."""
    tokens = plan.num_blocks * plan.limits.block_size
    by = _IMPLEMENTATIONS[plan.implementation]
    about = "about " if plan.device == "cuda" else ""
    return [
        line("model", f"{name}: {plan.spec.architecture}, {plan.model.num_parameters:,} parameters, {by}"),
        line("", f"{plan.precision} on {plan.device}, weights {size(plan.weight_bytes)}"),
        line("cache", f"{about}{tokens:,} tokens ({plan.num_blocks:,} blocks of {plan.limits.block_size})"),
        line("context", f"{plan.limits.max_model_len:,} tokens"),
        *(line("adapter", f"{each.name}: {each}") for each in plan.adapters),
        *(line("note", note) for note in plan.notes),
    ]


def line(label: str, text: str) -> str:
    """Return a line of a report."""
    return f"{label:<10} {text}"


def size(num_bytes: int) -> str:
    """Return the bytes in GiB or MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size(total)} in total"


def _gpus() -> list[str]:
    cuda = importlib.import_module("torch").cuda
    if not cuda.is_available():
        return [line("gpu", "none usable by torch")]
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
