"""The composition root: a configuration becomes a plan, a runner and an Engine.

`plan_launch` decides everything that can be known without loading the weights; `build_engine` loads and joins. The only
room besides `engine.engine` that knows both control plane and data plane.
"""

from engine.build.join import build_engine, profile_folder, profile_key, stored_profile
from engine.build.memory import READ_TOGETHER, host_bytes, scheduler_config
from engine.build.plan import local_config, plan_launch, resolve_model
from engine.build.runner import build_follower, build_runner

__all__ = [
    "READ_TOGETHER",
    "build_engine",
    "build_follower",
    "build_runner",
    "host_bytes",
    "local_config",
    "plan_launch",
    "profile_folder",
    "profile_key",
    "resolve_model",
    "scheduler_config",
    "stored_profile",
]
