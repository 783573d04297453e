"""How a process's interpreter shares its time: collections at moments that cost nobody, short turns of threads.

Nearly everything here is freed by its reference count. A collection of the older generations finds a few thousand
objects in minutes, and keeps a chat's token for 5 to 25 ms wherever it happens to begin (seen on an H100's host). So
only the youngest objects are looked at while somebody waits (about a millisecond), and all of them when nobody does.
"""

import gc
import sys

SOON, YOUNG = 700, 2_000
"""New objects, beyond those that went, after which `collect_due` looks at the young ones, and the interpreter by itself
wherever it is."""
NEVER = 1 << 30
AT_REST, AT_MOST = 20, 1_000
"""Collections of young objects after which all are looked at: while nobody waits, and whoever waits. The second bounds
what a leak of cycles can take: some hundred MB."""


SWITCH_SECONDS = 0.0002
"""For which a thread may keep the others from the interpreter (5 ms without us): the plan for a step keeps the launch
of the one before, which needs the interpreter after each call of the driver; a body that is read keeps the loop."""


def settle() -> None:
    """For a process of our own. Threads take short turns. What there is stays and is not looked at again: modules and a
    model are some 300,000 objects, over which a collection takes 150 ms. Older objects are `collect_due`'s from now on.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, NEVER, NEVER)
    sys.setswitchinterval(SWITCH_SECONDS)


def collect_due(*, at_rest: bool) -> None:
    """At a moment of ours, if it is time: look at the young objects, or at all that came since `settle`. `at_rest`:
    nobody waits for anything."""
    young, collections, _ = gc.get_count()
    if collections >= (AT_REST if at_rest else AT_MOST):
        gc.collect()
    elif young >= SOON:
        gc.collect(0)
