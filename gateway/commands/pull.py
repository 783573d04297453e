"""`tidemill pull`: show the size of a model on the Hugging Face hub, then download it with the hub's library.

Files go into the hub's cache, where `tidemill serve` finds them. A broken connection resumes where it broke. An
interrupted pull keeps complete files and downloads the unfinished one again.
"""

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.machine.folders import user_folder
from gateway.commands.report import line, size


def run(name: str, revision: str | None, say: Callable[[str], None]) -> int:
    """Download a model and return the exit code. Raise ConfigError or ModelLoadError on failure."""
    if not {"HF_HOME", "HF_HUB_CACHE"} & os.environ.keys():
        user_folder("cache", "HF_HOME")  # raises without a home folder, where the hub's library writes to `~` itself
    hub = importlib.import_module("engine.models.hub")
    offer = hub.look_up(name, revision)
    spec = hub.check_offer(offer)
    print("\n".join(describe(offer, spec)), flush=True)
    if offer.missing_bytes:
        _check_disk(offer)
    folder = hub.fetch(offer)
    shown = f"{name} --revision {revision}" if revision else name
    say(f"{name} is in {folder}; next: tidemill serve {shown}")
    return 0


def describe(offer: Any, spec: Any) -> list[str]:
    """Return lines that compare the model with free disk and memory. `offer` is an engine.models.hub.Offer."""
    memory = importlib.import_module("engine.execution.memory").available_memory()
    weights = f"weights {size(offer.weight_bytes)} of {size(memory)} free"
    if offer.weight_bytes > memory:
        weights += ": more than the free host memory (GPU memory is not counted)"
    here = "all downloaded" if not offer.missing_bytes else f"{size(offer.missing_bytes)} to download"
    return [
        line("model", f"{offer.name} at {offer.commit[:12]}: {spec.num_parameters:,} parameters in {spec.dtype}"),
        line("files", f"{len(offer.files)}, {size(offer.total_bytes)} in all, {here}"),
        line("disk", f"{size(_free(offer.cache))} free at {offer.cache}"),
        line("memory", weights),
    ]


def _check_disk(offer: Any) -> None:
    free = _free(offer.cache)
    if offer.missing_bytes > free:
        raise ConfigError(
            f"{offer.name} needs {size(offer.missing_bytes)} more, and {offer.cache} has {size(free)} free; free space "
            f"or run HF_HOME=/another/disk tidemill pull {offer.name}"
        )


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free
