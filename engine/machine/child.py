"""Python processes of our own.

With `-P`, so that no file in the working directory is taken for a module, whatever it is called; our packages are named
by their place, so that they are found from a source tree, too.
"""

import os
import sys
import threading
import time
from pathlib import Path

LOOK_SECONDS = 1.0
ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import runpy, sys; root, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "root in sys.path or sys.path.insert(0, root); runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules, as `python -m` would."""
    return [sys.executable, "-P", "-c", _START, str(ROOT), module, *arguments]


def end_with(parent: int) -> None:
    """Have this process end soon after `parent`, the one that started it, however that one ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="tidemill-parent", daemon=True).start()
