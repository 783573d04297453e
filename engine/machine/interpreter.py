"""Interpreter settings for latency: garbage collections at suitable moments, and short thread switch intervals.

Nearly all objects are freed by reference counting. A collection of the older generations finds a few thousand objects
in minutes, and delays a token by 5 to 25 ms wherever it happens to start (seen on an H100's host). Therefore only young
objects are collected while requests run (about a millisecond), and all objects when the engine is idle.
"""

import gc
import sys

SOON, YOUNG = 700, 2_000
"""Numbers of new objects (created minus freed) after which `collect_due`, or the interpreter at any point, collects the
young generation."""
NEVER = 1 << 30
AT_REST, AT_MOST = 20, 1_000
"""Numbers of young collections after which all objects are collected: while idle, and in any case. The second bounds
the memory of leaked cycles to some hundred MB."""


SWITCH_SECONDS = 0.0002
"""Thread switch interval (Python's default is 5 ms). Planning a step would delay the launch of the previous one, which
needs the interpreter after each driver call; parsing a request body would delay the event loop."""


def settle() -> None:
    """Configure a process of this project, after its imports.

    Existing objects are excluded from collections: modules and a model are some 300,000 objects, which take 150 ms to
    collect. Later objects of older generations are collected by `collect_due` only.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, NEVER, NEVER)
    sys.setswitchinterval(SWITCH_SECONDS)


def collect_due(*, at_rest: bool) -> None:
    """Collect young objects, or all objects since `settle`, if due. `at_rest`: no request is waiting."""
    young, collections, _ = gc.get_count()
    if collections >= (AT_REST if at_rest else AT_MOST):
        gc.collect()
    elif young >= SOON:
        gc.collect(0)
