"""`tidemill` whose engine processes have faults (`benchmarks.chaos.child`) and may die any number of times."""

import sys
from functools import partial
from typing import Any

from engine.process import client, launcher
from engine.process.requests import RestartPolicy
from tidemill.cli import main

if __name__ == "__main__":
    replaced: Any = client
    replaced.RestartPolicy = partial(RestartPolicy, max_deaths=sys.maxsize, max_delay=0.0)
    launcher.CHILD = "benchmarks.chaos.child"
    sys.exit(main())
