"""How torch's OpenMP threads wait for each other, decided before torch is loaded; torch-free.

A step of a model is some thousand parallel regions, and at the end of each the threads meet. GNU OpenMP lets those
that arrive first spin. On cores of their own that is fastest; beside busy neighbours a spinning thread uses up the time
slice that the thread it waits for needs, and a step takes 10 to 70 times as long. Waiting passively costs 10 to 20 % in
quiet. The library reads its choice once, when it is loaded.

Where the native kernels are to run, which have threads of their own, torch is left with odd jobs: its threads wait
passively then, so that they do not spin beside those, and there is nothing to measure or to tell.
"""

import os
import sys
from collections.abc import Callable, MutableMapping

from engine.config import EngineConfig
from engine.execution.cpu.native import is_built
from engine.machine.activity import QUIET_SHARE, processor_share
from engine.machine.facts import cuda_devices, read_processor

POLICY = "OMP_WAIT_POLICY"


def choose_waiting(
    config: EngineConfig, environment: MutableMapping[str, str], measure: Callable[[int], float] | None = None
) -> str | None:
    """Set the policy in `environment` where passive waiting helps. Returns what was decided, one line to tell; None
    where there is nothing to decide: on a GPU, with one thread, where the user has chosen, once torch is loaded, or
    where steps are expected to run by the native kernels.

    `measure(threads)`: the share of their time that so many busy threads get; `processor_share` if not given.
    """
    threads = num_threads(config, environment)
    if _is_decided(config, environment, threads):
        return None
    if expects_native(config):
        environment[POLICY] = "passive"
        return None
    share = (measure or processor_share)(threads)
    if share >= QUIET_SHARE:
        return (
            f"{threads} threads wait for each other spinning: the machine is quiet ({POLICY}=passive beside other work)"
        )
    environment[POLICY] = "passive"
    return (
        f"{threads} threads wait for each other passively: other work takes {1 - share:.0%} of their time "
        f"({POLICY}=active makes them spin)"
    )


def must_measure(config: EngineConfig, environment: MutableMapping[str, str]) -> bool:
    """Whether `choose_waiting` will look how busy the machine is."""
    return not _is_decided(config, environment, num_threads(config, environment)) and not expects_native(config)


def _is_decided(config: EngineConfig, environment: MutableMapping[str, str], threads: int) -> bool:
    on_gpu = config.device == "cuda" or (config.device == "auto" and bool(cuda_devices()))
    return on_gpu or threads < 2 or bool(environment.get(POLICY)) or "torch" in sys.modules


def expects_native(config: EngineConfig) -> bool:
    """Whether the native kernels will run every step, as far as can be known before torch is loaded: they may still
    fail their test. Steps from hidden state go by torch."""
    if config.device == "cuda" or config.cpu_kernels != "auto":
        return False
    return not config.hidden_cache and is_built()


def after_all(config: EngineConfig, environment: MutableMapping[str, str]) -> str:
    """What to add where torch runs the steps that were expected to run natively; empty otherwise."""
    if not expects_native(config) or environment.get(POLICY) != "passive":
        return ""
    return f"; its threads wait for each other passively ({POLICY}=active makes them spin)"


def num_threads(config: EngineConfig, environment: MutableMapping[str, str]) -> int:
    """Threads that a step will use, of each rank: --threads, OMP_NUM_THREADS, or a thread per core."""
    if config.threads is not None:
        return config.threads
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdigit() else max(1, read_processor().cores // config.tensor_parallel_size)


def announce(config: EngineConfig, say: Callable[[str], None]) -> None:
    """Decide for this process and tell the user."""
    if line := choose_waiting(config, os.environ):
        say(line)
