"""`tidemill pull`: fetches a model from the Hugging Face hub, sizes first; the hub's own library downloads.

What is fetched goes into its cache, where `tidemill serve` finds it. A connection that breaks is taken up again where
it broke; a pull that was ended keeps the files that are whole and fetches the one it was at from its start.
"""

import importlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from gateway.commands.report import line, size

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 10.0
"""How often progress is shown: on a terminal in one line, elsewhere in lines of their own."""


def run(name: str, revision: str | None, say: Callable[[str], None]) -> int:
    """Pull; returns the exit code. Raises ConfigError or ModelLoadError, one sentence each, with what to do next."""
    hub = importlib.import_module("engine.models.hub")
    with hub.without_bars():
        return _pull(hub, name, revision, say)


def _pull(hub: Any, name: str, revision: str | None, say: Callable[[str], None]) -> int:
    offer = hub.look_up(name, revision)
    spec = hub.check_offer(offer)
    print("\n".join(describe(offer, spec)), flush=True)
    if offer.missing_bytes:
        _check_disk(offer)
        with _progress(offer, sys.stdout.isatty(), say):
            folder = hub.fetch(offer)
    else:
        folder = hub.fetch(offer)
    shown = f"{name} --revision {revision}" if revision else name
    say(f"{name} is in {folder}; next: tidemill serve {shown}")
    return 0


def describe(offer: Any, spec: Any) -> list[str]:
    """What would be fetched, against the disk and the memory. `offer`: an engine.models.hub.Offer."""
    memory = importlib.import_module("engine.execution.memory").available_memory()
    weights = f"weights {size(offer.weight_bytes)} of {size(memory)} free"
    if offer.weight_bytes > memory:
        weights += ": too large for this machine's memory as it is now (a GPU's is not counted)"
    here = "all of it is here" if not offer.missing_bytes else f"{size(offer.missing_bytes)} to fetch"
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
            f"{offer.name} needs {size(offer.missing_bytes)} more, and {offer.cache} has {size(free)} free: make room, "
            f"or HF_HOME=/another/disk tidemill pull {offer.name}"
        )


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


@contextmanager
def _progress(offer: Any, terminal: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Show how much has come: the files' sizes on the disk, whatever way the library fetches them."""
    done = threading.Event()
    began, before = time.monotonic(), offer.bytes_on_disk()

    def show() -> None:
        while not done.wait(TERMINAL_SECONDS if terminal else LOG_SECONDS):
            got = max(0, offer.bytes_on_disk() - before)
            text = progress_line(got, offer.missing_bytes, time.monotonic() - began)
            if terminal:
                print(f"\r\033[K{text}", end="", flush=True)
            else:
                say(text)

    thread = threading.Thread(target=show, name="tidemill-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if terminal:
            print("\r\033[K", end="", flush=True)


def progress_line(got: int, wanted: int, seconds: float) -> str:
    """How much, how fast, how much longer."""
    rate = got / seconds if seconds > 0 else 0.0
    left = f"{(wanted - got) / rate:.0f} s left" if rate > 0 else "waiting"
    return f"{min(1.0, got / wanted):4.0%}  {size(got)} of {size(wanted)}, {size(int(rate))}/s, {left}"
