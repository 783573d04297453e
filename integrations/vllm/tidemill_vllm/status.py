"""Hands the scheduler's status from the engine process to the API server: one small file, replaced once a second."""

import json
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

STALE_SECONDS = 30.0
"""Age from which a status is not shown: the engine has no work, or it ended."""


def status_path(instance: str) -> Path:
    """Return the path of an engine's status. `instance`: `VllmConfig.instance_id`."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", instance) or "engine"
    return Path(tempfile.gettempdir()) / f"tidemill-vllm-{os.getuid()}" / f"{name}.json"


class StatusFile:
    """Writes the status. A folder that cannot be written is no error: `/tidemill/slo` says that nothing is known."""

    def __init__(self, instance: str) -> None:
        self._path = status_path(instance)

    def write(self, status: dict[str, Any]) -> None:
        """Replace the file."""
        data = json.dumps({"at": time.time(), **status}, default=str).encode()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.parent.stat().st_uid == os.getuid():
                new = self._path.with_suffix(".new")
                new.write_bytes(data)  # without fsync, which would hold up the step: a lost status is written again
                new.replace(self._path)
        except OSError:
            return

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)


def read_status(instance: str) -> dict[str, Any] | None:
    """Return the last status, NaN as None; None if there is none or it is stale."""
    try:
        found = json.loads(status_path(instance).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or time.time() - found.get("at", 0.0) > STALE_SECONDS:
        return None
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
