"""The wait policy of torch's OpenMP threads, chosen before torch is loaded. The module does not import torch.

A model step has about a thousand parallel regions, and its threads synchronize after each. By default, GNU OpenMP
threads spin while they wait. That is fastest on idle cores. On a busy machine a spinning thread uses the time slice of
the thread that it waits for, and a step takes 10 to 70 times as long. Passive waiting costs 10 to 20 % on an idle
machine. OpenMP reads the policy once, when it is loaded.

The native kernels have threads of their own. If they run the steps, torch's threads wait passively, so that they do not
compete for cores, and nothing is measured.
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
    """Set the policy in `environment` if passive waiting is faster, and return a status line.

    Return None if there is no choice: on a GPU, with one thread, if the user has set a policy, after torch is loaded,
    or if the native kernels are expected to run the steps. `measure(threads)` returns the share of their time that busy
    threads get, 0 to 1; the default is `processor_share`.
    """
    threads = num_threads(config, environment)
    if _is_decided(config, environment, threads):
        return None
    if expects_native(config):
        environment[POLICY] = "passive"
        return None
    share = (measure or processor_share)(threads)
    if share >= QUIET_SHARE:
        return f"{threads} OpenMP threads spin: the machine is idle (set {POLICY}=passive beside other work)"
    environment[POLICY] = "passive"
    return (
        f"{threads} OpenMP threads wait passively: other work takes {1 - share:.0%} of their time "
        f"(set {POLICY}=active to make them spin)"
    )


def must_measure(config: EngineConfig, environment: MutableMapping[str, str]) -> bool:
    """Return whether `choose_waiting` will measure how busy the machine is."""
    return not _is_decided(config, environment, num_threads(config, environment)) and not expects_native(config)


def _is_decided(config: EngineConfig, environment: MutableMapping[str, str], threads: int) -> bool:
    on_gpu = config.device == "cuda" or (config.device == "auto" and bool(cuda_devices()))
    return on_gpu or threads < 2 or bool(environment.get(POLICY)) or "torch" in sys.modules


def expects_native(config: EngineConfig) -> bool:
    """Return whether the native kernels are expected to run every step.

    They may still fail their test after torch is loaded. Steps from hidden state always use torch.
    """
    if config.device == "cuda" or config.kernels == "torch":
        return False
    return not config.hidden_cache and is_built()


def after_all(config: EngineConfig, environment: MutableMapping[str, str]) -> str:
    """Return a remark for the log if torch runs steps that the native kernels were expected to run, else ""."""
    if not expects_native(config) or environment.get(POLICY) != "passive":
        return ""
    return f"; its threads wait passively (set {POLICY}=active to make them spin)"


def num_threads(config: EngineConfig, environment: MutableMapping[str, str]) -> int:
    """Return the number of threads: --threads, OMP_NUM_THREADS, or one per core."""
    if config.threads is not None:
        return config.threads
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdigit() else max(1, read_processor().cores)


def announce(config: EngineConfig, say: Callable[[str], None]) -> None:
    """Choose the policy for this process and report it."""
    if line := choose_waiting(config, os.environ):
        say(line)
