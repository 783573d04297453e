"""The command that installs an optional dependency for the running interpreter. There is no release on PyPI."""

import importlib.util
import shlex
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install_command(extra: str, root: Path = ROOT) -> str:
    """Return a shell command that adds an extra to this installation: by the checkout, or else by its requirements."""
    if (root / "pyproject.toml").exists():
        wanted = ["--editable", f"{root}[{extra}]"]
    else:
        try:
            listed = metadata.requires("tidemill") or []
        except metadata.PackageNotFoundError:
            listed = []
        mark = f'extra == "{extra}"'
        wanted = [each.partition(";")[0].strip() for each in listed if mark in each.replace("'", '"')]
    pip = [sys.executable, "-m", "pip", "install"]
    if importlib.util.find_spec("pip") is None:
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *wanted])
