"""The composition root: build a plan, a runner and an Engine from a configuration.

`plan_launch` decides everything that does not need the weights. `build_engine` loads the weights and connects the
parts. Apart from `engine.engine`, only this package imports both the scheduler and the model execution.
"""

from engine.build.join import build_engine, profile_key, stored_profile
from engine.build.plan import (
    READ_TOGETHER,
    host_bytes,
    local_config,
    plan_launch,
    profile_folder,
    resolve_model,
    scheduler_config,
)
from engine.build.runner import build_runner
from engine.colocation.waits import slo_warning

__all__ = [
    "READ_TOGETHER",
    "build_engine",
    "build_runner",
    "host_bytes",
    "local_config",
    "plan_launch",
    "profile_folder",
    "profile_key",
    "resolve_model",
    "scheduler_config",
    "slo_warning",
    "stored_profile",
]
